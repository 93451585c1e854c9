"""Steady state: our step beside DistributedDataParallel's in one world, while the membership does not change.

`run(settings, progress)` returns rows whose `ours` and `peer` are seconds per step, and whose `ratio` is peer / ours:
0.99 means 99 % of DDP's throughput. `measure` does one world and one model. The peer has the same shards under
`no_sync`, the same bucket views and the same compile mode. The note tells the ratio's confidence interval, the same
ratio in CPU time, which other load on the machine hardly moves, and the A/A spread: the ratio of two DDP arms, which
is 1 but for noise.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from fallow.bench.rows import Peer, Progress, Row, Settings, ours
from fallow.bench.session import folder
from fallow.local.driver import Driver
from fallow.model import Exit, FallowError, RunStatus

BLOCK = 5
"""Measured steps in a block: short, so that both arms see the same noise."""
_ROUNDS = 120
_RESAMPLES = 2000


class Block(msgspec.Struct, frozen=True):
    """As `steady_member.Block`; that module needs torch."""

    arm: str
    wall: list[float]
    cpu: list[float]


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A median over rounds of paired blocks with its 95 % confidence interval (bootstrap)."""

    median: float
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
    "seconds per step, one value per block"
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
    return Figures(
        model=model,
        params=params,
        members=members,
        shards=shards,
        compiled=compiled,
        ours_s=[_wall(b) for b in mine],
        peer_s=[_wall(b) for b in peer],
        wall=_ratio([(_wall(a) + _wall(b)) / 2 for a, b in zip(peer, again, strict=True)], [_wall(b) for b in mine]),
        cpu=_ratio([(_cpu(a) + _cpu(b)) / 2 for a, b in zip(peer, again, strict=True)], [_cpu(b) for b in mine]),
        aa_wall=_ratio([_wall(b) for b in peer], [_wall(b) for b in again]),
        aa_cpu=_ratio([_cpu(b) for b in peer], [_cpu(b) for b in again]),
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
        ratio=figures.wall.median,
        note="; ".join(words),
    )


def _read(path: Path) -> list[Block]:
    return msgspec.json.decode(path.read_bytes(), type=list[Block])


def _wall(block: Block) -> float:
    return max(block.wall)


def _cpu(block: Block) -> float:
    return sum(block.cpu)


def _ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    pairs = [a / b for a, b in zip(above, below, strict=True)]
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    return Ratio(
        median=statistics.median(pairs),
        low=medians[int(0.025 * _RESAMPLES)],
        high=medians[int(0.975 * _RESAMPLES)],
    )


def _text(ratio: Ratio) -> str:
    return f"{ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})"


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
