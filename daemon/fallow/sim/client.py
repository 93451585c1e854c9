"""Slurm's commands over the simulated cluster, as the head calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fallow.model import ClusterConfig, ClusterState, JobRequest, OwnerView
from fallow.sim.slurm.engine import US, SlurmSim
from fallow.sim.types import POLL_REQUESTS, Wanted
from fallow.slurm import parse


class SimClient:
    """`SlurmClient` over an engine that somebody else plays.

    Args:
        engine: the cluster.
        has_job: called with the id of each job that was submitted, and its token.
    """

    answer_s = 0.2
    "from a poll to its answer"
    sbatch_s = 0.1
    "what sbatch takes"

    def __init__(self, engine: SlurmSim, has_job: Callable[[str, str], None] = lambda job_id, token: None) -> None:
        self.engine = engine
        self.poll_requests = POLL_REQUESTS
        self.backend = ""
        self._has_job = has_job

    async def config(self) -> ClusterConfig:
        return self.engine.config()

    async def poll(self) -> ClusterState:
        cluster = self.engine.poll()
        await asyncio.sleep(self.answer_s)
        return cluster

    async def submit(self, request: JobRequest) -> str:
        await asyncio.sleep(self.sbatch_s)
        given = option_values(request)
        wanted = Wanted(
            token=request.token,
            partition=given["partition"],
            minutes=parse.count(given["time"]),
            nodes=parse.count(given["nodes"]),
            node=given.get("nodelist", ""),
            exclude=frozenset(parse.nodes(given.get("exclude", ""))),
            nice=parse.count(given.get("nice", "0")),
        )
        job_id = self.engine.submit(wanted)
        self._has_job(job_id, request.token)
        return job_id

    async def cancel(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self.engine.cancel(job_id)

    async def owner(self) -> OwnerView:
        return OwnerView(user=US, at=self.engine.now)

    async def test_only(self, request: JobRequest) -> str:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing was started."""


def option_values(request: JobRequest) -> dict[str, str]:
    """What is given to sbatch: option -> value."""
    return dict(option.removeprefix("--").partition("=")[::2] for option in request.options)
