"""An eye of its own on the private cluster: samples Slurm while the demo runs, independent of the head."""

from __future__ import annotations

import asyncio
import time

from fallow.demo.compare import JobTimes
from fallow.demo.measure import Sample, sample_of
from fallow.model import FallowError
from fallow.slurm.client import SlurmClient


class Observer:
    """Takes a sample every `interval_s` until it is cancelled."""

    def __init__(self, slurm: SlurmClient, interval_s: float = 1.0) -> None:
        self.samples: list[Sample] = []
        self.base_jobs: set[str] = set()
        "job ids of the run's base allocations, told by the caller"
        self.jobs: dict[str, JobTimes] = {}
        "by name"
        self.missed = 0
        self._slurm = slurm
        self._interval_s = interval_s

    async def watch(self) -> None:
        while True:
            began = time.monotonic()
            try:
                cluster = await self._slurm.poll("fallow-")
            except FallowError:
                self.missed += 1
            else:
                self.samples.append(sample_of(cluster, frozenset(self.base_jobs)))
                for job in cluster.jobs:
                    started = job.start_at if job.state != "PENDING" else None
                    self.jobs[job.name] = JobTimes(job.submit_at or cluster.at, started)
            await asyncio.sleep(max(0.05, began + self._interval_s - time.monotonic()))
