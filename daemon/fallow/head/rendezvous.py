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
        self._waiting: list[_Waiting] = []

    def handle(self, worker: str, request: KvRequest, at: float) -> list[tuple[str, KvReply]]:
        """Apply one request; returns the replies it makes possible, each with the worker it is for."""
        values = self._values.setdefault(request.generation, {})
        self._forget_old()
        replies: list[tuple[str, KvReply]] = []
        key = request.keys[0] if request.keys else ""
        if request.op is KvOp.GET:
            self._waiting.append(_Waiting(worker, request, at + request.timeout_s))
            return self._answer_waiting(at)
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
        return replies + self._answer_waiting(at)

    def tick(self, at: float) -> list[tuple[str, KvReply]]:
        """Refuse what has waited past its deadline."""
        return self._answer_waiting(at)

    def _answer_waiting(self, at: float) -> list[tuple[str, KvReply]]:
        replies: list[tuple[str, KvReply]] = []
        still: list[_Waiting] = []
        for item in self._waiting:
            values = self._values.get(item.request.generation, {})
            if all(key in values for key in item.request.keys):
                found = [values[key] for key in item.request.keys]
                replies.append((item.worker, KvReply(id=item.request.id, ok=True, values=found)))
            elif at >= item.deadline_at:
                replies.append((item.worker, KvReply(id=item.request.id, ok=False)))
            else:
                still.append(item)
        self._waiting = still
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
