"""Plays a cluster, the runs on it and who asks for nodes, in order of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TypeVar

from fallow.sim.clock import VirtualLoop
from fallow.sim.meter import Tally
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import Happening, Options, RunPlan
from fallow.sim.work import Work

H = TypeVar("H", bound="Head")

PROGRESS_S = 600.0
"""Progress is told so often, in virtual time."""


class Head:
    """Who asks for nodes and hands them out, in virtual time. This one asks for none.

    Args:
        engine: the cluster.
        runs: that are trained.
        plans: the same runs.
        options: what it is told.
    """

    def __init__(self, engine: SlurmSim, runs: Work, plans: Sequence[RunPlan], options: Options) -> None:
        self._engine, self.runs, self._options = engine, runs, options
        self._plans = {plan.run: plan for plan in plans}
        self.loop = VirtualLoop(engine.now)

    def wake(self) -> None:
        """A poll is due, a submission done, a timer has run out."""
        self.loop.play(self._engine.now)

    def hear(self, happening: Happening) -> None:
        """What our jobs' agents and the runs notice at once."""

    def close(self) -> None:
        """Nothing more is played."""
        self.loop.close()


def play(
    engine: SlurmSim,
    policy: type[H],
    plans: Sequence[RunPlan],
    options: Options,
    meter: Tally,
    until: float,
    *,
    seed: int = 0,
    progress: Callable[[float, float], None] = lambda at, ratio: None,
) -> H:
    """Play from where the engine stands. Returns the head, which is closed.

    At equal times the engine comes first, then the runs, then the head; what they set off at once is played in further
    turns of the same moment.

    Args:
        engine: the cluster.
        policy: who asks for nodes.
        plans: runs that are trained.
        options: what the head is told, and what changes cost.
        meter: adds up what comes of it.
        until: Unix time of the trace.
        seed: of what is drawn.
        progress: called with the time and the ideal ratio so far.
    """
    runs = Work(plans, options.costs, seed, meter, engine)
    told_at = engine.now
    meter.pool(engine.now, engine.idle_nodes())
    try:
        with closing(policy(engine, runs, plans, options)) as head:
            while (at := max(engine.now, min(engine.next_at(), head.loop.due))) <= until:
                happenings = engine.advance(at)
                for happening in happenings:
                    # Timers of one time run in no order; these are heard in theirs, and before them.
                    head.loop.call_soon(head.hear, happening)
                meter.pool(at, engine.idle_nodes())
                if happenings or head.loop.due <= at:
                    head.wake()
                if at >= told_at + PROGRESS_S:
                    told_at = at
                    progress(at, meter.score().ideal_ratio)
        engine.advance(until)
    finally:
        meter.end(engine.now, engine.requests, engine.waits())
    return head
