"""Workers that crashed are started again, on an allocation that lives on."""

from __future__ import annotations

from fallow.core.allocations import Allocation
from fallow.core.membership.names import member_name
from fallow.core.protocol.agents import Ended
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
from fallow.model import AllocationState, Exit

FINAL = frozenset((Exit.OK, Exit.USAGE, Exit.DATA, Exit.NOINPUT, Exit.CONFIG, Exit.NOPERM, Exit.NO_RESTART))
"""Exit codes of a worker that another one in its place would end with, too."""

LONGEST_S = 64.0
"""Between a crash and the next start. The first one on a node is made good at once; where one follows another, each
start costs everybody a change of the membership."""


def ended(turn: Turn, run: Run, allocation: Allocation, host: str, end: Ended) -> None:
    """A node's workers have ended: note when others take their place, if any do."""
    agent = allocation.agents[host]
    known = run.roster.nodes.get(end.node)
    if agent.again_at is not None or agent.node != end.node or known is None or known.exited:
        return
    if not run.may_restart(allocation, host) or end.code in FINAL:
        return
    wait_s = min(LONGEST_S, 2.0 ** min(agent.restarts, 20)) if agent.restarts else 0.0
    agent.restarts, agent.again_at = agent.restarts + 1, turn.now + wait_s
    when = f"in {wait_s:g} s" if wait_s else "now"
    turn.record(run, "restart", f"other workers take the place of {member_name(end.node)} on {host} {when}")


def due(turn: Turn, run: Run, allocation: Allocation) -> None:
    """Want the next start where its time has come; the answer to an agent's next heartbeat says so."""
    for host, agent in allocation.agents.items():
        if agent.again_at is None or turn.now < agent.again_at:
            continue
        agent.again_at = None
        turn.dirty.add(run.id)
        if allocation.state is AllocationState.RUNNING and host not in run.barred and not agent.gone:
            agent.boot, agent.node = agent.boot + 1, 0
