"""The Slurm side of the head: what polls show, what is asked of Slurm in whose name, and what is given back.

In: polls and the answers of sbatch, squeue and scancel. Out: submissions, withdrawals and releases, which `calls`
carries out. `harvest` is one round of it; what is decided is decided in `core`.
"""
