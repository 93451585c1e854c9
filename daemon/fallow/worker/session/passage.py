"""A worker's way from one generation into the next: how it waits, and what ends the wait."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from fallow.core.protocol.workers import Start
from fallow.model import Doing
from fallow.worker.session.ends import Answered, Dismissed, HeadSilent, OthersEnded
from fallow.worker.session.groups import Groups
from fallow.worker.session.news import HeadNews
from fallow.worker.session.orders import Orders
from fallow.worker.session.progress import Progress
from fallow.worker.transport.group import Group
from fallow.worker.transport.upcoming import Upcoming

_LOST_S, _LATE_S = 0.3, 5.0
"""Others' scripts have ended: for so long a worker waits for a new generation, and for them, before it ends, too. What
is on its way already takes less."""


class Passage:
    """Of one worker; for its training thread.

    Args:
        start: who the worker is.
        changed: guards `orders` and `groups`, and is notified of whatever comes from the head.
        orders, groups, news, progress: of the session.
        speak: says the worker's status; called with `changed` held.
    """

    def __init__(
        self,
        start: Start,
        changed: threading.Condition,
        orders: Orders,
        groups: Groups,
        news: HeadNews,
        progress: Progress,
        speak: Callable[[], None],
    ) -> None:
        self._start, self._changed = start, changed
        self._orders, self._groups = orders, groups
        self._news, self._progress = news, progress
        self._speak = speak

    def await_commit(self, meanwhile: Callable[[], bool], answers: Callable[[Upcoming], bool]) -> Upcoming:
        """See `Session.await_commit`."""
        with self._awaiting():
            taken, old = self._take_committed(meanwhile, answers)
        if old is not None:
            self._groups.retire(old)
        return taken

    def waits_in_vain(self) -> bool:
        """Others' scripts have ended, and this worker, a member, waits for them."""
        if self._orders.newest.finish is None or not self._orders.taken:
            return False
        doing, stalled_s = self._progress.doing(self._groups.current)
        patience_s = _LATE_S if self._progress.awaiting_since is None else _LOST_S
        return doing is Doing.WAITING and stalled_s > patience_s

    @contextlib.contextmanager
    def _awaiting(self) -> Iterator[None]:
        self._progress.awaiting_since = time.monotonic()
        try:
            yield
        finally:
            self._progress.awaiting_since = None
            self._progress.move()

    def _take_committed(
        self, meanwhile: Callable[[], bool], answers: Callable[[Upcoming], bool]
    ) -> tuple[Upcoming, Group | None]:
        is_busy = True
        with self._changed:
            while True:
                upcoming, is_offered = self._orders.upcoming, self._orders.switch_offered > 0
                if not is_offered:
                    self._raise_end()
                if upcoming is not None and upcoming.plan.outcome is not None and answers(upcoming):
                    raise Answered(upcoming.plan.outcome)
                if is_offered:
                    return self._take()
                left_s = self._patience_left_s()
                if left_s <= 0:
                    raise HeadSilent(self._start.worker, self._start.setup.patience_s)
                if not is_busy:
                    self._changed.wait(min(left_s, _LOST_S))
                if not self._orders.switch_offered:
                    self._changed.release()  # messages arrive while something else is done
                    try:
                        is_busy = meanwhile()
                    finally:
                        self._changed.acquire()

    def _take(self) -> tuple[Upcoming, Group | None]:
        taken = self._orders.take()
        old = self._groups.enter(taken)
        if taken.generation <= self._orders.given_up:
            self._groups.interrupt(taken.generation, "the head has given it up")
        self._speak()
        return taken, old

    def _patience_left_s(self) -> float:
        since = self._progress.awaiting_since
        waited_s = time.monotonic() - since if since is not None else 0.0
        return self._start.setup.patience_s - min(self._news.silent_s, waited_s)

    def _raise_end(self) -> None:
        order = self._orders.newest
        if order.end is not None:
            raise Dismissed(order.end)
        if order.finish is not None and self.waits_in_vain():
            raise OthersEnded(order.finish)
