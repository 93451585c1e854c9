"""The rendezvous store of one generation: torch's `Store` interface on top of gathers among all ranks.

All keys of one family (gloo's addresses, or the cards of `Streams`) are one gather: each rank contributes the values
that it has set, and every rank receives all values at once. So a group costs each member a handful of messages,
whatever its size.
"""

import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import msgspec
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from fallow.core.membership.messages import Gathered
from fallow.core.protocol import Part

_FAMILY = re.compile(r"(card|(?:control|sums|node-\d+)/\d+)/\d+")
"""Keys that each rank sets with its own rank at the end: those of `Streams` and of gloo's addresses
(`gloo/context.cc`, `connectFullMesh`). Any other key is a family of its own, for example NCCL's id, set by rank 0."""

_WITHIN_NODE = "node-"
"""Prefix of the key families of a group among one node's workers."""

_QUESTION_S, _QUESTIONS = 1.0, 5
"""Seconds between questions for missing members, and their number. The agent may have lost its connection, so a
worker repeats the question."""

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(dict[str, bytes]).decode


class Gathers(Protocol):
    """Gathers of one generation. Every method raises RuntimeError once the generation is cancelled."""

    def give(self, key: str, part: bytes, *, within_node: bool = False) -> None:
        """Send this rank's part, once; does not wait. `within_node`: only the ranks of this node take part."""

    def parts(self, key: str, timeout_s: float) -> Sequence[bytes] | None:
        """Return all parts in rank order, after this rank has sent its own; None: some did not arrive in time."""

    def missing(self, key: str) -> Sequence[int]:
        """Return the nodes whose part has not arrived."""


class AgentGathers:
    """The gathers of one generation, through the agent and the head.

    The channel to the agent loses no message, and the agent repeats messages that the head has not answered. All
    methods raise RuntimeError once the generation is cancelled.

    Args:
        send: sends a message to the agent; does not wait.
        generation: number of the generation.
    """

    def __init__(self, send: Callable[[Part], None], generation: int) -> None:
        self._send, self.generation = send, generation
        self._changed = threading.Condition()
        self._answers: dict[str, tuple[bytes, ...]] = {}
        self._missing: dict[str, tuple[int, ...]] = {}
        self._is_over = False

    def give(self, key: str, part: bytes, *, within_node: bool = False) -> None:
        """Send this rank's part of a gather; does not wait."""
        with self._changed:
            self._check()
        self._send(Part(generation=self.generation, key=key, part=part, within_node=within_node))

    def parts(self, key: str, timeout_s: float) -> tuple[bytes, ...] | None:
        """Wait for all parts, in rank order; None: some did not arrive within `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._answers or self._is_over, max(0.0, timeout_s))
            self._check()
            return self._answers.get(key)

    def missing(self, key: str) -> tuple[int, ...]:
        """Ask the head for the nodes whose part is missing. RuntimeError also means that the head does not answer."""
        with self._changed:
            self._missing.pop(key, None)
        replies = self._missing, self._answers
        for _ in range(_QUESTIONS):
            self._send(Part(generation=self.generation, key=key, part=b""))
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or any(key in some for some in replies), _QUESTION_S)
                self._check()
                if key in self._answers:
                    return ()
                if key in self._missing:
                    return self._missing[key]
        raise RuntimeError(f"the head did not say who is missing in generation {self.generation}")

    def answer(self, gathered: Gathered) -> None:
        """Store an answer of the head and wake the waiting thread."""
        with self._changed:
            if gathered.missing:
                self._missing[gathered.key] = gathered.missing
            else:
                self._answers[gathered.key] = gathered.parts
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel the gathers of this generation and wake all waiting threads."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._is_over:
            raise RuntimeError(f"generation {self.generation} was cancelled")


class GatherStore(Store):
    """Key-value store through which the members of a generation meet. Each key is set once.

    If any rank gets a key of a family, every rank must set or get a key of this family. If the head is lost, the
    operation raises an error. Then only the build of this generation fails.

    Args:
        gathers: gathers of the generation.
        nodes: node number of each rank.
        timeout_s: longest wait for a key.
    """

    def __init__(self, gathers: Gathers, nodes: Sequence[int], timeout_s: float) -> None:
        super().__init__()
        self._gathers = gathers
        self._nodes = nodes
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._own_families: set[str] = set()
        "families for which this rank has sent its part"
        self._missing: dict[str, Sequence[int]] = {}
        "family -> nodes whose part was missing when this store asked"
        self.correction = [b"", b""]
        "address bytes that gloo publishes for this rank, and the bytes to publish instead; see `gloo`"

    def set(self, key: str, value: str | bytes) -> None:
        """Publish a value to all ranks; does not wait."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        family, (before, after) = _family(key), self.correction
        # Only in gloo's addresses: other values may contain the same bytes by chance.
        self._values[key] = data.replace(before, after) if before and family != key else data
        self._give(family, {key: self._values[key]})

    def get(self, key: str) -> bytes:
        """Return the value; waits for the value up to the store's timeout."""
        self._learn([key], self._timeout_s)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        self._learn(keys, timeout.total_seconds() if timeout else self._timeout_s)

    def check(self, keys: list[str]) -> bool:
        """Return True if each key is set, or if it ends in a rank and this rank has sent its part."""
        return all(key in self._values or self._has_come(key) for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait of later operations."""
        self._timeout_s = timeout.total_seconds()

    def _learn(self, keys: list[str], timeout_s: float) -> None:
        for family in dict.fromkeys(_family(key) for key in keys if key not in self._values):
            self._give(family, {})
            parts = self._gathers.parts(family, timeout_s)
            if parts is None:
                raise DistStoreError(f"not all members have given their part of {family} within {timeout_s:g} s")
            for part in parts:
                self._values |= _decode(part)
        absent = [key for key in keys if key not in self._values]
        if absent:
            raise DistStoreError(f"no member has set {', '.join(absent)}")

    def _give(self, family: str, values: dict[str, bytes]) -> None:
        if family not in self._own_families:
            self._own_families.add(family)
            self._gathers.give(family, _encode(values), within_node=family.startswith(_WITHIN_NODE))

    def _has_come(self, key: str) -> bool:
        family = _family(key)
        if family == key:
            return False
        if family not in self._missing:
            self._missing[family] = self._gathers.missing(family)
        return self._nodes[int(key.rpartition("/")[2])] not in self._missing[family]


def _family(key: str) -> str:
    of_rank = _FAMILY.fullmatch(key)
    return of_rank[1] if of_rank else key
