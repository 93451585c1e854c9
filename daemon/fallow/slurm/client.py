"""What the head asks of Slurm, whoever answers: commands (`cli`) or pyslurm (`pyslurm_client`)."""

from collections.abc import Sequence
from typing import Protocol

from fallow.model import ClusterConfig, ClusterState, Exit, FallowError, JobRequest, OwnerView


class SlurmUnavailable(FallowError):
    """Slurm did not answer in time, or its commands are missing. Nothing is known; try again later."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.UNAVAILABLE)


class SubmitRejected(FallowError):
    """Slurm said no: there is no such job. `reason` is what it said."""

    def __init__(self, token: str, reason: str) -> None:
        super().__init__(f"job {token}: Slurm refused it ({reason}); change the options or ask the site", Exit.DATA)
        self.token = token
        self.reason = reason


class SubmitUnknown(FallowError):
    """The job may exist: a later poll shows it by its name. Never simply submit again."""

    def __init__(self, token: str, reason: str) -> None:
        super().__init__(
            f"job {token}: not known whether Slurm took it ({reason}); look for it by its name before asking again",
            Exit.TEMPFAIL,
        )
        self.token = token
        self.reason = reason


class SlurmClient(Protocol):
    """Slurm for one user. Every call ends within a bounded time; all may be used at once."""

    poll_requests: int
    "requests to slurmctld that a `poll` takes"
    start_s: float
    "seconds of the last poll in which slurmctld was not asked: a program was started"

    @property
    def backend(self) -> str:
        """What answers, and why that, in words."""
        ...

    async def config(self) -> ClusterConfig:
        """What rarely changes. Call it first: it also learns the offset to slurmctld's clock, which is taken off all
        times that `poll` returns."""
        ...

    async def poll(self) -> ClusterState:
        """Nodes, partitions, reservations and jobs in one batch.

        Jobs: everybody's that have not ended (as far as Slurm shows them), and our own ended ones that carry a token,
        as long as Slurm remembers them (MinJobAge, 300 s by default).
        No node of a running job is IDLE; a node may look taken for one poll longer than its job.
        """
        ...

    async def submit(self, request: JobRequest) -> str:
        """Submit and return the job id (the leader's of a heterogeneous job).

        The job's name is `request.token`, whatever the options say. Raises `SubmitRejected`, `SubmitUnknown`, or
        `SlurmUnavailable` when nothing was sent at all.
        """
        ...

    async def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs. Jobs that have ended do not matter."""
        ...

    async def owner(self) -> OwnerView:
        """What Slurm's accounting says about this user: limits, fair share, priorities. Some requests: rarely."""
        ...

    async def test_only(self, request: JobRequest) -> str:
        """What Slurm says about when and where the job would start. Takes slurmctld's locks: call it rarely."""
        ...
