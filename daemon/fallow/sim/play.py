"""Plays a cluster, the runs on it and who asks for nodes, in order of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fallow.sim.clock import VirtualLoop
from fallow.sim.meter import IdealTally, Tally
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import Happening, Options, RunPlan
from fallow.sim.work import Work

PROGRESS_S = 600.0
"""Progress is told so often, in virtual time."""


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


class Ideal(Head):
    """Who knows everything, and for whom changes are free."""

    tally = IdealTally


def play(head: Head, until: float, progress: Callable[[float, float], None] = lambda at, ratio: None) -> None:
    """Play a cluster, from where it stands, and whoever asks it for nodes, who is closed then.

    At equal times the engine comes first, then the runs, then the head; what they set off at once is played in further
    turns of the same moment.

    Args:
        head: who asks for nodes.
        until: Unix time of the trace.
        progress: called with the time and the ideal ratio so far.
    """
    engine, meter, loop = head.engine, head.meter, head.loop
    told_at = engine.now
    meter.pool(engine.now, engine.idle_nodes())
    try:
        while (at := max(engine.now, min(engine.next_at(), loop.due))) <= until:
            happenings = engine.advance(at)
            for happening in happenings:
                # Timers of one time run in no order; these are heard in theirs, and before them.
                loop.call_soon(head.hear, happening)
            meter.pool(at, engine.idle_nodes())
            if happenings or loop.due <= at:
                head.wake()
            if at >= told_at + PROGRESS_S:
                told_at = at
                progress(at, meter.score().ideal_ratio)
        engine.advance(until)
    finally:
        loop.close()
        meter.end(engine.now, engine.requests, engine.waits())
