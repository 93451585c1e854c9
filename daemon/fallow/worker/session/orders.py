"""Obeying the newest order: which group to build, to drop, to give up, and when to go over. No I/O, no clock.

An order states the desired condition, so it replaces all earlier orders, and obeying it twice does nothing.
The exceptions here end a wait for the next generation for good.
"""

from typing import NamedTuple

from fallow.core.membership.messages import End, Finish, Order, Outcome, Peer, Plan, Refusal
from fallow.core.membership.roster import check_of
from fallow.model import Exit, FallowError
from fallow.worker.transport.build import RankMap, Upcoming


class Moves(NamedTuple):
    """What the session must do to obey an order."""

    build: Upcoming | None = None
    drop: Upcoming | None = None
    interrupt: int = 0
    "end all exchanges of this generation and of older ones; 0: none"


class Orders:
    """The orders to one worker, and how far the worker has obeyed them.

    Args:
        node: number of the worker's node.
        slot: index of the worker on its node.
    """

    def __init__(self, node: int, slot: int) -> None:
        self._node, self._slot = node, slot
        self.newest_order = Order(node=node, term=0, edition=0)
        self.upcoming: Upcoming | None = None
        "the next generation; None: none is planned"
        self.current_generation = 0
        "the generation that the worker has entered last"
        self.given_up_generation = 0
        "the worker finishes no further step in this generation or an older one"
        self._highest = 0
        "highest number of a planned generation"
        self._lists: dict[int, tuple[Peer, ...]] = {}
        "generation -> its nodes in order, for the committed and the planned generation"

    def obey(self, order: Order) -> Moves:
        """Take a newer order. An order that is not newer changes nothing."""
        if (order.term, order.edition) <= (self.newest_order.term, self.newest_order.edition):
            return Moves()
        self.newest_order, plan = order, order.plan
        broken = order.broken
        if plan is not None and plan.interrupt:
            broken = max(broken, plan.replaces)
        if order.end is not None:
            broken = max(broken, self._highest)
        self.given_up_generation = max(self.given_up_generation, broken)
        previous, build = self.upcoming, None
        if plan is not None and plan.generation > self._highest and order.end is None:
            self._highest = plan.generation
            build = self.upcoming = self._planned(plan)
        elif previous is not None and (plan is None or plan.generation != previous.generation):
            # Without a plan, the committed generation stays the next one.
            self.upcoming = previous if plan is None and order.committed == previous.generation else None
        if self.upcoming is not None:
            self.upcoming.is_committed = order.committed == self.upcoming.generation
            self.upcoming.state_since = order.state_since
        generations_needed = {order.committed, plan.generation if plan is not None else 0}
        self._lists = {
            generation: peers for generation, peers in self._lists.items() if generation in generations_needed
        }
        return Moves(
            build=build if build is not None and not build.is_built else None,
            drop=previous if previous is not self.upcoming else None,
            interrupt=broken,
        )

    def _planned(self, plan: Plan) -> Upcoming:
        if plan.leave:
            return Upcoming(plan, is_built=True)
        if plan.base and plan.base not in self._lists:
            return _unknown(plan, f"the members of generation {plan.base} are not known here")
        without = set(plan.without)
        stay = (peer for peer in self._lists.get(plan.base, ()) if peer.node not in without)
        peers = (*stay, *plan.more)
        if check_of(peer.node for peer in peers) != plan.check or all(peer.node != self._node for peer in peers):
            return _unknown(plan, f"the members of generation {plan.generation} are others here")
        self._lists[plan.generation] = peers
        return Upcoming(plan, RankMap(peers, self._node, self._slot))

    @property
    def switch_offered(self) -> int:
        """Number of the next generation once it is committed and its group is built here; else 0."""
        upcoming = self.upcoming
        return upcoming.generation if upcoming and upcoming.is_committed and upcoming.is_ready else 0

    @property
    def prepared_generation(self) -> int:
        """Newest generation whose group is built."""
        return (
            self.upcoming.generation
            if self.upcoming is not None and self.upcoming.is_ready
            else self.current_generation
        )

    @property
    def is_superseded(self) -> bool:
        """The current generation is over: a newer one is committed, it was given up, or this worker must end."""
        return (
            self.switch_offered > 0
            or self.given_up_generation >= self.current_generation
            or self.newest_order.end is not None
        )

    def give_up(self, generation: int) -> None:
        """Note that the worker itself finishes no further step of this generation."""
        self.given_up_generation = max(self.given_up_generation, generation)

    def take(self) -> Upcoming:
        """Enter the generation that is offered."""
        upcoming, self.upcoming = self.upcoming, None
        assert upcoming is not None
        self.current_generation = upcoming.generation
        return upcoming


def _unknown(plan: Plan, reason: str) -> Upcoming:
    return Upcoming(plan, refusal=Refusal(generation=plan.generation, reason=reason), is_built=True)


class Dismissed(Exception):
    """The head has told this worker to end."""

    def __init__(self, end: End) -> None:
        super().__init__(end.reason)
        self.code = end.code
        self.reason = end.reason


class Answered(Exception):
    """The joint call in which this worker waits was complete on a member that has failed."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("complete on a member that is gone")
        self.agreed = outcome.agreed
        self.answer = outcome.answer


class OthersEnded(FallowError):
    """The other members' scripts have ended while this worker waits for them."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(
            f"the other members' scripts have ended at step {finish.steps} while this one waits for them; every "
            "member has to make the same run.updates, run.mean and run.barrier calls: no `if run.is_main` around them",
            Exit.DATA,
        )
        self.agreed = finish.agreed
        self.answer = finish.answer


def exit_code(code: int) -> Exit:
    """Return the documented exit code of that number, or `Exit.SOFTWARE`."""
    try:
        return Exit(code)
    except ValueError:
        return Exit.SOFTWARE
