"""The work that so many nodes could do if changes cost nothing: what a score is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from math import log1p

from fallow.sim.curves import speeds
from fallow.sim.types import RunPlan


def fair_work(plans: Sequence[RunPlan], nodes: int) -> list[float]:
    """Work per second that 0, 1, ... `nodes` nodes add, shared out among the runs in the best way each time.

    The best way is the planner's own (`fallow.core.worth`): it makes the sum of weight x log(1 + speed) greatest. For
    runs alike whose curves bend down that is the equal split, as in published scores, and no other way does more work.
    Else, a policy that starves some runs for those that scale best can do more, and score above 1.

    Exact, by dynamic programming over the runs: the best of k runs with n nodes is the best of k-1 runs with n-m nodes
    and m nodes for the last. Which partitions a run may use is left out. With more nodes than the runs can use it ends
    sooner; its last entry then holds for all.
    """
    best, work = [0.0], [0.0]
    for plan in plans:
        speed = speeds(plan)
        worth = [plan.weight * log1p(v) for v in speed]
        size = min(nodes, len(best) - 1 + plan.most)
        more = size + 1 - len(best)
        before, done = best + [best[-1]] * more, work + [work[-1]] * more
        best, work = [], []
        for n in range(size + 1):
            value, m = max((before[n - m] + worth[m], m) for m in range(min(n, plan.most) + 1))
            best.append(value)
            work.append(done[n - m] + speed[m] - speed[0])
    return work
