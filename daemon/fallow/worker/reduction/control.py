"""The control exchange: a small part of each member's, sent to every other, that closes each reduction.

It tells everybody the same: whether to switch, whether all did the same work, each shard's loss and each member's pace.
All parts arrive as they are, so what is computed from them does not depend on who computed which shard.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fallow.core.failures import Apart, Stranger


class Head(NamedTuple):
    """A member's part, or the sums over the members; the order is that of the message."""

    contributors: float
    switch: float
    checkpoint: float
    step: float
    round: float
    samples: float
    crc: float
    scalars: float
    "members that saw the loss of a backward"
    more: float
    "members with gradients of further backwards, beyond this round's"
    agreement: float
    skipped: float
    "members whose final body made no backward"
    left: float = 0.0
    "members that have left the loop"
    ended: float = 0.0
    "those of them whose script has ended"
    buffers: float = 0.0
    "1: the member with shard 0 has changed its buffers"
    frozen: float = 0.0
    "which parameters are frozen in the final body, a checksum; nothing where that made no backward"
    resting: float = 0.0
    "likewise, which modules rest (`eval()`)"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every member knows about a step beforehand."""

    step: int
    "global, 0-based"
    samples: int
    crc: int
    "sum of the CRCs of all its shards"
    shards: int
    phase: int = 0
    "which part of the step, see run.phase"
    lone: tuple[float, ...] = ()
    "by rank, the weight of the only shard that it computes; empty: a full step has more shards than members"
    most: int = 1
    "shards in a full step of the member that has most"


class Cutting(NamedTuple):
    """How a member cuts the steps of a run.steps call, and which one that is."""

    shards: int
    "in a full step"
    batch_size: int
    since: int = 0
    "generation in which it became a member"
    epochs: int = 1
    max_steps: int = -1
    "-1: as many as there are"
    loop: int = -1
    "number of the run.epochs loop that the call is in; -1: it is in none"
    epoch: int = -1
    "of that loop"


@dataclass(frozen=True, slots=True)
class Control:
    """What a finished exchange told."""

    head: Head
    "sums over the members"
    rows: list[Head]
    "each member's part, by rank"
    paces: list[float]
    "seconds per shard that each member measured, by rank; 0: not yet"
    pieces: list[int]
    "checksum of a piece of the weights on each member before the step, by rank"
    losses: list[float]
    "weight x loss of each shard, in this round and those before it in the step"
    touched: list[bool]
    "parameters that received a gradient on any member"
    extent: list[int]
    "see `Arithmetic.judge`"

    @property
    def loss(self) -> float | None:
        """Mean loss so far in the step, None without any."""
        return exact_sum(self.losses) if self.head.scalars else None

    @property
    def drifted(self) -> bool:
        """The members began the step with unlike weights."""
        return len(set(self.pieces)) > 1

    @property
    def strangers(self) -> list[int]:
        """Ranks whose weights are not those of most members; empty where no side is the majority."""
        ((usual, count),) = Counter(self.pieces).most_common(1)
        return (
            [rank for rank, piece in enumerate(self.pieces) if piece != usual] if 2 * count > len(self.pieces) else []
        )


_DOUBLE = array("d").itemsize


def exact_sum(values: Sequence[float]) -> float:
    """Sum that does not depend on the order; NaN where infinities of both signs meet, as in floating point."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values) if any(math.isnan(v) or math.isinf(v) for v in values) else math.inf


def encode(
    head: Head,
    pace: float,
    piece: int,
    losses: Mapping[int, float],
    most: int,
    touched: Sequence[bool],
    extent: Sequence[int],
) -> torch.Tensor:
    """This member's part, as bytes; equally many on all members.

    Args:
        head: what is summed.
        pace: seconds per shard; 0: not measured.
        piece: checksum of a piece of the weights.
        losses: weight x loss by shard, at most `most`.
        most: see `StepPlan`.
        touched: parameters that received a gradient.
        extent: of which the maximum is taken, see `Arithmetic.extent`.
    """
    pairs = [*losses.items(), *[(-1, 0.0)] * (most - len(losses))]
    numbers = array("d", [*head, pace, piece, *(number for pair in pairs for number in pair)])
    return torch.frombuffer(
        bytearray(numbers.tobytes() + bytes(touched) + array("i", extent).tobytes()), dtype=torch.uint8
    )


def decode(parts: Sequence[torch.Tensor], shards: int, most: int, params: int) -> Control:
    """Take together what `encode` gave on all members.

    Args:
        parts: by rank.
        shards: of a step, see `StepPlan`.
        most: likewise.
        params: of which `touched` tells.
    """
    fields = len(Head._fields)
    bounds = _DOUBLE * (fields + 2 + 2 * most), _DOUBLE * (fields + 2 + 2 * most) + params
    texts = [part.numpy().tobytes() for part in parts]
    rows = [array("d", text[: bounds[0]]) for text in texts]
    losses = [0.0] * shards
    for row in rows:
        for shard, loss in zip(row[fields + 2 :: 2], row[fields + 3 :: 2], strict=True):
            if shard >= 0:
                losses[int(shard)] += loss
    touched = {text[bounds[0] : bounds[1]] for text in texts}
    extents = {text[bounds[1] :] for text in texts}
    heads = [Head(*row[:fields]) for row in rows]
    return Control(
        summed(heads),
        heads,
        [row[fields] for row in rows],
        [int(row[fields + 1]) for row in rows],
        losses,
        [any(column) for column in zip(*touched, strict=True)],
        [max(column) for column in zip(*(array("i", extent) for extent in extents), strict=True)],
    )


def summed(rows: Sequence[Head]) -> Head:
    """The sum of each field over the members."""
    return Head(*(sum(column) for column in zip(*rows, strict=True)))


def check(
    control: Control,
    plan: StepPlan,
    size: int,
    rounds: int,
    agreement: int,
    *,
    frozen: int = 0,
    resting: int = 0,
    drift: bool,
) -> None:
    """Compare the sums with what the plan says.

    Weights that came apart end a run in which they may not, though the majority could go on: one piece is compared in
    each step, so they may have been apart for longer, and gradients made with the minority's weights are in everybody's
    sums since then. What the majority has is not what an undisturbed run would have.

    Args:
        control: what the exchange told.
        plan: of the step.
        size: members.
        rounds: finished ones in this step.
        agreement: this member's; all must have the same.
        frozen: likewise, of those whose final body made a backward; 0: this one's did not.
        resting: likewise.
        drift: the members' weights may differ.

    Raises:
        Apart: the members did not do the same work.
    """
    first, got = rounds == 0, control.head
    if got.left == size:
        return
    if got.left:
        raise Apart(
            f"step {plan.step}: {got.left:.0f} of {size} members left the run.steps loop (break, return, or an "
            "exception that the script caught) while the others go on; all have to leave it in the same step: decide "
            "by run.mean(loss) in the final body or by run.step, not by a member's own loss or rank",
        )
    # Row by row: in a sum over three members the differences of two of them can cancel.
    trained = [row for row in control.rows if not row.skipped]
    unlike = any(row.agreement != agreement for row in control.rows) or (control.drifted and not drift)
    unlike = unlike or (frozen != 0 and any(row.frozen != frozen for row in trained))
    together = got.contributors == size and all(row.step == plan.step for row in control.rows)
    if together and unlike:
        raise Apart(
            f"at step {plan.step}: the members' weights, learning rates, buffers, frozen parameters or counts of "
            f"acting steps differ{_whose(control)}; every prepared object has to act alike on all members: no `if` "
            "around it that depends on the rank, on a count of bodies (use run.step) or on this member's own loss (use "
            "run.mean); and no other code changes weights, nor buffers (a forward in train mode behind the backward), "
            "nor gradients by random numbers (draw them in the optimizer's step)",
        )
    if together and resting and any(row.resting != resting for row in trained):
        raise Apart(
            f"at step {plan.step}: some prepared modules are in eval() on some members and in train() on others, so "
            "what dropout and batch norm do would depend on who computes which shard; where one member alone "
            "evaluates, write `model.train()` behind that, on the same branch, or for a model that is never trained "
            "`eval()` before the loop, on all members",
        )
    step = next((row.step for row in control.rows if row.step != plan.step), plan.step)
    finished = next((row.round for row in control.rows if row.round != rounds), rounds)
    wanted = [
        ("the number of members", got.contributors, size),
        ("a member's step", step, plan.step),
        ("a member's number of backward calls in this step", finished, rounds),
        ("the members' sum of samples", got.samples, plan.samples if first else 0),
        ("the members' sum of the checksum of the samples", got.crc, plan.crc if first else 0),
    ]
    for what, seen, planned in wanted:
        if seen != planned:
            raise Apart(
                f"step {plan.step}: {what} is {seen:.0f}, the plan says {planned}: they did "
                "not do the same work; every member's final body must make the same number of backward calls, "
                "and the dataset must be the same on every node. An IterableDataset gives every process the same "
                "samples in the same order: it is not divided by rank, and draws from the generators of torch, NumPy "
                "and `random`, which are seeded, or from its own with a fixed seed",
            )


def check_cuts(cuts: Sequence[Cutting], mine: int) -> str:
    """Refuse members that cut a step unlike each other, or are in unlike calls.

    Their exchanges would not be of the same size, or some would wait at the end of their call for ever.

    Where those who came first agree, it is the others who are wrong.

    Args:
        cuts: by rank.
        mine: this member's rank.

    Returns:
        Which newcomer the others have to do without, and why; empty: none.

    Raises:
        Apart: those who came first do.
        Stranger: this member does, which came later than those.
    """
    first = min(range(len(cuts)), key=lambda rank: cuts[rank].since)
    usual, refused = cuts[first], {}
    for rank, cut in enumerate(cuts):
        if cut._replace(since=usual.since) == usual:
            continue
        text = (
            f"rank {rank} is in run.steps({_call(cut)}, rank {first} in run.steps({_call(usual)}: every member has to "
            "make the same calls; what is behind a loop that some members leave early must not depend on that"
            if cut[:2] == usual[:2]
            else f"rank {rank} cuts a step into {cut.shards} shards of {cut.batch_size} samples, rank {first} into "
            f"{usual.shards} of {usual.batch_size}: give the DataLoader of this run.steps loop the same "
            "batch_size and run.prepare the same global_batch on all members"
        )
        if cut.since == usual.since:
            raise Apart(text)
        refused[rank] = text
    if mine in refused:
        raise Stranger(refused[mine])
    return next(iter(refused.values()), "")


def _call(cut: Cutting) -> str:
    most = "" if cut.max_steps < 0 else f", max_steps={cut.max_steps}"
    return f"epochs={cut.epochs}{most})" + (f" of epoch {cut.epoch}" if cut.epoch >= 0 else "")


def _whose(control: Control) -> str:
    ranks = control.strangers
    if not ranks:
        return ""
    which = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {len(control.pieces)}"
    return (
        f" (the weights of {which} are not those of most members; if the script is not the reason, "
        "that node computes wrongly: leave it out)"
    )
