"""When somebody else cancels jobs: a base job's run ends; a harvest job's node is left alone, and then all are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fallow.core.accounting import cancelled
from fallow.core.accounting.backoff import Backoff
from fallow.core.accounting.cancelled import CANCELS
from fallow.core.allocations import Allocation
from fallow.core.membership import events as ev
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
from fallow.model import AllocationKind, JobInfo


def look_for(
    turn: Turn, run: Run, allocation: Allocation, jobs: Sequence[JobInfo], closed: Collection[str], backoff: Backoff
) -> None:
    """Do what follows if somebody cancelled the jobs of an allocation, which have just been seen to be over.

    Args:
        turn, run, allocation, jobs: takes the effects, and whose jobs.
        closed: nodes that take no jobs any more.
        backoff: is told of a request that somebody cancelled.
    """
    if not cancelled.by_others(allocation, jobs, closed):
        return
    if allocation.kind is AllocationKind.BASE:
        base_cancelled(turn, run, allocation)
    else:
        _cancelled(turn, run, allocation, backoff)


def base_cancelled(turn: Turn, run: Run, allocation: Allocation) -> None:
    """End the run whose base job was cancelled, unless the user wants it to go on without one."""
    run.record.base_wanted = False
    turn.dirty.add(run.id)
    if run.ended:
        return
    what = f"job {allocation.job_id}, its base job, was cancelled"
    if run.spec.outlives_base:
        turn.record(run, "cancelled", f"{what}; the run outlives it", job=allocation.job_id)
    else:
        turn.apply(run, ev.Cancel(at=turn.at, reason=what))


def _cancelled(turn: Turn, run: Run, allocation: Allocation, backoff: Backoff) -> None:
    started = allocation.start_at is not None or bool(allocation.spans)
    node = allocation.nodes[0] if started and allocation.nodes else ""
    what = f"job {allocation.job_id}" + (f" on {node}" if node else f", a request in {allocation.partition}")
    text = f"somebody cancelled {what}"
    turn.record(run, "cancelled", text, job=allocation.job_id, node=node)
    turn.dirty.add(run.id)
    if node:
        _bar(turn, node, text)
    else:
        backoff.strike(text, run.asks_as(allocation), allocation.partition, None, turn.now)
    enough = cancelled.note(run.record.cancelled, turn.now, node)
    if enough and not run.record.harvest_paused and not run.ended:
        turn.stop_asking(
            run,
            f"{CANCELS} of its harvest jobs were cancelled by somebody within a day, the last: {what}; "
            f"if it may go on: fallow resume {run.id}",
        )
        for other in run.live_allocations():
            if other.kind is AllocationKind.HARVEST and other.start_at is None and not other.agents:
                turn.cancel(run, other, "harvest jobs of the run were cancelled by somebody")


def _bar(turn: Turn, node: str, text: str) -> None:
    """No run of ours asks for the node for a while, each time for longer."""
    for run in turn.book.on_slurm:
        if not run.ended and node not in run.barred:
            turn.apply(run, ev.Bar(at=turn.at, host=node, reason=text))
