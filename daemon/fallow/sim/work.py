"""The simulated training of runs: their members, their standstills, and their speed.

A change of the membership stalls its run for the duration of the change (`Costs`). All changes of a run in one moment
count as one change, and the longest duration applies. A change that begins during another change starts a new
standstill. That is what restarts do. Changes in place hardly ever overlap, because pauses are far shorter than the
times between them. The first member of a run stalls nobody.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf

from fallow.sim.clock import RUN, Agenda, VirtualLoop
from fallow.sim.meter import Tally
from fallow.sim.published import draw_cost_s, speeds
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import FirstStep, Kind, Measurement, Options, RunPlan, SimEvent

ONE_NODE_STEP_S = 16.0
"""Duration of a step on one node. A stretch has whole steps, so this value decides how soon speeds are known."""

LONG_ENOUGH_S, STEPS, WARM = 15.0, 3, 3
"""How the head cuts stretches (`head.peers.throughput`): least duration, least number of steps, warm-up steps."""

LONGEST_S = 3600.0
"""Longest piece in which an undisturbed stretch is reported. Pieces double up to this length."""

QUICK_S = 1.0
"""Longest time that a leaving node needs, even where the other members stand still for longer."""


@dataclass(slots=True)
class _Run:
    plan: RunPlan
    speeds: tuple[float, ...]
    members: dict[str, str] = field(default_factory=dict)
    "node -> job, in order of joining"
    starting_nodes: dict[str, tuple[float, str]] = field(default_factory=dict)
    "node that starts up -> (time at which it is ready, job)"
    size: int = 0
    "number of members after the last change"
    departures: dict[Kind, None] = field(default_factory=dict)
    "kinds of departures since the last change (a set in order)"
    changes: Counter[Kind] = field(default_factory=Counter)
    stalled_until: float = -inf
    stretch_at: float = inf
    "begin of the undisturbed stretch that is not reported yet; infinity: none"
    stamp: int = 0
    "number of the stretch; the agenda drops events of earlier stretches"

    @property
    def speed(self) -> float:
        return self.speeds[min(self.size, len(self.speeds) - 1)]


class Work:
    """Simulates the members of all runs. Tells the agenda of first steps and of undisturbed stretches of training.

    Args:
        plans: the runs.
        options: the duration of changes.
        meter: counts all changes.
        agenda: the agenda of the simulation.
    """

    def __init__(self, plans: Sequence[RunPlan], options: Options, meter: Tally, agenda: Agenda) -> None:
        self._runs = {plan.run: _Run(plan, speeds(plan)) for plan in plans}
        self._costs, self._seed, self._meter, self._agenda = options.costs, options.seed, meter, agenda
        self._starts: Counter[str] = Counter()
        "node -> number of its start-ups"

    def join(self, run: str, node: str, job_id: str) -> None:
        """Begin the start-up of a node whose job has just started. The run absorbs the node when the node is ready."""
        self._starts[node] += 1
        start_s = draw_cost_s(self._costs.start, f"{self._seed}/start/{node}/{self._starts[node]}")
        each, ready_at = self._runs[run], self._agenda.now + start_s
        each.starting_nodes[node] = ready_at, job_id
        self._agenda.at(ready_at, RUN, partial(self._change, each))

    def release(self, run: str, nodes: Collection[str]) -> float:
        """Stop members now. Returns the time at which they have left. Nodes that start up leave at once."""
        each = self._runs[run]
        leaves_s = min(QUICK_S, self._draw_cost_s(each, "release")) if self._remove(each, nodes, "release") else 0.0
        return self._agenda.now + leaves_s

    def lose(self, run: str, nodes: Collection[str]) -> None:
        """Remove nodes that were lost without notice."""
        self._remove(self._runs[run], nodes, "eject")

    def members(self, run: str) -> int:
        """Number of nodes that train."""
        return len(self._runs[run].members)

    def _draw_cost_s(self, run: _Run, kind: Kind) -> float:
        """Duration of the run's next change of that kind."""
        return draw_cost_s(getattr(self._costs, kind), f"{self._seed}/{kind}/{run.plan.run}/{run.changes[kind]}")

    def _remove(self, run: _Run, nodes: Collection[str], kind: Kind) -> bool:
        """Remove members, and settle the change after all events of this moment. Returns True if any was a member."""
        for node in nodes:
            run.starting_nodes.pop(node, None)
        leavers = [node for node in nodes if run.members.pop(node, None) is not None]
        if leavers:
            run.departures[kind] = None
            self._agenda.at(self._agenda.now, RUN, partial(self._change, run))
        return bool(leavers)

    def _change(self, run: _Run) -> None:
        """Settle all joins and departures of this moment as one change."""
        now = self._agenda.now
        ready = {node: job_id for node, (ready_at, job_id) in run.starting_nodes.items() if ready_at <= now}
        if not ready and not run.departures:
            return
        self._end_stretch(run)
        run.members.update(ready)
        for node in ready:
            del run.starting_nodes[node]
        for kind in (*run.departures, *(("absorb",) if ready else ())):
            # The first members stall nobody.
            cost_s = self._draw_cost_s(run, kind) if kind != "absorb" or run.speed > 0 else 0.0
            run.changes[kind] += 1
            run.stalled_until = max(run.stalled_until, now + cost_s)
            self._meter.count_change(kind)
        run.departures.clear()
        run.size = len(run.members)
        self._meter.set_members(now, run.plan.run, run.size, run.stalled_until)
        first_at = max(now, run.stalled_until)
        for job_id in ready.values():
            self._agenda.at(first_at, RUN, partial(self._first_step, run, job_id))
        if run.speed > 0:
            self._begin_stretch(run, first_at + WARM * ONE_NODE_STEP_S / run.speed, LONG_ENOUGH_S)

    def _first_step(self, run: _Run, job_id: str) -> None:
        if job_id in run.members.values():
            self._agenda.tell(FirstStep(at=self._agenda.now, job_id=job_id))

    # -- speeds -----------------------------------------------------------------------------------------------------

    def _begin_stretch(self, run: _Run, at: float, least_s: float) -> None:
        step_s = ONE_NODE_STEP_S / run.speed
        run.stretch_at = at
        told_at = at + step_s * max(STEPS, ceil(least_s / step_s - 1e-9))
        self._agenda.at(told_at, RUN, partial(self._tell_stretch, run), run)

    def _tell_stretch(self, run: _Run) -> None:
        """Report a stretch that is long enough, and begin the next one."""
        lasted_s = self._agenda.now - run.stretch_at
        self._begin_stretch(run, self._agenda.now, min(LONGEST_S, 2 * lasted_s))
        self._report_stretch(run, lasted_s)

    def _end_stretch(self, run: _Run) -> None:
        """End the stretch because of a change. Report its whole steps if they are enough."""
        run.stamp += 1
        if run.stretch_at < self._agenda.now:
            step_s = ONE_NODE_STEP_S / run.speed
            lasted_s = (self._agenda.now - run.stretch_at) // step_s * step_s
            if lasted_s >= max(LONG_ENOUGH_S, STEPS * step_s):
                self._report_stretch(run, lasted_s)
        run.stretch_at = inf

    def _report_stretch(self, run: _Run, lasted_s: float) -> None:
        step_s = ONE_NODE_STEP_S / run.speed
        measurement = Measurement(
            at=self._agenda.now, run=run.plan.run, members=run.size, step_s=step_s, lasted_s=lasted_s
        )
        self._agenda.tell(measurement)


class Head:
    """Base of the policies: requests nodes and gives them to runs, in virtual time. The base class requests none.

    Args:
        engine: the cluster.
        plans: the runs to train.
        options: settings.
    """

    tally = Tally

    def __init__(self, engine: SlurmSim, plans: Sequence[RunPlan], options: Options) -> None:
        self.engine, self._options = engine, options
        self._plans = {plan.run: plan for plan in plans}
        self.meter = self.tally(plans, len(engine.site.nodes), engine.now)
        "figures of this policy"
        self.runs = Work(plans, options, self.meter, engine)
        self.loop = VirtualLoop(engine.now)

    def wake(self) -> None:
        """Run everything that is due: polls, submissions, timers."""
        self.loop.play(self.engine.now)

    def hear(self, event: SimEvent) -> None:
        """Take note of an event of our jobs or of the runs."""
