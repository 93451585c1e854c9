"""Rendezvous of a generation as one gather: each participant gives its part, and all get all parts at once.

A node's part holds those of all its workers. It costs the same however many others wait, and the answer is made once.
In memory only: a generation that was being built when the head died is burned anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from fallow.core.nodes.messages import Gather, Gathered

KEPT = 4
"""Generations whose gathers are kept, the newest."""


class Gathers:
    """The gathers of one run."""

    def __init__(self) -> None:
        self._participants: dict[int, list[int]] = {}
        self._parts: dict[tuple[int, str], dict[int, bytes]] = {}
        self._answers: dict[tuple[int, str], Gathered] = {}

    def open(self, generation: int, participants: Sequence[int]) -> None:
        """A plan was sent: these nodes take part, in rank order."""
        self._participants[generation] = list(participants)
        for old in sorted(self._participants)[:-KEPT]:
            del self._participants[old]
            self._parts = {key: parts for key, parts in self._parts.items() if key[0] != old}
            self._answers = {key: answer for key, answer in self._answers.items() if key[0] != old}

    def take(self, said: Gather) -> tuple[Gathered | None, list[int]]:
        """Take one part.

        Returns:
            the answer and the nodes to send it to; None and no nodes while parts are missing.
        """
        wanted, key = self._participants.get(said.generation, []), (said.generation, said.key)
        if said.node not in wanted:
            return None, []
        if key in self._answers:
            return self._answers[key], [said.node]  # the answer was lost, so the node asks again
        parts = self._parts.setdefault(key, {})
        parts[said.node] = said.part
        if len(parts) < len(wanted):
            return None, []
        del self._parts[key]
        answer = Gathered(generation=said.generation, key=said.key, parts=tuple(parts[n] for n in wanted))
        self._answers[key] = answer
        return answer, wanted
