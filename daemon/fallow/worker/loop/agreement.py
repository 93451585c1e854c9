"""Checks that all members do the same work, and the error texts for members that do not. Pure: no waiting, no state."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fallow.core.membership.failures import Divergence, Stranger
from fallow.core.training.shards import Cut
from fallow.worker.handover.transfer import HOLDS
from fallow.worker.loop.exchange import JOINT, Call, Kind, Opening, Part
from fallow.worker.prepared.checksum import majority_and_others

_WHERE = {
    Kind.STEP: "in the next step of a run.updates loop",
    Kind.END: "at the end of a run.updates loop",
    Kind.MEAN: "in run.mean",
    Kind.BARRIER: "in run.barrier",
}

_ALIKE = (
    "the code after the inner loop must do the same on all members: no `if` around it that depends on the rank or "
    "on this member's own loss (use update.mean)"
)

_SAME_WORK = (
    "every member runs the same inner loops over the same data: the dataset must be the same on every node, and an "
    "IterableDataset gives every process the same samples in the same order (it is not divided by rank, and draws from "
    "the generators of torch, NumPy and `random`, which are seeded)"
)


def check_places(openings: Sequence[Opening]) -> None:
    """Check that all members are at the same place of the script.

    Args:
        openings: of the members that hold the run's state. All are at the same operation.

    Raises:
        Divergence: the members are at different places.
    """
    if len({opening.kind for opening in openings}) <= 1:
        return
    kinds = Counter(Kind(opening.kind) for opening in openings)
    step = max(opening.step for opening in openings)
    if set(kinds) == {Kind.STEP, Kind.END}:
        raise Divergence(
            f"step {step}: {kinds[Kind.END]} of {len(openings)} members left the run.updates loop (break, return, or "
            "an exception that the script caught) while the others go on; all have to leave it behind the same step: "
            "decide by update.mean, run.mean or update.step, not by a member's own loss or rank"
        )
    where = ", ".join(f"{count} {_WHERE[kind]}" for kind, count in kinds.items())
    raise Divergence(
        f"step {step}: the members are in different places of the script: {where}; every member has to make the same "
        "run.updates, run.mean and run.barrier calls: no `if run.is_main` around them"
    )


def check_calls(openings: Sequence[Opening], own_rank: int) -> str:
    """Check that all members make the same `run.updates` call and cut a step into the same shards.

    The members that joined first decide. A member that joined later and differs from them is a stranger.

    Args:
        openings: of all members, by rank. All are at a step.
        own_rank: this member's index in `openings`.

    Returns:
        Why the group must go on without a newcomer; empty if all members agree.

    Raises:
        Divergence: members that joined at the same time differ.
        Stranger: this member joined later than the members from which it differs.
    """
    first = min(range(len(openings)), key=lambda rank: openings[rank].joined_in)
    usual, differences = openings[first], {}
    for rank, one in enumerate(openings):
        if one.call == usual.call:
            continue
        text = _difference(one.call, rank, usual.call, first)
        if one.joined_in == usual.joined_in:
            raise Divergence(text)
        differences[rank] = text
    if own_rank in differences:
        raise Stranger(differences[own_rank])
    return next(iter(differences.values()), "")


def check_cuts(openings: Sequence[Opening]) -> None:
    """Check that all members cut the step into the same number of shards.

    Raises:
        Divergence: the numbers differ.
    """
    counts = {int(opening.value) for opening in openings} - {0}
    if len(counts) > 1:
        numbers = " and ".join(map(str, sorted(counts)))
        raise Divergence(f"step {openings[0].step}: the members cut it into {numbers} shards; {_SAME_WORK}")


def check_parts(parts: Sequence[Part], step: int, cut: Cut, *, drift: bool) -> None:
    """Compare the members' parts of one step.

    Without `drift`, different weights end the run, even if a majority agrees. Each step compares only a sample of the
    weights. The weights may have differed for several steps, and their gradients are in all members' sums since then.

    Args:
        parts: of all members, by rank.
        step: number of the step, for error texts.
        cut: the shards of the step.
        drift: the members' weights may differ.

    Raises:
        Divergence: the members did not do the same work.
    """
    first = parts[0]
    if any(part.place != first.place for part in parts):
        raise Divergence(
            f"step {step}: the members are in different inner loops of the step: all run the same ones, with the same "
            "phases in the same order"
        )
    checksums = [part.weight_checksum for part in parts]
    if any(part.agreement != first.agreement for part in parts) or (len(set(checksums)) > 1 and not drift):
        raise Divergence(
            f"step {step}: the members' weights, learning rates, or what is frozen or in eval() differ"
            f"{_whose(checksums)}; {_ALIKE}"
        )
    if len(acts := {part.acts for part in parts}) > 1:
        raise Divergence(
            f"step {step}: the members' optimizers have made {' and '.join(map(str, sorted(acts)))} steps since the "
            f"last inner loop; {_ALIKE}"
        )
    samples, checksum = sum(part.samples for part in parts), sum(part.crc for part in parts)
    if (samples, checksum) != (cut.samples, sum(cut.crcs)):
        many = samples != cut.samples
        what = f"{samples} samples, the step has {cut.samples}" if many else "other samples than the step has"
        raise Divergence(f"step {step}: the members computed {what}; {_SAME_WORK}")


class Ranks(NamedTuple):
    """Ranks of a new generation, by how far each member has come."""

    newest: list[int]
    "hold the run's state and have finished the most operations"
    lacking_outcome: list[int]
    "are one operation behind; the outcome of that operation is all that they need"
    awaiting_answer: list[int]
    "wait for the answer of a joint call that the newest members have, and lack part of the state"
    stale: list[int]
    "have missed operations: the newest members trained without them"


def ranks_of(openings: Sequence[Opening]) -> Ranks:
    """Return how far each member has come. All members compute the same result."""
    holders = [rank for rank, one in enumerate(openings) if one.state_status == HOLDS]
    if not holders:
        return Ranks([], [], [], [])
    op = max(openings[rank].op for rank in holders)
    newest = [rank for rank in holders if openings[rank].op == op]
    foremost = openings[newest[0]]
    ranks = Ranks(newest, [], [], [])
    for rank, one in enumerate(openings):
        is_there = one.op == op and one.kind in (foremost.kind, Kind.COMING)
        if not one.joined_in or rank in newest or is_there:
            continue
        joint = one.op == op - 1 and one.kind in JOINT
        if one.state_status == HOLDS and (joint or (one.op == op - 1 and one.sums_of == foremost.concluded)):
            ranks.lacking_outcome.append(rank)
        elif joint:
            ranks.awaiting_answer.append(rank)
        else:
            ranks.stale.append(rank)
    return ranks


def _difference(one: Call, rank: int, usual: Call, first: int) -> str:
    """Describe how the calls of two ranks differ."""
    if (one.shards, one.batch_size) != (usual.shards, usual.batch_size):
        return (
            f"rank {rank} cuts a step into {one.shards} shards of {one.batch_size} samples, rank {first} into "
            f"{usual.shards} of {usual.batch_size}: give the DataLoader of this run.updates loop the same batch_size "
            "and run.prepare the same global_batch on all members"
        )
    if one.samples != usual.samples:
        return f"rank {rank} has {one.samples} samples in an epoch, rank {first} has {usual.samples}: {_SAME_WORK}"
    return (
        f"rank {rank} is in run.updates({_call(one)}, rank {first} in run.updates({_call(usual)}: every member has "
        "to make the same calls; what is behind a loop that some members leave early must not depend on that"
    )


def _call(call: Call) -> str:
    most = "" if call.max_steps < 0 else f", max_steps={call.max_steps}"
    return f"epochs={call.epochs}{most})" + (f" of epoch {call.epoch}" if call.epoch >= 0 else "")


def _whose(checksums: Sequence[int]) -> str:
    majority, minority = majority_and_others(checksums)
    if not len(majority) > len(minority) > 0:
        return ""
    which = f"rank{'s' * (len(minority) > 1)} {', '.join(map(str, minority))} of {len(checksums)}"
    return (
        f" (the weights of {which} are not those of most members; if the script is not the reason, that node computes "
        "wrongly: leave it out)"
    )
