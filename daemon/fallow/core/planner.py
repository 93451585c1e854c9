"""The planner: which nodes to ask for, which requests to withdraw, which nodes to give back. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fallow.core.allocations import Allocation
from fallow.core.neighbour import GiveBack, blocks_others, give_back, waiting
from fallow.core.requests import Ask, Demand, HarvestRules, ask
from fallow.model import AllocationKind, AllocationState, ClusterState


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Cancel a request that is still pending."""

    token: str
    reason: str


def plan(
    cluster: ClusterState, demands: list[Demand], allocations: list[Allocation], rules: HarvestRules
) -> list[Ask | Withdraw | GiveBack]:
    """Decide on the requests for the next interval.

    Args:
        cluster: one poll.
        demands: what each run could use, most deserving first.
        allocations: every live allocation of every run.
        rules: what is allowed.
    """
    harvest = [a for a in allocations if a.kind is AllocationKind.HARVEST and a.live]
    pending = [a for a in harvest if a.state in (AllocationState.PENDING, AllocationState.UNKNOWN)]
    others = waiting(cluster, {a.token for a in allocations})
    out: list[Ask | Withdraw | GiveBack] = list(give_back(cluster, harvest, others))

    wanted = {demand.run: demand.nodes for demand in demands}
    kept: list[Allocation] = []
    for allocation in sorted(pending, key=lambda a: a.requested_at):
        if wanted.get(allocation.run, 0) < 0:
            wanted[allocation.run] += 1
            out.append(Withdraw(allocation.token, "the run no longer needs it"))
        elif cluster.at - allocation.requested_at > rules.pending_patience_s:
            out.append(Withdraw(allocation.token, f"Slurm did not start it within {rules.pending_patience_s:.0f} s"))
        elif blocks_others(allocation, others, cluster):
            out.append(Withdraw(allocation.token, "somebody else waits for the same nodes"))
        else:
            kept.append(allocation)

    room = rules.max_pending - len(kept)
    if rules.max_nodes is not None:
        held = sum(1 for a in harvest if a not in pending)
        room = min(room, rules.max_nodes - held - len(kept))
    out += ask(cluster, demands, kept, others, rules, room)
    return out
