"""Steady state: our step compared with DistributedDataParallel's in one world without membership changes.

The peer has the same shards under `no_sync`, the same bucket views and the same compile mode. Both take turns in the
same processes (`training`). There are several trainings, because the memory layout of a training affects all its
steps. The note has the 95 % confidence interval, and the ratio of two DDP arms (A/A), which differs from 1 by noise.
"""

import math
import random
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from bench.rows import Peer, Row, Settings, progress, quantile_of, summarize, world_text, worlds
from bench.session import train
from bench.workload import are_shared
from fallow.model import Exit, FallowError

ROUNDS, ROUNDS_EXACT = 500, 200
"""Number of turns of each arm, in all trainings together."""

FEW_ROUNDS = 100
"""Fewer rounds than this are divided between two trainings, more between four."""

_RESAMPLES = 1000
_CUT = 10
"""One in `_CUT` rounds is trimmed at each end, because other load on the machine lengthens single turns."""


class Ratio(NamedTuple):
    """The step time of one arm divided by another's, with the 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


Turns = dict[str, list[float]]
"""Arm -> seconds per step of each turn, on the slowest member. Turn i of all arms belongs to round i."""


def run(settings: Settings) -> Iterator[Row]:
    """Rows for all worlds with one shard a member. The first world also runs with four shards, and compiled."""
    first, *other_worlds = worlds(settings)
    arms = [(first, 1, False), (first, 4, False), *((world, 1, False) for world in other_worlds)]
    arms += [(first, 1, True)] if settings.device in ("cpu", "cuda") else []  # others have no compiler
    for (params, members), shards, compiled in arms:
        words = f"{shards} shards a member" + (", compiled" if compiled else "")
        progress(f"steady: {world_text(params, members)}, {words}")
        turns = compare(params, members, shards, settings.n or ROUNDS, settings.device, compile=compiled)
        yield Row(
            name="steady state",
            members=members,
            params=params,
            ours=summarize(turns["ours"]),
            peer=Peer(name="DDP", p50=quantile_of(turns["ddp"] + turns["ddp_again"], 0.5)),
            ratio=beside_ddp(turns).value,
            note=f"{words}; {beside_ddp(turns)}; A/A: {ratio(turns['ddp'], turns['ddp_again'])}",
        )


def run_reproducible(settings: Settings) -> Iterator[Row]:
    """Rows for the cost of `reproducible=True`, with one shard a member. The first world also runs with four shards.

    The ratio is (ours / DDP) in the reproducible mode divided by (ours / DDP) in the fast mode. So a machine that is
    slower during one of the two runs hardly affects the ratio.
    """
    first, *other_worlds = worlds(settings)
    for (params, members), shards in [(first, 1), (first, 4), *((world, 1) for world in other_worlds)]:
        progress(f"reproducible: {world_text(params, members)}, {shards} shards a member")
        fast, exact = (
            compare(params, members, shards, settings.n or ROUNDS_EXACT, settings.device, reproducible=mode)
            for mode in (False, True)
        )
        yield Row(
            name="reproducible",
            members=members,
            params=params,
            ours=summarize(exact["ours"]),
            peer=Peer(name="fast mode", p50=quantile_of(fast["ours"], 0.5)),
            ratio=beside_ddp(fast).value / beside_ddp(exact).value,
            note=f"{shards} shards a member; DDP / ours: fast {beside_ddp(fast)}, reproducible {beside_ddp(exact)}",
        )


def compare(params: int, members: int, shards: int, rounds: int, device: str, **options: bool) -> Turns:
    """Train under a private head and with DDP in the same processes.

    Args:
        params: approximate number of parameters.
        members: number of members, each with one worker on this machine.
        shards: shards of a step on each member.
        rounds: turns of each arm, in all trainings together.
        device: torch's name of the kind of device; each member needs its own device.
        options: `compile`: all arms use torch.compile; `reproducible`: ours uses `prepare(reproducible=True)`.

    Raises:
        FallowError: the training did not finish, or there are not enough devices.
    """
    if are_shared(device, members):
        raise FallowError(f"--members {members} beside DDP needs {members} devices ({device})", Exit.UNAVAILABLE)
    trainings = 2 if rounds < FEW_ROUNDS else 4
    settings = {"shards": shards, "rounds": -(-rounds // trainings), "device": device, **options}
    turns: Turns = {"ours": [], "ddp": [], "ddp_again": []}
    for _ in range(trainings):
        training = train(params, members, **settings)
        for arm, seconds in msgspec.json.decode(training.result, type=Turns).items():
            turns[arm] += seconds
    return turns


def beside_ddp(turns: Turns) -> Ratio:
    """DDP's step time divided by ours: above 1, ours is faster."""
    return ratio([fmean(pair) for pair in zip(turns["ddp"], turns["ddp_again"], strict=True)], turns["ours"])


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Trimmed geometric mean of above / below over the rounds, with its interval by bootstrap."""
    rounds = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    dice = random.Random(0)
    drawn = sorted(_middle(dice.choices(rounds, k=len(rounds))) for _ in range(_RESAMPLES))
    low, high = drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES)]
    return Ratio(math.exp(_middle(rounds)), math.exp(low), math.exp(high))


def _middle(rounds: Sequence[float]) -> float:
    """Trimmed mean."""
    cut = len(rounds) // _CUT
    return fmean(sorted(rounds)[cut : len(rounds) - cut])
