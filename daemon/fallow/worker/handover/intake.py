"""A receiver's end of the hand-over: see `supply`, which is the other end."""

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from fallow.model import FallowError
from fallow.worker.handover.pieces import Damaged, receive_piece
from fallow.worker.handover.supply import ASK, DONE, EARLY, HEAD, LATE, MIDDLE, PARTS, Outline
from fallow.worker.prepared import state
from fallow.worker.prepared.checksum import checksum, fingerprint
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport import device
from fallow.worker.transport.group import Group
from fallow.worker.transport.stream import receive
from fallow.worker.transport.waits import Interrupted

_CHANGED = (
    "weights changed while they were sent to a newcomer: the script changes them before a backward; the step is done "
    "again, and weights are sent inside the pause from now on"
)


class Changed(Interrupted):
    """The donors' weights did not stay as they were until the receiver had them."""


class Intake:
    """Takes a piece of the state from each donor, on a thread each. The outline is here when this returns.

    With `in_place` weights are received into the live ones, which are overwritten from here on. Without it nothing
    changes before everything has arrived.

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
        "pieces that are not here, by part"
        self._received = [0 for _ in PARTS]
        "bytes, by part"
        self._error: Exception | None = None
        self.completion = Future[None]()
        "done as soon as everything is here; never if it does not come"
        self._threads: list[threading.Thread] = []
        line: socket.socket | None = None
        try:
            with group.waits():
                line = group.streams.connect(donors[0])
                length, self._sum, more, sum_of_more = self._ask(line, 0)
                text, self._extra = receive(line, length), receive(line, more)
                if (checksum(text), checksum(self._extra)) != (self._sum, sum_of_more):
                    raise Damaged
                line.sendall(DONE)
            self._lay_out(text)
        except Exception as error:
            failure = self._fail(error, f"state from rank {donors[0]}: {error}")
            if line is not None:
                group.streams.drop(line)
            raise failure from None
        for number, rank in enumerate(donors):
            arguments = rank, number, line if number == 0 else None
            name = f"intake-{group.generation}"
            self._threads.append(threading.Thread(target=self._take, args=arguments, name=name, daemon=True))
            self._threads[-1].start()

    def _ask(self, line: socket.socket, number: int) -> tuple[int, ...]:
        """Ask a donor for a piece; returns what it says of the outline and of the extra state."""
        line.sendall(ASK.pack(number, self._pieces))
        return HEAD.unpack(receive(line, HEAD.size))

    def _lay_out(self, text: bytes) -> None:
        """Make room for the state: on this thread, so that memory of a device belongs to this thread's stream."""
        self._outline = outline = msgspec.msgpack.decode(text, type=Outline)
        place = state.reusable_tensors(self._prepared.weights() if self._in_place else [], outline.tensors)
        self.received = {id(tensor) for tensor in place.values()}
        "ids of the tree's tensors that are live ones"
        self._device = self._prepared.device
        late = outline.parts[LATE]  # in a block of its own: memory of the others can be freed
        for numbers in (late, sorted(set(range(len(outline.tensors))) - {*late, *place})):
            specs = [outline.tensors[n] for n in numbers]
            place |= zip(numbers, state.allocate(specs, self._device), strict=True)
        self._tensors = [place[n] for n in range(len(outline.tensors))]
        self._memory = [[state.as_bytes(self._tensors[n]) for n in numbers] for numbers in outline.parts]
        "the tensors' bytes, by part"
        self._ready = device.event(self._device)
        "behind it they may be written to"
        self._received[EARLY] += len(text)

    # ------------------------------------------------------------------------------------- one thread per donor

    def _take(self, rank: int, number: int, line: socket.socket | None) -> None:
        part = EARLY
        try:
            if line is None:
                line = self._group.streams.connect(rank)
                if self._ask(line, number)[1] != self._sum:
                    raise FallowError(
                        f"generation {self._group.generation}: members with equal weights hold different optimizer or "
                        "other state; prepare everything that changes with the steps, and have one version of Fallow "
                        "on all nodes"
                    )
            device.enter(self._device)
            with device.side_stream(self._device, self._ready):
                for part in PARTS:
                    got = receive_piece(line, self._memory[part], number, self._pieces, self._group.moved)
                    line.sendall(DONE)
                    self._count(part, got)
        except Exception as error:  # whatever it is, the training thread must hear of it
            # Each sum was taken before the donor's memory changed.
            failure = Changed(_CHANGED) if isinstance(error, Damaged) and part == MIDDLE else error
            self._fail(failure, f"state from rank {rank}: {failure}")
        finally:
            if line is not None:
                self._group.streams.drop(line)

    def _count(self, part: int, got: int) -> None:
        with self._changed:
            self._received[part] += got
            if part == LATE and self._open[LATE] == 1:
                self.completion.set_result(None)  # first: then the training thread may enter another generation
            self._open[part] -= 1
            self._changed.notify_all()

    def _fail(self, error: Exception, reason: str) -> Exception:
        """Break the group; returns why this intake ends."""
        with self._changed:
            # Before the interruption, which ends the other threads' lines: theirs would be errors of no meaning.
            if self._error is None:
                self._error = Interrupted(self._group.broken or reason) if isinstance(error, OSError) else error
            self._changed.notify_all()
        self._group.interrupt(reason)
        return self._error

    # --------------------------------------------------------------------------------------- the training thread

    def wait_weights(self) -> tuple[Any, bytes]:
        """The state's tree and extra state, once all but the late part is here; `settle` fills its late tensors.

        Raises:
            Changed: what came of the middle part is torn.
            Interrupted: the group broke. The weights are torn if they were received in place.
            FallowError: what came is damaged, or the donors differ.
        """
        self._wait_for(lambda: not self._open[MIDDLE if self._in_place else LATE])
        return state.decode(self._outline.tree, self._tensors), self._extra

    def check(self, theirs: int) -> None:
        """The tree was loaded: compare the weights with those that the donors had at the switch.

        Raises:
            Changed: they differ. The group is broken, and nothing comes any more.
        """
        if self._memory[MIDDLE] and fingerprint(self._prepared.weights()) != theirs:
            self.give_up(_CHANGED)
            raise Changed(_CHANGED)

    def adopt(self, objects: dict[str, Any]) -> None:
        """The tree was loaded: see to it that late tensors reach the live optimizers.

        An optimizer takes over the very tensor, if that lies on its parameter's device, in its type. Where one was
        copied, perhaps before it had arrived, all is waited for and loaded again.
        """
        live = {id(tensor) for tensor in self._prepared.optimizer_tensors()}
        if any(id(self._tensors[n]) not in live for n in self._outline.parts[LATE]):
            self.settle()
            self._prepared.load(objects, self.received)

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

    def settle(self) -> None:
        """Wait for the late part.

        Raises:
            Interrupted: the group broke before it was complete.
            FallowError: it arrived damaged.
        """
        self._wait_for(lambda: self.complete)

    def _wait_for(self, here: Callable[[], bool]) -> None:
        with self._group.waits(), self._changed:
            self._changed.wait_for(lambda: here() or self._error is not None)
        if not here():
            self._end_threads()
            assert self._error is not None
            raise self._error

    def give_up(self, why: str = "given up") -> None:
        """End an intake that is not complete, because its group is of no use."""
        self._group.interrupt(why)
        self._end_threads()

    def _end_threads(self) -> None:
        """The sockets are shut: no thread writes to this memory after it has ended."""
        for thread in self._threads:
            thread.join()
