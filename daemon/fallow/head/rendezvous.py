"""Rendezvous store of the generations of one run: a few hundred bytes per process group, in memory only.

It replaces torch's TCPStore, which listens on the network without any authentication (PyTorch SECURITY.md). It is lost
with the head on purpose: a group that was being built then is burned anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from fallow.model import KvOp, KvReply, KvRequest
from fallow.model.bounds import MOST

KEEP_GENERATIONS = 4
MAX_KEYS = 65536


@dataclass(frozen=True, slots=True)
class _Waiting:
    worker: str
    request: KvRequest
    deadline_at: float


class Rendezvous:
    """Key-value store per generation; `GET` may wait for keys that are not there yet."""

    def __init__(self) -> None:
        self._values: dict[int, dict[str, bytes]] = {}
        self._waiting: dict[tuple[int, str], list[_Waiting]] = {}
        "(generation, key) -> requests of which it is the first key that is not there"

    def handle(self, worker: str, request: KvRequest, at: float) -> list[tuple[str, KvReply]]:
        """Apply one request; returns the replies it makes possible, each with the worker it is for."""
        values = self._values.setdefault(request.generation, {})
        self._forget_old()
        replies: list[tuple[str, KvReply]] = []
        key = request.keys[0] if request.keys else ""
        if request.op is KvOp.GET:
            return self._answer([_Waiting(worker, request, at + request.timeout_s)], at)
        if request.op is KvOp.CHECK:
            ok = all(k in values for k in request.keys)
            return [(worker, KvReply(id=request.id, ok=True, number=int(ok)))]
        if len(values) >= MAX_KEYS:
            return [(worker, KvReply(id=request.id, ok=False))]
        if request.op is KvOp.SET:
            values[key] = request.value
            replies.append((worker, KvReply(id=request.id, ok=True)))
        elif request.op is KvOp.ADD:
            number = _sum(values.get(key, b"0"), request.amount)
            if number is None:
                return [(worker, KvReply(id=request.id, ok=False))]
            values[key] = str(number).encode()
            replies.append((worker, KvReply(id=request.id, ok=True, number=number)))
        elif request.op is KvOp.CAS:
            held = values.get(key, b"")
            if held == request.expected:
                values[key] = held = request.value
            replies.append((worker, KvReply(id=request.id, ok=True, values=[held])))
        return replies + self._answer(self._waiting.pop((request.generation, key), []), at)

    def tick(self, at: float) -> list[tuple[str, KvReply]]:
        """Refuse what has waited past its deadline."""
        waiting, self._waiting = self._waiting, {}
        return self._answer([one for several in waiting.values() for one in several], at)

    def _answer(self, waiting: list[_Waiting], at: float) -> list[tuple[str, KvReply]]:
        """Of those requests, the ones that have come to their end; the others wait."""
        replies: list[tuple[str, KvReply]] = []
        for one in waiting:
            generation, keys = one.request.generation, one.request.keys
            values = self._values.get(generation, {})
            missing = next((key for key in keys if key not in values), None)
            if missing is None:
                found = [values[key] for key in keys]
                replies.append((one.worker, KvReply(id=one.request.id, ok=True, values=found)))
            elif at >= one.deadline_at:
                replies.append((one.worker, KvReply(id=one.request.id, ok=False)))
            else:
                self._waiting.setdefault((generation, missing), []).append(one)
        return replies

    def _forget_old(self) -> None:
        for generation in sorted(self._values)[:-KEEP_GENERATIONS]:
            del self._values[generation]


def _sum(held: bytes, amount: int) -> int | None:
    """None: the key holds no number, or the sum is out of bounds."""
    try:
        number = int(held) + amount
    except ValueError:
        return None
    return number if abs(number) <= MOST else None
