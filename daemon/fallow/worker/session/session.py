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
from fallow.worker.session.news import HeadNews
from fallow.worker.session.orders import Answered, Dismissed, Orders, OthersEnded
from fallow.worker.session.status import Progress, Statement
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import Upcoming
from fallow.worker.transport.groups import Groups
from fallow.worker.transport.rendezvous import AgentGathers

_LONGEST_REASON = 1000
"""Characters."""

_LAST_WORDS_S = 5.0
"""The agent gets what was said last within this, or it is stopped."""

_LOST_S, _LATE_S = 0.3, 5.0
"""Others' scripts have ended: for so long a worker waits for a new generation, and for them, before it ends, too. What
is on its way already takes less."""


Connect = Callable[[Callable[[ToWorker], None], Callable[[str], None]], AgentChannel]


class Session:
    """One worker's side of the protocol.

    Args:
        connect: makes the channel to the agent, given what to call for each message, and when no more will come.
        grouped: its generations have a process group of ours; False: they are votes and commits alone.
    """

    def __init__(self, connect: Connect, *, grouped: bool = True) -> None:
        self.progress = Progress()
        self.news = HeadNews()
        self._grouped = grouped
        self._changed = threading.Condition()
        "guards orders and groups, and is notified of whatever comes from the head"
        self._start: Start | None = None
        self._failure: FallowError | None = None
        "why this worker cannot even begin"
        self._statement = Statement()
        self._closed = threading.Event()
        self._channel = connect(self._on_message, self._on_end)
        # Of nobody, until the first message says who this worker is.
        self.orders = Orders(0, 0)
        self.groups = Groups("", None)
        self._taken: Upcoming | None = None
        "the generation that this worker has gone over to last"

    # ------------------------------------------------------------------------------------------------ begin and end

    def open(self, patience_s: float = 60.0) -> None:
        """Wait until the agent has said who this worker is, and how the run stands.

        Raises:
            FallowError: it did not within `patience_s` seconds, or this worker cannot take part.
        """
        self._channel.start()
        with self._changed:
            self._changed.wait_for(lambda: self._failure or (self._start and self.news.is_known), patience_s)
            if self._failure is not None:
                raise self._failure
            if self._start is None or not self.news.is_known:
                raise FallowError(
                    f"the node's agent did not answer for {patience_s:g} s; see `fallow doctor`", Exit.TEMPFAIL
                )
        threading.Thread(target=self._beats, name="fallow-beats", daemon=True).start()

    def close(self) -> None:
        """Say what was not said yet, and nothing more."""
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
        """Its name."""
        return self.start.worker

    @property
    def setup(self) -> Setup:
        """What does not change as long as the run lives."""
        return self.start.setup

    # -------------------------------------------------------------------------------------------- what is said

    def say(self, **facts: Any) -> None:
        """From now on these fields of `Status` are so; said at once. Thread-safe."""
        with self._changed:
            self._statement.say(**facts)
            self._speak()

    def note(self, **facts: Any) -> None:
        """The same, but said with the next beat: it changes often. For the training thread."""
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
        """The group of `generation` is broken, and this worker has stopped.

        Args:
            generation: the one at work.
            reason: why it broke; of no interest if the head has given the generation up.
        """
        with self._changed:
            if generation > self.orders.given_up:
                self._statement.say(break_reason=reason[:_LONGEST_REASON])
            self.orders.give_up(generation)
            self._speak()

    def leave(self, last: int, left: int) -> None:
        """This worker has passed the boundary behind which it is no member.

        Args:
            last: the last generation with it.
            left: the first one without it; `last` if nobody has ordered it to leave.
        """
        with self._changed:
            self.orders.give_up(last)
            self._statement.say(passed_boundary=left)
            self._speak()

    def _speak(self) -> None:
        # Made and sent in one piece: a status that was made before another one must not be sent behind it.
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
                    self.groups.interrupt(self.orders.taken, "the others have finished")
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
                    self.news.take(message)
                case HeadSilence():
                    self.news.hear(message.silent_s)
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
        self._start = start

    def _obey(self, order: Order) -> None:
        moves = self.orders.obey(order)
        self._statement.note(self.orders.newest.noted)
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
        """Of the generation that comes next, and of the one at work."""
        known = self.orders.upcoming, self._taken
        return [one.gathers for one in known if one is not None and one.gathers is not None]

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
        """As long as this worker is in no generation: it is the main one, as the head last said."""
        return self.orders.newest.is_main and self.start.slot == 0

    @property
    def computed(self) -> int:
        """The generation in which this worker has computed last, with the whole state; 0: in none."""
        return self._statement.facts.generation

    # ---------------------------------------------------------------------------------------- the next generation

    def await_commit(
        self, meanwhile: Callable[[], bool], answers: Callable[[Upcoming], bool] = lambda _: False
    ) -> Upcoming:
        """Wait until a newer generation is committed and its group stands, then make it the current one.

        Args:
            meanwhile: called again and again, at once where it returns True.
            answers: True if a plan tells what this worker waits for.

        Raises:
            Answered: it does; the generation is left for the next call.
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
                    left_s = self.setup.patience_s - min(self.news.silent_s, time.monotonic() - since)
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
        taken = self.orders.take()
        self._close_gathers()
        self._taken = taken
        self.groups.enter(taken)
        if taken.generation <= self.orders.given_up:
            self.groups.interrupt(taken.generation, "the head has given it up")
        self._speak()
        return taken

    def _raise_end(self) -> None:
        order = self.orders.newest
        if order.end is not None:
            raise Dismissed(order.end)
        if order.finish is not None and self._waits_in_vain():
            raise OthersEnded(order.finish)

    def _waits_in_vain(self) -> bool:
        """Others' scripts have ended, and this worker, a member, waits for them."""
        if self.orders.newest.finish is None or not self.orders.taken:
            return False
        doing, stalled_s = self.progress.doing(self.groups.current)
        patience_s = _LATE_S if self.progress.awaiting_since is None else _LOST_S
        return doing is Doing.WAITING and stalled_s > patience_s
