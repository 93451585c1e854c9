"""Exchanges of a few bytes among members, and waits for them, which another thread can end."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from fallow.worker.transport import gloo
from fallow.worker.transport.stream import Streams

_LENGTH_BYTES = 8
_ROOM = 2048
"""Bytes of each part that a gather brings in one exchange; only longer parts need a second one."""

PATIENCE_S = 5.0
"""For so long a worker waits for a sibling. A sibling that is gone breaks the connection much sooner."""


class Interrupted(Exception):
    """A pending collective was given up. Never reaches the user's code."""


@dataclass(slots=True)
class Connections:
    """What the members of a group are connected by."""

    gloo_groups: list[Any] = field(default_factory=list)
    "control's, then what sums tensors of the host if there is such a one, then the node's"
    transport: Any = None
    streams: Streams | None = None
    store: Any = None
    "kept: a communicator may ask it again, and torch does not keep what is written in Python"


class Exchange:
    """An exchange of bytes among members: `works` fill `taken`, by rank, with `lengths` bytes of each member."""

    def __init__(self, waits: "Waits", taken: torch.Tensor, lengths: Sequence[int], works: Sequence[Any] = ()) -> None:
        self._waits, self._taken, self._lengths, self._works = waits, taken, lengths, works

    def wait(self) -> list[bytes]:
        """Wait for the bytes of all members, by rank.

        Raises:
            Interrupted: they do not come.
        """
        self._waits.finish(self._works)
        self._works = ()
        self._waits.exchanges.discard(self)
        data = self._taken.numpy().tobytes()
        ends = itertools.accumulate(self._lengths)
        return [data[end - length : end] for end, length in zip(ends, self._lengths, strict=True)]


class Waits:
    """What members tell each other, over the first of their gloo groups, and what one thread at a time waits for.

    The heartbeats tell of the waits.
    """

    patience_s: float | None = None
    "for a peer's answer; None: for as long as it takes"

    def __init__(self, size: int, connections: Connections | None) -> None:
        self.size = size
        self.connections = connections or Connections()
        self.exchanges: set[Exchange] = set()
        "memory to which peers write, also late ones"
        self.broken: str | None = None
        "why there is nothing to wait for any more; None: there is"
        self.waiting = False
        "the training thread waits for other members"
        self.turned_at = 0.0
        "time.monotonic at which the last wait began or ended, or a part of the state came in"
        self._guard = threading.Lock()
        self._wakes: list[Callable[[], None]] = []

    def interrupt(self, reason: str) -> None:
        """End every wait, now and in future; from any thread."""
        with self._guard:
            self.broken = self.broken or reason
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    @contextlib.contextmanager
    def waits(self, wake: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Inside, the training thread waits for other members: the head must not take it for one that hangs.

        Args:
            wake: called, from any thread, at an interrupt meanwhile.
        """
        self._wakes.append(wake)
        self.waiting, self.turned_at = True, time.monotonic()
        try:
            yield
        finally:
            self.waiting, self.turned_at = False, time.monotonic()
            self._wakes.remove(wake)

    def moved(self) -> None:
        """A part of the state has come in: those who wait for the rest of it get on."""
        self.turned_at = time.monotonic()

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for works of gloo.

        Raises:
            Interrupted: `interrupt` was called, a peer's connection is lost, or `patience_s` has passed.
        """
        if self.broken is None and works:
            futures = [work.get_future() for work in works]
            future = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
            over = threading.Event()
            with self.waits(over.set):
                try:
                    if not future.done() and self.broken is None:
                        future.add_done_callback(lambda _: over.set())
                        if not over.wait(self.patience_s):
                            self.interrupt(f"no answer from a peer within {self.patience_s:g} s")
                    if self.broken is None:
                        future.value()
                except RuntimeError as error:
                    self.interrupt(gloo.reason(error))
        if self.broken is not None:
            raise Interrupted(self.broken)

    # ------------------------------------------------------------------------------------------- what is told

    def tell(self, part: bytes) -> Exchange:
        """Launch an exchange of a few bytes among all.

        Args:
            part: of equal length on all ranks.

        Raises:
            Interrupted: `interrupt` was called, or a peer's connection is lost.
        """
        return self._tell(part, [len(part)] * self.size)

    def gather(self, part: bytes) -> list[bytes]:
        """Parts of unlike length of all members, by rank; waits. Raises as `tell`."""
        told = self.tell(len(part).to_bytes(_LENGTH_BYTES) + part[:_ROOM].ljust(_ROOM, b"\0")).wait()
        lengths = [int.from_bytes(text[:_LENGTH_BYTES]) for text in told]
        rest = self._tell(part[_ROOM:], [max(0, length - _ROOM) for length in lengths]).wait()
        begun = (text[_LENGTH_BYTES:][:length] for text, length in zip(told, lengths, strict=True))
        return [head + tail for head, tail in zip(begun, rest, strict=True)]

    def _tell(self, part: bytes, lengths: list[int]) -> Exchange:
        """Launch an exchange; `lengths` of all parts, by rank.

        Directly: each rank sends N - 1 messages. gloo's ring needs 4 (N - 1) for a sum and 2 (N - 1) for a gather, each
        after the one before it, and every message costs both sides processor time.
        """
        taken = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
        given = torch.frombuffer(bytearray(part * self.size), dtype=torch.uint8) if part else taken[:0]
        if self.size == 1 or not any(lengths):
            return Exchange(self, given, lengths)
        if self.broken is None:
            try:
                group, counts = self.connections.gloo_groups[0], [len(part)] * self.size
                exchange = Exchange(self, taken, lengths, [group.alltoall_base(taken, given, lengths, counts)])
                self.exchanges.add(exchange)
                return exchange
            except RuntimeError as error:
                self.interrupt(gloo.reason(error))
        raise Interrupted(self.broken)


# ---------------------------------------------------------------------------------------------- workers of one node


class _State(IntEnum):
    DEAF = 0
    "its wait ended without an answer"
    HEARD = 1
    LEAVES = 2
    "as DEAF, and it takes part in no further exchange of this generation"


class Node(Waits):
    """One worker's siblings, the workers of one generation that share its node: what one has heard, all of them have.

    A worker whose connection to another node breaks may miss an answer that its siblings have got. They would act on it
    while this one computes the step again, and a model that is sharded over the node's workers would hang in that
    moment. So siblings compare what they have heard before anybody acts on it, over connections that do not leave the
    node.

    Args:
        process_group: the connections among them, used for nothing else; None: it has no siblings.
        size: workers of the node in this generation, with this one.
    """

    def __init__(self, process_group: Any = None, size: int = 1) -> None:
        super().__init__(size, Connections([process_group]))
        self.patience_s = PATIENCE_S

    def share(self, heard: bytes | None) -> bytes | None:
        """Give siblings the answer to an exchange, or take it from them.

        Args:
            heard: the answer; None: this worker did not get it.

        Returns:
            The answer if any of the node's workers has it, else None. A worker that cannot reach its siblings any more
            gets back what it gave.
        """
        return self._share(heard, _State.DEAF if heard is None else _State.HEARD)

    def leave(self) -> None:
        """Tell siblings that this worker goes over to the next generation without an answer from this one."""
        self._share(None, _State.LEAVES)

    def _share(self, heard: bytes | None, state: _State) -> bytes | None:
        if self.size == 1 or self.broken is not None:
            return heard
        try:
            states = [_State(text[0]) for text in self.tell(bytes([state])).wait()]
            if _State.HEARD in states and len(set(states)) > 1:
                heard = self.gather(heard or b"")[states.index(_State.HEARD)]
        except Interrupted:
            return heard
        if _State.LEAVES in states:
            self.interrupt("a worker of this node has left the generation")
        return heard
