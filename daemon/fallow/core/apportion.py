"""Apportioning: which run gets how many nodes, so that the sum of what they are worth to the runs is greatest. Pure.

Nodes are alike within a kind; a run can use some of the kinds. The vectors of node counts that can be served are the
points of a polymatroid (they are what flows through a bipartite graph), so for concave values taking the best increment
that can still be served, one after the other, is exact, whatever the number of kinds (Federgruen & Groenevelt,
Operations Research 34, 1986). Values have stairs (whole shards, the cost of a change), so the greedy works on their
concave envelopes. That bounds the best result from above; branch and bound on the runs that it leaves between two
stairs closes the gap to `GAP`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from fallow.core.flow import Flow

GAP = 0.002
"""Part of the gain that may be missing to the best result."""

BRANCHES = 200
"""Problems looked at before the best result so far is good enough; its distance to the bound is told."""

EPSILON = 1e-12

Result = TypeVar("Result")


class Claim(NamedTuple):
    """What nodes are worth to a run.

    Attributes:
        kinds: of nodes that it can use.
        sizes: node counts at which the value changes, ascending; the first is the least that it must have.
        values: at these sizes, in a unit that all claims share. Between two sizes the lower one's value holds.
    """

    kinds: tuple[int, ...]
    sizes: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Apportioned:
    nodes: Sequence[int]
    "of each claim"
    value: float
    bound: float
    "no result is better than this"


def apportion(claims: Sequence[Claim], supply: Sequence[int], cap: int | None = None) -> Apportioned:
    """Find the best node counts, to within `GAP` of the gain over everybody's least.

    Args:
        claims: of the runs; together their least sizes can be served.
        supply: nodes of each kind.
        cap: nodes in all; None: no cap.
    """
    claims, supply = tuple(claims), tuple(supply)
    key = supply, cap, tuple([(claim.kinds, id(claim.sizes), id(claim.values)) for claim in claims])
    # Between two polls little changes that bears on it.
    return _APPORTIONED.of(key, claims, lambda: _apportioned(claims, supply, cap))


class _Kept(Generic[Result]):
    """The newest results, by the identity of the numbers that they come from: `worth.changes` gives out the same tuples
    again, and to hash all that is in them takes longer than to find them.

    A result is kept with its numbers, so no others can have their identity meanwhile.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[object, tuple[object, Result]] = {}

    def of(self, key: object, numbers: object, find: Callable[[], Result]) -> Result:
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= self._most:
                del self._known[next(iter(self._known))]
            known = self._known[key] = numbers, find()
        return known[1]


_APPORTIONED: _Kept[Apportioned] = _Kept(256)
_ENVELOPES: _Kept[list[tuple[float, int]]] = _Kept(4096)


def _apportioned(claims: Sequence[Claim], supply: Sequence[int], cap: int | None) -> Apportioned:
    problem = _Problem(claims, supply, cap)
    least = sum(claim.values[0] for claim in claims)
    whole = problem.relax([(0, len(claim.sizes) - 1) for claim in claims])
    if whole is None:
        return Apportioned([claim.sizes[0] for claim in claims], least, least)
    best, value = whole.chosen, whole.value
    order = count()
    queue = [(-whole.bound, next(order), whole)]
    for _ in range(BRANCHES):
        if not queue or -queue[0][0] - value <= GAP * (-queue[0][0] - least) + EPSILON:
            break
        relaxed = heapq.heappop(queue)[2]
        if relaxed.split is None:
            break
        claim, at = relaxed.split
        low, high = relaxed.ranges[claim]
        for part in ((low, at), (at + 1, high)):
            result = problem.relax([*relaxed.ranges[:claim], part, *relaxed.ranges[claim + 1 :]])
            if result is None:
                continue
            if result.value > value + EPSILON:
                best, value = result.chosen, result.value
            if result.bound > value:
                heapq.heappush(queue, (-result.bound, next(order), result))
    bound = max(value, -queue[0][0]) if queue else value
    return Apportioned([claim.sizes[k] for claim, k in zip(claims, best, strict=True)], value, bound)


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """The problem with every claim's sizes within a range, on concave envelopes."""

    ranges: list[tuple[int, int]]
    "first and last index into each claim's sizes"
    bound: float
    "of the envelopes' values; no choice within the ranges is worth more"
    chosen: list[int]
    "index of each claim's size in a solution made from it, within or beyond the ranges"
    value: float
    split: tuple[int, int] | None
    "claim that is furthest below its envelope, and the index of the size below what it got; None: none is"


class _Problem:
    def __init__(self, claims: Sequence[Claim], supply: Sequence[int], cap: int | None) -> None:
        self._claims = claims
        self._supply = supply
        self._cap = cap

    def relax(self, ranges: list[tuple[int, int]]) -> _Relaxed | None:
        """None: the least sizes of these ranges cannot be served."""
        claims = self._claims
        flow = Flow([claim.kinds for claim in claims], self._supply, self._cap)
        nodes: list[int] = []
        excess: list[float] = []
        bound = 0.0
        pieces: list[Sequence[tuple[float, int]]] = []
        for i, (claim, (low, _)) in enumerate(zip(claims, ranges, strict=True)):
            least = claim.sizes[low]
            if flow.take(i, least) < least:
                return None
            nodes.append(least)
            excess.append(claim.values[low])
            bound += claim.values[low]
        if flow.left:  # else nobody can get more than the least
            pieces = [_envelope(c.sizes, c.values, low, high) for c, (low, high) in zip(claims, ranges, strict=True)]
        # The steepest piece of any claim next; each claim's own are steepest first.
        queue = [(-some[0][0], i, 0) for i, some in enumerate(pieces) if some]
        heapq.heapify(queue)
        while queue and flow.left:
            slope, i, at = queue[0]
            amount = pieces[i][at][1]
            got = flow.take(i, amount)
            nodes[i] += got
            bound -= slope * got
            excess[i] -= slope * got
            if got == amount and at + 1 < len(pieces[i]):
                heapq.heapreplace(queue, (-pieces[i][at + 1][0], i, at + 1))
            else:
                heapq.heappop(queue)
        chosen = [bisect_right(claim.sizes, n) - 1 for claim, n in zip(claims, nodes, strict=True)]
        excess = [e - claim.values[k] for e, claim, k in zip(excess, claims, chosen, strict=True)]
        worst = max(range(len(claims)), key=excess.__getitem__, default=0)
        split = None
        if claims and excess[worst] > EPSILON and chosen[worst] < ranges[worst][1]:
            split = worst, chosen[worst]
        chosen = self._fill(flow, nodes, chosen)
        value = sum(claim.values[k] for claim, k in zip(claims, chosen, strict=True))
        return _Relaxed(ranges, bound, chosen, value, split)

    def _fill(self, flow: Flow, nodes: list[int], chosen: list[int]) -> list[int]:
        """Give nodes back that are above a size, then raise claims to whole sizes with what is left over."""
        claims, chosen = self._claims, list(chosen)
        for i, claim in enumerate(claims):
            flow.give(i, nodes[i] - claim.sizes[chosen[i]])
        while flow.left:
            for _, i, k in sorted(self._raises(chosen, flow.left), reverse=True):
                wanted = claims[i].sizes[k] - claims[i].sizes[chosen[i]]
                got = flow.take(i, wanted)
                if got == wanted:
                    chosen[i] = k
                    break
                flow.give(i, got)
            else:
                break
        return chosen

    def _raises(self, chosen: list[int], left: int) -> Iterator[tuple[float, int, int]]:
        """(value per node, claim, index of a larger size) for what up to `left` more nodes could do."""
        for i, (claim, now) in enumerate(zip(self._claims, chosen, strict=True)):
            for k in range(now + 1, len(claim.sizes)):
                more = claim.sizes[k] - claim.sizes[now]
                if more > left:
                    break
                gain = claim.values[k] - claim.values[now]
                if gain > EPSILON:
                    yield gain / more, i, k


def _envelope(sizes: tuple[int, ...], values: tuple[float, ...], low: int, high: int) -> list[tuple[float, int]]:
    """(value per node, nodes) of the concave envelope's rising pieces over a range of sizes, steepest first."""
    # Most claims of a plan are those of the plan before.
    key = id(sizes), id(values), low, high
    return _ENVELOPES.of(key, (sizes, values), lambda: _rising(sizes, values, low, high))


def _rising(sizes: tuple[int, ...], values: tuple[float, ...], low: int, high: int) -> list[tuple[float, int]]:
    corners = [(sizes[low], values[low])]
    rises: list[tuple[float, int]] = []
    "(value, nodes) from each corner to the next"
    for n, value in zip(sizes[low + 1 : high + 1], values[low + 1 : high + 1], strict=True):
        last, worth = corners[-1]
        if value <= worth:
            continue
        while rises and rises[-1][0] * (n - last) <= (value - worth) * rises[-1][1]:
            rises.pop()
            corners.pop()
            last, worth = corners[-1]
        corners.append((n, value))
        rises.append((value - worth, n - last))
    return [(value / nodes, nodes) for value, nodes in rises]
