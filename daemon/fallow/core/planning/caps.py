"""How many nodes more may be held, and how many requests may wait. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fallow.core.accounting.backoff import Asker
from fallow.core.allocations import Allocation
from fallow.core.planning.situation import Situation


class Caps:
    """How many nodes more may be held, and how many requests may wait. Nodes of normal priority are held, too.

    Args:
        situation: of the plan: its rules, the limits that were learned, and who asks.
        held: live harvest allocations that stay, requests included.
        pending: the requests among them.
    """

    def __init__(self, situation: Situation, held: Iterable[Allocation], pending: Iterable[Allocation]) -> None:
        self._rules, self._backoff, self._at = situation.rules, situation.known.backoff, situation.at
        self._held = Counter(a.partition for a in situation.allocations if a.hurried and a.live)
        self.waiting = 0
        "requests that wait"
        self._fresh = self._old = 0
        self._by_asker = Counter[Asker | None]()
        held = list(held)
        live, waits = {allocation.token for allocation in held}, {allocation.token for allocation in pending}
        for allocation in held:
            # A successor that waits for the node of the lease before it is the same node.
            if not (allocation.pinned and allocation.token in waits and allocation.replaces in live):
                self._held[allocation.partition] += 1
            if allocation.token in waits:
                demand, is_fresh = situation.by_run.get(allocation.run), not situation.waits_for_others(allocation)
                self._old += not (is_fresh or allocation.ahead)
                self._count(None if demand is None else demand.asker, is_fresh=is_fresh)

    def _count(self, asker: Asker | None, *, is_fresh: bool) -> None:
        self.waiting += 1
        self._fresh += is_fresh
        self._by_asker[asker] += 1

    def add_request(self, asker: Asker, partition: str, *, pinned: bool = False, ahead: bool = False) -> None:
        """One more request is made."""
        self._count(asker, is_fresh=not ahead)
        self._held[partition] += not pinned

    def nodes_left(self) -> int:
        """Nodes more that may be held in all."""
        most = self._rules.max_nodes
        return 1 << 30 if most is None else max(0, most - self._held.total())

    def full(self, partition: str) -> str:
        """That no more nodes may be held there, in words; empty: more may be."""
        if not self.nodes_left():
            return "limited: as many nodes are held as [harvest] max_nodes allows"
        if self.is_capped(partition):
            return f"limited: as many nodes of {partition} are held as [harvest] partition_nodes allows"
        return ""

    def is_capped(self, partition: str) -> bool:
        """Are as many held there as may be in this partition?"""
        most = self._rules.partition_nodes.get(partition)
        return most is not None and self._held[partition] >= most

    def places(self, partitions: Iterable[str]) -> int:
        """Nodes more that may be held in these partitions together."""
        most = ((self._rules.partition_nodes.get(name, 1 << 30), self._held[name]) for name in partitions)
        return min(self.nodes_left(), sum(max(0, cap - held) for cap, held in most))

    def requests_left(self) -> int:
        """Requests more that may wait for idle nodes."""
        most = self._rules.max_pending
        fresh = min(most, 2 * most - self._old) - self._fresh
        return max(0, min(fresh, self._rules.max_waiting - self.waiting))

    def may_wait(self, asker: Asker) -> bool:
        """May one more request wait in this name? Its account or QOS may have been at a limit of late."""
        room = self._backoff.room(asker, self._at)
        return room is None or self._by_asker[asker] < room

    def may_wait_ahead(self) -> bool:
        """May one more request wait for a node that others still have?"""
        return self.waiting < self._rules.max_waiting
