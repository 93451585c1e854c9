"""What Fallow asks of Slurm: the protocol (`client`), the command line (`cli`) and pyslurm in a process of its own."""
