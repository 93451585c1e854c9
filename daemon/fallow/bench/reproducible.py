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
    """Seconds per step in each world with each model, and how often the fast mode's that is.

    One shard each; with four, which need as much per shard, in the first of the worlds only.
    """
    first, *others = settings.worlds
    for (params, members), shards in [(first, 1), (first, 4), *((world, 1) for world in others)]:
        progress(f"reproducible: {members} members, {params / 1e6:g} M parameters, {shards} shards each")
        yield _row(measure(members, params, shards, settings.n or ROUNDS, settings.device))


def measure(
    members: int, params: int, shards: int, rounds: int, device: str = "cpu"
) -> tuple[list[Figures], list[Figures]]:
    """(fast, reproducible) runs in turn."""
    fast: list[Figures] = []
    exact: list[Figures] = []
    for _ in range(TURNS):
        for kind, into in ((False, fast), (True, exact)):
            figures = steady.measure(
                "gpt", params, members, shards, rounds=rounds, trainings=1, reproducible=kind, device=device
            )
            into.append(figures)
    return fast, exact


def _row(measured: tuple[list[Figures], list[Figures]]) -> Row:
    fast, exact = measured
    one = exact[0]
    wall = statistics.mean(f.wall.value for f in fast) / statistics.mean(f.wall.value for f in exact)
    cpu = statistics.mean(f.cpu.value for f in fast) / statistics.mean(f.cpu.value for f in exact)
    words = [
        f"{one.shards} shards a member; step time, reproducible / fast: wall {wall:.3f}, CPU {cpu:.3f}",
        f"throughput / DDP's: fast {_beside_ddp(fast)}, reproducible {_beside_ddp(exact)}",
    ]
    return Row(
        name="reproducible",
        members=one.members,
        params=one.params,
        unit="s",
        ours=rows.ours([value for figures in exact for value in figures.ours_s]),
        peer=Peer(name="fast mode", p50=statistics.median(value for figures in fast for value in figures.ours_s)),
        ratio=wall,
        note="; ".join(words),
    )


def _beside_ddp(runs: list[Figures]) -> str:
    """Of each run, with A/A in brackets."""
    return ", ".join(f"{one.wall.value:.3f} (A/A {one.aa_wall.value:.3f})" for one in runs)
