"""The runs being trained: who is a member, when training stands still, how fast it goes otherwise.

A change of a membership stalls its run for as long as it costs; what changes a run in the same moment is one change,
for the dearest part's cost. A change that begins while another one is under way begins it anew: restarts do, and in
place, where pauses are far shorter than the times between them, it is the next pause. The first member has nobody to
stall.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil, inf, isinf

from fallow.sim.costs import drawn
from fallow.sim.curves import speeds
from fallow.sim.meter import Tally
from fallow.sim.types import Active, Costs, Kind, Measured, RunPlan

ONE_NODE_STEP_S = 16.0
"""A step on one node. It decides how soon speeds are known, as a stretch has whole steps."""

LONG_ENOUGH_S, STEPS, WARM = 15.0, 3, 3
"""As the head cuts stretches (`head.peers.throughput`): at least so long, so many steps, after so many left out."""

LONGEST_S = 3600.0
"""Stretches without a change are told in pieces that grow up to this: evidence adds up."""


QUICK_S = 1.0
"""A node that leaves is gone by then, even where the others need longer to go on."""


@dataclass(slots=True)
class _Run:
    plan: RunPlan
    speed: tuple[float, ...]
    members: dict[str, str] = field(default_factory=dict)
    "node -> job, in the order in which they joined"
    coming: dict[str, tuple[float, str]] = field(default_factory=dict)
    "node -> (ready at, job)"
    was: int = 0
    "members after the last change"
    left: dict[Kind, None] = field(default_factory=dict)
    "how nodes went since then"
    changes: dict[Kind, int] = field(default_factory=lambda: {"absorb": 0, "release": 0, "eject": 0})
    stalled_until: float = -inf
    stretch: tuple[float, float] | None = None
    "of undisturbed training that has not been told: begin, and when it is to be told"
    stretch_number: int = 0


class Work:
    """The only one that changes memberships.

    Args:
        plans: the runs.
        costs: of changes.
        seed: of their spread.
        meter: is told of all changes.
        at: Unix time of the begin.
    """

    def __init__(self, plans: Sequence[RunPlan], costs: Costs, seed: int, meter: Tally, at: float) -> None:
        self._runs = {plan.run: _Run(plan, speeds(plan)) for plan in plans}
        self._costs, self._seed, self._meter = costs, seed, meter
        self._now = at
        self._order = count()
        self._events: list[tuple[float, int, str, Active | int | None]] = []
        "(at, order, run, what: a first step, the number of a stretch, or None: a change)"
        self._starts: dict[str, int] = {}
        "node -> how often it has started up"

    def join(self, run: str, node: str, job_id: str, at: float) -> None:
        """The node's job started at `at`: it starts up from then on and is absorbed then, now at the earliest."""
        nth = self._starts[node] = self._starts.get(node, 0) + 1
        ready_at = max(self._now, at + drawn(self._costs.start, f"{self._seed}/start/{node}/{nth}"))
        self._runs[run].coming[node] = ready_at, job_id
        self._push(ready_at, run, None)

    def release(self, run: str, nodes: Collection[str], at: float) -> float:
        """Members stop training at `at`; returns when they have left. Nodes that start up leave at once."""
        each = self._runs[run]
        if not self._take(each, nodes, "release", at):
            return at
        return at + min(QUICK_S, self._drawn(each, "release"))

    def lost(self, run: str, nodes: Collection[str], at: float) -> None:
        """They are gone, unannounced."""
        self._take(self._runs[run], nodes, "eject", at)

    def members(self, run: str) -> int:
        """Nodes that train."""
        return len(self._runs[run].members)

    def next_at(self) -> float:
        """When something happens by itself; infinity: nothing."""
        return self._events[0][0] if self._events else inf

    def advance(self, to: float) -> list[Active | Measured]:
        """Play everything up to `to`, in order of time."""
        found: list[Active | Measured] = []
        self._now = max(self._now, to)
        while self._events and self._events[0][0] <= to:
            at, _, name, what = heapq.heappop(self._events)
            run = self._runs[name]
            if what is None:
                found += self._change(run, at)
            elif isinstance(what, int):
                found += self._tell(run, what, at)
            elif what.job_id in run.members.values():
                found.append(what)
        return found

    def _push(self, at: float, run: str, what: Active | int | None) -> None:
        heapq.heappush(self._events, (at, next(self._order), run, what))

    def _drawn(self, run: _Run, kind: Kind) -> float:
        """What its next change of that kind costs."""
        cost = {"absorb": self._costs.absorb, "release": self._costs.release, "eject": self._costs.eject}[kind]
        return drawn(cost, f"{self._seed}/{kind}/{run.plan.run}/{run.changes[kind]}")

    def _take(self, run: _Run, nodes: Collection[str], kind: Kind, at: float) -> int:
        """Nodes are no longer members; what that costs is settled with everything else that happens in this moment."""
        for node in nodes:
            run.coming.pop(node, None)
        gone = [node for node in nodes if run.members.pop(node, None) is not None]
        if gone:
            run.left[kind] = None
            self._push(at, run.plan.run, None)
        return len(gone)

    def _change(self, run: _Run, at: float) -> list[Active | Measured]:
        """Settle what came and went in this moment."""
        ready = {node: job_id for node, (ready_at, job_id) in run.coming.items() if ready_at <= at}
        if not ready and not run.left:
            return []
        told = self._cut(run, at)
        run.members.update(ready)
        for node in ready:
            del run.coming[node]
        for kind in (*run.left, *(("absorb",) if ready else ())):
            # The first ones stall nobody.
            stalls = kind != "absorb" or run.speed[min(run.was, len(run.speed) - 1)] > 0
            cost_s = self._drawn(run, kind) if stalls else 0.0
            run.changes[kind] += 1
            run.stalled_until = max(run.stalled_until, at + cost_s)
            self._meter.change(at, kind)
        run.left.clear()
        run.was = len(run.members)
        self._meter.members(at, run.plan.run, run.was, run.stalled_until)
        first_at = max(at, run.stalled_until)
        for job_id in ready.values():
            self._push(first_at, run.plan.run, Active(at=first_at, job_id=job_id))
        self._measure(run, first_at)
        return told

    def _measure(self, run: _Run, first_at: float) -> None:
        """It trains from then on."""
        step_s = self._step_s(run)
        if not isinf(step_s):
            run.stretch_number += 1
            self._measure_from(run, first_at + WARM * step_s, LONG_ENOUGH_S)

    def _step_s(self, run: _Run) -> float:
        speed = run.speed[min(run.was, len(run.speed) - 1)]
        return ONE_NODE_STEP_S / speed if speed else inf

    def _measure_from(self, run: _Run, begin: float, least_s: float) -> None:
        step_s = self._step_s(run)
        run.stretch = begin, begin + step_s * max(STEPS, ceil(least_s / step_s - 1e-9))
        self._push(run.stretch[1], run.plan.run, run.stretch_number)

    def _tell(self, run: _Run, number: int, at: float) -> list[Active | Measured]:
        """A stretch is long enough, if nothing has changed since it began."""
        if run.stretch is None or number != run.stretch_number:
            return []
        begin = run.stretch[0]
        self._measure_from(run, at, min(LONGEST_S, 2 * (at - begin)))
        return [self._measured(run, at, at - begin)]

    def _cut(self, run: _Run, at: float) -> list[Active | Measured]:
        """A change ends the stretch: its whole steps are told if they are enough."""
        if run.stretch is None:
            return []
        begin, run.stretch = run.stretch[0], None
        step_s = self._step_s(run)
        lasted_s = (at - begin) // step_s * step_s
        enough = lasted_s >= max(LONG_ENOUGH_S, STEPS * step_s)
        return [self._measured(run, at, lasted_s)] if enough else []

    def _measured(self, run: _Run, at: float, lasted_s: float) -> Measured:
        return Measured(at=at, run=run.plan.run, members=run.was, step_s=self._step_s(run), lasted_s=lasted_s)
