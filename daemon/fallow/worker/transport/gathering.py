"""Gathers: each participant gives its part, and all get all parts. The agent and the head bring them together.

Nothing is lost on the way to the agent and back, and it repeats what waits for the head.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from fallow.core.membership.messages import Gathered
from fallow.core.protocol import Part

_QUESTION_S = 5.0
"""Whoever asks who is missing has waited for long already."""


class AgentGathers:
    """The gathers of one generation (`rendezvous.Gathers`); they raise RuntimeError once it is given up.

    Args:
        send: to the agent; does not wait.
        generation: its number.
    """

    def __init__(self, send: Callable[[Part], None], generation: int) -> None:
        self._send, self.generation = send, generation
        self._changed = threading.Condition()
        self._answers: dict[str, tuple[bytes, ...]] = {}
        self._missing: dict[str, tuple[int, ...]] = {}
        self._is_over = False

    def give(self, key: str, part: bytes, *, within_node: bool = False) -> None:
        """Take part in a gather; does not wait."""
        with self._changed:
            self._check()
        self._send(Part(generation=self.generation, key=key, part=part, within_node=within_node))

    def parts(self, key: str, timeout_s: float) -> tuple[bytes, ...] | None:
        """Wait for all parts, in the order of ranks; None: they were not all there within `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._answers or self._is_over, max(0.0, timeout_s))
            self._check()
            return self._answers.get(key)

    def missing(self, key: str) -> tuple[int, ...]:
        """Ask which nodes have not given their part. RuntimeError also means that the head does not answer."""
        with self._changed:
            self._missing.pop(key, None)
        self._send(Part(generation=self.generation, key=key, part=b""))
        with self._changed:
            self._changed.wait_for(lambda: key in self._missing or key in self._answers or self._is_over, _QUESTION_S)
            self._check()
            if key in self._answers:
                return ()
            if key not in self._missing:
                raise RuntimeError(f"the head did not say who is missing in generation {self.generation}")
            return self._missing[key]

    def answer(self, gathered: Gathered) -> None:
        """An answer came."""
        with self._changed:
            if gathered.missing:
                self._missing[gathered.key] = gathered.missing
            else:
                self._answers[gathered.key] = gathered.parts
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing comes of this generation any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._is_over:
            raise RuntimeError(f"generation {self.generation} was given up")
