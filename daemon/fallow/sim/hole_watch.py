"""Looks on while nodes become idle and are taken, and notes how long they are idle."""

from __future__ import annotations

from collections.abc import Iterable

from fallow.sim.hole_lengths import HoleLengths
from fallow.sim.slurm.cluster import places

LEAST_S = 5.0
"""What is shorter lies between two jobs that wait for each other: Slurm tidies up (Epilog) and looks at its queue."""


class Watch:
    """Watches nodes become idle and be taken; nodes are numbers.

    Args:
        begin: Unix time of the trace.
    """

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._since: dict[int, float] = {}
        self._mask = 0
        self._ended: list[float] = []

    def changed(self, at: float, joined: Iterable[int], left: Iterable[int]) -> None:
        """These are idle from now on, and those no more."""
        at = max(at, self._begin)
        for node in left:
            since = self._since.pop(node, at)
            if at - since >= LEAST_S:
                self._ended.append(at - since)
        for node in joined:
            self._since.setdefault(node, at)

    def seen(self, at: float, idle: int) -> None:
        """From now on the nodes of this set of bits are idle."""
        if idle != self._mask:
            self.changed(at, places(idle & ~self._mask), places(self._mask & ~idle))
            self._mask = idle

    def until(self, end: float) -> HoleLengths:
        """All that there were."""
        cut = sorted(end - since for since in self._since.values() if end - since >= LEAST_S)
        return HoleLengths(ended=tuple(sorted(self._ended)), cut=tuple(cut))
