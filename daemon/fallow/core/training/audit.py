"""From the workers' ledgers: was every sample used exactly once? Pure.

A step belongs to the generation whose [first step, first step of the next generation) contains it. What other
generations wrote about that step was thrown away with its gradients and does not count.
"""

from __future__ import annotations

from collections import Counter
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
) -> SampleReport:
    """Count consumed, lost and duplicated samples.

    Args:
        records: of all workers, in any order.
        first_steps: generation -> the first step (0-based) that it computed.
        steps: finished steps of the run.
        per_step: samples in a full step; stands in for a step of which no record exists at all.
        gaps: further ones than those among the records.

    Returns:
        What is missing in a step of a gap is neither consumed nor lost but unknown.
    """
    records = list(records)
    gaps = [*gaps, *(record for record in records if isinstance(record, Gap))]
    # A generation that was broken off before all its members had said so is known from their own records only.
    begun = {record.generation: record.first_step for record in records if isinstance(record, Start)}
    owner = _owners({**begun, **first_steps}, steps)
    counting = [r for r in records if isinstance(r, Fed) and owner.get(r.step) == r.generation]
    shards = {(record.step, record.shard): record.n for record in counting}
    found: Counter[int] = Counter()
    for (step, _), samples in shards.items():
        found[step] += samples
    totals = {record.step: record.total for record in counting}
    lacking = {step: totals.get(step, per_step) - found[step] for step in range(steps)}
    doubtful = {step for gap in gaps for step in range(gap.first_step, min(gap.last_step + 1, steps))}
    unknown = sum(max(0, lacking[step]) for step in doubtful)
    return SampleReport(
        consumed=sum(shards.values()),
        lost=sum(lacking.values()) - unknown,
        duplicated=sum(record.n for record in counting) - sum(shards.values()),
        unknown=unknown,
    )


def _owners(first_steps: Mapping[int, int], steps: int) -> dict[int, int]:
    """Step -> its generation. A later generation takes over from its first step on."""
    owner: dict[int, int] = {}
    end = steps
    for generation, first in sorted(first_steps.items(), reverse=True):
        owner |= dict.fromkeys(range(first, end), generation)
        end = min(first, end)
    return owner
