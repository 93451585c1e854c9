"""The interface of the head to Slurm. Commands (`cli`) and pyslurm (`pyslurm_client`) implement it."""

from collections.abc import Sequence
from typing import Protocol

from fallow.model import ClusterConfig, ClusterState, Exit, FallowError, JobRequest, OwnerView


class SlurmUnavailable(FallowError):
    """Slurm did not answer in time, or its commands are missing. Nothing is known; try again later."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.UNAVAILABLE)


class SubmitRejected(FallowError):
    """Slurm refused the job, so the job does not exist. `reason` is Slurm's message."""

    def __init__(self, token: str, reason: str) -> None:
        super().__init__(f"job {token}: Slurm refused it ({reason}); change its options or ask the site", Exit.DATA)
        self.token = token
        self.reason = reason


class SubmitUnknown(FallowError):
    """The job may exist: a later poll shows it by its name. Never submit it again without having looked."""

    def __init__(self, token: str, reason: str) -> None:
        super().__init__(
            f"job {token}: not known whether Slurm accepted it ({reason}); look for its name before you submit again",
            Exit.TEMPFAIL,
        )
        self.token = token
        self.reason = reason


class SlurmClient(Protocol):
    """Slurm for one user. Every call ends within a bounded time, and calls may run at the same time."""

    poll_requests: int
    "number of requests to slurmctld in one `poll`"
    start_s: float
    "seconds that the last poll spent on starting a program, before it asked slurmctld"

    @property
    def backend(self) -> str:
        """What answers and why, in words."""
        ...

    async def config(self) -> ClusterConfig:
        """Settings that rarely change.

        Call it first: it also measures the offset of slurmctld's clock, which `poll` subtracts from all times.
        """
        ...

    async def poll(self) -> ClusterState:
        """Nodes, partitions, reservations and jobs in one batch.

        Jobs: all users' jobs that have not ended (as far as Slurm shows them), and our own ended jobs that carry a
        token, as long as Slurm remembers them (MinJobAge, 300 s by default). No node of a running job is IDLE. A node
        may look allocated for one poll longer than its job.
        """
        ...

    async def submit(self, request: JobRequest) -> str:
        """Submit a job and return its id (the leader's of a heterogeneous job).

        The job's name is `request.token`, whatever the options say. Raises `SubmitRejected`, `SubmitUnknown`, or
        `SlurmUnavailable` if nothing was sent at all.
        """
        ...

    async def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs. Jobs that have ended are ignored."""
        ...

    async def owner(self) -> OwnerView:
        """This user's limits, fair share and priorities from Slurm. Takes several requests: call it rarely."""
        ...

    async def test_only(self, request: JobRequest) -> str:
        """What Slurm says about when and where the job would start. Takes slurmctld's locks: call it rarely."""
        ...
