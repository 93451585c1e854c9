"""`fallow local`: a real head, store, agents and workers on this machine, with a scripted membership and no Slurm."""
