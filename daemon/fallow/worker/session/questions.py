"""Questions to the head's rendezvous store, each of which waits for its answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from fallow.model import KvOp, KvReply, KvRequest

_REFUSAL_S = 1.0
"""The head says that a question has waited too long; that takes its way, too."""

_ASK_AGAIN_S = 1.0
"""Repeat a question that may have been lost (only those that can be asked twice)."""


class Questions:
    """Those that are under way."""

    def __init__(self, send: Callable[[KvRequest], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._answers: dict[int, KvReply | None] = {}
        self._numbers = itertools.count(1)
        self._given_up = 0

    def ask(self, generation: int, op: KvOp, keys: list[str], value: bytes, timeout_s: float) -> KvReply:
        """Ask, and wait for the answer.

        Raises:
            RuntimeError: the head did not answer, or the generation was given up.
        """
        number = next(self._numbers)
        self._answers[number] = None
        request = KvRequest(id=number, generation=generation, op=op, keys=keys, value=value, timeout_s=timeout_s)
        end = time.monotonic() + timeout_s + _REFUSAL_S
        try:
            while True:
                self._send(request)
                left = end - time.monotonic()
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._answers[number] is not None or generation <= self._given_up,
                        max(0.0, min(left, _ASK_AGAIN_S)),
                    )
                    reply = self._answers[number]
                if reply is not None:
                    return reply
                if generation <= self._given_up:
                    raise RuntimeError(f"generation {generation} was given up")
                if left <= 0:
                    raise RuntimeError(f"the head did not answer {op} {keys} within {timeout_s:g} s")
        finally:
            with self._changed:
                del self._answers[number]

    def answer(self, reply: KvReply) -> None:
        """An answer came; one that nobody waits for any more is dropped."""
        with self._changed:
            if reply.id in self._answers:
                self._answers[reply.id] = reply
                self._changed.notify_all()

    def give_up(self, generation: int) -> None:
        """Nothing comes of this generation and those before it: nobody waits for answers about them any more."""
        with self._changed:
            self._given_up = max(self._given_up, generation)
            self._changed.notify_all()
