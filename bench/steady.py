"""Steady state: our step beside DistributedDataParallel's in one world, while the membership does not change.

The peer has the same shards under `no_sync`, the same bucket views and the same compile mode. Both take turns in the
same processes (`training`), in several trainings one after the other: where a training's memory lies moves all
its steps. The note tells the 95 % confidence interval, and the ratio of two DDP arms (A/A), which is 1 but for noise.
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
"""Turns of each arm, in all trainings together."""

FEW_ROUNDS = 100
"""Fewer than that are shared by two trainings, others by four."""

_RESAMPLES = 1000
_CUT = 10
"""One in so many rounds is left out at each end: other load on the machine lengthens single turns."""


class Ratio(NamedTuple):
    """How much longer the steps of one arm take than another's, with the 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


Turns = dict[str, list[float]]
"""Arm -> seconds per step of each turn, on the slowest member. Turn number i of all arms is of the same round."""


def run(settings: Settings) -> Iterator[Row]:
    """All worlds and models with one shard a member; the first one also with four shards, and compiled."""
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
    """What `reproducible=True` costs, with one shard a member; the first of the worlds also with four.

    The ratio is (ours / DDP) in the reproducible mode, divided by the same of the fast one, so that a machine that is
    slower during one of the runs hardly shows.
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
    """Train under a private head beside DDP.

    Args:
        params: about so many parameters.
        members: one worker each, all on this machine.
        shards: of a step, on each member.
        rounds: turns of each arm, in all trainings together.
        device: to train on, as torch names its kind; each member needs one of its own.
        options: `compile`: both with torch.compile; `reproducible`: ours with `prepare(reproducible=True)`.

    Raises:
        FallowError: the training did not finish, or there are not enough devices.
    """
    if are_shared(device, members):
        raise FallowError(f"{members} members beside DDP need {members} devices ({device})", Exit.UNAVAILABLE)
    trainings = 2 if rounds < FEW_ROUNDS else 4
    settings = {"shards": shards, "rounds": -(-rounds // trainings), "device": device, **options}
    turns: Turns = {"ours": [], "ddp": [], "ddp_again": []}
    for _ in range(trainings):
        training = train(params, members, **settings)
        for arm, seconds in msgspec.json.decode(training.result, type=Turns).items():
            turns[arm] += seconds
    return turns


def beside_ddp(turns: Turns) -> Ratio:
    """DDP ÷ ours: above 1, ours is faster."""
    return ratio([fmean(pair) for pair in zip(turns["ddp"], turns["ddp_again"], strict=True)], turns["ours"])


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Geometric mean over the rounds, without the outer ones; the interval by bootstrap."""
    rounds = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    dice = random.Random(0)
    drawn = sorted(_middle(dice.choices(rounds, k=len(rounds))) for _ in range(_RESAMPLES))
    low, high = drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES)]
    return Ratio(math.exp(_middle(rounds)), math.exp(low), math.exp(high))


def _middle(rounds: Sequence[float]) -> float:
    """Mean without the outer ones."""
    cut = len(rounds) // _CUT
    return fmean(sorted(rounds)[cut : len(rounds) - cut])
