"""How the head comes to know the workers of this node, from the first hello until their end is noted. Pure.

What is said here is said again, until the head has answered it (`unanswered`).
"""

from __future__ import annotations

import msgspec

from fallow.core.protocol import Ended, EndNoted, Hello


class Enrolment:
    """The start of workers that goes on, or is wanted, and the ends of those before.

    Args:
        hello: for the first start.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        "of the start that goes on; it has the number of its workers once they are to be started"
        self.was_admitted = False
        "the head has admitted workers of this node, ever"
        self._is_greeted = False
        "the head has answered the hello"
        self._end: Ended | None = None
        "how the workers of this start have ended"
        self._unnoted: dict[tuple[int, int], Ended] = {}

    def unanswered(self) -> list[Hello | Ended]:
        """What the head has not answered."""
        greeting = [] if self._is_greeted else [self.hello]
        return [*greeting, *self._unnoted.values()]

    def unnoted(self) -> list[Ended]:
        """Ends that the head has not noted."""
        return list(self._unnoted.values())

    def greet_again(self) -> None:
        """The head does not know this agent's workers: a connection is new, or it has forgotten them."""
        self._is_greeted = False

    def admit(self, node: int) -> None:
        """The head has numbered the workers of this start."""
        self.hello = msgspec.structs.replace(self.hello, node=node)
        self._is_greeted = self.was_admitted = True
        if self._end is not None and (self._end.node, self._end.boot) not in self._unnoted:
            # It has forgotten them since it noted their end, which must not count twice.
            self.end(msgspec.structs.replace(self._end, node=node, report=None, is_ordered=True))

    def end(self, ended: Ended) -> None:
        """All workers of this start have ended."""
        self._end = ended
        self._unnoted[ended.node, ended.boot] = ended

    def note_end(self, noted: EndNoted) -> None:
        """The head has noted the end of a start of workers."""
        self._unnoted.pop((noted.node, noted.boot), None)

    def want(self, boot: int) -> bool:
        """The head wants that start of workers. True: no earlier one runs, so it is that one from now on."""
        if boot <= self.hello.boot or (self.hello.node and self._end is None):
            return False
        self.hello = msgspec.structs.replace(self.hello, boot=boot, node=0)
        self._is_greeted = False
        self._end = None
        return True
