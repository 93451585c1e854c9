"""Calls in threads, for file systems that may not answer."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from fallow.files import unwritable
from fallow.model import Exit, FallowError

FILES_S, SCAN_S = 10.0, 25.0
"""Longest waits for a few files and for many files. Commands wait 30 s for the head's answer."""

COUNT_S = 600.0
"""Longest count of a run's samples: about 20 GB of ledgers on a fast disk. Commands wait longer for its result."""

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Make a slow call, or one that a file system may never answer, in a thread of its own.

    The call delays neither the loop nor the head's end. The event loop's own threads are few, and reading polls needs
    them.
    """
    future = Future[T]()
    future.set_running_or_notify_cancel()  # a caller that stops waiting cannot stop the call

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # raised in the caller that waits for the result
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class FileCalls:
    """Calls that use shared files, in threads. A file system that hangs delays these calls only.

    While a call hangs, further calls at the same place fail at once, so that threads do not pile up.
    """

    def __init__(self) -> None:
        self._hanging: set[str] = set()
        "places where a call was not answered in time"

    async def call(
        self, place: str, call: Callable[[], T], patience_s: float | None, undo: Callable[[], None] | None = None
    ) -> T:
        """Make a call in a thread. It must not use state that changes.

        Args:
            place: name of the folder, for messages.
            call: reads or writes files.
            patience_s: longest wait; None: no limit.
            undo: called once a call has ended that failed or was late.

        Raises:
            FallowError: a file cannot be written, or the call has not ended in time. It may still end later.
        """
        if place not in self._hanging:
            work = in_thread(call, "files")
            future = asyncio.wrap_future(work)
            await asyncio.wait([future], timeout=patience_s)
            if undo is not None and not (future.done() and future.exception() is None):
                work.add_done_callback(lambda _: undo())
            if future.done():
                with unwritable():
                    return future.result()
            self._hanging.add(place)
            # In that thread, since the loop may have ended by then.
            work.add_done_callback(lambda _: self._hanging.discard(place))
            future.add_done_callback(asyncio.Future.exception)  # nobody waits for the error
        raise FallowError(f"{place}: its file system does not answer; try again when it answers", Exit.TEMPFAIL)
