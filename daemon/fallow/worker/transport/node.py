"""The workers of one generation that share a node: what one of them has heard, all of them have.

A worker whose connection to another node breaks may miss an answer that its siblings have got. They would act on it
while this one computes the step again, and a model that is sharded over the node's workers would hang in that moment.
So siblings compare what they have heard before anybody acts on it, over connections that do not leave the node.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from fallow.worker.transport.waits import Interrupted, Waits

PATIENCE_S = 5.0
"""For so long a worker waits for a sibling. A sibling that is gone breaks the connection much sooner."""

_LENGTH_BYTES = 8


class _State(IntEnum):
    DEAF = 0
    "its wait ended without an answer"
    HEARD = 1
    LEAVES = 2
    "as DEAF, and it takes part in no further exchange of this generation"


class Node(Waits):
    """One worker's siblings.

    Args:
        process_group: the connections among them, used for nothing else; None: it has no siblings.
        size: workers of the node in this generation, with this one.
    """

    def __init__(self, process_group: Any = None, size: int = 1) -> None:
        super().__init__()
        self.patience_s = PATIENCE_S
        self._process_group = process_group
        self.size = size

    def share(self, heard: bytes | None) -> bytes | None:
        """Give siblings the answer to an exchange, or take it from them.

        Args:
            heard: the answer; None: this worker did not get it.

        Returns:
            The answer if any of the node's workers has it, else None. A worker that cannot reach its siblings any more
            gets back what it gave.
        """
        return self._share(heard, _State.DEAF if heard is None else _State.HEARD)

    def leave(self) -> None:
        """Tell siblings that this worker goes over to the next generation without an answer from this one."""
        self._share(None, _State.LEAVES)

    def _share(self, heard: bytes | None, state: _State) -> bytes | None:
        if self.size == 1 or self.broken is not None:
            return heard
        try:
            length = len(heard or b"").to_bytes(_LENGTH_BYTES)
            told = self.launch_exchange(
                self._process_group, bytes([state]) + length, [1 + _LENGTH_BYTES] * self.size
            ).wait()
            states = [_State(text[0]) for text in told]
            if _State.HEARD in states and len(set(states)) > 1:
                lengths = [int.from_bytes(text[1:]) for text in told]
                answers = self.launch_exchange(self._process_group, heard or b"", lengths).wait()
                heard = answers[states.index(_State.HEARD)]
        except Interrupted:
            return heard
        if _State.LEAVES in states:
            self.interrupt("a worker of this node has left the generation")
        return heard
