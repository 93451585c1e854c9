"""Rendezvous of a generation as one gather: each participant gives its part, and all get all parts at once.

A part costs the same however many others wait, and the answer is made once. In memory only: a generation that was being
built when the head died is burned anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from fallow.core.nodes.messages import Gather, Gathered, encode

KEPT = 4
"""Generations whose gathers are kept, the newest."""

MOST_BYTES = 1 << 16
"""Of one part; a longer one is refused."""


class Gathers:
    """The gathers of one run."""

    def __init__(self) -> None:
        self._participants: dict[int, list[int]] = {}
        self._parts: dict[tuple[int, str], dict[int, bytes]] = {}
        self._answers: dict[tuple[int, str], bytes] = {}

    def open(self, generation: int, participants: Sequence[int]) -> None:
        """A plan was sent: these nodes take part, in rank order."""
        self._participants[generation] = list(participants)
        for old in sorted(self._participants)[:-KEPT]:
            del self._participants[old]
            self._parts = {key: parts for key, parts in self._parts.items() if key[0] != old}
            self._answers = {key: answer for key, answer in self._answers.items() if key[0] != old}

    def take(self, said: Gather) -> tuple[bytes, list[int]]:
        """Take one part, or the question who is missing.

        Returns:
            the encoded answer, and the nodes to send it to; no nodes while parts are missing.
        """
        wanted, key = self._participants.get(said.generation, []), (said.generation, said.key)
        if said.node not in wanted or len(said.part) > MOST_BYTES:
            return b"", []
        if key in self._answers:
            return self._answers[key], [said.node]  # the answer was lost, so the node asks again
        parts = self._parts.setdefault(key, {})
        if not said.part:
            missing = tuple(n for n in wanted if n not in parts)
            return encode(Gathered(generation=said.generation, key=said.key, missing=missing)), [said.node]
        parts[said.node] = said.part
        if len(parts) < len(wanted):
            return b"", []
        del self._parts[key]
        answer = Gathered(generation=said.generation, key=said.key, parts=tuple(parts[n] for n in wanted))
        self._answers[key] = encode(answer)
        return self._answers[key], wanted
