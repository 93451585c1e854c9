"""Buckets in which no member has had a gradient for a while: they are not reduced before one has.

Most often their parameters are frozen. What members tell each other beside the sums says who had a gradient for what:
all know it alike, whatever their scripts do. A bucket that is needed again follows behind the control exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

from fallow.worker.reduction.buckets import Bucket

STEPS = 16
"""Many loops train a part of the model in some of the steps only: those buckets go with the others, beside backward."""


class Idle:
    """One per run; all of it is forgotten when the membership changes, for a newcomer knows of nothing before."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], list[int]] = {}
        "(phase, round) -> by bucket, steps since one had a gradient in it"

    def forget(self) -> None:
        """Another generation begins."""
        self._steps = {}

    def stays(self, phase: int, number: int, bucket: int) -> bool:
        """Whether that bucket stays here when round `number` of the phase is reduced."""
        known = self._steps.get((phase, number))
        return known is not None and known[bucket] >= STEPS

    def count(self, phase: int, number: int, buckets: Sequence[Bucket], touched: Sequence[bool]) -> list[Bucket]:
        """A round is known to all members.

        Args:
            phase: of the step.
            number: of the round.
            buckets: all of them.
            touched: by parameter, whether some member has had a gradient for it.

        Returns:
            Those that have stayed but must be reduced after all.
        """
        known = self._steps.setdefault((phase, number), [0] * len(buckets))
        late = []
        for index, bucket in enumerate(buckets):
            if any(touched[member] for member in bucket.members):
                if known[index] >= STEPS:
                    late.append(bucket)
                known[index] = 0
            else:
                known[index] += 1
        return late
