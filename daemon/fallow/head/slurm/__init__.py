"""The Slurm side of the head: it takes in polls, requests nodes and gives them back.

In: polls and the answers of sbatch, squeue and scancel. Out: submissions, cancellations and releases, which `calls`
carries out. `harvest` does one round: poll, plan, requests. The decisions themselves are made in `core`.
"""
