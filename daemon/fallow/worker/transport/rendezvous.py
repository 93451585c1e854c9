"""The rendezvous store of one generation: torch's `Store`, answered by the head."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from fallow.model import KvOp, KvReply

Ask = Callable[[int, KvOp, list[str], bytes, float], KvReply]
"""(generation, operation, keys, value, timeout in seconds) -> the head's answer; raises TimeoutError."""


_OF_RANK = re.compile(r"(?:control|sums)/\d+/(?=\d+$)")
"""Beginning of the key under which gloo keeps the address of a rank (`gloo/context.cc`, `connectFullMesh`)."""


class HeadStore(Store):
    """Key-value store of `generation` in the head's memory, through which its members meet. No key is written twice.

    gloo asks for the address of each rank by itself, twice, though it needs them all. Here the first question brings
    them all: so the head has as many questions as members, and not as many as pairs of them.

    A lost head shows as an error of the operation, which fails the vote and nothing else.
    """

    def __init__(self, generation: int, size: int, ask: Ask, timeout_s: float) -> None:
        super().__init__()
        self._generation = generation
        self._size = size
        self._ask = ask
        self._timeout_s = timeout_s
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._do(KvOp.SET, [key], data, self._timeout_s)

    def get(self, key: str) -> bytes:
        """The value; waits until it exists or the store's timeout has passed."""
        self._learn([key], self._timeout_s)
        return self._known[key]

    def read(self, keys: list[str], timeout_s: float) -> list[bytes] | None:
        """All values; None if they were not all there in time."""
        reply = self._ask(self._generation, KvOp.GET, keys, b"", timeout_s)
        return reply.values if reply.ok else None

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._learn(keys, timeout.total_seconds() if timeout else self._timeout_s)

    def check(self, keys: list[str]) -> bool:
        """True if all keys exist now."""
        return bool(self._ask(self._generation, KvOp.CHECK, keys, b"", self._timeout_s).number)

    def set_timeout(self, timeout: timedelta) -> None:
        """Upper end of every later wait."""
        self._timeout_s = timeout.total_seconds()

    def _learn(self, keys: list[str], timeout_s: float) -> None:
        wanted = [one for key in keys if key not in self._known for one in self._with(key)]
        if wanted:
            self._known |= zip(wanted, self._do(KvOp.GET, wanted, b"", timeout_s).values, strict=True)

    def _with(self, key: str) -> list[str]:
        of_rank = _OF_RANK.match(key)
        return [f"{of_rank[0]}{rank}" for rank in range(self._size)] if of_rank else [key]

    def _do(self, op: KvOp, keys: list[str], value: bytes, timeout_s: float) -> KvReply:
        reply = self._ask(self._generation, op, keys, value, timeout_s)
        if not reply.ok:
            raise DistStoreError(f"rendezvous of generation {self._generation}: {op} {keys} was not answered in time")
        return reply
