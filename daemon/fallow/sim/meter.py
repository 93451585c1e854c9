"""Adds up what a policy made of the idle nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fallow.core.quantile import quantile
from fallow.model import DelayedJobs, Score
from fallow.sim.curves import speeds
from fallow.sim.ideal import fair_work
from fallow.sim.types import Kind, RunPlan

DAY_S = 86400.0


@dataclass(slots=True)
class _Run:
    speed: tuple[float, ...]
    nodes: int = 0
    since: float = 0.0
    stalled_until: float = 0.0


class Tally:
    """A meter (see `fallow.sim.types.Meter`): all figures are integrals over virtual time.

    Args:
        plans: the runs.
        nodes: of the site.
        begin: what was before that does not count; times in Unix seconds.
    """

    def __init__(self, plans: Sequence[RunPlan], nodes: int, begin: float) -> None:
        self._begin = self._at = begin
        self._runs = {plan.run: _Run(speeds(plan), since=begin) for plan in plans}
        self._ideal = fair_work(plans, nodes)
        self._idle = 0
        self._members = 0
        self._idle_s = self._ideal_s = self._harvested_s = self._work = 0.0
        self.over_node_s = 0.0
        "in which there were more members than idle nodes; 0 unless nodes die, or owners are back before us"
        self._changes: dict[Kind, int] = {"absorb": 0, "release": 0, "eject": 0}
        self._waits: dict[str, float] = {}
        self._calls = 0

    def pool(self, at: float, idle: int) -> None:
        self._until(at)
        self._idle = idle

    def members(self, at: float, run: str, nodes: int, stalled_until: float) -> None:
        self._until(at)
        each = self._runs[run]
        self._settle(each)
        self._members += nodes - each.nodes
        each.nodes, each.stalled_until = nodes, stalled_until

    def change(self, at: float, kind: Kind, nodes: int) -> None:
        """One change of one run, of however many nodes."""
        if at >= self._begin:
            self._changes[kind] += 1

    def waited(self, job_id: str, seconds: float) -> None:
        if seconds > 0:
            self._waits[job_id] = self._waits.get(job_id, 0.0) + seconds

    def calls(self, number: int) -> None:
        self._calls += number

    def score(self) -> Score:
        self._settle_all()
        seconds = self._at - self._begin
        days, waits = seconds / DAY_S, self._waits.values()
        return Score(
            # Without a single idle node there was nothing to miss.
            ideal_ratio=self._work / self._ideal_s if self._ideal_s else 1.0,
            idle_node_s=self._idle_s,
            harvested_node_s=self._harvested_s,
            absorbs_per_day=self._changes["absorb"] / days if days else 0.0,
            releases_per_day=self._changes["release"] / days if days else 0.0,
            unannounced_per_day=self._changes["eject"] / days if days else 0.0,
            others_delayed=DelayedJobs(
                jobs=len(waits), p95_s=quantile(waits, 0.95) or 0.0, max_s=max(waits, default=0.0)
            ),
            slurmctld_rpcs_per_min=self._calls * 60.0 / seconds if seconds else 0.0,
        )

    def _until(self, at: float) -> None:
        """The numbers of nodes were as they are until now."""
        lasted_s = at - self._at
        if lasted_s <= 0:
            return
        over = self._members - self._idle
        if over > 0:
            self._settle_all()
        self._idle_s += self._idle * lasted_s
        self._ideal_s += self._ideal[min(self._idle, len(self._ideal) - 1)] * lasted_s
        self._at = at
        if over > 0:
            # What a node does while its owner waits for it, or does no more, counts for nothing.
            self._settle_all(self._idle / self._members)
            self.over_node_s += over * lasted_s

    def _settle_all(self, part: float = 1.0) -> None:
        for run in self._runs.values():
            self._settle(run, part)

    def _settle(self, run: _Run, part: float = 1.0) -> None:
        """Add up a run's work until now, or that part of it."""
        lasted_s = self._at - run.since
        if lasted_s > 0:
            self._harvested_s += part * run.nodes * lasted_s
            trained_s = self._at - max(run.since, run.stalled_until)
            if trained_s > 0:
                self._work += part * run.speed[min(run.nodes, len(run.speed) - 1)] * trained_s
            # What it does with its own nodes alone is not won, and lost while it stands still.
            self._work -= part * run.speed[0] * lasted_s
            run.since = self._at
