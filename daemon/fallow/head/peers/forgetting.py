"""What need not be known any more of a run that goes on and on."""

from __future__ import annotations

from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run


def forget(turn: Turn, run: Run) -> None:
    """Drop what nodes that are forgotten had said, and nodes of `fallow local` that nothing is left of."""
    for node in [node for node in run.progress if node not in run.roster.nodes]:
        del run.progress[node]
    if run.spec.local:
        known = {node.token for node in run.roster.nodes.values()}
        for token, allocation in list(run.allocations.items()):
            if not allocation.live and token not in known:
                del run.allocations[token]
                turn.dirty.add(run.id)
    for place in [place for place in run.agent_seen if place[0] not in run.allocations]:
        del run.agent_seen[place]
