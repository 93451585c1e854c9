"""From a user's batch script to a run and its jobs. Pure.

In: the script with its `#SBATCH` and `#FALLOW` lines. Out: a `RunSpec` (`prepare`) and the options of base and harvest
jobs (`sbatch`). `sbatch_table` knows sbatch's options, `sbatch_line` reads them, `script` reads the file.
"""
