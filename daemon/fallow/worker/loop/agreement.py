"""What members must do alike, and what is said where they do not. Pure: no waiting, no state."""

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
    "what stands behind the inner loop has to act alike on all members: no `if` around it that depends on the rank or "
    "on this member's own loss (use update.mean)"
)

_SAME_WORK = (
    "every member runs the same inner loops over the same data: the dataset must be the same on every node, and an "
    "IterableDataset gives every process the same samples in the same order (it is not divided by rank, and draws from "
    "the generators of torch, NumPy and `random`, which are seeded)"
)


def check_places(openings: Sequence[Opening]) -> None:
    """Refuse members that are at different places of the script.

    Args:
        openings: of the members that hold the run's state, all at the same operation.

    Raises:
        Apart: they are.
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
    """Refuse members that cut a step unlike each other, or are in unlike calls.

    Where those who came first agree, it is the others who are wrong.

    Args:
        openings: of all members, all at a step.
        own_rank: this member's place among them.

    Returns:
        Which newcomer the others have to do without, and why; empty: none.

    Raises:
        Apart: those who came first do.
        Stranger: this member does, which came later than those.
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
    """Refuse members that cut a step, whose beginning they have told, into unlike numbers of shards.

    Raises:
        Apart: they do.
    """
    counts = {int(opening.value) for opening in openings} - {0}
    if len(counts) > 1:
        numbers = " and ".join(map(str, sorted(counts)))
        raise Divergence(f"step {openings[0].step}: the members cut it into {numbers} shards; {_SAME_WORK}")


def check_parts(parts: Sequence[Part], step: int, cut: Cut, *, drift: bool) -> None:
    """Compare what members say behind the sums, by rank.

    Weights that came apart end a run in which they may not (`drift` false), though the majority could go on: one sample
    is compared in each step, so they may have been apart for longer, and are in everybody's sums since then.

    Raises:
        Apart: the members did not do the same work.
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
    """How far the members of a new generation are."""

    newest: list[int]
    "have the run's state and are furthest"
    lacking_outcome: list[int]
    "one operation behind: what the others have concluded is all that they need"
    awaiting_answer: list[int]
    "wait for the answer of a joint call that the others have, and have not got all of the state"
    stale: list[int]
    "the others trained without them"


def ranks_of(openings: Sequence[Opening]) -> Ranks:
    """Tell how far the members are; all tell the same."""
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
    """What the members of two ranks do unlike each other."""
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
