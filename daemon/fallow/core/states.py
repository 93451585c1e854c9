"""What the state of a job means, in Slurm's words (squeue(1), JOB STATE CODES). Pure."""

ON_NODES = frozenset(
    ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
)
"""States of jobs that have nodes."""
