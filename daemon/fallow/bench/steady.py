"""Steady state: our step beside DistributedDataParallel's in one world, while the membership does not change.

`run(settings, progress)` returns rows whose `ours` and `peer` are seconds per step, and whose `ratio` is peer / ours:
0.99 means 99 % of DDP's throughput. `measure` does one world and one model. The peer has the same shards under
`no_sync`, the same bucket views and the same compile mode. The ratio is that of the lower quartiles of all steps: other
load on the machine only ever adds to a step, and moves the median several times as much. The note tells the ratio's
confidence interval, the same ratio in CPU time, and the A/A spread, the ratio of two DDP arms: 1 but for noise.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from fallow.bench.rows import Peer, Progress, Row, Settings, ours
from fallow.bench.session import folder
from fallow.local.driver import Driver
from fallow.model import Exit, FallowError, RunStatus

BLOCK = 5
"""Measured steps in a block: short, so that both arms see the same noise."""
_ROUNDS = 120
_RESAMPLES = 1000


class Block(msgspec.Struct, frozen=True):
    """As `steady_member.Block`; that module needs torch."""

    arm: str
    wall: list[list[float]]
    cpu: list[list[float]]


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Of the lower quartiles of two arms' steps, with its 95 % confidence interval (bootstrap over rounds)."""

    value: float
    low: float
    high: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One world and one model."""

    model: str
    params: int
    members: int
    shards: int
    compiled: bool
    ours_s: list[float]
    "seconds of each step"
    peer_s: list[float]
    wall: Ratio
    "DDP / ours"
    cpu: Ratio
    aa_wall: Ratio
    "DDP / DDP"
    aa_cpu: Ratio


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """All worlds and models that were asked for: 1 and 4 shards on each member, and 1 with `torch.compile`."""
    for params, members in settings.worlds:
        for shards, compiled in ((1, False), (4, False), (1, True)):
            words = f"{shards} shards each{', compiled' if compiled else ''}"
            progress(f"steady: {members} members, {params / 1e6:g} M parameters, {words}")
            yield row(measure("gpt", params, members, shards, rounds=settings.n or _ROUNDS, compiled=compiled))


def measure(
    model: str,
    params: int,
    members: int,
    shards: int,
    *,
    rounds: int = _ROUNDS,
    block: int = BLOCK,
    compiled: bool = False,
    reproducible: bool = False,
) -> Figures:
    """Train under a private head and compare.

    Args:
        model: "gpt" or "mlp".
        params: about so many parameters.
        members: worlds of at least 2; one worker each, all on this machine.
        shards: of a step, on each member.
        rounds: pairs of blocks.
        block: measured steps in a block.
        compiled: both with torch.compile.
        reproducible: ours with `prepare(reproducible=True)`.

    Raises:
        FallowError: the training did not finish.
    """
    with folder() as scratch:
        out = scratch / "blocks.json"
        command = [sys.executable, "-m", "fallow.bench.steady_member", "--out", str(out)]
        command += ["--model", model, "--params", str(params), "--members", str(members), "--shards", str(shards)]
        command += ["--rounds", str(rounds), "--block", str(block), *(["--compile"] if compiled else [])]
        command += ["--reproducible"] if reproducible else []
        driver = Driver(scratch, command, members, output=sys.stderr.fileno())
        report = asyncio.run(driver.train())
        if report.status is not RunStatus.FINISHED or not out.exists():
            raise FallowError(
                f"the measured training is {report.status}: {report.message or 'no reason known'}", Exit.SOFTWARE
            )
        blocks = _read(out)
    mine, peer, again = ([b for b in blocks if b.arm == arm] for arm in ("ours", "ddp", "ddp again"))
    wall, wall_peer, wall_again = ([_wall(b) for b in some] for some in (mine, peer, again))
    cpu, cpu_peer, cpu_again = ([_cpu(b) for b in some] for some in (mine, peer, again))
    return Figures(
        model=model,
        params=params,
        members=members,
        shards=shards,
        compiled=compiled,
        ours_s=list(chain(*wall)),
        peer_s=list(chain(*wall_peer, *wall_again)),
        wall=_ratio([a + b for a, b in zip(wall_peer, wall_again, strict=True)], wall),
        cpu=_ratio([a + b for a, b in zip(cpu_peer, cpu_again, strict=True)], cpu),
        aa_wall=_ratio(wall_peer, wall_again),
        aa_cpu=_ratio(cpu_peer, cpu_again),
    )


def row(figures: Figures) -> Row:
    """As `fallow bench` shows it."""
    words = [
        f"{figures.model}, {figures.shards} shards a member{', compiled' if figures.compiled else ''}",
        f"wall {_text(figures.wall)}, CPU {_text(figures.cpu)}",
        f"A/A: wall {_text(figures.aa_wall)}, CPU {_text(figures.aa_cpu)}",
    ]
    return Row(
        name="steady state",
        members=figures.members,
        params=figures.params,
        unit="s",
        ours=ours(figures.ours_s),
        peer=Peer(name="DDP", p50=statistics.median(figures.peer_s)),
        ratio=figures.wall.value,
        note="; ".join(words),
    )


def _read(path: Path) -> list[Block]:
    return msgspec.json.decode(path.read_bytes(), type=list[Block])


def _wall(block: Block) -> list[float]:
    """Of each step, on the member that took longest."""
    return [max(ranks) for ranks in zip(*block.wall, strict=True)]


def _cpu(block: Block) -> list[float]:
    """Of each step, on all members together."""
    return [sum(ranks) for ranks in zip(*block.cpu, strict=True)]


def _ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Ratio:
    """Steps by round; a round of one belongs to the same round of the other."""

    def of(rounds: Sequence[int]) -> float:
        over, under = (statistics.quantiles([s for r in rounds for s in some[r]], n=4)[0] for some in (above, below))
        return over / under

    dice = random.Random(0)
    every = range(len(above))
    drawn = sorted(of(dice.choices(every, k=len(every))) for _ in range(_RESAMPLES))
    return Ratio(value=of(every), low=drawn[int(0.025 * _RESAMPLES)], high=drawn[int(0.975 * _RESAMPLES)])


def _text(ratio: Ratio) -> str:
    return f"{ratio.value:.4f} ({ratio.low:.4f} to {ratio.high:.4f})"


def main() -> int:
    """`python -m fallow.bench.steady`: one world and one model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", choices=("gpt", "mlp"), default="gpt")
    parser.add_argument("--params", type=int, default=10_000_000)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--block", type=int, default=BLOCK)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    say: Callable[[str], int] = sys.stdout.write
    figures = measure(
        args.model,
        args.params,
        args.members,
        args.shards,
        rounds=args.rounds,
        block=args.block,
        compiled=args.compile,
    )
    say(msgspec.json.format(msgspec.json.encode(row(figures))).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
