"""A donor's end of the hand-over: what a newcomer must have first, and what may come behind.

Three parts come one after the other on each line. *Early*: buffers, small tensors and everything that is no tensor;
donors wait in the pause until it has arrived. *Middle*: large parameters, which nothing but a prepared optimizer
changes; the receiver waits for them before its first forward, while the donors are at work. *Late*: large tensors of
plain optimizers, which arrive during the receiver's first forward and backward. Each receiver takes an equal piece of
every part from several donors at once. What arrives damaged breaks the group, and the receiver ends.

Donors send from live memory: it stays as it is until every receiver has everything, since a receiver tells that it has
the step's sums only then, and no optimizer acts before all members have told that. A script that writes to weights
before, by hand, tears what is sent. The receiver notices by the weights' fingerprint, and the next generation sends
the middle part early; see `Standing.whole`.
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

EARLY, MIDDLE, LATE = PARTS = range(3)

_LARGE = 1 << 16
"""Bytes from which on a tensor need not come early."""

ASK = struct.Struct("<II")
"""Number of the piece, and of how many."""

HEAD = struct.Struct("<QQQQ")
"""Length and sum of the outline, and of the extra state; both follow on the first line only."""

DONE = b"\x01"
"""From the receiver, after the texts and after each part: it is here."""


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """The state without its tensors' bytes; the same on all donors."""

    tree: bytes
    tensors: list[TensorSpec]
    parts: list[list[int]]
    "numbers of the tensors that come in each part"


class Supply:
    """Hands pieces of this member's state to those who ask: so many `pieces`.

    `encoded` is the whole state; the modules' tensors come first. `extra` is extra state of modules; a receiver takes
    that of its first donor. `whole`: there is no middle part, all weights come early; the same on all members.
    """

    def __init__(
        self, group: Group, prepared: Prepared, encoded: Encoded, extra: bytes, pieces: int, *, whole: bool
    ) -> None:
        specs = encoded.specs
        middle = set() if whole else prepared.trained_weights()
        plain = prepared.plain_optimizers()
        late = {n for n, path in enumerate(encoded.paths) if _is_late(path, plain)}
        parts: list[list[int]] = [[] for _ in PARTS]
        for n, spec in enumerate(specs):
            part = EARLY if spec.nbytes < _LARGE else MIDDLE if n in middle else LATE if n in late else EARLY
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
        "pieces that have not arrived, by part"
        group.streams.serve(self._serve)

    def _serve(self, line: socket.socket) -> None:
        number, pieces = ASK.unpack(receive(line, ASK.size))
        try:
            line.sendall(self._head)
            if number == 0:
                line.sendall(self._text)
                receive(line, len(DONE))
            device.enter(self._device)
            with device.side_stream(self._device, self._ready):
                for part in PARTS:
                    send_piece(line, self._memory[part], number, pieces)
                    receive(line, len(DONE))
                    with self._changed:
                        self._open[part] -= 1
                        if not self._open[LATE]:
                            self._memory = []  # copies, where the state has gaps in memory
                            self._group.streams.serve(None)
                        self._changed.notify_all()
        except Exception as error:  # whatever it is, the training thread must hear of it
            self._group.interrupt(f"state for another member could not be sent: {error}")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, part: int) -> None:
        """Wait until everybody who takes from here has this part, and those in front of it. Raises Interrupted."""
        with self._group.waits(self._wake), self._changed:
            self._changed.wait_for(lambda: not self._open[part] or self._group.broken is not None)
            if self._open[part]:
                raise Interrupted(self._group.broken)


def _is_late(path: Path, plain: Set[int]) -> bool:
    """True for a tensor in the state of an optimizer that takes tensors over as they are."""
    return path[:2] == ["objects", "optimizers"] and path[3] == "state" and path[2] in plain
