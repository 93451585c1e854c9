"""Would jobs fit on nodes, and which nodes would they take? Pure.

Nodes have a rank: cheap ones (idle) come before dear ones (ours, newest first). Jobs are placed one after the other; a
job that does not fit as a whole leaves no trace. What is taken is then the cheapest set of nodes on which all placed
jobs fit at once: each slot takes the cheapest node that an augmenting path reaches, which is the greedy algorithm on a
transversal matroid (Edmonds and Fulkerson 1965), so exact as long as every slot takes a whole node. Jobs that share
nodes are packed: into a slot that is there or a new one, whichever costs less.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

FEW_NODES = 16
"""Jobs of more nodes than this are not packed together with others; they hardly ever share nodes."""

OPEN_SLOTS = 8
"""As many slots with room left are tried for a job that shares nodes, where others would have to move for it ..."""

SMALL = 64
"""... among at most so many nodes; with more there is always another way, and no time."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one node must give to one job."""

    cpus: int = 1
    memory_mb: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict)
    "type -> number; the empty type is any"
    whole: bool = False
    "nothing else runs beside it"


@dataclass(frozen=True, slots=True)
class Place:
    """A node that could be had, and what of it."""

    node: str
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int]
    empty: bool = True
    "nothing (that stays) runs there"

    def holds(self, shares: Sequence[Share]) -> bool:
        """Is there room for all these side by side?"""
        if any(share.whole for share in shares) and not (self.empty and len(shares) == 1):
            return False
        wanted: dict[str, int] = {}
        for share in shares:
            for kind, count in share.gpus.items():
                wanted[kind] = wanted.get(kind, 0) + count
        typed = all(self.gpus.get(kind, 0) >= count for kind, count in wanted.items() if kind)
        return (
            typed
            and sum(wanted.values()) <= sum(self.gpus.values())
            and sum(share.cpus for share in shares) <= self.cpus
            and sum(share.memory_mb for share in shares) <= self.memory_mb
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A job, or one component of a heterogeneous one: so many different nodes with one share each."""

    nodes: int
    share: Share
    may: frozenset[str]
    "nodes that it may run on, whatever is free there"
    must: frozenset[str] = frozenset()
    "nodes that it must have, all of them"


@dataclass(slots=True)
class _Slots:
    """Places that are alike: each takes one node."""

    count: int
    shares: list[Share]
    fits: frozenset[str]
    owners: frozenset[int]
    "jobs in it; no job takes the same node twice"
    taken: set[str] = field(default_factory=set)


class Packing:
    """Jobs on nodes.

    Args:
        places: the nodes that could be had, cheapest first.
        dear: how many of the last ones cost something; the fewest of them are used.
    """

    def __init__(self, places: Sequence[Place], dear: int = 0) -> None:
        self._places = {place.node: place for place in places}
        self._order = [place.node for place in places]
        self._rank = {node: index for index, node in enumerate(self._order)}
        self._first_dear = len(places) - dear
        self._alike: dict[tuple[object, ...], list[str]] = {}
        for place in places:
            key = (place.cpus, place.memory_mb, tuple(sorted(place.gpus.items())), place.empty)
            self._alike.setdefault(key, []).append(place.node)
        self._slots: list[_Slots] = []
        self._holder: dict[str, int] = {}
        "node -> its slots"
        self._free = list(range(len(places)))
        "ranks of the nodes that nobody has"
        self._cost = 0
        self._undo: list[Callable[[], object]] = []
        self._jobs = 0

    def nodes(self) -> dict[int, set[str]]:
        """Nodes of every job that has been placed."""
        found: dict[int, set[str]] = {}
        for slots in self._slots:
            for job in slots.owners:
                found.setdefault(job, set()).update(slots.taken)
        return found

    def place(self, parts: Sequence[Part]) -> int | None:
        """Place a job, all its parts or nothing; returns its number, or None when it does not fit."""
        start = len(self._undo)
        job = self._jobs
        if all(self._place_part(part, job) for part in parts):
            self._jobs += 1
            return job
        self._back_to(start)
        return None

    def cost_of(self, parts: Sequence[Part]) -> int | None:
        """How many more dear nodes this job would take; None when it does not fit. Changes nothing."""
        start, cost = len(self._undo), self._cost
        number = self.place(parts)
        if number is None:
            return None
        more = self._cost - cost
        self._back_to(start)
        self._jobs -= 1
        return more

    def _place_part(self, part: Part, job: int) -> bool:
        if part.nodes < max(1, len(part.must)):
            return False
        for node in sorted(part.must):
            if not self._add(part.share, part.may & {node}, job):
                return False
        rest = part.nodes - len(part.must)
        if part.share.whole or part.nodes > FEW_NODES:
            return rest == 0 or self._new(rest, part.share, part.may, job)
        return all(self._add(part.share, part.may, job) for _ in range(rest))

    def _add(self, share: Share, may: frozenset[str], job: int) -> bool:
        """One node more for a job: in a slot that others have begun, or in one of its own."""
        if share.whole:
            return self._new(1, share, may, job)
        open_slots = [
            index
            for index, slots in enumerate(self._slots)
            if slots.count == 1 and job not in slots.owners and not slots.shares[0].whole
        ]
        for index in open_slots:
            (node,) = self._slots[index].taken
            if node in may and self._places[node].holds([*self._slots[index].shares, share]):
                # It costs nothing, and nobody has to move.
                self._narrow(index, share, may, job)
                return True
        start, cost = len(self._undo), self._cost
        ways: list[int | None] = [None]
        if len(self._places) <= SMALL:
            ways += open_slots[:OPEN_SLOTS]
        best: tuple[int, int] | None = None
        for number, way in enumerate(ways):
            if self._try(way, share, may, job) and (best is None or self._cost < best[0]):
                best = (self._cost, number)
                if self._cost == cost:
                    return True
            self._back_to(start)
        return best is not None and self._try(ways[best[1]], share, may, job)

    def _try(self, way: int | None, share: Share, may: frozenset[str], job: int) -> bool:
        return self._new(1, share, may, job) if way is None else self._join(way, share, may, job)

    def _join(self, index: int, share: Share, may: frozenset[str], job: int) -> bool:
        """One share more for a slot whose node has no room for it."""
        self._narrow(index, share, may, job)
        # Where this one had a node that it can no longer have, another one may want it: from the beginning.
        for each in range(len(self._slots)):
            for node in list(self._slots[each].taken):
                self._leave(each, node)
        return all(self._fill(i) for i, each in enumerate(self._slots) for _ in range(each.count))

    def _narrow(self, index: int, share: Share, may: frozenset[str], job: int) -> None:
        """A slot takes one share more; its node stays."""
        old = self._slots[index]
        shares = [*old.shares, share]
        new = _Slots(1, shares, self._fitting(shares) & old.fits & may, old.owners | {job}, old.taken)
        self._slots[index] = new
        self._undo.append(lambda: self._slots.__setitem__(index, old))

    def _new(self, count: int, share: Share, may: frozenset[str], job: int) -> bool:
        fits = self._fitting([share]) & may
        if len(fits) < count:
            return False
        self._slots.append(_Slots(count, [share], fits, frozenset((job,))))
        self._undo.append(self._slots.pop)
        return all(self._fill(len(self._slots) - 1) for _ in range(count))

    def _fitting(self, shares: list[Share]) -> frozenset[str]:
        """Nodes with room for all these side by side."""
        return frozenset(n for nodes in self._alike.values() if self._places[nodes[0]].holds(shares) for n in nodes)

    def _fill(self, index: int) -> bool:
        """Give these slots one node more: the cheapest one that can be had, moving others where that helps."""
        if not self._free:
            return False
        came_from: dict[int, tuple[int, str] | None] = {index: None}
        best: tuple[int, int] | None = None
        queue = [index]
        while queue and (best is None or best[0] > self._free[0]):
            here = queue.pop(0)
            fits = self._slots[here].fits
            rank = next((rank for rank in self._free if self._order[rank] in fits), None)
            if rank is not None and (best is None or rank < best[0]):
                best = (rank, here)
            for node, there in self._holder.items():
                if there not in came_from and node in fits:
                    came_from[there] = (here, node)
                    queue.append(there)
        if best is None:
            return False
        node, at = self._order[best[0]], best[1]
        while (step := came_from[at]) is not None:
            # Whoever led here takes over a node of these slots, which get another one.
            before, given = step
            self._leave(at, given)
            self._take(at, node)
            at, node = before, given
        self._take(at, node)
        return True

    # -- changes that can be taken back -----------------------------------------------------------------------------

    def _take(self, index: int, node: str) -> None:
        self._set(index, node)
        self._undo.append(lambda: self._unset(index, node))

    def _leave(self, index: int, node: str) -> None:
        self._unset(index, node)
        self._undo.append(lambda: self._set(index, node))

    def _set(self, index: int, node: str) -> None:
        rank = self._rank[node]
        self._slots[index].taken.add(node)
        self._holder[node] = index
        del self._free[bisect_left(self._free, rank)]
        self._cost += rank >= self._first_dear

    def _unset(self, index: int, node: str) -> None:
        rank = self._rank[node]
        self._slots[index].taken.discard(node)
        del self._holder[node]
        insort(self._free, rank)
        self._cost -= rank >= self._first_dear

    def _back_to(self, length: int) -> None:
        while len(self._undo) > length:
            self._undo.pop()()
