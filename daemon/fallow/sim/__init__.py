"""A Slurm cluster in virtual time, and the head's own planner driven over it."""
