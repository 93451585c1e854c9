"""Plays a cluster, the runs on it and who asks for nodes, in order of time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from fallow.sim.meter import Tally
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import Head, Pool, Waited
from fallow.sim.work import Work

PROGRESS_S = 600.0
"""Progress is told so often, in virtual time."""

STUCK = 100_000
"""Turns at one moment after which somebody is going round in circles."""


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
            meter.calls = head.calls
        if at >= told_at + PROGRESS_S:
            told_at = at
            progress(at, meter.score().ideal_ratio)
    for waits in engine.held():
        meter.waited(waits.job_id, waits.seconds)
    meter.pool(until, engine.idle_nodes())
