"""`fallow demo`: the whole story on a private Slurm, measured and checked."""
