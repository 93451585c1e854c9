"""State from the members that have it to those that have not: what must be there first, and what may come behind.

The *early* part goes inside the pause: parameters, buffers, small tensors and everything that is no tensor. The *late*
part, the large tensors of plain optimizers, comes while the first forward and backward run, straight into the
receiver's optimizer. Each receiver takes an equal piece of both parts from several donors at once.

Donors send from live memory. It stays as it is until every receiver has everything, since a receiver takes part in the
first step's reduction only then, and nobody's optimizer acts before that reduction is complete.
"""

from __future__ import annotations

import socket
import struct
import threading
import zlib
from collections.abc import Callable, Sequence

import msgspec
import torch

from fallow.model import FallowError
from fallow.worker import state
from fallow.worker.group import Group, Interrupted
from fallow.worker.prepared import Prepared
from fallow.worker.stream import Bytes, arrays, receive, receive_piece, send_piece

_LATE = 1 << 16
"""Bytes from which on an optimizer's tensor may come late."""

_ASK = struct.Struct("<II")
_HEAD = struct.Struct("<QI")
_DONE = b"\x01"


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """What a donor says before the bytes."""

    state: state.Encoded
    weights: int
    "the first so many tensors are those of the modules"
    late: list[int]
    "numbers of the tensors that come late"


class Supply:
    """A donor's part: hands its pieces to those who ask.

    Args:
        group: the new generation's.
        prepared: live objects.
        tree: their whole state; its first tensors are those of the modules.
        pieces: how many pieces will be asked for here.
    """

    def __init__(self, group: Group, prepared: Prepared, tree: object, pieces: int) -> None:
        encoded, tensors = state.encode(tree, "run")
        behind = {id(tensor) for tensor in prepared.plain_optimizer_tensors()}
        late = [
            number
            for number, raw in enumerate(state.tensors_in(tree))
            if id(raw) in behind and encoded.tensors[number].nbytes >= _LATE
        ]
        self._text = msgspec.msgpack.encode(Outline(state=encoded, weights=len(prepared.weight_tensors()), late=late))
        self._crc = zlib.crc32(self._text)
        hidden = set(late)
        self._early = arrays([tensor for number, tensor in enumerate(tensors) if number not in hidden])
        self._late = arrays([tensors[number] for number in late])
        self._group = group
        self._changed = threading.Condition()
        self._early_open = self._late_open = pieces
        group.streams.serve(self._serve)

    def _serve(self, line: socket.socket) -> None:
        try:
            number, pieces = _ASK.unpack(receive(line, _ASK.size))
            line.sendall(_HEAD.pack(len(self._text), self._crc))
            if number == 0:
                line.sendall(self._text)
            send_piece(line, self._early, number, pieces)
            receive(line, len(_DONE))
            with self._changed:
                self._early_open -= 1
                self._changed.notify_all()
            send_piece(line, self._late, number, pieces)
            receive(line, len(_DONE))
            with self._changed:
                self._late_open -= 1
                self._changed.notify_all()
        except Exception as error:  # whatever it is, the training thread must hear of it
            self._group.interrupt(f"state for another member could not be sent: {error}")
            with self._changed:
                self._changed.notify_all()
        else:
            if not self._late_open:
                self._group.end_transfers()

    def wait_early(self) -> None:
        """Until everybody who takes from here has the early part. Raises Interrupted."""
        self._wait(lambda: not self._early_open)

    def settle(self) -> None:
        """Until everybody who takes from here has everything. Raises Interrupted."""
        self._wait(lambda: not self._late_open)

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._group.waits(), self._changed:
            self._changed.wait_for(lambda: done() or self._group.broken is not None)
            if not done():
                raise Interrupted(self._group.broken)


class Intake:
    """A receiver's part.

    Args:
        group: the new generation's.
        prepared: live objects; their parameters and buffers are overwritten from here on where `in_place` is set.
        donors: ranks that send a piece each.
        in_place: receive weights into the live ones. Without it nothing changes before everything has arrived.
    """

    def __init__(self, group: Group, prepared: Prepared, donors: Sequence[int], *, in_place: bool) -> None:
        self._group = group
        self._prepared = prepared
        self._in_place = in_place
        self._changed = threading.Condition()
        self._outline: Outline | None = None
        self._crc = 0
        self._tensors: list[torch.Tensor] = []
        self._early: list[Bytes] = []
        self._late: list[Bytes] = []
        self._early_open = self._late_open = len(donors)
        self._error: Exception | None = None
        self._then: Callable[[], None] | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.early_bytes = 0
        self.late_bytes = 0
        self._threads = [
            threading.Thread(
                target=self._take, args=(rank, number, len(donors)), name=f"intake-{group.generation}", daemon=True
            )
            for number, rank in enumerate(donors)
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------------------------- one thread per donor

    def _take(self, rank: int, number: int, pieces: int) -> None:
        streams = self._group.streams
        line: socket.socket | None = None
        try:
            line = streams.line(rank)
            line.sendall(_ASK.pack(number, pieces))
            length, crc = _HEAD.unpack(receive(line, _HEAD.size))
            self._agree(receive(line, length) if number == 0 else None, crc)
            early = receive_piece(line, self._early, number, pieces, self._group.moved)
            line.sendall(_DONE)
            with self._changed:
                self.early_bytes += early
                self._early_open -= 1
                self._changed.notify_all()
            late = receive_piece(line, self._late, number, pieces, self._group.moved)
            line.sendall(_DONE)
            with self._changed:
                self.late_bytes += late
                self._late_open -= 1
                last = not self._late_open
                then = self._then if last else None
                self._changed.notify_all()
            if last:
                self._group.end_transfers()
            if then is not None:
                then()
        except Exception as error:  # whatever it is, the training thread must hear of it
            reason = f"state from rank {rank}: {error}"
            with self._changed:
                # Before the interruption, which ends the other threads' lines: theirs would be errors of no meaning.
                if self._error is None:
                    lost = isinstance(error, OSError)
                    self._error = Interrupted(self._group.broken or reason) if lost else error
            self._group.interrupt(reason)
            with self._changed:
                self._changed.notify_all()
        finally:
            if line is not None:
                streams.drop(line)

    def _agree(self, text: bytes | None, crc: int) -> None:
        """The first donor's outline makes the room for everybody's bytes; the others must have the same."""
        with self._changed:
            if text is not None:
                self._lay_out(text)
                self._crc = crc
                self.early_bytes += len(text)
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._outline is not None or self._error is not None)
            if self._error is not None:
                raise ConnectionAbortedError("the first donor failed")
        if crc != self._crc:
            raise FallowError(
                f"generation {self._group.generation}: members with equal weights hold different optimizer or other "
                "state; prepare everything that changes with the steps"
            )

    def _lay_out(self, text: bytes) -> None:
        outline = msgspec.msgpack.decode(text, type=Outline)
        specs = outline.state.tensors
        late = set(outline.late)
        own = self._prepared.weight_tensors() if self._in_place else []
        places: list[torch.Tensor | None] = [None] * len(specs)
        for number, tensor in enumerate(own[: outline.weights]):
            spec = specs[number]
            fits = str(tensor.dtype).removeprefix("torch.") == spec.dtype and list(tensor.shape) == spec.shape
            if fits and tensor.device.type == "cpu" and tensor.is_contiguous():
                places[number] = tensor
        for some in (late, {number for number in range(len(specs)) if number not in late and places[number] is None}):
            numbers = sorted(some)
            for number, tensor in zip(numbers, state.room([specs[number] for number in numbers]), strict=True):
                places[number] = tensor
        self._tensors = [tensor for tensor in places if tensor is not None]
        self._early = arrays([tensor for number, tensor in enumerate(self._tensors) if number not in late])
        self._late = arrays([self._tensors[number] for number in outline.late])
        self._outline = outline

    # --------------------------------------------------------------------------------------- the training thread

    def wait_early(self) -> dict[str, object]:
        """The state's tree; its late tensors are filled by `settle`.

        Raises:
            Interrupted: the group broke. The weights are torn if they were received in place.
            FallowError: what came is damaged, or the donors differ.
        """
        self._wait(lambda: not self._early_open)
        assert self._outline is not None
        tree: dict[str, object] = state.decode(self._outline.state, self._tensors)
        return tree

    def adopt(self) -> None:
        """The tree was loaded: see to it that late tensors reach the live optimizers.

        On the CPU `load_state_dict` takes the very tensors over, and nothing is left to do. Else they are copied at the
        end (another device); where that is not possible, everything is waited for and loaded again.
        """
        outline = self._outline
        assert outline is not None
        late = {self._tensors[number].data_ptr(): self._tensors[number] for number in outline.late}
        live = {id(tensor): tensor for tensor in self._prepared.plain_optimizer_tensors()}
        taken = {tensor.data_ptr() for tensor in live.values()}
        missing = [tensor for pointer, tensor in late.items() if pointer not in taken]
        if not missing:
            return
        tree = state.decode(outline.state, self._tensors)
        pairs = self._prepared.optimizer_pairs(tree["objects"])
        if pairs is None:
            self.settle()
            self._prepared.load(tree["objects"])
            return
        wanted = {tensor.data_ptr() for tensor in missing}
        self._copies = [(here, there) for here, there in pairs if there.data_ptr() in wanted]

    @property
    def complete(self) -> bool:
        """Everything is here."""
        return not self._late_open

    def when_complete(self, then: Callable[[], None]) -> None:
        """Call this once, as soon as everything is here; never if it does not come."""
        with self._changed:
            self._then = then
            now = not self._late_open
        if now:
            then()

    def settle(self) -> None:
        """Wait for the late part and put it in its place.

        Raises:
            Interrupted: the group broke before it was complete.
            FallowError: it arrived damaged.
        """
        self._wait(lambda: not self._late_open)
        with torch.no_grad():
            for here, there in self._copies:
                here.copy_(there)
        self._copies = []

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._group.waits(), self._changed:
            self._changed.wait_for(lambda: done() or self._error is not None)
        if done():
            return
        # The sockets are shut: no thread writes to this memory after it has ended.
        for thread in self._threads:
            thread.join()
        assert self._error is not None
        raise self._error

    def give_up(self) -> None:
        """End an intake that is not complete, because its group is broken."""
        self._group.interrupt("given up")
        for thread in self._threads:
            thread.join()
