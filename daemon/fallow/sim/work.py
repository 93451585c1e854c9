"""The runs being trained: who is a member, when training stands still, how fast it goes otherwise.

A change of a membership stalls its run for as long as it costs; what changes a run in the same moment is one change,
for the dearest part's cost. A change that begins while another one is under way begins it anew: restarts do, and in
place, where pauses are far shorter than the times between them, it is the next pause. The first member has nobody to
stall.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf

from fallow.sim.clock import RUN, Agenda, VirtualLoop
from fallow.sim.meter import Tally
from fallow.sim.published import drawn, speeds
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import Active, Happening, Kind, Measured, Options, RunPlan

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
    speeds: tuple[float, ...]
    members: dict[str, str] = field(default_factory=dict)
    "node -> job, in the order in which they joined"
    coming: dict[str, tuple[float, str]] = field(default_factory=dict)
    "node -> (ready at, job)"
    was: int = 0
    "members after the last change"
    left: dict[Kind, None] = field(default_factory=dict)
    "how nodes went since then"
    changes: Counter[Kind] = field(default_factory=Counter)
    stalled_until: float = -inf
    stretch_at: float = inf
    "when the stretch of undisturbed training began that has not been told"
    stamp: int = 0
    "counts stretches, so that what was planned for one that a change has ended comes to nothing"

    @property
    def speed(self) -> float:
        return self.speeds[min(self.was, len(self.speeds) - 1)]


class Work:
    """The only one that changes memberships. Tells of first steps, and of stretches of undisturbed training.

    Args:
        plans: the runs.
        options: what changes cost.
        meter: is told of all changes.
        agenda: of all that happens.
    """

    def __init__(self, plans: Sequence[RunPlan], options: Options, meter: Tally, agenda: Agenda) -> None:
        self._runs = {plan.run: _Run(plan, speeds(plan)) for plan in plans}
        self._costs, self._seed, self._meter, self._agenda = options.costs, options.seed, meter, agenda
        self._starts: Counter[str] = Counter()
        "node -> how often it has started up"

    def join(self, run: str, node: str, job_id: str) -> None:
        """The node's job has started: it starts up from now on, and is absorbed then."""
        self._starts[node] += 1
        start_s = drawn(self._costs.start, f"{self._seed}/start/{node}/{self._starts[node]}")
        each, ready_at = self._runs[run], self._agenda.now + start_s
        each.coming[node] = ready_at, job_id
        self._agenda.at(ready_at, RUN, partial(self._change, each))

    def release(self, run: str, nodes: Collection[str]) -> float:
        """Members stop training now; returns when they have left. Nodes that start up leave at once."""
        each = self._runs[run]
        leaves_s = min(QUICK_S, self._drawn(each, "release")) if self._take(each, nodes, "release") else 0.0
        return self._agenda.now + leaves_s

    def lost(self, run: str, nodes: Collection[str]) -> None:
        """They are gone, unannounced."""
        self._take(self._runs[run], nodes, "eject")

    def members(self, run: str) -> int:
        """Nodes that train."""
        return len(self._runs[run].members)

    def _drawn(self, run: _Run, kind: Kind) -> float:
        """What its next change of that kind costs."""
        return drawn(getattr(self._costs, kind), f"{self._seed}/{kind}/{run.plan.run}/{run.changes[kind]}")

    def _take(self, run: _Run, nodes: Collection[str], kind: Kind) -> bool:
        """Nodes are no longer members; what that costs is settled with everything else that happens in this moment."""
        for node in nodes:
            run.coming.pop(node, None)
        leavers = [node for node in nodes if run.members.pop(node, None) is not None]
        if leavers:
            run.left[kind] = None
            self._agenda.at(self._agenda.now, RUN, partial(self._change, run))
        return bool(leavers)

    def _change(self, run: _Run) -> None:
        """Settle what came and went in this moment."""
        now = self._agenda.now
        ready = {node: job_id for node, (ready_at, job_id) in run.coming.items() if ready_at <= now}
        if not ready and not run.left:
            return
        self._end_stretch(run)
        run.members.update(ready)
        for node in ready:
            del run.coming[node]
        for kind in (*run.left, *(("absorb",) if ready else ())):
            # The first ones stall nobody.
            cost_s = self._drawn(run, kind) if kind != "absorb" or run.speed > 0 else 0.0
            run.changes[kind] += 1
            run.stalled_until = max(run.stalled_until, now + cost_s)
            self._meter.change(kind)
        run.left.clear()
        run.was = len(run.members)
        self._meter.members(now, run.plan.run, run.was, run.stalled_until)
        first_at = max(now, run.stalled_until)
        for job_id in ready.values():
            self._agenda.at(first_at, RUN, partial(self._first_step, run, job_id))
        if run.speed > 0:
            self._begin_stretch(run, first_at + WARM * ONE_NODE_STEP_S / run.speed, LONG_ENOUGH_S)

    def _first_step(self, run: _Run, job_id: str) -> None:
        if job_id in run.members.values():
            self._agenda.tell(Active(at=self._agenda.now, job_id=job_id))

    # -- what is measured -------------------------------------------------------------------------------------------

    def _begin_stretch(self, run: _Run, at: float, least_s: float) -> None:
        step_s = ONE_NODE_STEP_S / run.speed
        run.stretch_at = at
        told_at = at + step_s * max(STEPS, ceil(least_s / step_s - 1e-9))
        self._agenda.at(told_at, RUN, partial(self._tell_stretch, run), run)

    def _tell_stretch(self, run: _Run) -> None:
        """A stretch is long enough."""
        lasted_s = self._agenda.now - run.stretch_at
        self._begin_stretch(run, self._agenda.now, min(LONGEST_S, 2 * lasted_s))
        self._measured(run, lasted_s)

    def _end_stretch(self, run: _Run) -> None:
        """A change ends the stretch: its whole steps are told if they are enough."""
        run.stamp += 1
        if run.stretch_at < self._agenda.now:
            step_s = ONE_NODE_STEP_S / run.speed
            lasted_s = (self._agenda.now - run.stretch_at) // step_s * step_s
            if lasted_s >= max(LONG_ENOUGH_S, STEPS * step_s):
                self._measured(run, lasted_s)
        run.stretch_at = inf

    def _measured(self, run: _Run, lasted_s: float) -> None:
        step_s = ONE_NODE_STEP_S / run.speed
        measurement = Measured(at=self._agenda.now, run=run.plan.run, members=run.was, step_s=step_s, lasted_s=lasted_s)
        self._agenda.tell(measurement)


class Head:
    """Who asks for nodes and hands them out, in virtual time. This one asks for none.

    Args:
        engine: the cluster, as it stands.
        plans: runs that are trained.
        options: what it is told.
    """

    tally = Tally

    def __init__(self, engine: SlurmSim, plans: Sequence[RunPlan], options: Options) -> None:
        self.engine, self._options = engine, options
        self._plans = {plan.run: plan for plan in plans}
        self.meter = self.tally(plans, len(engine.site.nodes), engine.now)
        "adds up what comes of it"
        self.runs = Work(plans, options, self.meter, engine)
        self.loop = VirtualLoop(engine.now)

    def wake(self) -> None:
        """A poll is due, a submission done, a timer has run out."""
        self.loop.play(self.engine.now)

    def hear(self, happening: Happening) -> None:
        """What our jobs' agents and the runs notice at once."""
