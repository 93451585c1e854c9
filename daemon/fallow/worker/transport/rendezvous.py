"""The rendezvous store of one generation: torch's `Store`, answered by the head."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store

from fallow.model import KvOp, KvReply

Ask = Callable[[int, KvOp, list[str], bytes, float], KvReply]
"""(generation, operation, keys, value, timeout in seconds) -> the head's answer; raises TimeoutError."""


class HeadStore(Store):
    """Key-value store of `generation` in the head's memory; gloo exchanges its addresses through it.

    A lost head shows as an error of the operation, which fails the vote and nothing else.
    """

    def __init__(self, generation: int, ask: Ask, timeout_s: float) -> None:
        super().__init__()
        self._generation = generation
        self._ask = ask
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._do(KvOp.SET, [key], data)

    def get(self, key: str) -> bytes:
        """The value; waits until it exists or the store's timeout has passed."""
        return self._do(KvOp.GET, [key]).values[0]

    def read(self, keys: list[str], timeout_s: float) -> list[bytes] | None:
        """All values; None if they were not all there in time."""
        reply = self._ask(self._generation, KvOp.GET, keys, b"", timeout_s)
        return reply.values if reply.ok else None

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._do(KvOp.GET, keys, timeout_s=timeout.total_seconds() if timeout else None)

    def check(self, keys: list[str]) -> bool:
        """True if all keys exist now."""
        return bool(self._ask(self._generation, KvOp.CHECK, keys, b"", self._timeout_s).number)

    def set_timeout(self, timeout: timedelta) -> None:
        """Upper end of every later wait."""
        self._timeout_s = timeout.total_seconds()

    def _do(self, op: KvOp, keys: list[str], value: bytes = b"", timeout_s: float | None = None) -> KvReply:
        reply = self._ask(self._generation, op, keys, value, timeout_s or self._timeout_s)
        if not reply.ok:
            raise RuntimeError(f"rendezvous of generation {self._generation}: {op} {keys} was not answered in time")
        return reply
