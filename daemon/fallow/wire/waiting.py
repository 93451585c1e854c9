"""Messages that wait until they can be sent. All of them say how things stand, so only the newest of each is kept."""

from __future__ import annotations

from collections.abc import Hashable

from fallow.core.membership.messages import Gather, Gathered, Wire
from fallow.core.protocol import Ended, Part
from fallow.wire.codec import encode

MOST = 256
"""Messages that wait at most; beyond that, the oldest are dropped."""


class Waiting:
    """Encoded messages, oldest first. A message takes the place of an older one about the same thing."""

    def __init__(self) -> None:
        self._encoded: dict[Hashable, bytes] = {}

    def __len__(self) -> int:
        return len(self._encoded)

    def put(self, message: Wire) -> None:
        """Add a message.

        Raises:
            Unreadable: it is too large.
        """
        subject = _subject(message)
        data = encode(message)
        self._encoded.pop(subject, None)
        self._encoded[subject] = data
        if len(self._encoded) > MOST:
            self.pop()

    def put_first(self, message: Wire) -> None:
        """Add a message in front of all others."""
        subject = _subject(message)
        others = {other: data for other, data in self._encoded.items() if other != subject}
        self._encoded = {subject: encode(message), **others}

    def first(self) -> bytes:
        """The next message to send."""
        return next(iter(self._encoded.values()))

    def pop(self) -> bytes:
        """The same; it waits no more."""
        return self._encoded.pop(next(iter(self._encoded)))


def _subject(message: Wire) -> Hashable:
    match message:
        case Gather() | Part():
            return type(message), message.generation, message.key, bool(message.part)
        case Gathered():
            return Gathered, message.generation, message.key
        case Ended():
            return Ended, message.node, message.boot
        case _:
            return type(message)
