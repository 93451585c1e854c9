"""Which idle nodes can be asked for, and which of them requests that wait will take. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fallow.core.allocations import Allocation
from fallow.core.holes import Hole
from fallow.core.planning.eligibility import Eligibility
from fallow.core.planning.situation import Situation
from fallow.core.planning.unstarted import RunClass


class Offer(NamedTuple):
    """An idle node as one of its partitions offers it, and the classes of runs that can use it there."""

    hole: Hole
    users: frozenset[RunClass]


def offers(situation: Situation, eligibility: Eligibility) -> list[Offer]:
    """What can be asked for: what few can use comes first, and what can be had in one way only."""
    classes = dict.fromkeys(demand.run_class for demand in situation.demands)
    ways = Counter(hole.node for hole in situation.holes)
    found = []
    for hole in situation.holes:
        able = [each for each in classes if not eligibility.why_not(each, hole.node, hole.partition, hole.part)]
        found.append(Offer(hole, frozenset(able)))
    return sorted(found, key=lambda offer: (len(offer.users), ways[offer.hole.node]))


@dataclass(frozen=True, slots=True)
class Matched:
    """Which idle nodes requests that wait will take, the oldest first."""

    taken: dict[str, str] = field(default_factory=dict)
    "node -> token"
    unmatched: list[Allocation] = field(default_factory=list)
    "requests for which there is no idle node"


def match(pending: Iterable[Allocation], holes: Sequence[Hole], eligibility: Eligibility) -> Matched:
    """Match requests with idle nodes, as Slurm would.

    Args:
        pending: requests, the oldest first.
        holes: idle nodes, best first.
        eligibility: who can use which.
    """
    found, by_partition = Matched(), dict[str, list[Hole]]()
    for hole in holes:
        by_partition.setdefault(hole.partition, []).append(hole)
    for allocation in pending:
        if allocation.pinned:
            continue
        left = (hole for hole in by_partition.get(allocation.partition, ()) if hole.node not in found.taken)
        taken = next((hole.node for hole in left if eligibility.could_take(allocation, hole)), None)
        if taken is not None:
            found.taken[taken] = allocation.token
        elif allocation.part is not None:
            found.taken[allocation.part.node] = allocation.token
        else:
            found.unmatched.append(allocation)
    return found
