"""What need not be known any more of a run that goes on and on: its record is written at each change of it.

Old reports of generations go to the store once and for all (`head.durable`); `fallow report` has them all the same.
"""

from __future__ import annotations

import msgspec

from fallow.core.allocations import Allocation
from fallow.core.proposals import involved
from fallow.head.book import Run
from fallow.head.turn import Turn
from fallow.model import GenerationReport, WorkerPhase

KEPT_REPORTS = 50
"""The newest stay in the record: how long changes take is asked at every turn."""

_CHUNK = 10
"""So many go at a time."""


def forget(turn: Turn, run: Run) -> None:
    """Drop workers that are gone for good, what they said, and nodes of `fallow local` that nothing is left of."""
    if run.roster.status.ended:
        return
    r, record = run.roster, run.record
    needed = set(involved(r))
    for worker in list(r.workers.values()):
        name, allocation = worker.worker, record.allocations.get(worker.token)
        if worker.phase is WorkerPhase.GONE and name not in needed and _over(allocation, name):
            run.machine.forget(name)
            key = record.worker_keys.pop(name, None)
            if key is not None:
                turn.book.revoke(key)
            run.beats.pop(name, None)
            turn.dirty.add(run.id)
    if run.spec.local:
        tokens = {worker.token for worker in r.workers.values()}
        for token, allocation in list(record.allocations.items()):
            if not allocation.live and token not in tokens:
                del record.allocations[token]
                turn.dirty.add(run.id)
    for place in [place for place in run.agent_seen if place[0] not in record.allocations]:
        del run.agent_seen[place]


def _over(allocation: Allocation | None, worker: str) -> bool:
    """Its process has ended. One that may still run has to be told so when it speaks, which takes knowing it."""
    if allocation is None:
        return True
    if worker in allocation.exited:
        return worker not in allocation.again
    # Another has taken its place.
    return worker not in allocation.workers and worker not in allocation.reserved


def old_reports(run: Run) -> bytes | None:
    """Take the oldest reports out of the record, once there are enough of them; the caller writes them down."""
    history = run.roster.history
    if len(history) < KEPT_REPORTS + _CHUNK:
        return None
    chunk = msgspec.msgpack.encode(history[:-KEPT_REPORTS])
    run.roster.history = history[-KEPT_REPORTS:]
    run.past.append(chunk)
    return chunk


def reports(run: Run) -> list[GenerationReport]:
    """Of all generations, the oldest first."""
    old = (report for chunk in run.past for report in msgspec.msgpack.decode(chunk, type=list[GenerationReport]))
    return [*old, *run.roster.history]
