"""Plays a cluster, the runs on it and who asks for nodes, in order of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from math import inf
from typing import TypeVar

from fallow.sim.clock import VirtualLoop
from fallow.sim.meter import Tally
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import Active, Happening, Measured, Options, Pool, RunPlan, Waited
from fallow.sim.work import Work

H = TypeVar("H", bound="Head")

PROGRESS_S = 600.0
"""Progress is told so often, in virtual time."""

STUCK = 100_000
"""Turns at one moment after which somebody is going round in circles."""


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
    runs = Work(plans, options.costs, seed, meter, engine.now)
    with closing(policy(engine, runs, plans, options)) as head:
        _play(engine, head, meter, until, progress)
    for waits in engine.held():
        meter.waited(waits.job_id, waits.seconds)
    meter.pool(until, engine.idle_nodes())
    return head


def _play(engine: SlurmSim, head: Head, meter: Tally, until: float, progress: Callable[[float, float], None]) -> None:
    runs = head.runs
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
