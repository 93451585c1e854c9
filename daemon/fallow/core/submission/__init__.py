"""Turns a user's batch script into a run and its jobs. Pure.

In goes the script with its `#SBATCH` and `#FALLOW` lines; out come a `RunSpec` (`prepare`) and the options of base and
harvest jobs (`sbatch`). `sbatch_table` knows sbatch's options, `sbatch_line` reads them, `script` reads the file.
"""
