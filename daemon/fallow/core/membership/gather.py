"""Rendezvous of a generation: each participant sends its part, and all participants get all parts at once.

A node's part contains the parts of all its workers. Gathers are kept in memory only: a generation that was being built
when the head died is burned anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fallow.core.membership.messages import Gather, Gathered

MAX_GENERATIONS = 4
"""Number of newest generations whose gathers are kept."""

MAX_KEYS = 256
"""Most gathers of one generation; further ones are ignored."""


@dataclass(slots=True)
class _Generation:
    nodes: dict[int, None]
    "participants in the order of ranks"
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    answers: dict[str, Gathered] = field(default_factory=dict)


class Gathers:
    """The gathers of one run."""

    def __init__(self) -> None:
        self._generations: dict[int, _Generation] = {}

    def open(self, generation: int, participants: Sequence[int]) -> None:
        """Register the participants of a generation, in rank order. Repeated calls change nothing."""
        if generation in self._generations:
            return
        self._generations[generation] = _Generation(dict.fromkeys(participants))
        for old in sorted(self._generations)[:-MAX_GENERATIONS]:
            del self._generations[old]

    def take(self, gather: Gather) -> tuple[Gathered | None, list[int]]:
        """Handle one part, or the question whose parts are missing.

        Returns:
            Answer and the nodes to send it to; None and no nodes while parts are missing.
        """
        gathers = self._generations.get(gather.generation)
        if gathers is None or gather.node not in gathers.nodes:
            return None, []
        if gather.key in gathers.answers:
            return gathers.answers[gather.key], [gather.node]  # the answer was lost, so the node asks again
        if gather.key not in gathers.parts and len(gathers.parts) + len(gathers.answers) >= MAX_KEYS:
            return None, []
        parts = gathers.parts.setdefault(gather.key, {})
        if not gather.part:
            missing = tuple(node for node in gathers.nodes if node not in parts)
            return Gathered(generation=gather.generation, key=gather.key, missing=missing), [gather.node]
        parts[gather.node] = gather.part
        if len(parts) < len(gathers.nodes):
            return None, []
        del gathers.parts[gather.key]
        ordered = tuple(parts[node] for node in gathers.nodes)
        answer = gathers.answers[gather.key] = Gathered(generation=gather.generation, key=gather.key, parts=ordered)
        return answer, list(gathers.nodes)
