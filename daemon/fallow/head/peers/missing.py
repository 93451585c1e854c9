"""What is said of a run's jobs that run without an agent, in the event log and in `status`."""

from __future__ import annotations

from fallow.core.allocations import Allocation
from fallow.core.missing_agents import missing_agents, note
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
from fallow.model import AllocationKind


def look(turn: Turn, run: Run) -> None:
    """Find the jobs whose agents should have come by now; the event log has each once."""
    if run.spec.local:
        return
    found: dict[str, str] = {}
    for allocation in run.live_allocations():
        if nodes := missing_agents(allocation, turn.now):
            text = note(allocation, nodes, turn.now, turn.book.endpoint, _output(turn, run, allocation))
            found[allocation.token] = text
            if allocation.token not in run.without_agent:
                turn.record(run, "network", text, job=allocation.job_id)
    run.without_agent = found


def _output(turn: Turn, run: Run, allocation: Allocation) -> str:
    """Where the job's output is; of a user's own job only Slurm knows."""
    if allocation.kind is AllocationKind.HARVEST or allocation.renewed:
        return str(turn.book.paths.run(run.id).logs / f"{allocation.token}.out")
    return f"StdOut in: scontrol show job {allocation.job_id or allocation.token}"
