"""Plays a cluster, the runs on it and who asks for nodes, in order of time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from fallow.model import Score
from fallow.sim.types import Engine, Head, Meter, Pool, Runs, Waited

PROGRESS_S = 600.0
"""Progress is told so often, in virtual time."""

STUCK = 100_000
"""Turns at one moment after which somebody is going round in circles."""


def play(
    engine: Engine,
    head: Head,
    runs: Runs,
    meter: Meter,
    until: float,
    progress: Callable[[float, float], None] = lambda at, ratio: None,
) -> Score:
    """Play from where the engine stands.

    At equal times the engine comes first, then the runs, then the head; what they set off at once is played in further
    turns of the same moment.

    Args:
        until: Unix time of the trace.
        progress: called with the time and the ideal ratio so far.
    """
    meter.pool(engine.now, engine.idle_nodes())
    told_at, before, turns, calls = engine.now, -inf, 0, 0
    while True:
        asked_at = min(runs.next_at(), head.next_at())
        while True:
            due = min(engine.next_at(), asked_at)
            at = max(engine.now, min(due, until))
            turns = turns + 1 if at == before else 0
            if turns > STUCK:
                raise AssertionError(f"{head.name}: no end of what happens at {at:.3f}")
            before = at
            happened = engine.advance(at)
            # What only the engine knows of changes nothing for the others.
            if happened or due >= asked_at or due > until or at >= told_at + PROGRESS_S:
                break
        for happening in happened:
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
            meter.calls(head.calls - calls)
            calls = head.calls
        if at >= told_at + PROGRESS_S:
            told_at = at
            progress(at, meter.score().ideal_ratio)
    meter.pool(until, engine.idle_nodes())
    return meter.score()
