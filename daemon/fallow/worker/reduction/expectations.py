"""What is expected of the next sum: which gradients come, and what no member has use for."""

from __future__ import annotations

from collections.abc import Sequence

PATIENCE = 16
"""Bodies, or sums, in which something may be missing before nobody waits for it any more."""


class Expected:
    """How many gradients a body gives for each bucket: this member's guess from the bodies before.

    A guess that is too high makes a bucket leave at the end of the sum, one that is too low costs a second round.
    So it rises at once and falls after `PATIENCE` bodies.
    """

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._missed: dict[str, list[int]] = {}
        "phase -> by bucket, bodies in a row that gave less than expected"

    def counts(self, phase: str, first: Sequence[int]) -> list[int]:
        """Return the gradients to wait for, by bucket.

        Args:
            phase: of the step.
            first: the guess for a phase that is new.
        """
        self._missed.setdefault(phase, [0] * len(first))
        return self._counts.setdefault(phase, list(first))

    def learn(self, phase: str, came: Sequence[int]) -> None:
        """A body of that phase has given so many gradients, by bucket."""
        counts, missed = self._counts[phase], self._missed[phase]
        for bucket, count in enumerate(came):
            missed[bucket] = missed[bucket] + 1 if count < counts[bucket] else 0
            if count > counts[bucket] or missed[bucket] >= PATIENCE:
                counts[bucket], missed[bucket] = count, 0


class Unused:
    """What nobody had use for in the last sums of a phase, in the eyes of all members alike.

    Args:
        first: by item, whether it counts as unused in a phase that is new.
    """

    def __init__(self, first: Sequence[bool]) -> None:
        self._first = [PATIENCE if unused else 0 for unused in first]
        self._sums: dict[str, list[int]] = {}
        "phase -> by item, sums in a row without use for it"

    def items(self, phase: str) -> list[bool]:
        """Return by item whether it is unused."""
        return [sums >= PATIENCE for sums in self._sums.get(phase, self._first)]

    def count(self, phase: str, used: Sequence[bool]) -> None:
        """A sum of that phase counts; `used` says by item whether some member had use for it."""
        known = self._sums.setdefault(phase, list(self._first))
        self._sums[phase] = [0 if use else min(sums + 1, PATIENCE) for sums, use in zip(known, used, strict=True)]

    def export(self) -> dict[str, list[int]]:
        """Return the counts, as plain values."""
        return {phase: list(sums) for phase, sums in sorted(self._sums.items())}

    def load(self, exported: dict[str, list[int]]) -> None:
        """Take over exported counts."""
        self._sums = {phase: list(sums) for phase, sums in exported.items()}
