"""Plays policies for `fallow simulate`: one after the other or in several processes, with progress and an early end."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

from fallow.model import Exit, FallowError
from fallow.sim.report import Played
from fallow.sim.simulate import Setup, Stopped, play_policy

TELL_S = 0.2
"""Progress is told so often."""

COLLECT_AFTER = 50_000
"""New objects until Python looks for cycles. A play makes hardly any, and usual are 700."""

Tell = Callable[[int, float, float], None]
"""Called with the number of a policy, the share of it that was played, and its result so far."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def play_all(setup: Setup, policies: Sequence[str], jobs: int, tell: Tell) -> list[Played]:
    """In the order given. SIGINT or SIGTERM ends it with what is known so far, a second one at once.

    Args:
        setup: what to play.
        policies: their names; nodes are looked at one by one for the first.
        jobs: so many processes at once.
        tell: told at most five times a second per policy.

    Raises:
        FallowError: it was ended before there was anything to report (75), or a policy could not be played.
    """
    gc.set_threshold(COLLECT_AFTER)
    several = jobs > 1 and len(policies) > 1
    found = _side_by_side(setup, policies, jobs, tell) if several else _one_by_one(setup, policies, tell)
    found = [each for each in found if each.seconds > 0]
    if not found:
        raise FallowError("simulate: interrupted before there was anything to report", Exit.TEMPFAIL)
    return found


def _one_by_one(setup: Setup, policies: Sequence[str], tell: Tell) -> list[Played]:
    stop = _Stop()
    found: list[Played] = []
    with stop.listening():
        for number, name in enumerate(policies):
            if stop.asked:
                break
            found.append(play_policy(setup, name, number == 0, _paced(number, tell, lambda: stop.asked)))
    return found


class _Stop:
    """Whether somebody wants it to end."""

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """The next SIGINT or SIGTERM only sets `asked`; the one after it acts as usual."""
        usual = {number: signal.getsignal(number) for number in _SIGNALS}

        def ask(number: int, _frame: object) -> None:
            self.asked = True
            for each, handler in usual.items():
                signal.signal(each, handler)

        for number in _SIGNALS:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)


def _paced(number: int, tell: Tell, stop: Callable[[], bool]) -> Callable[[float, float], None]:
    """Raises `Stopped` between two events when it is to stop."""
    next_at = 0.0

    def progress(share: float, ratio: float) -> None:
        nonlocal next_at
        now = time.monotonic()
        if now >= next_at:
            next_at = now + TELL_S
            tell(number, share, ratio)
            if stop():
                raise Stopped

    return progress


# -- several processes -----------------------------------------------------------------------------------------------

_shared: dict[str, Any] = {}
"""Of a child: the queue for its progress, and the event that ends it."""


def _begin(news: Any, stop: Any) -> None:
    gc.set_threshold(COLLECT_AFTER)
    for number in _SIGNALS:  # a terminal sends them to all; the parent decides
        signal.signal(number, signal.SIG_IGN)
    _shared.update(news=news, stop=stop)


def _play(setup: Setup, name: str, number: int) -> Played:
    news, stop = _shared["news"], _shared["stop"]
    return play_policy(setup, name, number == 0, _paced(number, lambda *each: news.put(each), stop.is_set))


def _side_by_side(setup: Setup, policies: Sequence[str], jobs: int, tell: Tell) -> list[Played]:
    context = multiprocessing.get_context("spawn")
    news, event, stop = context.SimpleQueue(), context.Event(), _Stop()
    with (
        stop.listening(),
        ProcessPoolExecutor(min(jobs, len(policies)), context, _begin, (news, event)) as pool,
    ):
        futures = [pool.submit(_play, setup, name, number) for number, name in enumerate(policies)]
        waiting: set[Future[Played]] = set(futures)
        while waiting:
            done, waiting = wait(waiting, TELL_S, FIRST_COMPLETED)
            while not news.empty():
                tell(*news.get())
            failed = next((each for each in done if not each.cancelled() and each.exception() is not None), None)
            if stop.asked or failed is not None:
                event.set()
                for each in waiting:
                    each.cancel()
            if failed is not None:
                raise failed.exception() or AssertionError(failed)
        return [each.result() for each in futures if not each.cancelled()]
