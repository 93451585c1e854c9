"""Was every sample used exactly once? The workers' ledgers answer. Pure.

A step belongs to the generation whose [first step, first step of the next generation) contains it. Records of other
generations about the step do not count: their gradients were discarded.
"""

from array import array
from collections.abc import Iterable, Mapping

import msgspec

from fallow.model import SampleReport


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag=True):
    """Base of the records of a ledger, tagged by names."""


class Start(Line, frozen=True):
    """This worker begins to compute in `generation`, at the 0-based step `first_step` of the run."""

    generation: int
    first_step: int


class Fed(Line, frozen=True):
    """A shard's gradients were added to the sums of `step`. Written before the member reports its part."""

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


class StepFinished(Line, frozen=True, tag="Done"):
    """`step` (global, 0-based) is finished on this worker."""

    generation: int
    step: int


class Gap(Line, frozen=True, kw_only=True):
    """Records of these steps (global, 0-based, both included) are missing: they could not be written."""

    first_step: int
    last_step: int


Record = Start | Fed | StepFinished | Gap


def audit(
    records: Iterable[Record],
    first_steps: Mapping[int, int],
    steps: int,
    per_step: int,
    gaps: Iterable[Gap] = (),
    reached: int | None = None,
) -> SampleReport:
    """Count consumed, lost and duplicated samples.

    Only sums per step are kept, because a long run has more records than a head has memory.

    Args:
        records: of all workers, in any order; iterated twice.
        first_steps: generation -> the first step (0-based) that it computed.
        steps: finished steps of the run.
        per_step: samples in a full step; used for a step without any record.
        gaps: further gaps, besides those among the records.
        reached: finished steps of the current members; None: all. After a return to a checkpoint it is below `steps`
            for a
            while: steps that will be repeated do not count.

    Returns:
        The counts. Samples that are missing in a step of a gap are unknown: neither consumed nor lost.
    """
    begun: dict[int, int] = {}
    finished_steps: dict[int, int] = {}
    doubtful = list(gaps)
    for record in records:
        if isinstance(record, Start):
            begun[record.generation] = record.first_step
        elif isinstance(record, StepFinished):
            finished_steps[record.generation] = max(finished_steps.get(record.generation, 0), record.step + 1)
        elif isinstance(record, Gap):
            doubtful.append(record)
    # A generation may have ended before all its members had reported it: then only their records know it.
    begun |= first_steps
    if reached is not None and begun:
        steps = _valid_steps(begun, finished_steps, steps, reached)
    owner = _owners(begun, steps)
    shards, consumed_by_step, totals = [0] * steps, array("q", bytes(8 * steps)), array("q", [per_step]) * steps
    duplicated = 0
    for record in records:
        if not isinstance(record, Fed) or record.step >= steps or owner[record.step] != record.generation:
            continue
        step, shard = record.step, 1 << record.shard
        if shards[step] & shard:
            duplicated += record.n
        else:
            consumed_by_step[step] += record.n
        shards[step] |= shard
        totals[step] = record.total
    unsure = {step for gap in doubtful for step in range(gap.first_step, min(gap.last_step + 1, steps))}
    unknown = sum(max(0, totals[step] - consumed_by_step[step]) for step in unsure)
    consumed = sum(consumed_by_step)
    return SampleReport(
        consumed=consumed, lost=sum(totals) - consumed - unknown, duplicated=duplicated, unknown=unknown
    )


def _valid_steps(begun: Mapping[int, int], finished_steps: Mapping[int, int], steps: int, reached: int) -> int:
    """Finished steps, without those that the newest generation will repeat."""
    newest = max(begun)
    went_back = any(end > begun[newest] for generation, end in finished_steps.items() if generation < newest)
    return min(steps, max(begun[newest], reached, finished_steps.get(newest, 0))) if went_back else steps


def _owners(first_steps: Mapping[int, int], steps: int) -> "array[int]":
    """Generation of each step. A later generation owns all steps from its first one on."""
    owner, end = array("q", bytes(8 * steps)), steps
    for generation, first in sorted(first_steps.items(), reverse=True):
        if first < end:
            owner[first:end] = array("q", [generation]) * (end - first)
            end = first
    return owner
