"""Backfill's map: which nodes jobs that wait will not need, and when (`backfill.c`: `node_space_map_t`)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Space:
    """Slots of time, one after the other, each with the nodes that nobody has set aside in it.

    Args:
        now: the first slot begins here, rounded down to the resolution.
        window_s: how far it reaches.
        resolution_s: of every time in it.
        nodes: that are up.
    """

    def __init__(self, now: float, window_s: float, resolution_s: float, nodes: int) -> None:
        self._resolution_s = resolution_s
        self.end = self._down(now + window_s)
        self._begins = [self._down(now)]
        self._avail = [nodes]

    def _down(self, at: float) -> float:
        return at // self._resolution_s * self._resolution_s

    def slot(self, start: float, limit_s: float) -> tuple[float, float]:
        """The time that a job takes in the map."""
        return self._down(start), self._down(start + limit_s + self._resolution_s - 1.0)

    def over(self, nodes: int, start: float, end: float) -> tuple[int, float | None]:
        """Those of `nodes` that are free from start to end, and when more of them might be (None: never)."""
        begins, avail = self._begins, self._avail
        found, later = nodes, None
        last = len(begins) - 1
        for place in range(max(bisect_right(begins, start) - 1, 0), last + 1):
            if later is None and place < last and nodes & avail[place + 1] & ~(found & avail[place]):
                later = begins[place + 1]
            # A slot that begins as the job must end counts.
            if begins[place] > end:
                break
            found &= avail[place]
        return found, later

    def overlaps(self, nodes: int, start: float, end: float) -> bool:
        """Has somebody set aside one of them in that time?"""
        begins, avail = self._begins, self._avail
        first, last = max(bisect_right(begins, start) - 1, 0), bisect_left(begins, end)
        return any(nodes & ~avail[place] for place in range(first, last))

    def reserve(self, nodes: int, start: float, end: float) -> None:
        """Set them aside for that time, for one slot at least."""
        start = max(start, self._begins[0])
        end = min(max(end, start + self._resolution_s), self.end)
        if start >= end:
            return
        first, last = self._cut(start), self._cut(end)
        for place in range(first, last):
            self._avail[place] &= ~nodes

    def _cut(self, at: float) -> int:
        """The slot that begins at that time; one is made if there is none."""
        if at >= self.end:
            return len(self._begins)
        place = bisect_left(self._begins, at)
        if place == len(self._begins) or self._begins[place] != at:
            self._begins.insert(place, at)
            self._avail.insert(place, self._avail[place - 1])
        return place

    def free_until(self, nodes: int, now: float, end: float) -> float:
        """When, before `end`, one of them is first set aside; slots that have begun do not count."""
        for begin, avail in zip(self._begins, self._avail, strict=True):
            if begin >= end:
                break
            if begin > now and nodes & ~avail:
                return begin
        return end
