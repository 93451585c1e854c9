"""Gathers: each participant gives its part, and all get all parts. The agent and the head bring them together."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fallow.core.membership.messages import Gathered
from fallow.core.protocol.workers import Part

_AGAIN_S = 1.0
"""A part, and a question, is sent again until its answer comes: agent and head may have lost it."""

_QUESTION_S = 5.0
"""Whoever asks who is missing has waited for long already."""


class Gathering:
    """The gathers of one worker.

    Args:
        send: to the agent; does not wait.
    """

    def __init__(self, send: Callable[[Part], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._open: dict[tuple[int, str], Part] = {}
        "(generation, key) -> this worker's part, as long as the answer has not come"
        self._answers: dict[tuple[int, str], tuple[bytes, ...]] = {}
        self._missing: dict[tuple[int, str], tuple[int, ...]] = {}
        self._dropped: set[int] = set()
        "generations of which nothing comes"
        self._oldest: float = 0
        "generation; nothing comes of older ones"

    def of(self, generation: int) -> GenerationGathers:
        """Those of one generation."""
        return GenerationGathers(self, generation)

    def give(self, part: Part) -> None:
        """Take part in a gather; does not wait. Its part is sent again by `repeat`.

        Raises:
            RuntimeError: nothing comes of the generation.
        """
        with self._changed:
            self._check(part.generation)
            self._open[part.generation, part.key] = part
        self._send(part)

    def repeat(self) -> None:
        """Send unanswered parts once more."""
        with self._changed:
            unanswered = list(self._open.values())
        for part in unanswered:
            self._send(part)

    def parts(self, generation: int, key: str, timeout_s: float) -> tuple[bytes, ...] | None:
        """Wait for all parts, in the order of ranks; None: they were not all there within `timeout_s` seconds.

        Raises:
            RuntimeError: nothing comes of the generation.
        """
        at = generation, key
        with self._changed:
            self._changed.wait_for(lambda: at in self._answers or self._over(generation), max(0.0, timeout_s))
            self._check(generation)
            return self._answers.get(at)

    def missing(self, generation: int, key: str) -> tuple[int, ...]:
        """Ask which nodes have not given their part.

        Raises:
            RuntimeError: nothing comes of the generation, or the head does not answer.
        """
        at, question = (generation, key), Part(generation=generation, key=key, part=b"")
        end = time.monotonic() + _QUESTION_S
        with self._changed:
            self._missing.pop(at, None)
        while (left_s := end - time.monotonic()) > 0:
            self._send(question)
            with self._changed:
                self._changed.wait_for(
                    lambda: at in self._missing or at in self._answers or self._over(generation), min(left_s, _AGAIN_S)
                )
                self._check(generation)
                if at in self._answers:
                    return ()
                if at in self._missing:
                    return self._missing[at]
        raise RuntimeError(f"the head did not say who is missing in generation {generation}")

    def answer(self, gathered: Gathered) -> None:
        """An answer came."""
        at = gathered.generation, gathered.key
        with self._changed:
            if gathered.missing:
                self._missing[at] = gathered.missing
            elif self._open.pop(at, None) is not None:
                self._answers[at] = gathered.parts
            self._changed.notify_all()

    def drop(self, generation: int) -> None:
        """Nothing comes of this generation: nobody waits for its gathers any more."""
        with self._changed:
            self._dropped.add(generation)
            self._forget()

    def drop_before(self, generation: float) -> None:
        """Nothing comes of older generations than this one."""
        with self._changed:
            self._oldest = max(self._oldest, generation)
            self._dropped = {dropped for dropped in self._dropped if dropped >= self._oldest}
            self._forget()

    def close(self) -> None:
        """Nothing comes of any generation any more."""
        self.drop_before(math.inf)

    def _forget(self) -> None:
        self._open = {at: part for at, part in self._open.items() if not self._over(at[0])}
        self._answers = {at: parts for at, parts in self._answers.items() if not self._over(at[0])}
        self._missing = {at: nodes for at, nodes in self._missing.items() if not self._over(at[0])}
        self._changed.notify_all()

    def _over(self, generation: int) -> bool:
        return generation < self._oldest or generation in self._dropped

    def _check(self, generation: int) -> None:
        if self._over(generation):
            raise RuntimeError(f"generation {generation} was given up")


@dataclass(frozen=True, slots=True)
class GenerationGathers:
    """The gathers of one generation (`transport.rendezvous.Gathers`)."""

    gathering: Gathering
    generation: int

    def give(self, key: str, part: bytes, *, within_node: bool = False) -> None:
        self.gathering.give(Part(generation=self.generation, key=key, part=part, within_node=within_node))

    def parts(self, key: str, timeout_s: float) -> Sequence[bytes] | None:
        return self.gathering.parts(self.generation, key, timeout_s)

    def missing(self, key: str) -> Sequence[int]:
        return self.gathering.missing(self.generation, key)
