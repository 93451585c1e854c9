"""Would jobs fit on nodes, and which nodes would they take? Pure.

Nodes have a rank: cheap ones (idle) come before dear ones (ours, newest first). Jobs are placed one after the other; a
job that does not fit as a whole leaves no trace. What is taken is then the cheapest set of nodes on which all placed
jobs fit at once: each slot takes the cheapest node that an augmenting path reaches, which is the greedy algorithm on a
transversal matroid (Edmonds and Fulkerson 1965), so exact as long as every slot takes a whole node. Jobs that share
nodes are packed: into a slot that is there or a new one, whichever costs less. Paths are looked for from group to group
of slots that may have the same nodes, since there are few of these, and never again where none can be found any more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice

import msgspec

FEW_NODES = 16
"""Jobs of more nodes than this are not packed together with others; they hardly ever share nodes."""

OPEN_SLOTS = 8
"""As many slots with room left are tried for a job that shares nodes, where others would have to move for it ..."""

SMALL = 64
"""... among at most so many nodes; with more there is always another way, and no time."""


class Share(msgspec.Struct, frozen=True):
    """What one node must give to one job."""

    cpus: int = 1
    memory_mb: int = 0
    gpus: Mapping[str, int] = {}
    "type -> number; the empty type is any"
    whole: bool = False
    "nothing else runs beside it"
    user: str = ""
    "whose job it is; where no job minds, nobody needs to say"
    own_user: bool = False
    "nobody else's jobs run beside it"


class Place(msgspec.Struct, frozen=True):
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
        if any(share.own_user for share in shares) and len({share.user for share in shares}) > 1:
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


class Part(msgspec.Struct, frozen=True):
    """A job, or one component of a heterogeneous one: so many different nodes with one share each."""

    nodes: int
    share: Share
    may: frozenset[str]
    "nodes that it may run on, whatever is free there"
    must: frozenset[str] = frozenset()
    "nodes that it must have, all of them"


class _Group:
    """Slots that may have the same nodes: what one of them can reach, all can."""

    def __init__(self, fits: frozenset[str], rank: Mapping[str, int], others: Iterable[_Group]) -> None:
        self.fits = fits
        self.held: dict[str, int] = {}
        "node -> slots of this group that have it"
        self.near: set[_Group] = set()
        "groups with some node in common"
        self.kin = [self]
        "those, theirs and so on: one list for all of them"
        self._ranks = sorted(rank[node] for node in fits)
        self._from = 0
        "none before is free"
        for other in others:
            if not fits.isdisjoint(other.fits):
                self.near.add(other)
                other.near.add(self)
                if other.kin is not self.kin:
                    self.kin += other.kin
                    for each in self.kin:
                        each.kin = self.kin

    def cheapest(self, free: bytearray) -> int | None:
        """Rank of the cheapest free node that its slots may have."""
        while self._from < len(self._ranks):
            if free[self._ranks[self._from]]:
                return self._ranks[self._from]
            self._from += 1
        return None

    def has(self, count: int, free: bytearray) -> bool:
        """Are so many nodes free that its slots may have?"""
        found = (rank for rank in islice(self._ranks, self._from, None) if free[rank])
        return len(list(islice(found, count))) == count

    def freed(self, node: str, rank: int) -> None:
        if node in self.fits:
            self._from = min(self._from, bisect_left(self._ranks, rank))

    def held_by(self, other: _Group) -> str | None:
        """A node that slots of another group have, and these may have."""
        if other not in self.near or self.fits.isdisjoint(other.held.keys()):
            return None
        return next(node for node in other.held if node in self.fits)


@dataclass(slots=True)
class _Slots:
    """Places that are alike: each takes one node."""

    count: int
    shares: list[Share]
    group: _Group
    owners: frozenset[int]
    "jobs in it; no job takes the same node twice"
    taken: dict[str, None] = field(default_factory=dict)
    "its nodes, in the order in which they came: what is moved first must not depend on the process"


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
        self._groups: dict[frozenset[str], _Group] = {}
        "by the nodes that they may have"
        self._wide: dict[object, frozenset[str]] = {}
        "shares -> nodes with room for them side by side"
        self._holder: dict[str, int] = {}
        "node -> its slots"
        self._open: dict[int, set[int]] = {}
        "CPUs that are left on a node -> slots that share it"
        self._left: dict[int, int] = {}
        "those slots -> CPUs"
        self._asked: dict[object, tuple[frozenset[str], _Group]] = {}
        "group of a share, by what the job that is being placed asks for"
        self._free = bytearray(b"\1" * len(places))
        "by rank: does nobody have it?"
        self._dead: set[str] = set()
        "nodes that those who have them can never spare: no path leads from them to a free one"
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
        self._asked.clear()
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

    def divide(self, part: Part, tasks: int, share: Share) -> list[int] | None:
        """How many of a job's tasks its nodes take, each one at least, so that the fewest dear ones are needed.

        Args:
            part: as many nodes as it says, among those.
            tasks: in all.
            share: what one task needs.

        Returns:
            The most first; None where there is no room for them all.
        """
        rooms: tuple[list[int], list[int]] = [], []
        for node in part.may:
            rank, place = self._rank[node], self._places[node]
            slots = None if self._free[rank] else self._slots[self._holder[node]]
            if slots is not None and (slots.count > 1 or slots.shares[0].whole):
                continue
            there = () if slots is None else slots.shares
            room = (place.cpus - sum(each.cpus for each in there)) // share.cpus
            if share.memory_mb:
                room = min(room, (place.memory_mb - sum(each.memory_mb for each in there)) // share.memory_mb)
            if room > 0:
                rooms[rank >= self._first_dear].append(room)
        cheap, dear = (nlargest(part.nodes, some) for some in rooms)
        for paid in range(part.nodes + 1):
            chosen = sorted([*cheap[: part.nodes - paid], *dear[:paid]], reverse=True)
            if len(chosen) == part.nodes and sum(chosen) >= tasks:
                taken: list[int] = []
                for index, room in enumerate(chosen):
                    others = part.nodes - index - 1
                    taken.append(min(room, tasks - sum(taken) - others))
                return taken
        return None

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
        for index in sorted(i for cpus, some in self._open.items() if cpus >= share.cpus for i in some):
            (node,) = self._slots[index].taken
            crowded = job in self._slots[index].owners or node not in may
            if not crowded and self._places[node].holds([*self._slots[index].shares, share]):
                # It costs nothing, and nobody has to move.
                self._narrow(index, share, may, job)
                return True
        start, cost = len(self._undo), self._cost
        ways: list[int | None] = [None]
        if len(self._places) <= SMALL:
            shared = (i for i, slots in enumerate(self._slots) if slots.count == 1 and not slots.shares[0].whole)
            ways += islice((i for i in shared if job not in self._slots[i].owners), OPEN_SLOTS)
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
        group = self._group(self._fitting(shares) & old.group.fits & may)
        new = _Slots(1, shares, group, old.owners | {job}, old.taken)
        self._replace(index, old, new)
        self._undo.append(lambda: self._replace(index, new, old))

    def _new(self, count: int, share: Share, may: frozenset[str], job: int) -> bool:
        index, group = len(self._slots), self._group_of(share, may)
        if len(group.fits) < count:
            return False
        self._slots.append(_Slots(count, [share], group, frozenset((job,))))
        self._undo.append(self._slots.pop)
        if count > 1 and not group.has(count, self._free) and self._within_reach(group) < count:
            return False
        if all(self._fill(index) for _ in range(count)):
            return True
        self._bury(index, job)
        return False

    def _group_of(self, share: Share, may: frozenset[str]) -> _Group:
        key = (share.cpus, share.memory_mb, tuple(share.gpus.items()), share.whole, id(may), len(self._dead))
        if key not in self._asked:
            # With `may` itself, so that nothing else is given its number.
            self._asked[key] = may, self._group((self._fitting([share]) & may) - self._dead)
        return self._asked[key][1]

    def _group(self, fits: frozenset[str]) -> _Group:
        if fits not in self._groups:
            self._groups[fits] = _Group(fits, self._rank, self._groups.values())
        return self._groups[fits]

    def _fitting(self, shares: list[Share]) -> frozenset[str]:
        """Nodes with room for all these side by side."""
        key = tuple((s.cpus, s.memory_mb, tuple(sorted(s.gpus.items())), s.whole, s.user, s.own_user) for s in shares)
        if key not in self._wide:
            alike = (nodes for nodes in self._alike.values() if self._places[nodes[0]].holds(shares))
            self._wide[key] = frozenset(node for nodes in alike for node in nodes)
        return self._wide[key]

    def _fill(self, index: int) -> bool:
        """Give these slots one node more: the cheapest one that can be had, moving others where that helps."""
        start = self._slots[index].group
        ranks = (each.cheapest(self._free) for each in start.kin if each.held or each is start)
        goal = min((rank for rank in ranks if rank is not None), default=None)
        if goal is None:
            return False
        best: tuple[int, _Group] | None = None
        came_from: dict[_Group, tuple[_Group, str]] = {}
        for here in self._reach(start, came_from):
            rank = here.cheapest(self._free)
            if rank is not None and (best is None or rank < best[0]):
                best = (rank, here)
                if rank == goal:
                    break
        if best is None:
            return False
        node, at = self._order[best[0]], best[1]
        while at is not start:
            # Whoever led here takes over a node of these slots, which get another one.
            before, given = came_from[at]
            holder = self._holder[given]
            self._leave(holder, given, free=False)
            self._take(holder, node)
            at, node = before, given
        self._take(index, node)
        return True

    def _reach(self, start: _Group, came_from: dict[_Group, tuple[_Group, str]]) -> Iterator[_Group]:
        """Groups that could spare a node for these slots if they got another one, nearest first.

        Args:
            start: that of the slots.
            came_from: filled: group -> the one that led to it, and the node that it would give to it.
        """
        queue, unseen = deque((start,)), [each for each in start.kin if each.held and each is not start]
        while queue:
            here = queue.popleft()
            yield here
            rest: list[_Group] = []
            for there in unseen:
                node = here.held_by(there)
                if node is None:
                    rest.append(there)
                else:
                    came_from[there] = here, node
                    queue.append(there)
            unseen = rest

    def _within_reach(self, start: _Group) -> int:
        """At most so many nodes could be had by slots of a group."""
        if not any(self._free):
            return 0
        nodes = frozenset[str]().union(*(each.fits for each in self._reach(start, {})))
        return sum(self._free[self._rank[node]] for node in nodes)

    def _bury(self, index: int, job: int) -> None:
        """Slots of a job got no node: all that they could reach is taken for good.

        Whoever is within reach has nothing but nodes within reach, and all of them. So no later path leads out from
        there, unless a slot goes away, as those of the job itself do.
        """
        reached = list(self._reach(self._slots[index].group, {}))
        holders = (slots for each in reached for slots in each.held.values())
        if not any(job in self._slots[slots].owners for slots in holders):
            self._dead.update(*(each.fits for each in reached))

    # -- changes that can be taken back -----------------------------------------------------------------------------

    def _take(self, index: int, node: str) -> None:
        self._set(index, node)
        self._undo.append(lambda: self._unset(index, node))

    def _leave(self, index: int, node: str, *, free: bool = True) -> None:
        """Args: free: False: others take it at once, so nobody need look for free nodes from there on again."""
        self._unset(index, node, free=free)
        self._undo.append(lambda: self._set(index, node))

    def _set(self, index: int, node: str) -> None:
        rank, slots = self._rank[node], self._slots[index]
        slots.taken[node] = None
        slots.group.held[node] = index
        self._holder[node] = index
        self._free[rank] = 0
        self._cost += rank >= self._first_dear
        self._look(index)

    def _unset(self, index: int, node: str, *, free: bool = True) -> None:
        rank, slots = self._rank[node], self._slots[index]
        slots.taken.pop(node, None)
        del slots.group.held[node]
        del self._holder[node]
        if free:
            self._free[rank] = 1
            for each in slots.group.kin:
                each.freed(node, rank)
        self._cost -= rank >= self._first_dear
        self._look(index)

    def _replace(self, index: int, old: _Slots, new: _Slots) -> None:
        for node in old.taken:
            del old.group.held[node]
            new.group.held[node] = index
        self._slots[index] = new
        self._look(index)

    def _look(self, index: int) -> None:
        """Keep note of what slots leave to others."""
        before = self._left.pop(index, 0)
        if before:
            self._open[before].discard(index)
        slots = self._slots[index]
        if slots.count == 1 and slots.taken and not slots.shares[0].whole:
            (node,) = slots.taken
            left = self._places[node].cpus - sum(share.cpus for share in slots.shares)
            if left > 0:
                self._left[index] = left
                self._open.setdefault(left, set()).add(index)

    def _back_to(self, length: int) -> None:
        while len(self._undo) > length:
            self._undo.pop()()
