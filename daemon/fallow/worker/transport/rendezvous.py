"""The rendezvous store of one generation: torch's `Store`, over gathers of all its ranks.

What ranks set under one family of keys (gloo's addresses, cards of lines) is one gather: each rank gives what it has
set, and all get everything at once. So a group costs each member a handful of messages, whatever its size.
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
"""Keys that each rank sets with its own number at the end: of `Streams`, and of gloo's addresses (`gloo/context.cc`,
`connectFullMesh`). Any other key is a family of its own, as NCCL's id is that rank 0 sets."""

_WITHIN_NODE = "node-"
"""Beginning of the families of a group of one node's workers."""

_QUESTION_S, _QUESTIONS = 1.0, 5
"""Whoever asks who is missing has waited for long already. It asks again: the agent may have lost its connection."""

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(dict[str, bytes]).decode


class Gathers(Protocol):
    """Gathers of one generation. Each raises RuntimeError once nothing comes of the generation any more."""

    def give(self, key: str, part: bytes, *, within_node: bool = False) -> None:
        """This rank's part, once; does not wait. `within_node`: only the ranks of this node take part."""

    def parts(self, key: str, timeout_s: float) -> Sequence[bytes] | None:
        """All parts by rank, once this rank has given its own; None: not all have come in time."""

    def missing(self, key: str) -> Sequence[int]:
        """Nodes whose part has not come."""


class AgentGathers:
    """The gathers of one generation, which the agent and the head bring together.

    Nothing is lost on the way to the agent and back, and it repeats what waits for the head. They raise RuntimeError
    once the generation is given up.

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
        said = self._missing, self._answers
        for _ in range(_QUESTIONS):
            self._send(Part(generation=self.generation, key=key, part=b""))
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or any(key in some for some in said), _QUESTION_S)
                self._check()
                if key in self._answers:
                    return ()
                if key in self._missing:
                    return self._missing[key]
        raise RuntimeError(f"the head did not say who is missing in generation {self.generation}")

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


class GatherStore(Store):
    """Key-value store through which the members of a generation meet. No key is set twice.

    Every rank must set or get a key of each family that any rank gets. A lost head shows as an error of the operation,
    which fails the vote and nothing else.

    Args:
        gathers: of the generation.
        nodes: by rank, the number of its node.
        timeout_s: upper end of each wait.
    """

    def __init__(self, gathers: Gathers, nodes: Sequence[int], timeout_s: float) -> None:
        super().__init__()
        self._gathers = gathers
        self._nodes = nodes
        self._timeout_s = timeout_s
        self._known: dict[str, bytes] = {}
        self._given: set[str] = set()
        "families to which this rank has given its part"
        self._missing: dict[str, Sequence[int]] = {}
        "family -> nodes that had not come when this store asked"
        self.correction = [b"", b""]
        "what gloo would publish for this rank, and what it publishes in its place, see `gloo`"

    def set(self, key: str, value: str | bytes) -> None:
        """Give a value to all; does not wait."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        family, (before, after) = _family(key), self.correction
        # Of gloo's addresses alone: others' bytes may be the same by chance.
        self._known[key] = data.replace(before, after) if before and family != key else data
        self._give(family, {key: self._known[key]})

    def get(self, key: str) -> bytes:
        """The value; waits until it is there or the store's timeout has passed."""
        self._learn([key], self._timeout_s)
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._learn(keys, timeout.total_seconds() if timeout else self._timeout_s)

    def check(self, keys: list[str]) -> bool:
        """True if all keys are there, or if of families with ranks, the ranks at the end of the keys have come."""
        return all(key in self._known or self._has_come(key) for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Upper end of every later wait."""
        self._timeout_s = timeout.total_seconds()

    def _learn(self, keys: list[str], timeout_s: float) -> None:
        for family in dict.fromkeys(_family(key) for key in keys if key not in self._known):
            self._give(family, {})
            parts = self._gathers.parts(family, timeout_s)
            if parts is None:
                raise DistStoreError(f"not all members have given their part of {family} within {timeout_s:g} s")
            for part in parts:
                self._known |= _decode(part)
        absent = [key for key in keys if key not in self._known]
        if absent:
            raise DistStoreError(f"no member has set {', '.join(absent)}")

    def _give(self, family: str, values: dict[str, bytes]) -> None:
        if family not in self._given:
            self._given.add(family)
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
