"""Rendezvous of a generation as one gather: each participant gives its part, and all get all parts at once.

A node's part holds those of all its workers. It costs the same however many others wait, and the answer is made once.
In memory only: a generation that was being built when the head died is burned anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fallow.core.membership.messages import Gather, Gathered

KEPT = 4
"""Generations whose gathers are kept, the newest."""

MOST_KEYS = 256
"""Gathers of one generation; more are not taken."""


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
        """A plan was sent: these nodes take part, in rank order. Saying it again changes nothing."""
        if generation in self._generations:
            return
        self._generations[generation] = _Generation(dict.fromkeys(participants))
        for old in sorted(self._generations)[:-KEPT]:
            del self._generations[old]

    def take(self, said: Gather) -> tuple[Gathered | None, list[int]]:
        """Take one part, or the question who is missing.

        Returns:
            the answer and the nodes to send it to; None and no nodes while parts are missing.
        """
        known = self._generations.get(said.generation)
        if known is None or said.node not in known.nodes:
            return None, []
        if said.key in known.answers:
            return known.answers[said.key], [said.node]  # the answer was lost, so the node asks again
        if said.key not in known.parts and len(known.parts) + len(known.answers) >= MOST_KEYS:
            return None, []
        parts = known.parts.setdefault(said.key, {})
        if not said.part:
            missing = tuple(node for node in known.nodes if node not in parts)
            return Gathered(generation=said.generation, key=said.key, missing=missing), [said.node]
        parts[said.node] = said.part
        if len(parts) < len(known.nodes):
            return None, []
        del known.parts[said.key]
        ordered = tuple(parts[node] for node in known.nodes)
        answer = known.answers[said.key] = Gathered(generation=said.generation, key=said.key, parts=ordered)
        return answer, list(known.nodes)
