"""`fallow demo`: train on a private Slurm that other users need, too; measure and check the run."""
