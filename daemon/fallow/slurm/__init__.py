"""What Fallow asks of Slurm: the protocol (`client`), the command line (`cli`) and a scripted fake (`fake`)."""
