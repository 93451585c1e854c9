"""Slurm's commands over the simulated cluster, as the head calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fallow.model import ClusterConfig, ClusterState, JobRequest, OwnerView
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import POLL_REQUESTS, Wanted
from fallow.slurm import parse

ANSWER_S = 0.2
"""From a poll to its answer."""

SBATCH_S = 0.1
"""What sbatch takes."""


class SimClient:
    """`SlurmClient` over an engine that somebody else plays.

    Args:
        engine: the cluster.
        has_job: called with the id of each job that was submitted, and its token.
    """

    def __init__(self, engine: SlurmSim, has_job: Callable[[str, str], None]) -> None:
        self.requests = 0
        "that slurmctld has had"
        self.poll_requests = POLL_REQUESTS
        self.backend = ""
        self._engine, self._has_job = engine, has_job

    async def config(self) -> ClusterConfig:
        self.requests += 1
        return self._engine.config()

    async def poll(self) -> ClusterState:
        self.requests += self.poll_requests
        cluster = self._engine.poll()
        await asyncio.sleep(ANSWER_S)
        return cluster

    async def submit(self, request: JobRequest) -> str:
        await asyncio.sleep(SBATCH_S)
        self.requests += 1
        given = dict(option.removeprefix("--").partition("=")[::2] for option in request.options)
        wanted = Wanted(
            token=request.token,
            partition=given["partition"],
            minutes=parse.count(given["time"]),
            node=given.get("nodelist", ""),
            exclude=frozenset(parse.nodes(given.get("exclude", ""))),
            nice=parse.count(given["nice"]),
        )
        job_id = self._engine.submit(wanted)
        self._has_job(job_id, request.token)
        return job_id

    async def cancel(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self.requests += 1
            self._engine.cancel(job_id)

    async def owner(self) -> OwnerView:
        raise NotImplementedError

    async def test_only(self, request: JobRequest) -> str:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing was started."""
