"""Gathers: each participant gives its part, and all get all parts. The agent and the head bring them together.

Nothing is lost on the way to the agent and back, and it repeats what waits for the head.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from fallow.core.membership.messages import Gathered
from fallow.core.protocol.workers import Part

_AGAIN_S = 1.0
"""A question is sent again until its answer comes: the head may have lost it."""

_QUESTION_S = 5.0
"""Whoever asks who is missing has waited for long already."""

_Send = Callable[[Part], None]


class Gathering:
    """The gathers of one worker.

    Args:
        send: to the agent; does not wait.
    """

    def __init__(self, send: _Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._generations: dict[int, GenerationGathers] = {}
        self._oldest: float = 0
        "generation; nothing comes of older ones"

    def of(self, generation: int) -> GenerationGathers:
        """Those of one generation."""
        with self._lock:
            found = self._generations.get(generation)
            if found is None:
                found = GenerationGathers(self._send, generation)
                if generation < self._oldest:
                    found.close()
                else:
                    self._generations[generation] = found
            return found

    def answer(self, gathered: Gathered) -> None:
        """An answer came."""
        self.of(gathered.generation).answer(gathered)

    def drop(self, generation: int) -> None:
        """Nothing comes of this generation: nobody waits for its gathers any more."""
        self.of(generation).close()

    def drop_before(self, generation: float) -> None:
        """Nothing comes of older generations than this one."""
        with self._lock:
            self._oldest = max(self._oldest, generation)
            over = [number for number in self._generations if number < self._oldest]
            for number in over:
                self._generations.pop(number).close()

    def close(self) -> None:
        """Nothing comes of any generation any more."""
        self.drop_before(math.inf)


class GenerationGathers:
    """The gathers of one generation (`transport.rendezvous.Gathers`); they raise RuntimeError once it is given up."""

    def __init__(self, send: _Send, generation: int) -> None:
        self._send, self._generation = send, generation
        self._changed = threading.Condition()
        self._answers: dict[str, tuple[bytes, ...]] = {}
        self._missing: dict[str, tuple[int, ...]] = {}
        self._is_over = False

    def give(self, key: str, part: bytes, *, within_node: bool = False) -> None:
        """Take part in a gather; does not wait."""
        with self._changed:
            self._check()
        self._send(Part(generation=self._generation, key=key, part=part, within_node=within_node))

    def parts(self, key: str, timeout_s: float) -> tuple[bytes, ...] | None:
        """Wait for all parts, in the order of ranks; None: they were not all there within `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._answers or self._is_over, max(0.0, timeout_s))
            self._check()
            return self._answers.get(key)

    def missing(self, key: str) -> tuple[int, ...]:
        """Ask which nodes have not given their part. RuntimeError also means that the head does not answer."""
        question = Part(generation=self._generation, key=key, part=b"")
        end = time.monotonic() + _QUESTION_S
        with self._changed:
            self._missing.pop(key, None)
        while (left_s := end - time.monotonic()) > 0:
            self._send(question)
            with self._changed:
                is_told = self._changed.wait_for(
                    lambda: key in self._missing or key in self._answers or self._is_over, min(left_s, _AGAIN_S)
                )
                self._check()
                if is_told:
                    return () if key in self._answers else self._missing[key]
        raise RuntimeError(f"the head did not say who is missing in generation {self._generation}")

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
            raise RuntimeError(f"generation {self._generation} was given up")
