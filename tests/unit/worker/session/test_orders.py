"""Obeying orders: lists of members from deltas, what is built and dropped, and what is given up."""

from typing import Any

import pytest

from fallow.core.membership.messages import End, Order, Plan
from fallow.core.membership.roster import check_of
from fallow.worker.session.orders import Moves, Orders
from fallow.worker.transport.build import Upcoming
from scripted_agent import peers, plan


class Worker:
    """One worker's orders; groups stand as soon as somebody asks for them."""

    def __init__(self, node: int = 1, slot: int = 0) -> None:
        self.orders = Orders(node, slot)
        self._edition = 0

    def obey(self, planned: Plan | None = None, **fields: Any) -> Moves:
        self._edition += 1
        return self.orders.obey(Order(**{"node": 1, "term": 1, "edition": self._edition, "plan": planned, **fields}))

    def go(self, planned: Plan, **fields: Any) -> Upcoming:
        """All the way into a generation."""
        moves = self.obey(planned, **fields)
        if moves.build is not None:
            moves.build.take(None)
        self.obey(planned, committed=planned.generation, **fields)
        assert self.orders.switch_offered == planned.generation
        return self.orders.take()


def delta(generation: int, base: int, members: list[int], *, without: tuple[int, ...] = (), more: tuple = ()) -> Plan:
    """To members of generation `base`."""
    return plan(generation, *members, base=base, without=without, more=more)


def nodes(upcoming: Upcoming | None) -> list[int]:
    return [peer.node for peer in upcoming.ranks.peers]


def test_a_delta_counts_on_from_the_generation_that_was_built_before() -> None:
    worker = Worker()
    worker.go(plan(1, 1, 2, 3))
    assert nodes(worker.go(delta(2, 1, [1, 3, 4], without=(2,), more=peers(4)))) == [1, 3, 4]
    burned = worker.obey(delta(3, 2, [1, 3, 4, 5], more=peers(5)), committed=2)
    assert nodes(burned.build) == [1, 3, 4, 5]
    worker.obey(None, committed=2)
    assert nodes(worker.obey(delta(4, 2, [1, 4], without=(3,)), committed=2).build) == [1, 4]


@pytest.mark.parametrize(
    "planned",
    [
        plan(2, 1, 2, check=check_of([1, 3])),
        delta(2, 7, [1, 2]),
        plan(2, 5, 6),
    ],
)
def test_a_list_that_is_another_one_here_is_refused(planned: Plan) -> None:
    worker = Worker()
    worker.go(plan(1, 1, 2))
    assert worker.obey(planned, committed=1).build is None
    upcoming = worker.orders.upcoming
    assert not upcoming.is_ready
    assert (upcoming.refusal.generation, upcoming.refusal.unreachable) == (2, ())
    worker.obey(planned, committed=2)
    assert worker.orders.switch_offered == 0
    assert nodes(worker.obey(plan(3, 1, 2), committed=1).build) == [1, 2], "the whole list helps"


def test_an_older_order_changes_nothing() -> None:
    orders = Orders(1, 0)
    assert orders.obey(Order(node=1, term=2, edition=1, plan=plan(5, 1))).build is not None
    for term, edition in ((1, 9), (2, 1), (2, 0)):
        assert orders.obey(Order(node=1, term=term, edition=edition, broken=9, end=End(code=1, reason="r"))) == Moves()
    assert (orders.newest_order.term, orders.newest_order.edition, orders.given_up_generation) == (2, 1, 0)


def test_what_a_newer_order_does_not_plan_is_dropped_unless_it_is_committed() -> None:
    worker = Worker()
    first = worker.obey(plan(2, 1, 2)).build
    moves = worker.obey(plan(3, 1))
    assert (moves.drop, nodes(moves.build)) == (first, [1])
    assert worker.obey(None).drop is moves.build
    assert worker.orders.upcoming is None
    third = worker.obey(plan(4, 1)).build
    assert worker.obey(None, committed=4).drop is None
    assert worker.orders.upcoming is third
    assert worker.obey(None, committed=3).drop is third, "the store has lost the commit"
