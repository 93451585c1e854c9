"""From the workers' ledgers: was every sample used exactly once? Pure.

A step belongs to the generation whose [first step, first step of the next generation) contains it. What other
generations wrote about that step was thrown away with its gradients and does not count.
"""

from array import array
from collections.abc import Iterable, Mapping

import msgspec

from fallow.model import SampleReport


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag=True):
    """Base of the records of a ledger, tagged by the names of their classes."""


class Start(Line, frozen=True):
    """This worker begins to compute in `generation`, at the 0-based step `first_step` of the run."""

    generation: int
    first_step: int


class Fed(Line, frozen=True):
    """A shard's gradients went into the sums of `step`. Written before its member tells its part."""

    generation: int
    epoch: int
    step: int
    "global, 0-based"
    shard: int
    n: int
    "samples in the shard"
    total: int
    "samples in the whole step"
    crc: int


class Done(Line, frozen=True):
    """`step` (global, 0-based) is finished on this worker."""

    generation: int
    step: int


class Gap(Line, frozen=True, kw_only=True):
    """Records of these steps (global, 0-based, both included) are missing: they could not be written."""

    first_step: int
    last_step: int


Record = Start | Fed | Done | Gap


def audit(
    records: Iterable[Record],
    first_steps: Mapping[int, int],
    steps: int,
    per_step: int,
    gaps: Iterable[Gap] = (),
    reached: int | None = None,
) -> SampleReport:
    """Count consumed, lost and duplicated samples.

    Of a step only sums are kept: a long run has more records than a head has memory.

    Args:
        records: of all workers, in any order. They are gone through twice.
        first_steps: generation -> the first step (0-based) that it computed.
        steps: finished steps of the run.
        per_step: samples in a full step; stands in for a step of which no record exists at all.
        gaps: further ones than those among the records.
        reached: finished steps of those who train now; None: all. Behind a checkpoint it is fewer than `steps` for a
            while: what was done before and will be done again does not count.

    Returns:
        What is missing in a step of a gap is neither consumed nor lost but unknown.
    """
    begun: dict[int, int] = {}
    done: dict[int, int] = {}
    doubtful = list(gaps)
    for record in records:
        if isinstance(record, Start):
            begun[record.generation] = record.first_step
        elif isinstance(record, Done):
            done[record.generation] = max(done.get(record.generation, 0), record.step + 1)
        elif isinstance(record, Gap):
            doubtful.append(record)
    # A generation that was broken off before all its members had said so is known from their own records only.
    begun |= first_steps
    if reached is not None and begun:
        steps = _standing(begun, done, steps, reached)
    owner = _owners(begun, steps)
    shards, found, totals = [0] * steps, array("q", bytes(8 * steps)), array("q", [per_step]) * steps
    duplicated = 0
    for record in records:
        if not isinstance(record, Fed) or record.step >= steps or owner[record.step] != record.generation:
            continue
        step, shard = record.step, 1 << record.shard
        if shards[step] & shard:
            duplicated += record.n
        else:
            found[step] += record.n
        shards[step] |= shard
        totals[step] = record.total
    unsure = {step for gap in doubtful for step in range(gap.first_step, min(gap.last_step + 1, steps))}
    unknown = sum(max(0, totals[step] - found[step]) for step in unsure)
    consumed = sum(found)
    return SampleReport(
        consumed=consumed, lost=sum(totals) - consumed - unknown, duplicated=duplicated, unknown=unknown
    )


def _standing(begun: Mapping[int, int], done: Mapping[int, int], steps: int, reached: int) -> int:
    """Finished steps, without those that the newest generation will do again. Args: done: as the records say."""
    newest = max(begun)
    went_back = any(end > begun[newest] for generation, end in done.items() if generation < newest)
    return min(steps, max(begun[newest], reached, done.get(newest, 0))) if went_back else steps


def _owners(first_steps: Mapping[int, int], steps: int) -> "array[int]":
    """Of each step, its generation. A later generation takes over from its first step on."""
    owner, end = array("q", bytes(8 * steps)), steps
    for generation, first in sorted(first_steps.items(), reverse=True):
        if first < end:
            owner[first:end] = array("q", [generation]) * (end - first)
            end = first
    return owner
