"""The worker's conversation with the head, through the node's agent.

Messages arrive on the channel's thread and become facts behind one condition; the training thread reads the facts at
the turn of the loop. What this worker says is its whole status, with every beat and as soon as a fact has changed.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from fallow.core.checks.network import data_address, port_range
from fallow.core.membership.messages import Contract, Gathered, Order, Unreadable
from fallow.core.protocol import BeatReply, HeadSilence, Setup, Start, ToWorker
from fallow.model import Doing, Exit, FallowError
from fallow.wire.address import interfaces
from fallow.wire.frames import AgentChannel
from fallow.worker.session.head_status import HeadStatus
from fallow.worker.session.orders import Answered, Dismissed, Orders, OthersEnded
from fallow.worker.session.status import Progress, Statement
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import Upcoming
from fallow.worker.transport.groups import Groups
from fallow.worker.transport.rendezvous import AgentGathers

_LONGEST_REASON = 1000
"""Characters."""

_LAST_WORDS_S = 5.0
"""Seconds that the last status may take to reach the agent."""

_LOST_S, _LATE_S = 0.3, 5.0
"""After the other members' scripts have ended: seconds that a worker still waits for a new generation, and for the
other members, before it ends, too."""


Connect = Callable[[Callable[[ToWorker], None], Callable[[str], None]], AgentChannel]


class Session:
    """One worker's side of the protocol.

    Args:
        connect: makes the channel to the agent, given what to call for each message, and when no more will come.
        grouped: generations have a Fallow process group; False: only votes and commits.
    """

    def __init__(self, connect: Connect, *, grouped: bool = True) -> None:
        self.progress = Progress()
        self.head_status = HeadStatus()
        self._grouped = grouped
        self._changed = threading.Condition()
        "guards orders and groups, and is notified of whatever comes from the head"
        self._start: Start | None = None
        self._failure: FallowError | None = None
        "why this worker cannot take part"
        self._statement = Statement()
        self._closed = threading.Event()
        self._channel = connect(self._on_message, self._on_end)
        # Placeholders until the first message says who this worker is.
        self.orders = Orders(0, 0)
        self.groups = Groups("", None)
        self._current: Upcoming | None = None
        "the generation that this worker has entered last"

    # ------------------------------------------------------------------------------------------------ begin and end

    def open(self, patience_s: float = 60.0) -> None:
        """Wait until the agent has said who this worker is, and how the run stands.

        Raises:
            FallowError: it did not within `patience_s` seconds, or this worker cannot take part.
        """
        self._channel.start()
        with self._changed:
            self._changed.wait_for(lambda: self._failure or (self._start and self.head_status.is_known), patience_s)
            if self._failure is not None:
                raise self._failure
            if self._start is None or not self.head_status.is_known:
                raise FallowError(
                    f"the node's agent did not answer for {patience_s:g} s; see `fallow doctor`", Exit.TEMPFAIL
                )
        threading.Thread(target=self._beats, name="fallow-beats", daemon=True).start()

    def close(self) -> None:
        """Send what was not sent yet, and close the channel."""
        with self._changed:
            self._closed.set()
            self._close_gathers()
        self._channel.close(_LAST_WORDS_S)

    @property
    def start(self) -> Start:
        """Who this worker is."""
        assert self._start is not None, "the session is not open"
        return self._start

    @property
    def worker(self) -> str:
        """Name of this worker."""
        return self.start.worker

    @property
    def setup(self) -> Setup:
        """Settings that do not change during the run."""
        return self.start.setup

    # -------------------------------------------------------------------------------------------- what is said

    def say(self, **facts: Any) -> None:
        """Set fields of `Status` and send them at once. Thread-safe."""
        with self._changed:
            self._statement.say(**facts)
            self._speak()

    def note(self, **facts: Any) -> None:
        """Set fields of `Status` and send them with the next beat. For facts that change often."""
        with self._changed:
            self._statement.say(**facts)

    def announce(self, contract: Contract, device: torch.device = devices.HOST) -> None:
        """Rehearsal done.

        Args:
            contract: what the head is told.
            device: of the parameters; groups are made for it from now on.
        """
        if devices.asynchronous(device) and self.groups.device == devices.HOST:
            find = lambda: None if (group := self.groups.current) is None else group.device_progress  # noqa: E731
            devices.watch_device(self.worker, device, self.setup.beat_s, find, self._closed)
        self.groups.device = device
        self.say(ready=contract)

    def hold(self, generation: int, reason: str) -> None:
        """Report that the group of `generation` is broken and that this worker has stopped.

        Args:
            generation: the current generation.
            reason: why the group broke; not reported if the head has given the generation up.
        """
        with self._changed:
            if generation > self.orders.given_up_generation:
                self._statement.say(break_reason=reason[:_LONGEST_REASON])
            self.orders.give_up(generation)
            self._speak()

    def leave(self, last: int, first_without: int) -> None:
        """Report that this worker has passed the boundary after which it is no member.

        Args:
            last: the last generation with this worker.
            first_without: the first generation without this worker; `last` if nobody has ordered it to leave.
        """
        with self._changed:
            self.orders.give_up(last)
            self._statement.say(passed_boundary=first_without)
            self._speak()

    def _speak(self) -> None:
        # Made and sent under one lock: an older status must not be sent after a newer one.
        self._channel.send(self._statement.status(self.orders, self.progress, self.groups))

    def _beats(self) -> None:
        while not self._closed.wait(self.setup.beat_s):
            self.groups.measure_links()
            with self._changed:
                try:
                    self._speak()
                except Unreadable as error:
                    sys.stderr.write(f"fallow: {self.worker}: {error.message}\n")
                if self._waits_in_vain():
                    self.groups.interrupt(self.orders.current_generation, "the others have finished")
                    self._changed.notify_all()

    # ------------------------------------------------------------------------------------------- what the head says

    def _on_message(self, message: ToWorker) -> None:
        with self._changed:
            match message:
                case Start():
                    self._begin(message)
                case Order():
                    self._obey(message)
                case BeatReply():
                    self.head_status.take(message)
                case HeadSilence():
                    self.head_status.note_silence(message.silent_s)
                case Gathered():
                    for gathers in self._gathers():
                        if gathers.generation == message.generation:
                            gathers.answer(message)
            self._changed.notify_all()

    def _on_end(self, reason: str) -> None:
        """The agent has ended, or cannot be understood: from now on the head is silent."""
        with self._changed:
            self._failure = FallowError(
                f"no more messages from the node's agent: {reason or 'it has ended'}", Exit.TEMPFAIL
            )
            self._changed.notify_all()

    def _begin(self, start: Start) -> None:
        network = start.setup.network
        try:
            address = data_address(interfaces(), start.address, network, os.environ)
        except FallowError as error:
            self._failure = error
            return
        ports = port_range(network.member_ports) if network.member_ports else None
        self.groups = Groups(address, ports)
        self.orders = Orders(start.node, start.slot)
        self.head_status.has_siblings = start.slots > 1
        self._start = start

    def _obey(self, order: Order) -> None:
        moves = self.orders.obey(order)
        self._statement.note(self.orders.newest_order.noted)
        reason = order.end.reason if order.end is not None else f"the head gives up generation {moves.interrupt}"
        self.groups.interrupt(moves.interrupt, reason)
        if moves.drop is not None:
            moves.drop.drop("the head has given it up")
        if moves.build is not None and not self._closed.is_set():
            moves.build.gathers = AgentGathers(self._channel.send, moves.build.generation)
            name = f"build-{moves.build.generation}"
            threading.Thread(target=self._build, args=(moves.build,), name=name, daemon=True).start()
        self._speak()

    def _gathers(self) -> list[AgentGathers]:
        """Gathers of the next generation and of the current one."""
        generations = self.orders.upcoming, self._current
        return [one.gathers for one in generations if one is not None and one.gathers is not None]

    def _close_gathers(self) -> None:
        for gathers in self._gathers():
            gathers.close()

    def _build(self, upcoming: Upcoming) -> None:
        groups = self.groups
        built = upcoming.build(groups.address, groups.device, groups.ports) if self._grouped else None
        with self._changed:
            upcoming.take(built)
            is_wanted = self.orders.upcoming is upcoming
            if is_wanted:
                self._changed.notify_all()
                self._speak()
        if not is_wanted:
            upcoming.drop("superseded")

    # -------------------------------------------------------------------------------------------- what is asked here

    @property
    def is_main(self) -> bool:
        """True if this worker is the main member, as the head last said. For workers in no generation."""
        return self.orders.newest_order.is_main and self.start.slot == 0

    @property
    def computed(self) -> int:
        """Last generation in which this worker has computed with the complete state; 0: none."""
        return self._statement.facts.generation

    # ---------------------------------------------------------------------------------------- the next generation

    def await_commit(
        self, meanwhile: Callable[[], bool], answers: Callable[[Upcoming], bool] = lambda _: False
    ) -> Upcoming:
        """Wait until a newer generation is committed and its group stands, then make it the current one.

        Args:
            meanwhile: called repeatedly, at once after it has returned True.
            answers: returns True if a plan has the answer for which this worker waits.

        Raises:
            Answered: a plan has the answer; the generation stays for the next call.
            Dismissed: the head has told this worker to end.
            FallowError: the head was silent for its whole patience, or others' scripts have ended.
        """
        since = self.progress.awaiting_since = time.monotonic()
        is_busy = True
        try:
            with self._changed:
                while True:
                    upcoming, is_offered = self.orders.upcoming, self.orders.switch_offered > 0
                    if not is_offered:
                        self._raise_end()
                    if upcoming is not None and upcoming.plan.outcome is not None and answers(upcoming):
                        raise Answered(upcoming.plan.outcome)
                    if is_offered:
                        return self._take()
                    left_s = self.setup.patience_s - min(self.head_status.silent_s, time.monotonic() - since)
                    if left_s <= 0:
                        raise FallowError(
                            f"worker {self.worker}: the head was silent for {self.setup.patience_s:g} s while this "
                            "worker waited for a new generation; state is in the newest checkpoint",
                            Exit.TEMPFAIL,
                        )
                    if not is_busy:
                        self._changed.wait(min(left_s, _LOST_S))
                    if not self.orders.switch_offered:
                        self._changed.release()  # messages arrive while something else is done
                        try:
                            is_busy = meanwhile()
                        finally:
                            self._changed.acquire()
        finally:
            self.progress.awaiting_since = None
            self.progress.move()

    def _take(self) -> Upcoming:
        upcoming = self.orders.take()
        self._close_gathers()
        self._current = upcoming
        self.groups.enter(upcoming)
        if upcoming.generation <= self.orders.given_up_generation:
            self.groups.interrupt(upcoming.generation, "the head has given it up")
        self._speak()
        return upcoming

    def _raise_end(self) -> None:
        order = self.orders.newest_order
        if order.end is not None:
            raise Dismissed(order.end)
        if order.finish is not None and self._waits_in_vain():
            raise OthersEnded(order.finish)

    def _waits_in_vain(self) -> bool:
        """True if the other members' scripts have ended while this member waits for them."""
        if self.orders.newest_order.finish is None or not self.orders.current_generation:
            return False
        doing, stalled_s = self.progress.doing(self.groups.current)
        patience_s = _LATE_S if self.progress.awaiting_since is None else _LOST_S
        return doing is Doing.WAITING and stalled_s > patience_s
