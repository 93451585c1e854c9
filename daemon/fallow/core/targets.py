"""Targets: how many harvested nodes each run should have, by what they are worth to it. Pure.

Idle nodes go where they are worth most. A node is taken from one run for another only where that is worth more than
what the change costs both of them, until the next node comes and goes where most is missing anyway; the run then gives
it back, and whoever is to have it asks for it once it is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import msgspec

from fallow.core.allocations import Allocation
from fallow.core.apportion import Claim, apportion
from fallow.core.flow import Flow
from fallow.core.worth import Worth, changes, margins, slope

MOVABLE_S = 600.0
"""A node that goes away sooner than this is not taken from its run for another one."""


class Place(NamedTuple):
    """A node, idle or held, as far as it matters who can use it: in which of its partitions it may be asked for."""

    node: str
    partitions: tuple[str, ...]


class Party(msgspec.Struct, frozen=True):
    """One run that has or wants harvested nodes.

    Attributes:
        run: its id.
        sort: runs of one sort can use the same nodes.
        worth: of nodes to it.
        room: more nodes than it holds that it may have; below 0: it has so many too many.
    """

    run: str
    sort: Hashable
    worth: Worth
    room: int


@dataclass
class Targets:
    """What `targets` decides."""

    nodes: dict[str, int] = field(default_factory=dict)
    "run -> harvested nodes it should have"
    more: dict[str, int] = field(default_factory=dict)
    "run -> nodes to ask for (below 0: requests to withdraw), the one with the greatest gain per node first"
    kinds: dict[str, dict[int, int]] = field(default_factory=dict)
    "run -> kind -> nodes of it to ask for: others can use what is left for them"
    places: dict[Place, int] = field(default_factory=dict)
    "kind of each node"
    release: list[Allocation] = field(default_factory=list)
    "allocations to give back because another run gains more from the node"
    unused: list[Allocation] = field(default_factory=list)
    "allocations to give back because the run gains nothing from them"
    settled: bool = False
    "there is a price at which nobody would buy a node or sell one; that ends come nearer does not change it"


def targets(
    parties: Sequence[Party],
    held: Sequence[Allocation],
    pending: Collection[str],
    idle: Iterable[Place],
    suits: Callable[[Hashable, Place], bool],
    fits: Callable[[Allocation, Place], bool] = lambda _, __: True,
    elsewhere: Callable[[str, str], tuple[str, ...]] = lambda _, __: (),
    *,
    at: float,
    horizon_s: float,
    next_s: float = inf,
    cap: int | None = None,
) -> Targets:
    """Apportion idle and held nodes.

    Args:
        parties: the runs, in any order.
        held: their harvest allocations of one node each that count: running ones that nobody has asked to go, and
            requests.
        pending: tokens of the requests among them.
        idle: nodes that may be asked for, those that requests will take included.
        suits: can runs of this sort use this node, in any of its partitions?
        fits: can Slurm start this request on this idle node?
        elsewhere: partitions besides this one in which a held node could be asked for.
        at: Unix time.
        horizon_s: for so long nodes are expected to stay.
        next_s: after so long another node comes, as a rule: it goes where most is missing, so what moving one there
            gains, it gains until then.
        cap: nodes over all runs; None: no cap.
    """
    supply = _Supply(parties, suits, fits, elsewhere, idle)
    mine: dict[str, list[Allocation]] = {party.run: [] for party in parties}
    for allocation in held:
        if allocation.run not in mine:
            continue
        mine[allocation.run].append(allocation)
        supply.hold(allocation, allocation.token in pending)
    supply.add_idle()

    haves = [len(mine[party.run]) for party in parties]
    ending = _ending(held, pending, at)
    bounds = [_bounds(party, mine[party.run], pending, ending) for party in parties]
    kinds = [tuple(supply.kinds_of(party)) for party in parties]
    staying = []
    for party, have, (low, high), some in zip(parties, haves, bounds, kinds, strict=True):
        sizes, values = changes(party.worth, have, max(low, min(have, high)), high, horizon_s)
        staying.append(Claim(some, sizes, values))
    if cap is not None:
        cap = max(cap + supply.ahead, sum(claim.sizes[0] for claim in staying))
    found = apportion(staying, supply.counts, cap)
    claims = []
    for party, have, (low, high), some, nodes in zip(parties, haves, bounds, kinds, found.nodes, strict=True):
        sizes, values = changes(party.worth, nodes, low, high, min(horizon_s, next_s), stalls=nodes == have)
        claims.append(Claim(some, sizes, values))
    least = sum(claim.values[claim.sizes.index(n)] for claim, n in zip(claims, found.nodes, strict=True))
    moved = apportion(claims, supply.counts, cap)
    runs = [
        _Run(party, some, mine[party.run], low, high, horizon_s)
        for party, (low, high), some in zip(parties, bounds, kinds, strict=True)
    ]
    if moved.value > least + 1e-9:
        result, complete = _carried_out(runs, moved.nodes, pending, supply)
        if complete:
            return result
    return _carried_out(runs, found.nodes, pending, supply)[0]


def settled(
    parties: Sequence[Party],
    held: Sequence[Allocation],
    pending: Collection[str],
    *,
    at: float,
    horizon_s: float,
    next_s: float = inf,
) -> Targets | None:
    """`targets` where no node is idle and none is to change hands; None: one might be.

    If there is a price at which nobody would buy a node and nobody would sell one, no other way to share the same nodes
    is worth more, whatever kinds and caps allow. That is so in most plans, and quickly seen.

    Args: as for `targets`.
    """
    haves = {party.run: 0 for party in parties}
    for allocation in held:
        if allocation.run in haves:
            haves[allocation.run] += 1
    for_more, for_fewer, soon_s = 0.0, inf, min(horizon_s, next_s)
    ending = _ending(held, pending, at)
    for party in parties:
        if party.room < 0:
            return None
        have = haves[party.run]
        low, high = _range(party, have, ending)
        more, fewer = margins(party.worth, have, low, high, soon_s)
        if more > for_more:
            for_more = more
        if fewer < for_fewer:
            for_fewer = fewer
        if for_more > for_fewer:
            return None
    return Targets(nodes=haves, more=dict.fromkeys(haves, 0), settled=True)


def _ending(held: Sequence[Allocation], pending: Collection[str], at: float) -> list[str]:
    """The run of each node that is near its end."""
    ending = [a for a in held if a.end_at is not None and a.end_at - at < MOVABLE_S]
    return [a.run for a in ending if a.token not in pending]


def _bounds(
    party: Party, mine: Sequence[Allocation], pending: Collection[str], ending: Sequence[str]
) -> tuple[int, int]:
    """Nodes that a run keeps whatever others would gain, and the most that it may have."""
    if party.room < 0:
        # Requests are withdrawn; who leaves of those that train is decided where the limit was lowered.
        running = [a for a in mine if a.token not in pending]
        fixed = max(len(running), len(mine) + party.room)
        return fixed, fixed
    return _range(party, len(mine), ending)


def _range(party: Party, have: int, ending: Sequence[str]) -> tuple[int, int]:
    """The same for a run that has no node too many."""
    soon, owed = ending.count(party.run), party.worth.least - party.worth.base
    return max(soon, min(have, owed)), have + party.room


class _Supply:
    """Nodes by kind: a kind is all nodes that the same sorts of runs can use."""

    def __init__(
        self,
        parties: Sequence[Party],
        suits: Callable[[Hashable, Place], bool],
        fits: Callable[[Allocation, Place], bool],
        elsewhere: Callable[[str, str], tuple[str, ...]],
        idle: Iterable[Place],
    ) -> None:
        self._sorts = {sort: number for number, sort in enumerate(dict.fromkeys(party.sort for party in parties))}
        "sort of runs -> its number: a sort's own hash takes its time, and each node asks for one"
        self._suits = suits
        self._fits = fits
        self._elsewhere = elsewhere
        self._idle = list(dict.fromkeys(idle))
        self._taken: set[Place] = set()
        "idle nodes that requests will take"
        self._kinds: dict[Hashable, int] = {}
        self._users: list[tuple[int, ...]] = []
        "kind -> numbers of the sorts that can use it"
        self._usable: dict[int, frozenset[int]] = {}
        "number of a sort -> kinds that it can use, once all are counted"
        self.counts: list[int] = []
        self.kind: dict[str, int] = {}
        "token -> kind of the node that it holds or waits for"
        self._own: dict[str, list[int]] = {}
        self.places: dict[Place, int] = {}
        self.ahead = 0
        "requests that wait for nodes of others: their places under the cap are for whoever can use a node now"

    def free(self) -> list[int]:
        """Nodes of each kind that nobody holds or waits for."""
        free = self.counts.copy()
        for kind in self.kind.values():
            free[kind] -= 1
        return free

    def add_idle(self) -> None:
        """Count what no request will take."""
        for place in self._idle:
            if place not in self._taken:
                self.add(place)

    def add(self, place: Place) -> int:
        """Count a node; returns its kind."""
        suits = self._suits
        users = tuple([number for sort, number in self._sorts.items() if suits(sort, place)])
        kind = self._kinds.get(users)
        if kind is None:
            kind = self._count(users, users)
        else:
            self.counts[kind] += 1
        self.places[place] = kind
        return kind

    def hold(self, allocation: Allocation, pending: bool) -> None:
        """Count the node of an allocation. A request will take an idle node, or else one that nobody knows of yet."""
        nodes, name = allocation.nodes, allocation.partition
        node = allocation.pinned if pending else nodes[0] if nodes else ""
        if node:
            place: Place | None = Place(node, (name, *self._elsewhere(node, name)))
        else:
            there = (place for place in self._idle if name in place.partitions and place not in self._taken)
            place = next((place for place in there if self._fits(allocation, place)), None)
            self._taken.update(() if place is None else (place,))
            self.ahead += place is None and allocation.ahead
        kind = self._count(("", allocation.run), ()) if place is None else self.add(place)
        self.kind[allocation.token] = kind
        self._own.setdefault(allocation.run, []).append(kind)

    def _count(self, key: Hashable, users: tuple[int, ...]) -> int:
        kind = self._kinds.setdefault(key, len(self.counts))
        if kind == len(self.counts):
            self.counts.append(0)
            self._users.append(users)
        self.counts[kind] += 1
        return kind

    def kinds_of(self, party: Party) -> list[int]:
        """Kinds that a run can use; what it holds is always among them."""
        sort = self._sorts[party.sort]
        if sort not in self._usable:
            self._usable[sort] = frozenset(kind for kind, users in enumerate(self._users) if sort in users)
        return sorted(self._usable[sort].union(self._own.get(party.run, ())))


class _Run(msgspec.Struct, frozen=True):
    party: Party
    kinds: tuple[int, ...]
    mine: list[Allocation]
    low: int
    high: int
    horizon_s: float

    def changes(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Numbers of nodes that it may have, and what it is worth to come to each from those that it has."""
        return changes(self.party.worth, len(self.mine), self.low, self.high, self.horizon_s)

    def gains_nothing(self, target: int) -> bool:
        """Is it as well off with so many nodes as with those that it has?"""
        worth = self.party.worth
        return worth.of(worth.base + target) >= worth.of(worth.base + len(self.mine))


def _carried_out(
    runs: Sequence[_Run], nodes: Sequence[int], pending: Collection[str], supply: _Supply
) -> tuple[Targets, bool]:
    """What has to be done for these node counts, and whether all of it can be, with held nodes where they are."""
    out = Targets(nodes={run.party.run: target for run, target in zip(runs, nodes, strict=True)})
    growing = [(run, target) for run, target in zip(runs, nodes, strict=True) if target > len(run.mine)]
    wanted = {kind for run, _ in growing for kind in run.kinds}
    free = supply.free()
    for run, target in zip(runs, nodes, strict=True):
        if target >= len(run.mine):
            out.more[run.party.run] = 0
            continue
        withdrawn = [a for a in run.mine if a.token in pending][: len(run.mine) - target]
        out.more[run.party.run] = -len(withdrawn)
        # Of the kind that somebody waits for; else, the newest.
        order = sorted(
            (a for a in run.mine if a.token not in pending),
            key=lambda a: (supply.kind[a.token] not in wanted, -(a.start_at or 0.0), a.token),
        )
        released = order[: len(run.mine) - target - len(withdrawn)]
        (out.unused if run.gains_nothing(target) else out.release).extend(released)
        for allocation in [*withdrawn, *released]:
            free[supply.kind[allocation.token]] += 1
    gains = {run.party.run: -slope(*run.changes(), len(run.mine), target) for run, target in growing}
    growing.sort(key=lambda pair: gains[pair[0].party.run])
    flow = Flow([run.kinds for run, _ in growing], free)
    complete = True
    for i, (run, target) in enumerate(growing):
        have = len(run.mine)
        got = flow.take(i, target - have)
        complete = complete and have + got == target
        useful = max(size for size in run.changes()[0] if size <= have + got)
        flow.give(i, have + got - useful)
        out.nodes[run.party.run] = useful
    more = {run.party.run: out.nodes[run.party.run] - len(run.mine) for run, _ in growing}
    out.more = more | {run: n for run, n in out.more.items() if run not in more}
    out.places = supply.places
    out.kinds = {run.party.run: flow.uses(i) for i, (run, _) in enumerate(growing)}
    return out, complete
