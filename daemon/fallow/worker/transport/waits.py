"""Exchanges of a few bytes among members, and waits that another thread can interrupt."""

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
_FIRST_BYTES = 2048
"""Bytes of each part that the first exchange of a gather carries. Longer parts need a second exchange."""


class Interrupted(Exception):
    """A pending collective was interrupted. Never reaches the user's code."""


@dataclass(slots=True)
class Connections:
    """The connections of one member of a group."""

    gloo_groups: list[Any] = field(default_factory=list)
    "groups for control, then for sums of host tensors (not if the device has a communicator), then for the node"
    transport: Any = None
    streams: Streams | None = None
    store: Any = None
    "reference that keeps the store alive: a communicator may use it later, and torch keeps no Python objects alive"


class Exchange:
    """A pending exchange: `works` fill `buffer`, in rank order, with `lengths` bytes from each member."""

    def __init__(self, waits: "Waits", buffer: torch.Tensor, lengths: Sequence[int], works: Sequence[Any] = ()) -> None:
        self._waits, self._buffer, self._lengths, self._works = waits, buffer, lengths, works

    def wait(self) -> list[bytes]:
        """Wait for the bytes of all members, in rank order.

        Raises:
            Interrupted: the bytes of some member do not arrive.
        """
        self._waits.finish(self._works)
        self._works = ()
        self._waits.exchanges.discard(self)
        data = self._buffer.numpy().tobytes()
        ends = itertools.accumulate(self._lengths)
        return [data[end - length : end] for end, length in zip(ends, self._lengths, strict=True)]


class Waits:
    """Exchanges over the first gloo group, and interruptible waits of one thread at a time.

    The heartbeats report the waits.
    """

    def __init__(self, size: int, connections: Connections | None) -> None:
        self.size = size
        self.connections = connections or Connections()
        self.exchanges: set[Exchange] = set()
        "exchanges whose memory late peers may still write to"
        self.broken: str | None = None
        "reason of the interruption; None: not interrupted"
        self.waiting = False
        "True while the training thread waits for other members"
        self.turned_at = 0.0
        "time.monotonic() when the last wait began or ended, or when a part of the state last arrived"
        self._guard = threading.Lock()
        self._wakes: list[Callable[[], None]] = []

    def interrupt(self, reason: str) -> None:
        """End every current and future wait. Any thread may call this."""
        with self._guard:
            self.broken = self.broken or reason
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    @contextlib.contextmanager
    def waits(self, wake: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Mark a wait for other members, so that the head does not take this worker for one that hangs.

        Args:
            wake: called, from any thread, if an interrupt happens during the wait.
        """
        self._wakes.append(wake)
        self.waiting, self.turned_at = True, time.monotonic()
        try:
            yield
        finally:
            self.waiting, self.turned_at = False, time.monotonic()
            self._wakes.remove(wake)

    def moved(self) -> None:
        """Note progress of a wait: a part of the state has arrived."""
        self.turned_at = time.monotonic()

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for gloo's works.

        Raises:
            Interrupted: `interrupt` was called, or a peer's connection is lost.
        """
        if self.broken is None and works:
            futures = [work.get_future() for work in works]
            future = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
            over = threading.Event()
            with self.waits(over.set):
                try:
                    if not future.done() and self.broken is None:
                        future.add_done_callback(lambda _: over.set())
                        over.wait()
                    if future.done():  # even if it was interrupted in this moment: siblings know that it is complete
                        future.value()
                        return
                except RuntimeError as error:
                    self.interrupt(gloo.reason(error))
        if self.broken is not None:
            raise Interrupted(self.broken)

    # ------------------------------------------------------------------------------------------------- exchanges

    def tell(self, part: bytes) -> Exchange:
        """Launch an exchange of a few bytes among all ranks.

        Args:
            part: this rank's bytes; of equal length on all ranks.

        Raises:
            Interrupted: `interrupt` was called, or a peer's connection is lost.
        """
        return self._tell(part, [len(part)] * self.size)

    def gather(self, part: bytes) -> list[bytes]:
        """Exchange parts of different lengths and wait for them. Returns them in rank order. Raises as `tell`."""
        texts = self.tell(len(part).to_bytes(_LENGTH_BYTES) + part[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0")).wait()
        lengths = [int.from_bytes(text[:_LENGTH_BYTES]) for text in texts]
        tails = self._tell(part[_FIRST_BYTES:], [max(0, length - _FIRST_BYTES) for length in lengths]).wait()
        heads = (text[_LENGTH_BYTES:][:length] for text, length in zip(texts, lengths, strict=True))
        return [head + tail for head, tail in zip(heads, tails, strict=True)]

    def _tell(self, part: bytes, lengths: list[int]) -> Exchange:
        """Launch an exchange of parts with these `lengths`, in rank order.

        Uses all-to-all: each rank sends N - 1 messages at once. gloo's ring needs 4 (N - 1) messages for a sum and
        2 (N - 1) for a gather, one after the other, and every message costs processor time on both sides.
        """
        incoming = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
        outgoing = torch.frombuffer(bytearray(part * self.size), dtype=torch.uint8) if part else incoming[:0]
        if self.size == 1 or not any(lengths):
            return Exchange(self, outgoing, lengths)
        if self.broken is None:
            try:
                group, counts = self.connections.gloo_groups[0], [len(part)] * self.size
                exchange = Exchange(self, incoming, lengths, [group.alltoall_base(incoming, outgoing, lengths, counts)])
                self.exchanges.add(exchange)
                return exchange
            except RuntimeError as error:
                self.interrupt(gloo.reason(error))
        raise Interrupted(self.broken)


# ---------------------------------------------------------------------------------------------- workers of one node


class _State(IntEnum):
    NO_ANSWER = 0
    "the worker's wait ended without an answer, or there was none to wait for"
    HAS_ANSWER = 1
    LEAVES = 2
    "the worker has no answer, and takes part in no further exchange of this generation"


class Node(Waits):
    """The siblings of a worker: the workers of one generation on the same node. Siblings go the same way.

    A worker whose connection to another node breaks may miss an answer that its siblings have, or may leave the
    generation when its siblings have begun the next body. A model that is sharded over the node's workers would hang.
    So siblings exchange answers before anybody acts on them, and wait for each other before the script's code goes on,
    over connections that do not leave the node. No deadline: the head ejects the node of a worker that is stopped or
    hangs, and the connection to a dead sibling breaks at once.

    Args:
        process_group: gloo group of the siblings, used for nothing else; None: no siblings.
        size: number of workers of the node in this generation, including this worker.
    """

    def __init__(self, process_group: Any = None, size: int = 1) -> None:
        super().__init__(size, Connections([process_group]))

    def share(self, answer: bytes | None) -> bytes | None:
        """Share the answer to an exchange with the siblings.

        Args:
            answer: this worker's answer; None: it got no answer.

        Returns:
            The answer if any of the node's workers has it, else None. If the siblings cannot be reached: `answer`.
        """
        if self.size == 1 or self.broken is not None:
            return answer
        own = _State.NO_ANSWER if answer is None else _State.HAS_ANSWER
        try:
            states = [_State(text[0]) for text in self.tell(bytes([own])).wait()]
            if set(states) == {_State.HAS_ANSWER, _State.NO_ANSWER}:
                answer = self.gather(answer or b"")[states.index(_State.HAS_ANSWER)]
        except Interrupted:
            return answer
        if _State.LEAVES in states:
            self.interrupt("a worker of this node has left the generation")
        return answer

    def leave(self) -> None:
        """Tell the siblings that this worker enters the next generation. Does not wait for them."""
        with contextlib.suppress(Interrupted):
            self.tell(bytes([_State.LEAVES]))
