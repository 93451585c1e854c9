"""Power-of-two scales of parameters, under which gradients become integers.

The scale 2^s belongs to a parameter and to a phase: s = BITS - GROWTH - e, where the reference exponent e follows the
largest magnitude of any shard's gradient. All members learn that magnitude with each sum, so references are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fallow.model import Exit, FallowError

BITS = 62
"""A sum of integers stays below 2^BITS."""
GROWTH = 6
"""A gradient may grow by this power of two over its reference before the sum is made again with another scale."""
DECLINE = 8
"""It may fall by this power of two below its reference."""

NOTHING, NOT_FINITE = -1 << 20, 1 << 20
"""Exponents of a parameter without a nonzero gradient, and of one with an infinity or NaN."""

_LEAST = -940
"""Smaller exponents count as this one, so that scales stay float64 numbers."""
_GUESS = -6
"""Reference of a parameter that had no gradient yet."""
_ATTEMPTS = 8


def exponent(value: float, parts: int = 1) -> int:
    """Return the least e with `parts` x |value| < 2^e, rounded up in `parts`, and at least -940.

    Args:
        value: largest magnitude among a shard's gradients of a parameter.
        parts: gradients that one shard gives for the parameter.
    """
    if not math.isfinite(value):
        return NOT_FINITE
    return max(math.frexp(value)[1] + (parts - 1).bit_length(), _LEAST) if value else NOTHING


class Scales:
    """The reference exponents of all phases."""

    def __init__(self) -> None:
        self._references: dict[str, dict[int, int]] = {}
        "phase -> parameter's index -> exponent"
        self._phase_references: dict[int, int] = {}
        "those of the phase at work"
        self._trial: dict[int, int] = {}
        "exponents with which this sum is tried because the reference did not fit"
        self._attempts = 0
        self.not_finite: set[int] = set()
        "parameters that are not finite in the sum that was judged last"
        self.repeated = 0
        "finished sums that were made again because a scale did not fit"

    def begin(self, phase: str) -> None:
        """Begin an attempt at the sum of that phase."""
        self._phase_references = self._references.setdefault(phase, {})

    def _exponent(self, index: int) -> int:
        return self._trial.get(index, self._phase_references.get(index, _GUESS))

    def shift(self, index: int) -> int:
        """The s of the parameter's scale 2^s in this attempt."""
        return BITS - GROWTH - self._exponent(index)

    def judge(self, extents: Sequence[int], *, is_void: bool = False) -> bool:
        """Compare the gradients with what the scales are made for; False: all members try again.

        Where they fit, the references follow: up at once, down by one power of two per sum unless the sum was repeated.

        Args:
            extents: by parameter's index, the greatest exponent on any member.
            is_void: the sum is made again whatever the scales are, and `extents` lack some of its gradients.

        Raises:
            FallowError: the gradients are others in each attempt.
        """
        if is_void:
            return False
        self.not_finite = {index for index, found in enumerate(extents) if found == NOT_FINITE}
        largest = {index: found for index, found in enumerate(extents) if found not in (NOTHING, NOT_FINITE)}
        misfits = {
            index: found for index, found in largest.items() if not -DECLINE <= found - self._exponent(index) <= GROWTH
        }
        self._trial |= misfits
        self._attempts += bool(misfits)
        if self._attempts > _ATTEMPTS:
            raise FallowError(
                f"the scale of a gradient did not settle in {_ATTEMPTS} attempts at one step: the same shard gave "
                "other gradients each time; with reproducible=True a body must depend on its batch, the state "
                "and torch's, numpy's and random's own generators only",
                Exit.DATA,
            )
        if misfits:
            return False
        for index, found in largest.items():
            falls_slowly = index in self._phase_references and index not in self._trial
            self._phase_references[index] = max(found, self._phase_references[index] - 1) if falls_slowly else found
        self.repeated += bool(self._attempts)
        self.forget()
        return True

    def forget(self) -> None:
        """Go back to the references of the last finished sum."""
        self._trial, self._attempts = {}, 0

    def export(self) -> dict[str, Any]:
        """References in order, as plain values."""
        references = {phase: sorted(known.items()) for phase, known in sorted(self._references.items()) if known}
        return {"references": references, "repeated": self.repeated}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over an exported state."""
        self.forget()
        self._references = {phase: dict(known) for phase, known in state["references"].items()}
        self.repeated = int(state["repeated"])
