"""State from the members that have it to those that have not: what must be there first, and what may come behind.

Three parts, one after the other on each line. *Early*: buffers, small tensors and everything that is no tensor; donors
wait in the pause until it has arrived. *Middle*: large parameters, which nothing but a prepared optimizer changes; the
receiver waits for them before its first forward, donors are at work by then. *Late*: large tensors of plain optimizers,
which come while the receiver's first forward and backward run, straight into its optimizer. Each receiver takes an
equal piece of all parts from several donors at once. What arrives damaged is sent again.

Donors send from live memory where it is plain, on the CPU. It stays as it is until every receiver has everything, since
a receiver takes part in the first step's reduction only then, and nobody's optimizer acts before that reduction is
complete. A script that writes to weights before it, by hand, tears what is sent: the receiver sees that by the weights'
fingerprint, and the group is built again with the middle part in the early one; see `Standing.whole`.
"""

from __future__ import annotations

import socket
import struct
import threading
import zlib
from collections.abc import Callable
from functools import partial

import msgspec

from fallow.worker.handover import state
from fallow.worker.handover.stream import arrays, receive, send_piece
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport.group import Group, Interrupted

EARLY, MIDDLE, LATE = PARTS = range(3)

_LARGE = 1 << 16
"""Bytes from which on a tensor need not come early."""

ASK = struct.Struct("<II")
"""Number of the piece, and of how many."""

HEAD = struct.Struct("<QI")
"""Length and CRC of the outline, which follows on the first line only."""

DONE, AGAIN = b"\x01", b"\x02"
"""From the receiver, after the outline and after each part: it is here, or it arrived damaged."""


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """What a donor says before the bytes."""

    state: state.Encoded
    weights: int
    "the first so many tensors are those of the modules"
    middle: list[int]
    "numbers of the tensors of that part"
    late: list[int]

    def split(self) -> list[list[int]]:
        """Numbers of the tensors of each part."""
        behind = {*self.middle, *self.late}
        return [[n for n in range(len(self.state.tensors)) if n not in behind], self.middle, self.late]


class Supply:
    """A donor's part: hands its pieces to those who ask.

    Args:
        group: the new generation's.
        prepared: live objects.
        tree: their whole state; its first tensors are those of the modules.
        pieces: how many pieces will be asked for here.
        whole: there is no middle part: all weights come early. The same on all members.
    """

    def __init__(self, group: Group, prepared: Prepared, tree: object, pieces: int, *, whole: bool) -> None:
        encoded, tensors = state.encode(tree, "run")
        large = {number for number, spec in enumerate(encoded.tensors) if spec.nbytes >= _LARGE}
        plain = {id(tensor) for tensor in prepared.plain_optimizer_tensors()}
        outline = Outline(
            state=encoded,
            weights=len(prepared.weight_tensors()),
            middle=[] if whole else [number for number in prepared.trained_weights() if number in large],
            late=[n for n, tensor in enumerate(state.tensors_in(tree)) if n in large and id(tensor) in plain],
        )
        self._text = msgspec.msgpack.encode(outline)
        self._crc = zlib.crc32(self._text)
        self._parts = [arrays([tensors[number] for number in numbers]) for numbers in outline.split()]
        self._group = group
        self._changed = threading.Condition()
        self._open = [pieces for _ in PARTS]
        "pieces that have not arrived, by part"
        group.on_break(self._wake)
        group.streams.serve(self._serve)

    def _serve(self, line: socket.socket) -> None:
        # A line that was opened ahead may never be asked for anything, and ends without harm.
        number, pieces = ASK.unpack(receive(line, ASK.size))
        try:
            line.sendall(HEAD.pack(len(self._text), self._crc))
            if number == 0:
                _until_done(line, lambda: line.sendall(self._text))
            for part in PARTS:
                _until_done(line, partial(send_piece, line, self._parts[part], number, pieces))
                with self._changed:
                    self._open[part] -= 1
                    self._changed.notify_all()
        except Exception as error:  # whatever it is, the training thread must hear of it
            self._group.interrupt(f"state for another member could not be sent: {error}")
        else:
            if not self._open[LATE]:
                self._parts = []  # copies, where the state is not in plain memory
                self._group.end_transfers()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_early(self) -> None:
        """Until everybody who takes from here has the early part. Raises Interrupted."""
        self._wait(EARLY)

    def settle(self) -> None:
        """Until everybody who takes from here has everything. Raises Interrupted."""
        self._wait(LATE)

    def _wait(self, part: int) -> None:
        with self._group.waits(), self._changed:
            self._changed.wait_for(lambda: not self._open[part] or self._group.broken is not None)
            if self._open[part]:
                raise Interrupted(self._group.broken)


def _until_done(line: socket.socket, send: Callable[[], object]) -> None:
    """Send it until it is there; the receiver bounds the tries. Its memory is as it was until then: see above."""
    while True:
        send()
        if receive(line, len(DONE)) == DONE:
            return
