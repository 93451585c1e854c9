"""The donor's end of a state transfer. The state travels in three parts, one after the other on each connection:

- *Early*: buffers, small tensors and everything that is no tensor. Donors pause until this part has arrived.
- *Middle*: large parameters that only a prepared optimizer changes. The donors compute meanwhile. The receiver waits
  for this part before its first forward.
- *Late*: large tensors of plain optimizers. They arrive during the receiver's first forward and backward.

Each receiver takes equal pieces of every part from several donors at once. Damaged data breaks the group and ends the
receiver.

Donors send from live memory. No optimizer acts before all members confirm the step's sums, and a receiver confirms only
after it has the whole state. So the memory does not change unless the script writes to weights by hand. The receiver
detects this by the fingerprint of the weights. The next generation then sends all weights early; see
`StateStatus.weights_in_pause`.
"""

import socket
import struct
import threading
from collections.abc import Set

import msgspec

from fallow.worker.handover.pieces import send_piece
from fallow.worker.prepared.checksum import checksum
from fallow.worker.prepared.objects import Prepared
from fallow.worker.prepared.state import Encoded, Path, TensorSpec, as_bytes, device_of
from fallow.worker.transport import device
from fallow.worker.transport.group import Group
from fallow.worker.transport.stream import receive
from fallow.worker.transport.waits import Interrupted

EARLY_PART, MIDDLE_PART, LATE_PART = PARTS = range(3)

_LARGE = 1 << 16
"""Smallest size, in bytes, of a tensor in the middle or late part."""

ASK = struct.Struct("<II")
"""Receiver's request: number of the piece, number of pieces."""

HEAD = struct.Struct("<QQQQ")
"""Donor's answer: length and checksum of the outline, length and checksum of the extra state. Outline and extra state
follow only on the connection for piece 0."""

RECEIPT = b"\x01"
"""Receiver's confirmation, after outline and extra state, and after each part."""


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """The state without the bytes of its tensors; equal on all donors."""

    tree: bytes
    tensors: list[TensorSpec]
    parts: list[list[int]]
    "numbers of the tensors in each part"


class Supply:
    """Sends pieces of this member's state on request.

    Args:
        group: the new generation's group.
        prepared: live objects.
        encoded: the whole state; tensors of modules come first.
        extra: extra state of modules; a receiver takes that of its first donor.
        pieces: number of pieces that receivers will request here.
        weights_in_pause: send all weights in the early part, without a middle part; equal on all members.
    """

    def __init__(
        self, group: Group, prepared: Prepared, encoded: Encoded, extra: bytes, pieces: int, *, weights_in_pause: bool
    ) -> None:
        specs = encoded.specs
        middle = set() if weights_in_pause else prepared.trained_weights()
        plain = prepared.plain_optimizers()
        late_numbers = {n for n, path in enumerate(encoded.paths) if _is_late(path, plain)}
        parts: list[list[int]] = [[] for _ in PARTS]
        for n, spec in enumerate(specs):
            part = EARLY_PART
            if spec.nbytes >= _LARGE:
                part = MIDDLE_PART if n in middle else LATE_PART if n in late_numbers else EARLY_PART
            parts[part].append(n)
        outline = Outline(tree=encoded.tree, tensors=specs, parts=parts)
        text = msgspec.msgpack.encode(outline)
        self._text = text + extra
        self._head = HEAD.pack(len(text), checksum(text), len(extra), checksum(extra))
        self._memory = [[as_bytes(encoded.tensors[n]) for n in numbers] for numbers in parts]
        self._device = device_of(encoded.tensors)
        self._ready = device.event(self._device)
        self._group = group
        self._changed = threading.Condition()
        self._open = [pieces for _ in PARTS]
        "number of unconfirmed pieces, by part"
        group.streams.serve(self._serve)

    def _serve(self, connection: socket.socket) -> None:
        number, pieces = ASK.unpack(receive(connection, ASK.size))
        try:
            connection.sendall(self._head)
            if number == 0:
                connection.sendall(self._text)
                receive(connection, len(RECEIPT))
            device.enter(self._device)
            with device.side_stream(self._device, self._ready):
                for part in PARTS:
                    send_piece(connection, self._memory[part], number, pieces)
                    receive(connection, len(RECEIPT))
                    with self._changed:
                        self._open[part] -= 1
                        if not self._open[LATE_PART]:
                            self._memory = []  # may hold copies, of tensors that are not contiguous
                            self._group.streams.serve(None)
                        self._changed.notify_all()
        except Exception as error:  # the training thread must learn of any error
            self._group.interrupt(f"state for another member could not be sent: {error}")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, part: int) -> None:
        """Wait until all receivers have this part and the earlier parts. Raises Interrupted."""
        with self._group.waits(self._wake), self._changed:
            self._changed.wait_for(lambda: not self._open[part] or self._group.broken is not None)
            if self._open[part]:
                raise Interrupted(self._group.broken)


def _is_late(path: Path, plain: Set[int]) -> bool:
    """Return True for a tensor in the state of a plain optimizer, which adopts tensors without a copy."""
    return path[:2] == ["objects", "optimizers"] and path[3] == "state" and path[2] in plain
