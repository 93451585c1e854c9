"""The gathers in which one start of a node's workers takes part. Pure.

Each worker gives its part. Their agent sends the parts of all of them to the head as one, and hands out the answer, in
which are the parts of all workers of all nodes, in the order of ranks. Gathers within the node the agent answers by
itself. Nothing is timed here: a worker repeats its part, and the agent what waits for the head (`unanswered`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from fallow.core.membership.gather import KEPT
from fallow.core.membership.messages import Gather, Gathered, Unreadable
from fallow.core.protocol.workers import Part

_PARTS: msgspec.msgpack.Decoder[tuple[bytes, ...]] = msgspec.msgpack.Decoder(tuple[bytes, ...])


class Answer(NamedTuple):
    """What to tell the workers of these slots."""

    gathered: Gathered
    slots: Sequence[int]


@dataclass(slots=True)
class _Open:
    parts: dict[int, bytes] = field(default_factory=dict)
    "slot -> its part"
    answer: Gathered | None = None


class NodeGathers:
    """The gathers of one start of workers; of the newest `KEPT` generations.

    Args:
        node: its number.
        slots: how many workers it has.
    """

    def __init__(self, node: int, slots: int) -> None:
        self._node, self._slots = node, range(slots)
        self._gathers: dict[int, dict[tuple[str, bool], _Open]] = {}
        "generation -> (key, is it within the node?) -> gather"

    def take(self, slot: int, part: Part) -> Answer | Gather | None:
        """Take a worker's part, or its question which nodes are missing: the head answers that at once.

        Returns:
            an answer for workers, or what to send to the head; None: others' parts, or the head's answer, are missing.
        """
        gather = self._open(part)
        if gather is None:
            return None
        if gather.answer is not None:
            return Answer(gather.answer, (slot,))
        if not part.part:
            return Gather(node=self._node, generation=part.generation, key=part.key, part=b"")
        was_complete = len(gather.parts) == len(self._slots)
        gather.parts.setdefault(slot, part.part)
        if was_complete or len(gather.parts) < len(self._slots):
            return None
        if part.within_node:
            parts = tuple(gather.parts[slot] for slot in self._slots)
            gather.answer = Gathered(generation=part.generation, key=part.key, parts=parts)
            return Answer(gather.answer, self._slots)
        return self._for_head(part.generation, part.key, gather)

    def hear(self, gathered: Gathered) -> Answer | None:
        """Take the head's answer, whose parts are of whole nodes. None: nobody waits for it.

        Raises:
            Unreadable: a node's part does not hold the parts of its workers.
        """
        if gathered.missing:
            return Answer(gathered, self._slots)
        gather = self._gathers.get(gathered.generation, {}).get((gathered.key, False))
        if gather is None or gather.answer is not None or len(gather.parts) < len(self._slots):
            return None
        try:
            parts = tuple(part for of_node in gathered.parts for part in _PARTS.decode(of_node))
        except msgspec.MsgspecError as error:
            raise Unreadable(
                f"answer to {gathered.key} of generation {gathered.generation}: a part that is none: {error}"
            ) from error
        gather.answer = msgspec.structs.replace(gathered, parts=parts)
        return Answer(gather.answer, self._slots)

    def unanswered(self) -> list[Gather]:
        """What waits for the head's answer, to be sent again."""
        return [
            self._for_head(generation, key, gather)
            for generation, gathers in self._gathers.items()
            for (key, is_within), gather in gathers.items()
            if not is_within and gather.answer is None and len(gather.parts) == len(self._slots)
        ]

    def _open(self, part: Part) -> _Open | None:
        """The gather to which a part belongs; None: its generation is over."""
        if part.generation not in self._gathers:
            newest = sorted([*self._gathers, part.generation])[-KEPT:]
            if part.generation not in newest:
                return None
            self._gathers = {n: gathers for n, gathers in self._gathers.items() if n in newest}
        of_generation = self._gathers.setdefault(part.generation, {})
        return of_generation.setdefault((part.key, part.within_node), _Open())

    def _for_head(self, generation: int, key: str, gather: _Open) -> Gather:
        parts = [gather.parts[slot] for slot in self._slots]
        return Gather(node=self._node, generation=generation, key=key, part=msgspec.msgpack.encode(parts))
