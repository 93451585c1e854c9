"""What the state of a job means, in Slurm's words (squeue(1), JOB STATE CODES). Pure."""

ON_NODES = frozenset(
    ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
)
"""States of jobs that have nodes."""

BOOTING = "CONFIGURING"
"""State of a job whose nodes are being booted, or prepared: nothing of it runs yet."""

BOOTS = "Booting"
"""Reason of our own for such a job, as Slurm gives none."""

ENDED_STATES = frozenset(
    (
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"),
        *("OUT_OF_MEMORY", "REVOKED"),
    )
)
"""After which nothing of a job is left."""

REQUEUED = frozenset(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"))
"""Of jobs that wait in the queue; one that had nodes before has been requeued."""

ENDING = frozenset(("COMPLETING", "STAGE_OUT"))
"""Of jobs that have been ended and are not gone yet."""
