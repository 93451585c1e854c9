"""Clients of Slurm: their protocol (`client`), Slurm's commands (`cli`), and pyslurm in a separate process."""
