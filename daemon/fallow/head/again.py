"""Another worker in the place of one that crashed, on an allocation that lives on."""

from __future__ import annotations

from fallow.core import events as ev
from fallow.core.allocations import Allocation
from fallow.head.book import Run
from fallow.head.turn import Turn, agent_peer
from fallow.model import AgentPlan, AllocationState, Exit, WorkerExit

FINAL = frozenset((Exit.OK, Exit.USAGE, Exit.DATA, Exit.NOINPUT, Exit.CONFIG, Exit.NOPERM, Exit.NO_RESTART))
"""Exit codes of a worker that another one in its place would end with, too."""

LONGEST_S = 64.0
"""Between a crash and the next start. The first one on a node is made good at once; where one follows another, each
start costs everybody a change of the membership."""


def ended(turn: Turn, run: Run, allocation: Allocation, node: str, exit_: WorkerExit) -> None:
    """A worker's process has ended: note when another takes its place, if one does."""
    if exit_.worker in allocation.exited:
        return
    restart = run.may_restart(allocation, node, exit_.worker) and exit_.code not in FINAL
    allocation.exited.append(exit_.worker)
    turn.dirty.add(run.id)
    if not restart:
        return
    tries = allocation.restarts.get(node, 0)
    allocation.restarts[node] = tries + 1
    wait_s = min(LONGEST_S, 2.0 ** min(tries, 20)) if tries else 0.0
    allocation.again[exit_.worker] = turn.now + wait_s
    when = f"in {wait_s:g} s" if wait_s else "now"
    turn.record(run, "restart", f"another worker takes the place of {exit_.worker} on {node} {when}")


def due(turn: Turn, run: Run, allocation: Allocation, beat_s: float) -> None:
    """Give the places whose time has come to new workers, and their agents new plans."""
    for worker in [w for w, at in allocation.again.items() if turn.now >= at]:
        del allocation.again[worker]
        turn.dirty.add(run.id)
        node = next((n for n, names in allocation.agents.items() if worker in names), None)
        if node is None or allocation.state is not AllocationState.RUNNING or node in run.roster.barred:
            continue
        names, name = allocation.agents[node], f"w{run.roster.next_index}"
        # The same place in the list is the same share of the node.
        names[names.index(worker)] = name
        allocation.exited.remove(worker)
        turn.apply(run, ev.WorkerExpected(at=turn.at, worker=name, token=allocation.token, node=node))
        turn.messages.append((agent_peer(allocation, node), plan_of(turn, run, allocation, node, beat_s)))
        turn.show_output(run, allocation, node)


def plan_of(turn: Turn, run: Run, allocation: Allocation, node: str, beat_s: float) -> AgentPlan:
    """What the agent of that node is to start."""
    return AgentPlan(
        term=turn.book.term,
        run=run.id,
        workers=list(allocation.agents[node]),
        folder=str(turn.book.paths.run(run.id).root),
        beat_s=beat_s,
        network=turn.book.network,
    )
