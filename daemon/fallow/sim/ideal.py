"""The most work that so many nodes can do: what a score is measured against."""

from __future__ import annotations

from collections.abc import Sequence

from fallow.sim.curves import speeds
from fallow.sim.types import RunPlan


def most_work(plans: Sequence[RunPlan], nodes: int) -> list[float]:
    """Work per second of 0, 1, ... `nodes` nodes, shared out among the runs as well as can be, changes for nothing.

    Exact, by dynamic programming over the runs: the best of k runs with n nodes is the best of k-1 runs with n-m nodes
    and m nodes for the last. Which partitions a run may use is left out, so with such limits it is a bound. No weights:
    work is work. With more nodes than the runs can use it ends sooner; its last entry then holds for all.
    """
    best = [0.0]
    for plan in plans:
        speed = speeds(plan)
        size = min(nodes, len(best) - 1 + plan.max_nodes)
        before = best + [best[-1]] * (size + 1 - len(best))
        best = [max(before[n - m] + speed[m] for m in range(min(n, plan.max_nodes) + 1)) for n in range(size + 1)]
    return best
