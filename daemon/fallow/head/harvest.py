"""The Slurm side of the head: what is observed, what is asked for, and what nobody looks after any more."""

from __future__ import annotations

from fallow.config import Config
from fallow.core.allocations import Allocation
from fallow.head import orphans, submissions
from fallow.head.asking import Asking
from fallow.head.book import Run
from fallow.head.jobs import take_in
from fallow.head.turn import Turn
from fallow.model import ClusterState, JobRequest


class Harvest:
    """Keeps allocations and Slurm in step, and asks for more."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._asking = Asking(config)
        self.cluster: ClusterState | None = None

    def polled(self, turn: Turn, cluster: ClusterState) -> None:
        """Take in one poll, then plan."""
        self.cluster = cluster
        # MessageTimeout (10 s) + SAVE_MAX_WAIT (5 s) + margin, and never before two polls.
        take_in(turn, cluster, horizon_s=max(30.0, 2.5 * self._config.slurm.poll_interval_s))
        orphans.sweep(turn, cluster)
        self._asking.plan(turn, cluster)

    def request(self, state: str, run: Run, allocation: Allocation, log: str) -> JobRequest:
        """What to hand to sbatch for an allocation."""
        return submissions.job_request(self._config, state, run, allocation, log)

    submitted = staticmethod(submissions.submitted)
    refused = staticmethod(submissions.refused)
    unknown = staticmethod(submissions.unknown)
