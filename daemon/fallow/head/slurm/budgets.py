"""No run spends more than its budget of node-hours."""

from __future__ import annotations

from fallow.core.accounting import budget
from fallow.core.accounting.backoff import Backoff, base_job
from fallow.core.accounting.cancelled import awaits_verdict
from fallow.core.submission.sbatch_line import base_nodes
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
from fallow.model import AllocationKind, AllocationState
from fallow.text import counted


def left_s(run: Run, at: float) -> float | None:
    """Node-seconds that may still be asked for; None: no budget. `at`: Unix time of the last poll."""
    hours = run.spec.budget_node_hours
    if hours is None:
        return None
    return budget.left(hours * 3600.0, run.record.spent_node_s, run.allocations.values(), at)


def keep_within_budget(turn: Turn, run: Run, at: float) -> None:
    """Jobs whose granted time is more than the budget has left go in time; what watches walltimes releases them."""
    hours, room = run.spec.budget_node_hours, left_s(run, at)
    if hours is None or room is None or run.ended:
        return
    allocations = list(run.allocations.values())
    waiting = [a for a in allocations if a.live and budget.charged(a) and not a.spans and not a.agents]
    for allocation in sorted(waiting, key=lambda a: -a.requested_at):
        if room >= 0:
            break
        room += budget.booked(allocation, at)
        if allocation.asked_at is None:
            turn.cancel(run, allocation, f"the budget of {hours:g} node-hours does not allow for it")
    end = budget.exhausted_at(hours * 3600.0, run.record.spent_node_s, allocations, at)
    for allocation in allocations:
        running = allocation.state is AllocationState.RUNNING and budget.charged(allocation)
        if end is not None and running and (allocation.end_at is None or end < allocation.end_at):
            allocation.end_at, allocation.ends_because = end, f"the budget of {hours:g} node-hours is used up"
            turn.dirty.add(run.id)


def renew_base(turn: Turn, run: Run, at: float, backoff: Backoff) -> None:
    """Submit the base job again when the last one is over and the script is not finished."""
    record = run.record
    if run.ended or not record.base_wanted or run.roster.finishing or record.paused:
        return
    if not run.bases or any(a.live or awaits_verdict(a, turn.now) for a in run.bases):
        return
    if turn.now < backoff.put_off_until(base_job(run.id)):
        return
    if run.root.limit <= len(run.roster.present()):
        limit = counted(run.root.limit, "node")
        hold_back(turn, run, f"the limit of {limit} leaves no place for it; to raise it: fallow grow {run.id}")
        return
    # It will be granted what the last one was granted.
    limit_s, room, nodes = run.bases[-1].limit_s, left_s(run, at), base_nodes(run.spec)
    if room is not None and (limit_s is None or limit_s * nodes > room):
        needs = "has no time limit" if limit_s is None else f"needs {limit_s * nodes / 3600:.3g}"
        hold_back(turn, run, f"{max(0.0, room) / 3600:.3g} node-hours are left and it {needs}")
        return
    run.held_back = ""
    turn.new_allocation(run, AllocationKind.BASE, nodes_wanted=nodes, renewed=True, limit_s=limit_s)


def hold_back(turn: Turn, run: Run, why: str) -> None:
    """Say once why the base job is not submitted again."""
    text = f"the base job is not submitted again: {why}"
    if text != run.held_back:
        turn.record(run, "budget", text)
    run.held_back = text
