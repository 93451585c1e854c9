"""A receiver's part in the hand-over of the state: see `supply`, which is the other end."""

from __future__ import annotations

import socket
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch

from fallow.model import Exit, FallowError
from fallow.worker.handover import state
from fallow.worker.handover.stream import Bytes, arrays, receive, receive_piece
from fallow.worker.handover.supply import AGAIN, ASK, DONE, EARLY, HEAD, LATE, MIDDLE, PARTS, Outline
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport.group import Group, Interrupted

_CHANGED = (
    "weights changed while they were sent to a newcomer: the script changes them before a backward; the step is done "
    "again, and weights are sent inside the pause from now on"
)

_T = TypeVar("_T")

TRIES = 3
"""Of a piece that arrives damaged. All from the same donor: another may be at work by then, and its buffers change."""


class Changed(Interrupted):
    """The donors' weights did not stay as they were until the first reduction."""


class Intake:
    """Takes a piece of the state from each donor.

    Args:
        group: the new generation's.
        prepared: live objects; their parameters and buffers are overwritten from here on where `in_place` is set.
        donors: ranks that send a piece each.
        in_place: receive weights into the live ones, and what comes late into the live optimizers. Without it nothing
            changes before everything has arrived.
    """

    def __init__(self, group: Group, prepared: Prepared, donors: Sequence[int], *, in_place: bool) -> None:
        self._group = group
        self._prepared = prepared
        self._in_place = in_place
        self._changed = threading.Condition()
        self._outline: Outline | None = None
        self._crc = 0
        self._tensors: list[torch.Tensor] = []
        self._parts: list[list[Bytes]] = []
        self._open = [len(donors) for _ in PARTS]
        "pieces that are not here, by part"
        self._received = [0 for _ in PARTS]
        "bytes, by part"
        self._error: Exception | None = None
        self._then: Callable[[], None] | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
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
            line.sendall(ASK.pack(number, pieces))
            length, crc = HEAD.unpack(receive(line, HEAD.size))
            text: bytes | None = None
            if number == 0:
                text = self._whole(line, rank, lambda: _outline(line, length, crc))
                line.sendall(DONE)
            self._agree(text, crc)
            for part in PARTS:
                got = self._receive(line, rank, part, number, pieces)
                line.sendall(DONE)
                with self._changed:
                    self._received[part] += got
                    self._open[part] -= 1
                    last = not self._open[LATE]
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

    def _receive(self, line: socket.socket, rank: int, part: int, number: int, pieces: int) -> int:
        memory = self._parts[part]
        try:
            return self._whole(line, rank, lambda: receive_piece(line, memory, number, pieces, self._group.moved))
        except FallowError:
            if part == MIDDLE:  # each sum was taken before the donor's memory changed
                raise Changed(_CHANGED) from None
            raise

    def _whole(self, line: socket.socket, rank: int, take: Callable[[], _T]) -> _T:
        """What comes next on the line, sent again if it arrives damaged."""
        where = f"generation {self._group.generation}: state from rank {rank} to rank {self._group.rank}"
        for _ in range(TRIES - 1):
            try:
                return take()
            except FallowError:
                sys.stderr.write(f"fallow: {where} arrived damaged; it is sent again\n")
                line.sendall(AGAIN)
        try:
            return take()
        except FallowError:
            raise FallowError(
                f"{where} arrived damaged {TRIES} times; check the memory and the network of both nodes", Exit.TEMPFAIL
            ) from None

    def _agree(self, text: bytes | None, crc: int) -> None:
        """The first donor's outline makes the room for everybody's bytes; the others must have the same."""
        with self._changed:
            if text is not None:
                self._lay_out(text)
                self._crc = crc
                self._received[EARLY] += len(text)
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
        self._parts = [arrays([self._tensors[number] for number in numbers]) for numbers in outline.split()]
        self._outline = outline

    # --------------------------------------------------------------------------------------- the training thread

    def wait_weights(self) -> dict[str, object]:
        """The state's tree, once all but the late part is here; its late tensors are filled by `settle`.

        Raises:
            Changed: what came of the middle part is torn.
            Interrupted: the group broke. The weights are torn if they were received in place.
            FallowError: what came is damaged, or the donors differ.
        """
        self._wait(MIDDLE)
        assert self._outline is not None
        tree: dict[str, object] = state.decode(self._outline.state, self._tensors)
        return tree

    def check(self, fingerprint: int) -> None:
        """The tree was loaded: are these the weights that the donors had in the exchange?

        Raises:
            Changed: they are not. The group is broken, and nothing comes any more.
        """
        if self._parts[MIDDLE] and state.fingerprint(self._prepared.weights()) != fingerprint:
            self._group.interrupt(_CHANGED)
            self.give_up()
            raise Changed(_CHANGED)

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
    def bytes_in_pause(self) -> int:
        """Bytes for which other members stood still."""
        return self._received[EARLY] if self._in_place else sum(self._received)

    @property
    def bytes_behind(self) -> int:
        """Bytes that came while they were at work."""
        return sum(self._received) - self.bytes_in_pause

    @property
    def complete(self) -> bool:
        """Everything is here."""
        return not self._open[LATE]

    def when_complete(self, then: Callable[[], None]) -> None:
        """Call this once, as soon as everything is here; never if it does not come."""
        with self._changed:
            self._then = then
            now = not self._open[LATE]
        if now:
            then()

    def settle(self) -> None:
        """Wait for the late part and put it in its place.

        Raises:
            Interrupted: the group broke before it was complete.
            FallowError: it arrived damaged.
        """
        self._wait(LATE)
        with torch.no_grad():
            for here, there in self._copies:
                here.copy_(there)
        self._copies = []

    def _wait(self, part: int) -> None:
        with self._group.waits(), self._changed:
            self._changed.wait_for(lambda: not self._open[part] or self._error is not None)
        if not self._open[part]:
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


def _outline(line: socket.socket, length: int, crc: int) -> bytes:
    text = receive(line, length)
    if zlib.crc32(text) != crc:
        raise FallowError("the outline arrived damaged", Exit.TEMPFAIL)
    return text
