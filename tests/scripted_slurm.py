"""The simulated Slurm as a client whose answers a test scripts: outages, refusals, limits, odd states of nodes.

What jobs do is the engine's: `slurm.engine` takes jobs of others, and ends or holds jobs. Here is what is no part of a
cluster, or would be wrong in a simulation: calls that fail, and what polls show beside the truth.
"""

from collections.abc import Iterable, Sequence
from math import inf

from msgspec.structs import replace

from builders import NOW
from fallow.core.states import ENDED_STATES
from fallow.core.tokens import carries_token
from fallow.model import ClusterConfig, ClusterState, JobInfo, JobRequest, PartitionInfo
from fallow.sim.slurm import SlurmSim
from fallow.sim.slurm.engine import SimClient, option_values
from fallow.sim.types import SimEvent
from fallow.slurm.client import SlurmUnavailable, SubmitRejected, SubmitUnknown
from sim_cases import site, tiers

USUAL = {"partition": "normal", "time": "10", "nodes": "1"}
"""Of jobs that do not say."""


class ScriptedSlurm(SimClient):
    """Time stands still until `advance`. What can start starts at once, and what is cancelled is gone at once."""

    answer_s = sbatch_s = 0.0

    def __init__(
        self, nodes: int, partitions: Sequence[PartitionInfo] | None = None, config: ClusterConfig | None = None
    ) -> None:
        where = site(nodes, partitions=partitions or tiers(nodes), gpus=4, preempt=True, pass_s=0.0, epilog_s=0.0)
        super().__init__(SlurmSim(where, 0, NOW))
        self.poll_requests = 1
        self.shown_config = config or self.engine.config()
        self.others: list[JobInfo] = []
        "jobs that polls show beside those of the engine"
        self.unavailable = False
        "every call fails as if slurmctld did not answer"
        self.lost_submits = 0
        "so many submissions from now on time out, and leave no job"
        self.refusal: str | None = None
        "Slurm's reason to refuse every job from now on"
        self.most, self.reason = inf, "QOSMaxJobsPerUserLimit"
        "so many jobs of ours may run at once, and for which reason the others wait"
        self._given: dict[str, dict[str, str]] = {}
        "token -> options"

    @property
    def now(self) -> float:
        return self.engine.now

    def advance(self, seconds: float) -> None:
        """Let time pass; everything that is due happens in order."""
        until = self.now + seconds
        self._let_start()
        while self.now < until or self.engine.next_at() <= until:
            self.happened(self.engine.advance(min(self.engine.next_at(), until)))
            self._let_start()

    def happened(self, happenings: Iterable[SimEvent]) -> None:
        """Whoever scripts what jobs do does it here."""

    def running(self) -> list[str]:
        """Ids of our jobs."""
        return [job.job_id for job in self.engine.poll().jobs if job.state == "RUNNING"]

    def _let_start(self) -> None:
        room = self.most - len(self.running())
        for job in self.engine.poll().jobs:
            if job.state == "PENDING":
                self.engine.hold(job.job_id, "" if room > 0 else self.reason)
                room -= 1

    # -- SlurmClient --------------------------------------------------------------------------------------------

    async def config(self) -> ClusterConfig:
        self._check()
        return self.shown_config

    async def poll(self) -> ClusterState:
        self._check()
        seen = await super().poll()
        jobs = [self._shown(job) for job in seen.jobs]
        jobs = [job for job in jobs if job.state not in ENDED_STATES or carries_token(job)]
        return replace(seen, jobs=[*jobs, *self.others])

    def _shown(self, job: JobInfo) -> JobInfo:
        given = self._given.get(job.name, {})
        return replace(job, **{name: given.get(name, "") for name in ("comment", "account", "qos")})

    async def submit(self, request: JobRequest) -> str:
        self._check()
        if self.lost_submits:
            self.lost_submits -= 1
            raise SubmitUnknown(request.token, "Socket timed out on send/recv operation")
        if self.refusal is not None:
            raise SubmitRejected(request.token, self.refusal)
        given = self._given[request.token] = {**USUAL, **option_values(request)}
        return self.engine.submit(request.token, given)

    async def cancel(self, job_ids: Sequence[str]) -> None:
        self._check()
        await super().cancel(job_ids)
        for job_id in job_ids:
            self.engine.note_exit(job_id)  # processes end as soon as they are told to

    async def test_only(self, request: JobRequest) -> str:
        self._check()
        idle = [node.node for node in self.engine.poll().nodes if node.state == "IDLE"]
        if self.refusal is not None or int(option_values(request)["nodes"]) > len(idle):
            raise SubmitRejected(request.token, self.refusal or "Requested node configuration is not available")
        return f"Job to start at {self.now:.0f} on nodes {','.join(idle)}"

    def _check(self) -> None:
        if self.unavailable:
            raise SlurmUnavailable("scripted Slurm: switched off by the test; set unavailable = False")
