"""The gathers in which one start of a node's workers takes part. Pure.

Each worker gives its part. Their agent sends the parts of all of them to the head as one, and hands out the answer, in
which are the parts of all workers of all nodes, in the order of ranks. Gathers within the node the agent answers by
itself. Nothing is timed here: the agent repeats what waits for the head (`unanswered`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fallow.core.membership.gather import KEPT, Gathers
from fallow.core.membership.messages import Gather, Gathered, Unreadable
from fallow.core.protocol import Part

_PARTS: msgspec.msgpack.Decoder[tuple[bytes, ...]] = msgspec.msgpack.Decoder(tuple[bytes, ...])


class NodeGathers:
    """The gathers of one start of workers; of the newest `KEPT` generations.

    Args:
        node: its number.
        slots: how many workers it has.
    """

    def __init__(self, node: int, slots: int) -> None:
        self._node, self._slots = node, range(slots)
        self._within_node, self._of_node = Gathers(), Gathers()
        "each brings the parts of this node's workers together, for themselves and for the head"
        self._asked: dict[tuple[int, str], Gather | Gathered] = {}
        "(generation, key) -> what the head was given, and once it has answered, the answer"

    def take(self, slot: int, part: Part) -> tuple[Gathered | Gather | None, Sequence[int]]:
        """Take a worker's part, or its question which nodes are missing: the head answers that at once.

        Returns:
            an answer and the slots to tell it to, or what to send to the head; None: others' parts, or the head's
            answer, are missing.
        """
        place = part.generation, part.key
        answer = None if part.within_node else self._asked.get(place)
        if isinstance(answer, Gathered):
            return answer, [slot]
        if not part.part:
            return Gather(node=self._node, generation=part.generation, key=part.key, part=b""), []
        gathers = self._within_node if part.within_node else self._of_node
        gathers.open(part.generation, self._slots)
        given = Gather(node=slot, generation=part.generation, key=part.key, part=part.part)
        found, slots = gathers.take(given)
        if found is None:
            return None, []
        if part.within_node:
            return found, slots
        whole = self._asked[place] = msgspec.structs.replace(
            given, node=self._node, part=msgspec.msgpack.encode(found.parts)
        )
        newest = sorted({generation for generation, _ in self._asked})[-KEPT:]
        self._asked = {place: said for place, said in self._asked.items() if place[0] in newest}
        return whole, []

    def hear(self, gathered: Gathered) -> Gathered | None:
        """Take the head's answer, whose parts are of whole nodes, for all workers. None: nobody waits for it.

        Raises:
            Unreadable: a node's part does not hold the parts of its workers.
        """
        if gathered.missing:
            return gathered
        place = gathered.generation, gathered.key
        if not isinstance(self._asked.get(place), Gather):
            return None
        try:
            parts = tuple(part for of_node in gathered.parts for part in _PARTS.decode(of_node))
        except msgspec.MsgspecError as error:
            raise Unreadable(
                f"answer to {gathered.key} of generation {gathered.generation}: a part that is none: {error}"
            ) from error
        answer = self._asked[place] = msgspec.structs.replace(gathered, parts=parts)
        return answer

    def unanswered(self) -> list[Gather]:
        """What waits for the head's answer, to be sent again."""
        return [said for said in self._asked.values() if isinstance(said, Gather)]
