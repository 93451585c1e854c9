"""Every node at once, to the smallest run."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from fallow.sim.policies.standing import Counts, Crew, Shared, Standing


def equal_split(crew: Crew, standing: Standing, runs: Collection[str]) -> dict[str, Counts]:
    """Spare nodes to those of these runs that have the fewest, one by one; kinds that few may use first."""
    total = {run: crew.plans[run].base + sum(held) for run, held in standing.held.items()}
    given: dict[str, Counts] = {}
    for kind in sorted(range(crew.kinds), key=lambda k: (len(crew.users[k]), k)):
        smallest = [
            (total[run], number, run)
            for number, run in enumerate(crew.users[kind])
            if run in runs and total[run] < crew.plans[run].max_nodes
        ]
        heapq.heapify(smallest)
        for _ in range(standing.spare[kind]):
            if not smallest:
                break
            nodes, number, run = heapq.heappop(smallest)
            given.setdefault(run, [0] * crew.kinds)[kind] += 1
            total[run] = nodes + 1
            if nodes + 1 < crew.plans[run].max_nodes:
                heapq.heappush(smallest, (nodes + 1, number, run))
    return given


class Greedy:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def share(self, standing: Standing) -> Shared:
        return Shared(give=equal_split(self._crew, standing, self._crew.plans))
