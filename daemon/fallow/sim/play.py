"""Plays a cluster, the runs on it and who asks for nodes, in order of time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from fallow.sim.clock import VirtualLoop
from fallow.sim.meter import Tally
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import Active, Happening, Measured, Pool, Waited
from fallow.sim.work import Work

PROGRESS_S = 600.0
"""Progress is told so often, in virtual time."""

STUCK = 100_000
"""Turns at one moment after which somebody is going round in circles."""


class Head:
    """Who asks for nodes and hands them out, in virtual time. This one asks for none.

    Args:
        engine: the cluster.
    """

    def __init__(self, engine: SlurmSim) -> None:
        self._engine = engine
        self._loop = VirtualLoop(engine.now)

    def next_at(self) -> float:
        """When something is due; infinity: nothing."""
        return self._loop.due

    def wake(self, at: float) -> None:
        """A poll is due, a submission done, a timer has run out."""
        self._loop.play(at)

    def told(self, happening: Happening | Active | Measured) -> None:
        """What our jobs' agents and the runs notice at once."""

    def close(self) -> None:
        """Nothing more is played."""
        self._loop.close()


def play(
    engine: SlurmSim,
    head: Head,
    runs: Work,
    meter: Tally,
    until: float,
    progress: Callable[[float, float], None] = lambda at, ratio: None,
) -> None:
    """Play from where the engine stands.

    At equal times the engine comes first, then the runs, then the head; what they set off at once is played in further
    turns of the same moment.

    Args:
        engine: the cluster.
        head: who asks for nodes.
        runs: that are trained.
        meter: adds up what comes of it.
        until: Unix time of the trace.
        progress: called with the time and the ideal ratio so far.
    """
    meter.pool(engine.now, engine.idle_nodes())
    told_at, before, turns = engine.now, -inf, 0
    while True:
        due = min(engine.next_at(), runs.next_at(), head.next_at())
        at = max(engine.now, min(due, until))
        turns = turns + 1 if at == before else 0
        if turns > STUCK:
            raise AssertionError(f"no end of what happens at {at:.3f}")
        before = at
        for happening in engine.advance(at):
            if isinstance(happening, Pool):
                meter.pool(happening.at, happening.idle)
            elif isinstance(happening, Waited):
                meter.waited(happening.job_id, happening.seconds)
            head.told(happening)
        for each in runs.advance(at):
            head.told(each)
        if due > until:
            break
        if head.next_at() <= at:
            head.wake(at)
            meter.calls = engine.requests
        if at >= told_at + PROGRESS_S:
            told_at = at
            progress(at, meter.score().ideal_ratio)
    for waits in engine.held():
        meter.waited(waits.job_id, waits.seconds)
    meter.pool(until, engine.idle_nodes())
