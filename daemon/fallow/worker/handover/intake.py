"""The receiver's end of a state transfer. `supply` is the donor's end and describes the protocol."""

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from fallow.model import FallowError
from fallow.worker.handover.pieces import Damaged, receive_piece
from fallow.worker.handover.supply import ASK, EARLY_PART, HEAD, LATE_PART, MIDDLE_PART, PARTS, RECEIPT, Outline
from fallow.worker.prepared import state
from fallow.worker.prepared.checksum import checksum, fingerprint
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport import device
from fallow.worker.transport.group import Group
from fallow.worker.transport.stream import receive
from fallow.worker.transport.waits import Interrupted

_CHANGED = (
    "weights changed while they were sent to a new member: the script changes weights before a backward. The step is "
    "repeated, and from now on all weights are sent while no member computes"
)


class Changed(Interrupted):
    """The donors' weights changed before the receiver had all of them."""


class Intake:
    """Receives a piece of the state from each donor, on one thread per donor.

    The constructor returns once the outline has arrived.

    Args:
        group: the new generation's group.
        prepared: live objects.
        donors: rank that sends each piece.
        in_place: receive weights into the live weights, which are torn until the transfer ends. Otherwise no object
            changes before the whole state has arrived.

    Raises:
        Interrupted: the group broke.
        FallowError: the outline arrived damaged, or does not fit.
    """

    def __init__(self, group: Group, prepared: Prepared, donors: Sequence[int], *, in_place: bool) -> None:
        self._group = group
        self._prepared = prepared
        self._pieces = len(donors)
        self._in_place = in_place
        self._changed = threading.Condition()
        self._open = [self._pieces for _ in PARTS]
        "number of missing pieces, by part"
        self._received = [0 for _ in PARTS]
        "received bytes, by part"
        self._error: Exception | None = None
        self.completion = Future[None]()
        "complete once the whole state has arrived; never complete if the transfer fails"
        self._threads: list[threading.Thread] = []
        connection: socket.socket | None = None
        try:
            with group.waits():
                connection = group.streams.connect(donors[0])
                length, self._sum, more, sum_of_more = self._ask(connection, 0)
                text, self._extra = receive(connection, length), receive(connection, more)
                if (checksum(text), checksum(self._extra)) != (self._sum, sum_of_more):
                    raise Damaged
                connection.sendall(RECEIPT)
            self._lay_out(text)
        except Exception as error:
            failure = self._fail(error, f"state from rank {donors[0]}: {error}")
            if connection is not None:
                group.streams.drop(connection)
            raise failure from None
        for number, rank in enumerate(donors):
            arguments = rank, number, connection if number == 0 else None
            name = f"intake-{group.generation}"
            self._threads.append(threading.Thread(target=self._take, args=arguments, name=name, daemon=True))
            self._threads[-1].start()

    def _ask(self, connection: socket.socket, number: int) -> tuple[int, ...]:
        """Ask a donor for a piece; returns the fields of `HEAD`."""
        connection.sendall(ASK.pack(number, self._pieces))
        return HEAD.unpack(receive(connection, HEAD.size))

    def _lay_out(self, text: bytes) -> None:
        """Allocate memory for the state. On the calling thread, so that device memory belongs to its stream."""
        self._outline = outline = msgspec.msgpack.decode(text, type=Outline)
        place = state.reusable_tensors(self._prepared.weights() if self._in_place else [], outline.tensors)
        self.received = {id(tensor) for tensor in place.values()}
        "ids of the live tensors in the tree"
        self._device = self._prepared.device
        late_numbers = outline.parts[LATE_PART]  # in a separate block: the memory of the other tensors can be freed
        for numbers in (late_numbers, sorted(set(range(len(outline.tensors))) - {*late_numbers, *place})):
            specs = [outline.tensors[n] for n in numbers]
            place |= zip(numbers, state.allocate(specs, self._device), strict=True)
        self._tensors = [place[n] for n in range(len(outline.tensors))]
        self._memory = [[state.as_bytes(self._tensors[n]) for n in numbers] for numbers in outline.parts]
        "bytes of the tensors, by part"
        self._ready = device.event(self._device)
        "event after which the tensors may be written"
        self._received[EARLY_PART] += len(text)

    # ------------------------------------------------------------------------------------- one thread per donor

    def _take(self, rank: int, number: int, connection: socket.socket | None) -> None:
        part = EARLY_PART
        try:
            if connection is None:
                connection = self._group.streams.connect(rank)
                if self._ask(connection, number)[1] != self._sum:
                    raise FallowError(
                        f"generation {self._group.generation}: members with equal weights hold different optimizer or "
                        "other state; prepare everything that changes with the steps, and have one version of Fallow "
                        "on all nodes"
                    )
            device.enter(self._device)
            with device.side_stream(self._device, self._ready):
                for part in PARTS:
                    size = receive_piece(connection, self._memory[part], number, self._pieces, self._group.moved)
                    connection.sendall(RECEIPT)
                    self._count(part, size)
        except Exception as error:  # the training thread must learn of any error
            # The donor computes a checksum and sends afterwards: a wrong checksum means that its memory changed.
            failure = Changed(_CHANGED) if isinstance(error, Damaged) and part == MIDDLE_PART else error
            self._fail(failure, f"state from rank {rank}: {failure}")
        finally:
            if connection is not None:
                self._group.streams.drop(connection)

    def _count(self, part: int, size: int) -> None:
        with self._changed:
            self._received[part] += size
            if part == LATE_PART and self._open[LATE_PART] == 1:
                self.completion.set_result(None)  # before the wake-up: the training thread may enter a new generation
            self._open[part] -= 1
            self._changed.notify_all()

    def _fail(self, error: Exception, reason: str) -> Exception:
        """Interrupt the group; returns the error that ends this intake."""
        with self._changed:
            # Set before the interrupt: that closes the other threads' connections, whose errors mean nothing.
            if self._error is None:
                self._error = Interrupted(self._group.broken or reason) if isinstance(error, OSError) else error
            self._changed.notify_all()
        self._group.interrupt(reason)
        return self._error

    # --------------------------------------------------------------------------------------- the training thread

    def wait_weights(self) -> tuple[Any, bytes]:
        """Wait for all but the late part; returns the state's tree and extra state. `settle` waits for the late part.

        Raises:
            Changed: the donors' weights changed while they were sent.
            Interrupted: the group broke. The weights are torn if they were received in place.
            FallowError: the state arrived damaged, or the donors' states differ.
        """
        self._wait_for(lambda: not self._open[MIDDLE_PART if self._in_place else LATE_PART])
        return state.decode(self._outline.tree, self._tensors), self._extra

    def check(self, donors_fingerprint: int) -> None:
        """Compare the loaded weights with the donors' weights at the switch.

        Raises:
            Changed: the weights differ. The group is interrupted.
        """
        if self._memory[MIDDLE_PART] and fingerprint(self._prepared.weights()) != donors_fingerprint:
            self.give_up(_CHANGED)
            raise Changed(_CHANGED)

    def adopt(self, objects: dict[str, Any]) -> None:
        """Make sure that late tensors reach the live optimizers. Call after the tree was loaded.

        An optimizer adopts a tensor if device and type match those of its parameter. Otherwise it copies the tensor,
        perhaps before the tensor has arrived. Then this waits for the late part and loads the tree again.
        """
        live = {id(tensor) for tensor in self._prepared.optimizer_tensors()}
        if any(id(self._tensors[n]) not in live for n in self._outline.parts[LATE_PART]):
            self.settle()
            self._prepared.load(objects, self.received)

    @property
    def bytes_in_pause(self) -> int:
        """Bytes that arrived while the other members paused."""
        return self._received[EARLY_PART] if self._in_place else sum(self._received)

    @property
    def bytes_behind(self) -> int:
        """Bytes that arrived while the other members computed."""
        return sum(self._received) - self.bytes_in_pause

    @property
    def is_complete(self) -> bool:
        """True once the whole state has arrived."""
        return not self._open[LATE_PART]

    def settle(self) -> None:
        """Wait for the late part.

        Raises:
            Interrupted: the group broke before the part was complete.
            FallowError: the part arrived damaged.
        """
        self._wait_for(lambda: self.is_complete)

    def _wait_for(self, has_arrived: Callable[[], bool]) -> None:
        with self._group.waits(), self._changed:
            self._changed.wait_for(lambda: has_arrived() or self._error is not None)
        if not has_arrived():
            self._end_threads()
            assert self._error is not None
            raise self._error

    def give_up(self, why: str = "given up") -> None:
        """End an incomplete intake and interrupt its group."""
        self._group.interrupt(why)
        self._end_threads()

    def _end_threads(self) -> None:
        """Join all threads, so that none writes to the tensors any more. The sockets are closed already."""
        for thread in self._threads:
            thread.join()
