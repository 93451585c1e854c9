"""Steady state: our step beside DistributedDataParallel's in one world, while the membership does not change.

`run(settings, progress)` returns rows whose `ours` and `peer` are seconds per step, and whose `ratio` is peer / ours:
0.99 means 99 % of DDP's throughput. `measure` does one world and one model. The peer has the same shards under
`no_sync`, the same bucket views and the same compile mode. Both take turns of two steps (`steady_member`), in several
trainings one after the other, since where a training's memory lies moves all its steps. The ratio is the mean over the
rounds (geometric, without the outer tenths: other load on the machine lengthens single turns several times). The note
tells its 95 % confidence interval, the same ratio in CPU time, and the A/A spread, the ratio of two DDP arms: 1 but for
noise.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

import msgspec

from fallow.bench.rows import Peer, Progress, Row, Settings, ours
from fallow.bench.session import folder
from fallow.local.driver import Driver
from fallow.model import Exit, FallowError, RunStatus

ROUNDS = 500
TRAININGS = 4
"""That share the rounds."""
_RESAMPLES = 1000
_CUT = 10
"""One in so many rounds is left out at each end."""


class Series(msgspec.Struct, frozen=True):
    """As `steady_member.Series`; that module needs torch."""

    arm: str
    wall: list[list[float]]
    cpu: list[list[float]]

    def seconds(self) -> list[float]:
        """Of each turn, on the member that took longest."""
        return [max(ranks) for ranks in zip(*self.wall, strict=True)]

    def cpu_seconds(self) -> list[float]:
        """Of each turn, on all members together."""
        return [sum(ranks) for ranks in zip(*self.cpu, strict=True)]


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Of two arms' steps, with its 95 % confidence interval (bootstrap over rounds)."""

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
    reproducible: bool
    "ours"
    device: str
    ours_s: list[float]
    "seconds per step, of each turn"
    peer_s: list[float]
    wall: Ratio
    "DDP / ours"
    cpu: Ratio
    aa_wall: Ratio
    "DDP / DDP"
    aa_cpu: Ratio


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """All worlds and models that were asked for, with a shard on each member.

    The first of the worlds also with four shards each, and with `torch.compile`.
    """
    first, *others = settings.worlds
    arms = [(first, 1, False), (first, 4, False), (first, 1, True), *((world, 1, False) for world in others)]
    for (params, members), shards, compiled in arms:
        words = f"{shards} shards each{', compiled' if compiled else ''}"
        progress(f"steady: {members} members, {params / 1e6:g} M parameters, {words}")
        figures = measure(
            "gpt", params, members, shards, rounds=settings.n or ROUNDS, compiled=compiled, device=settings.device
        )
        yield row(figures)


def measure(
    model: str,
    params: int,
    members: int,
    shards: int,
    *,
    rounds: int = ROUNDS,
    trainings: int = TRAININGS,
    compiled: bool = False,
    reproducible: bool = False,
    device: str = "cpu",
) -> Figures:
    """Train under a private head and compare.

    Args:
        model: "gpt" or "mlp".
        params: about so many parameters.
        members: one worker each, all on this machine.
        shards: of a step, on each member.
        rounds: turns of each arm, in all trainings together.
        trainings: one after the other, each in new processes.
        compiled: both with torch.compile.
        reproducible: ours with `prepare(reproducible=True)`.
        device: to train on, as torch names its kind; each member needs one of its own.

    Raises:
        FallowError: the training did not finish, or there are not enough devices.
    """
    if device != "cpu":
        check_devices(device, members)
    command = [sys.executable, "-m", "fallow.bench.steady_member", "--model", model, "--params", str(params)]
    command += ["--members", str(members), "--shards", str(shards), "--rounds", str(-(-rounds // trainings))]
    command += ["--device", device]
    command += [*(["--compile"] if compiled else []), *(["--reproducible"] if reproducible else [])]
    arms: dict[str, list[Series]] = {"ours": [], "ddp": [], "ddp again": []}
    for _ in range(trainings):
        for series in _train(command, members):
            arms[series.arm].append(series)
    wall = [[turn for series in some for turn in series.seconds()] for some in arms.values()]
    cpu = [[turn for series in some for turn in series.cpu_seconds()] for some in arms.values()]
    return Figures(
        model=model,
        params=params,
        members=members,
        shards=shards,
        compiled=compiled,
        reproducible=reproducible,
        device=device,
        ours_s=wall[0],
        peer_s=wall[1] + wall[2],
        wall=ratio(_mean(wall[1], wall[2]), wall[0]),
        cpu=ratio(_mean(cpu[1], cpu[2]), cpu[0]),
        aa_wall=ratio(wall[1], wall[2]),
        aa_cpu=ratio(cpu[1], cpu[2]),
    )


def check_devices(device: str, members: int) -> None:
    """Raises FallowError if members would have to share a device: that would say nothing of either side."""
    from fallow.bench.device import count

    if members > count(device):
        raise FallowError(
            f"{members} members beside DDP need {members} devices ({device}), this machine has {count(device)}",
            Exit.UNAVAILABLE,
        )


def row(figures: Figures) -> Row:
    """As `fallow bench` shows it."""
    kinds = [*(["compiled"] if figures.compiled else []), *(["ours reproducible"] if figures.reproducible else [])]
    words = [
        ", ".join([f"{figures.model}, {figures.shards} shards a member", *kinds]),
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
        device=figures.device,
    )


def _train(command: Sequence[str], members: int) -> list[Series]:
    with folder() as scratch:
        out = scratch / "series.json"
        driver = Driver(scratch, [*command, "--out", str(out)], members, output=sys.stderr.fileno())
        report = asyncio.run(driver.train())
        if report.status is not RunStatus.FINISHED or not out.exists():
            raise FallowError(
                f"the measured training is {report.status}: {report.message or 'no reason known'}", Exit.SOFTWARE
            )
        return msgspec.json.decode(out.read_bytes(), type=list[Series])


def _mean(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [(a + b) / 2 for a, b in zip(first, second, strict=True)]


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """How much longer the steps of one arm take than another's, turn by turn of the same round."""
    rounds = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    dice = random.Random(0)
    drawn = sorted(_middle(dice.choices(rounds, k=len(rounds))) for _ in range(_RESAMPLES))
    value, low, high = (
        math.exp(at) for at in (_middle(rounds), drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES)])
    )
    return Ratio(value=value, low=low, high=high)


def _middle(rounds: Sequence[float]) -> float:
    """Mean without the outer ones."""
    cut = len(rounds) // _CUT
    return statistics.fmean(sorted(rounds)[cut : len(rounds) - cut])


def _text(ratio: Ratio) -> str:
    return f"{ratio.value:.4f} ({ratio.low:.4f} to {ratio.high:.4f})"


def main() -> int:
    """`python -m fallow.bench.steady`: one world and one model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", choices=("gpt", "mlp"), default="gpt")
    parser.add_argument("--params", type=int, default=10_000_000)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--trainings", type=int, default=TRAININGS)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--reproducible", action="store_true", help="ours")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    say: Callable[[str], int] = sys.stdout.write
    figures = measure(
        args.model,
        args.params,
        args.members,
        args.shards,
        rounds=args.rounds,
        trainings=args.trainings,
        compiled=args.compile,
        reproducible=args.reproducible,
        device=args.device,
    )
    say(msgspec.json.format(msgspec.json.encode(row(figures))).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
