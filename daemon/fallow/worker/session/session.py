"""The worker's conversation with the head.

Messages arrive on the link's thread and become facts behind one condition; the training thread reads the facts at the
turn of the loop. Everything that must get through is repeated with the beats until the head has reacted.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

import fallow
from fallow.model import (
    PROTOCOL,
    Abort,
    Beat,
    BeatAck,
    Checkpointed,
    CheckpointNoted,
    Commit,
    Dismiss,
    Exit,
    FallowError,
    FromWorker,
    Held,
    Interrupt,
    KvReply,
    OthersFinished,
    Outcome,
    Prepare,
    Refused,
    SaveCheckpoint,
    ToWorker,
    Welcome,
    WorkerHello,
    WorkerReady,
    WorkerSecret,
)
from fallow.worker.session.progress import Progress
from fallow.worker.session.questions import Questions
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import reap
from fallow.worker.transport.group import Group
from fallow.worker.transport.link_load import LinkLoad
from fallow.worker.transport.upcoming import Built, Upcoming

_HELLO_S = 1.0
"""Repeat the first message until the head answers."""

HEAD_SILENT_S = 5.0
"""A head that has said nothing for so long, though it answers each beat, will not release this worker in time."""

_UNSEEN = (
    "fallow: worker {worker}: {device} does not tell how far it is: {error}\n"
    "fallow: worker {worker}: until it does, a kernel that hangs there cannot be told from a wait for other members\n"
)

_DELIVER_AGAIN_S = 1.0
"""Repeat the last message of a process until the head has heard of it."""


class Channel(Protocol):
    """What the session needs of a ZeroMQ link."""

    last_heard: float
    "time.monotonic of the last message"

    def start(self) -> None: ...
    def send(self, message: FromWorker) -> None: ...
    def close(self) -> Any: ...


Connect = Callable[[Callable[[ToWorker], None], Callable[[], None]], Channel]


class Session:
    """One worker's side of the protocol.

    Args:
        worker: this worker's id.
        address: local address for process groups.
        connect: makes the link, given what to call for each message and after each new connection.
        grouped: its generations have a process group of ours; False: they are votes and commits alone.
        ports: on which process groups listen; None: the kernel chooses.
    """

    def __init__(
        self, worker: str, address: str, connect: Connect, *, grouped: bool = True, ports: range | None = None
    ) -> None:
        self.worker = worker
        self.progress = Progress()
        self.address = address
        self.ports = ports
        self._grouped = grouped
        self._device = devices.HOST
        self._changed = threading.Condition()
        self._welcome: Welcome | None = None
        self._term = 0
        self._next: Upcoming | None = None
        self._highest = 0
        self._taken = 0
        self._held: Held | None = None
        self._awaiting_since: float | None = None
        self._broken_upto = 0
        self._why_broken = ""
        self._current: Group | None = None
        self._peer_addresses: frozenset[str] = frozenset()
        "of the other members of the current generation"
        self._link_load = LinkLoad()
        self._retired: list[Group] = []
        self._ready: WorkerReady | None = None
        self._ready_seen = False
        self._end: FallowError | Dismissed | None = None
        "the head has ended this worker"
        self._others: OthersEnded | None = None
        self._deadline: float | None = None
        self.checkpoint_wanted = False
        "the head asks for one; False again once this member has begun it"
        self._warned = False
        self.checkpoint_due_at: float | None = None
        "when the next periodic one is due, on the monotonic clock, as the head has last told; None: it has not"
        self.checkpoint_given_up = 0, 0
        "(generation, step) of the last one that was not written, likewise"
        self._unnoted: dict[str, Checkpointed] = {}
        self._questions = Questions(self.send)
        self.ask = self._questions.ask
        self._acks = 0
        self.members_reached = 0, 0
        "where the members are in their data, as the head has last told"
        self.joins = False
        "members train already, as the head has last told"
        self.is_main = False
        "as long as this worker is in no generation: as the head has last told"
        self._closed = threading.Event()
        self._link = connect(self._on_message, lambda: self.send(self._hello()))

    # ------------------------------------------------------------------------------------------- life of the link

    def open(self, patience_s: float = 60.0) -> Welcome:
        """Say hello and wait for the answer.

        Raises:
            FallowError: the head refused, or did not answer for `patience_s` seconds.
        """
        self._link.start()
        threading.Thread(target=self._beats, name="fallow-beats", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._welcome or self._end, patience_s)
            self._raise_end()
            if self._welcome is None:
                raise FallowError(
                    f"worker {self.worker}: the head did not answer for {patience_s:g} s; see `fallow doctor`",
                    Exit.TEMPFAIL,
                )
            return self._welcome

    def close(self) -> None:
        """Stop beats and link."""
        self._closed.set()
        self._questions.give_up(self._highest)
        self._link.close()

    def send(self, message: FromWorker) -> None:
        """Send once; thread-safe."""
        self._link.send(message)

    def deliver(self, message: FromWorker, timeout_s: float) -> None:
        """Send until the head shows that it is alive, by an answer to a beat sent afterwards, at most `timeout_s`.

        Repeated, because of what is sent while the head is away only the newest is kept; the head takes each message
        of an end once.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            seen = self._acks
        while (left := end - time.monotonic()) > 0:
            self.send(message)
            self.beat()
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._acks > seen or self._end is not None, min(left, _DELIVER_AGAIN_S)
                ):
                    return

    @property
    def deadline_in_s(self) -> float | None:
        """Seconds until this node goes away, as the head last said; None: unknown."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def warn(self) -> None:
        """Slurm says that this node goes away. Safe in a signal's handler."""
        self._warned = True

    def leaves_alone(self, margin_s: float) -> bool:
        """True if this node goes away and no head is there to release this worker.

        Args:
            margin_s: without a warning by Slurm it leaves so long before the end that the head last told.
        """
        if time.monotonic() - self._link.last_heard < HEAD_SILENT_S:
            return False
        left_s = self.deadline_in_s
        return self._warned or (left_s is not None and left_s < margin_s)

    def _beats(self) -> None:
        while not self._closed.is_set():
            welcome = self._welcome
            if welcome is None:
                self.send(self._hello())
            else:
                self.progress.busy_links = self._link_load.measure(self._peer_addresses)
                self.beat()
            self._closed.wait(_HELLO_S if welcome is None else welcome.beat_s)

    def _look_at_device(self, device: torch.device) -> None:
        welcome, is_reported = self._welcome, False
        while welcome is not None and not self._closed.wait(welcome.beat_s):
            try:
                devices.enter(device)
                if self._current is not None:
                    self._current.device_progress.look(device)
            except Exception as error:  # whatever it is, the next look may succeed
                if not is_reported:
                    sys.stderr.write(_UNSEEN.format(worker=self.worker, device=device, error=error))
                is_reported = True

    def _hello(self) -> WorkerHello:
        return WorkerHello(
            worker=self.worker,
            protocol=PROTOCOL,
            pid=os.getpid(),
            version=fallow.__version__,
            torch=str(torch.__version__),
            address=self.address,
            generation=self.progress.generation,
            step=self.progress.step,
        )

    def beat(self) -> None:
        """Tell the head how the training gets on, and whatever it has not reacted to; thread-safe."""
        # In one piece: sent after a vote that it does not know of, it would tell the head that this worker has missed
        # the commit, and a group that stands would be rebuilt.
        with self._changed:
            upcoming = self._next
            standing = upcoming.prepare.generation if upcoming and upcoming.standing else self._taken
            group = self._current
            doing, stalled_s = self.progress.doing(group, self._awaiting_since)
            self.send(
                Beat(
                    worker=self.worker,
                    prepared=standing,
                    held=self._held is not None,
                    doing=doing,
                    stalled_s=stalled_s,
                    computes=group is not None and group.device_progress.computes,
                    **self.progress.told(),
                )
            )
            self._report_held()
            for written in list(self._unnoted.values()):
                self.send(written)
            if self._ready is not None and not self._ready_seen and upcoming is None:
                self.send(self._ready)

    # ------------------------------------------------------------------------------------------- what the head says

    def _on_message(self, message: ToWorker) -> None:
        with self._changed:
            term = getattr(message, "term", self._term)
            if term < self._term:
                return  # a head that was replaced
            self._term = term
            match message:
                case Welcome():
                    self._welcome = message
                    self._learn(message)
                case Prepare():
                    self._on_prepare(message)
                case Commit():
                    if self._next is not None and self._next.prepare.generation == message.generation:
                        self._next.committed = True
                case Abort():
                    if self._next is not None and self._next.prepare.generation == message.generation:
                        self._drop_next(message.reason)
                case Interrupt():
                    self._break(message.generation, message.reason)
                case BeatAck():
                    self._acks += 1
                    self._ready_seen = message.ready
                    self._learn(message)
                    if message.deadline_in_s is not None:
                        self._deadline = time.monotonic() + message.deadline_in_s
                    self.checkpoint_given_up = message.checkpoint_given_up
                case SaveCheckpoint():
                    self.checkpoint_wanted = True
                case CheckpointNoted():
                    self._unnoted.pop(message.path, None)
                case Dismiss():
                    self._end = Dismissed(message)
                    self._break(self._highest, message.reason)
                case OthersFinished():
                    self._others = OthersEnded(message)
                    self._break(self._highest, "the others have finished")
                case Refused():
                    self._end = FallowError(message.message, exit_code(message.code))
                    self._break(self._highest, message.message)
                case KvReply():
                    self._questions.answer(message)
            self._changed.notify_all()

    def _learn(self, message: Welcome | BeatAck) -> None:
        self.is_main, self.joins, self.members_reached = message.main, message.joins, message.reached
        if message.checkpoint_in_s is not None:
            self.checkpoint_due_at = time.monotonic() + message.checkpoint_in_s

    def _on_prepare(self, prepare: Prepare) -> None:
        known = self._next
        if known is not None and known.prepare.generation == prepare.generation:
            self._vote(known)
            return
        if prepare.generation <= self._highest:
            return
        self._drop_next("superseded")
        self._highest = prepare.generation
        if prepare.interrupt:
            self._break(prepare.replaces, "the head replaces this generation")
        ranks = [rank for rank, peer in enumerate(prepare.members) if peer.worker == self.worker]
        self._next = Upcoming(prepare, ranks[0] if ranks else None)
        threading.Thread(
            target=self._build, args=(self._next,), name=f"build-{prepare.generation}", daemon=True
        ).start()

    def _drop_next(self, reason: str) -> None:
        dropped, self._next = self._next, None
        if dropped is None:
            return
        if self._grouped:  # else nobody asks about it, but about the current one
            self._questions.give_up(dropped.prepare.generation)
        dropped.drop(reason)

    def _break(self, generation: int, reason: str) -> None:
        if generation > self._broken_upto:
            self._broken_upto, self._why_broken = generation, reason
        if self._current is not None and self._current.generation <= self._broken_upto:
            self._current.interrupt(reason)

    def _build(self, upcoming: Upcoming) -> None:
        holds = self.progress.generation > 0
        built = Built()
        if self._grouped:
            built = upcoming.build(
                self.worker, self.address, self.ask, holds=holds, device=self._device, ports=self.ports
            )
        with self._changed:
            wanted = self._next is upcoming
            if wanted:
                upcoming.built = built
                self._changed.notify_all()
        if wanted:
            self._vote(upcoming)
        else:
            built.drop("superseded")

    def _vote(self, on: Upcoming) -> None:
        vote = on.vote(self.worker)
        if vote is not None:
            self.send(vote)

    # ------------------------------------------------------------------------------------------- the training thread

    def announce(self, ready: WorkerReady, device: torch.device = devices.HOST) -> None:
        """Rehearsal done; repeated with the beats until the head has noted it.

        Args:
            ready: what the head is told.
            device: of the parameters; groups are made for it from now on.
        """
        if devices.asynchronous(device) and self._device == devices.HOST:
            threading.Thread(target=self._look_at_device, args=(device,), name="fallow-device", daemon=True).start()
        self._ready, self._device = ready, device
        self.send(ready)

    def hold(self, generation: int, reason: str) -> None:
        """The group of `generation` is broken; repeated with the beats until the head has heard of it."""
        self._held = Held(worker=self.worker, generation=generation, step=self.progress.step, reason=reason)
        self._report_held()

    def _report_held(self) -> None:
        # Not where the head itself interrupted that generation: it would take it for another break.
        held = self._held
        if held is not None and held.generation > self._broken_upto:
            self.send(held)

    @property
    def switch_offered(self) -> int:
        """Number of the next generation once it is committed and its group stands here; 0: there is none."""
        upcoming = self._next
        return upcoming.prepare.generation if upcoming and upcoming.committed and upcoming.standing else 0

    @property
    def superseded(self) -> bool:
        """The generation that was taken is over: a newer one is committed, or the head has ended it or this worker."""
        return self.switch_offered > 0 or self._broken_upto >= self._taken or self._end is not None

    @property
    def ended(self) -> bool:
        """The head has ended this worker."""
        return self._end is not None

    @property
    def patience_s(self) -> float:
        """For how long a silent head is waited for."""
        return self._welcome.head_patience_s if self._welcome is not None else 0.0

    def announce_checkpoint(self, written: Checkpointed) -> None:
        """It is complete; repeated with the beats until the head has noted it."""
        with self._changed:
            self._unnoted[written.path] = written
        self.send(written)

    def await_commit(
        self, meanwhile: Callable[[], bool], answers: Callable[[Prepare], bool] = lambda _: False
    ) -> Upcoming:
        """Wait until a newer generation is committed and its group stands, then make it the current one.

        Args:
            meanwhile: called again and again, at once where it returns True.
            answers: True if a generation's announcement tells what this worker waits for.

        Raises:
            Answered: it does; the generation is left for the next call.
            FallowError: the head was silent for its whole patience, or ended this worker; or the device does not get
                rid of the group before (`Group.retire`).
        """
        self._awaiting_since = time.monotonic()
        try:
            taken, old = self._take_committed(meanwhile, answers)
        finally:
            self._awaiting_since = None
            self.progress.move()
        if old is not None:
            old.retire()
            self._retired.append(old)
        return taken

    def _take_committed(
        self, meanwhile: Callable[[], bool], answers: Callable[[Prepare], bool]
    ) -> tuple[Upcoming, Group | None]:
        busy, waiting_since = True, time.monotonic()
        with self._changed:
            while True:
                taken, is_committed = self._next, self.switch_offered > 0
                if not is_committed:
                    self._raise_end()
                if taken is not None and taken.prepare.outcome is not None and answers(taken.prepare):
                    self._held = None
                    raise Answered(taken.prepare.outcome)
                if taken is not None and is_committed:
                    break
                left = self.patience_s - (time.monotonic() - max(self._link.last_heard, waiting_since))
                if left <= 0:
                    raise FallowError(
                        f"worker {self.worker}: the head was silent for {self.patience_s:g} s while this worker waited "
                        "for a new generation; state is in the newest checkpoint",
                        Exit.TEMPFAIL,
                    )
                if not busy:
                    self._changed.wait(min(left, 1.0))
                if not self.switch_offered:
                    self._changed.release()  # messages arrive while something else is done
                    try:
                        busy = meanwhile()
                    finally:
                        self._changed.acquire()
            self._next = None
            self._taken = taken.prepare.generation
            self._peer_addresses = frozenset(peer.address for peer in taken.prepare.members) - {self.address}
            # What it waits for from here on are the new generation's members.
            self._held = None
            old, self._current = self._current, taken.group
            if taken.group is not None and taken.prepare.generation <= self._broken_upto:
                taken.group.interrupt(self._why_broken)
        return taken, old

    def reap_retired(self) -> None:
        """Take down the groups of earlier generations, which costs time that the pause need not wait for."""
        while self._retired:
            reap(self._retired.pop())

    def _raise_end(self) -> None:
        end = self._end or self._others
        if end is not None:
            raise end


def connection(secret: WorkerSecret) -> Connect:
    """Makes the link that an agent's secret is for."""
    from fallow.wire.link import Link

    keys = secret.endpoint, secret.server_key, secret.public_key, secret.secret_key
    head_file = Path(secret.head_file) if secret.head_file else None
    return lambda on_message, on_connect: Link(*keys, ToWorker, on_message, head_file, on_connect=on_connect)


class Dismissed(Exception):
    """The head does not need this worker any more."""

    def __init__(self, message: Dismiss) -> None:
        super().__init__(message.reason)
        self.code = message.code
        self.reason = message.reason


class Answered(Exception):
    """What this worker waits for was complete on a member that is gone."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("complete on a member that is gone")
        self.agreed = outcome.agreed
        self.answer = outcome.answer


class OthersEnded(FallowError):
    """The others' scripts have ended, and this one waits for them: for the last time, or wrongly."""

    def __init__(self, message: OthersFinished) -> None:
        super().__init__(
            f"the other members' scripts have ended at step {message.steps} while this one waits for them; every "
            "member has to make the same run.updates, run.mean and run.barrier calls: no `if run.is_main` around them",
            Exit.DATA,
        )
        self.agreed = message.agreed
        self.answer = message.answer


def exit_code(code: int) -> Exit:
    """The documented exit code of that number, or that of a mistake in the software."""
    try:
        return Exit(code)
    except ValueError:
        return Exit.SOFTWARE
