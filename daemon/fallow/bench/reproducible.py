"""What does `reproducible=True` cost?

Both modes are measured beside DDP in the same processes (see `fallow.bench.steady`), in runs that take turns; the ratio
is (ours / DDP) in the reproducible mode, divided by the same of the fast one. So a machine that is slower during one of
the two runs hardly shows.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from fallow.bench import rows, steady
from fallow.bench.rows import Peer, Progress, Row, Settings
from fallow.bench.steady import Figures

ROUNDS = 100
"""Turns of each arm in one run."""

TURNS = 2


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """One row per world, model and number of shards: seconds per step, and how often the fast mode's that is."""
    for params, members in settings.worlds:
        for shards in (1, 4):
            progress(f"reproducible: {members} members, {params / 1e6:g} M parameters, {shards} shards each")
            yield _row(measure(members, params, shards, settings.n or ROUNDS))


def measure(members: int, params: int, shards: int, rounds: int) -> tuple[list[Figures], list[Figures]]:
    """(fast, reproducible) runs in turn."""
    fast: list[Figures] = []
    exact: list[Figures] = []
    for _ in range(TURNS):
        for kind, into in ((False, fast), (True, exact)):
            into.append(steady.measure("gpt", params, members, shards, rounds=rounds, trainings=1, reproducible=kind))
    return fast, exact


def _row(measured: tuple[list[Figures], list[Figures]]) -> Row:
    fast, exact = measured
    one = exact[0]
    wall = statistics.mean(f.wall.value for f in fast) / statistics.mean(f.wall.value for f in exact)
    cpu = statistics.mean(f.cpu.value for f in fast) / statistics.mean(f.cpu.value for f in exact)
    return Row(
        name="reproducible",
        members=one.members,
        params=one.params,
        unit="s",
        ours=rows.ours([value for figures in exact for value in figures.ours_s]),
        peer=Peer(name="fast mode", p50=statistics.median(value for figures in fast for value in figures.ours_s)),
        ratio=wall,
        note=f"{one.shards} shards a member; step time, reproducible / fast: wall {wall:.3f}, CPU {cpu:.3f}",
    )
