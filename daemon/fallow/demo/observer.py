"""An eye of its own on the private cluster: samples Slurm while the demo runs, independent of the head."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from fallow.demo.compare import JobTimes
from fallow.demo.measure import Sample, sample_of
from fallow.model import ClusterState
from fallow.slurm.client import SlurmClient


class Observer:
    """Takes a sample every `interval_s` until it is cancelled; a look that fails ends nothing."""

    def __init__(self, slurm: SlurmClient, interval_s: float = 1.0) -> None:
        self.samples: list[Sample] = []
        self.base_jobs: set[str] = set()
        "job ids of the run's base allocations, told by the caller"
        self.jobs: dict[str, JobTimes] = {}
        "by name"
        self.missed = 0
        "looks that came to nothing"
        self.problem = ""
        "why the last one of them did"
        self._slurm = slurm
        self._interval_s = interval_s

    async def watch(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self._note(await self._slurm.poll("fallow-"))
            except Exception as error:  # whatever it was, the next look may be good: this is half an hour's evidence
                self.missed += 1
                self.problem = str(error)
            await asyncio.sleep(max(0.05, began + self._interval_s - time.monotonic()))

    @property
    def longest_gap_s(self) -> float:
        """From one look to the next, at most."""
        return max((b.at - a.at for a, b in pairwise(self.samples)), default=0.0)

    def _note(self, cluster: ClusterState) -> None:
        self.samples.append(sample_of(cluster, frozenset(self.base_jobs)))
        for job in cluster.jobs:
            # One that was cancelled while it waited has a start in Slurm's books, but no nodes.
            waited = job.state == "PENDING" or (job.state == "CANCELLED" and not job.nodes)
            self.jobs[job.name] = JobTimes(job.submit_at or cluster.at, None if waited else job.start_at)
