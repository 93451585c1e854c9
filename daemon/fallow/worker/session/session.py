"""The worker's conversation with the head, through the node's agent.

Messages arrive on the channel's thread and become facts behind one condition; the training thread reads the facts at
the turn of the loop. What this worker says is its whole status, with every beat and as soon as a fact has changed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fallow.core.checks.network import data_address, port_range
from fallow.core.membership.messages import Checkpoint, Contract, Gathered, Order
from fallow.core.protocol.agents import News, Setup
from fallow.core.protocol.workers import FromWorker, Heard, Start, ToWorker
from fallow.model import Exit, FallowError
from fallow.wire.address import interfaces
from fallow.worker.session.device_watch import watch_device
from fallow.worker.session.gathering import Gathering
from fallow.worker.session.groups import Groups
from fallow.worker.session.news import HeadNews
from fallow.worker.session.orders import Orders
from fallow.worker.session.passage import Passage
from fallow.worker.session.progress import Progress
from fallow.worker.session.statement import Statement
from fallow.worker.transport import device as devices
from fallow.worker.transport.upcoming import Built, Upcoming

_LONGEST_REASON = 1000
"""Characters."""

_LAST_WORDS_S = 5.0
"""The agent gets what was said last within this, or it is stopped."""


class Channel(Protocol):
    """What the session needs of `wire.frames.AgentChannel`."""

    def start(self) -> None: ...
    def send(self, message: FromWorker) -> None: ...
    def close(self, flush_s: float) -> Any: ...


Connect = Callable[[Callable[[ToWorker], None], Callable[[str], None]], Channel]


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
        self._start: Start | None = None
        self._passage: Passage | None = None
        self._failure: FallowError | None = None
        "why this worker cannot even begin"
        self._statement = Statement()
        self._closed = threading.Event()
        self._channel = connect(self._on_message, self._on_end)
        self.gathering = Gathering(self._channel.send)
        # Of nobody, until the first message says who this worker is.
        self._orders = Orders(0, 0)
        self._groups = Groups(self.gathering, "", None, grouped=grouped)

    # ------------------------------------------------------------------------------------------------ begin and end

    def open(self, patience_s: float = 60.0) -> None:
        """Wait until the agent has said who this worker is, and how the run stands.

        Raises:
            FallowError: it did not within `patience_s` seconds, or this worker cannot take part.
        """
        self._channel.start()
        with self._changed:
            self._changed.wait_for(lambda: self._failure or (self._start and self.news.newest), patience_s)
            if self._failure is not None:
                raise self._failure
            if self._start is None or self.news.newest is None:
                raise FallowError(
                    f"the node's agent did not answer for {patience_s:g} s; see `fallow doctor`", Exit.TEMPFAIL
                )
        threading.Thread(target=self._beats, name="fallow-beats", daemon=True).start()

    def close(self) -> None:
        """Say what was not said yet, and nothing more."""
        self._closed.set()
        self.gathering.close()
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

    @property
    def address(self) -> str:
        """Local address for process groups."""
        return self._groups.address

    @property
    def ports(self) -> range | None:
        """On which process groups listen; None: the kernel chooses."""
        return self._groups.ports

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

    def say_saved(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete; said until the head has noted it."""
        with self._changed:
            self._statement.say_saved(checkpoint)
            self._speak()

    def announce(self, contract: Contract, device: torch.device = devices.HOST) -> None:
        """Rehearsal done.

        Args:
            contract: what the head is told.
            device: of the parameters; groups are made for it from now on.
        """
        if devices.asynchronous(device) and self._groups.device == devices.HOST:
            watch_device(self.worker, device, self.setup.beat_s, lambda: self._groups.current, self._closed)
        self._groups.device = device
        self.say(ready=contract)

    def hold(self, generation: int, reason: str) -> None:
        """The group of `generation` is broken, and this worker has stopped.

        Args:
            generation: the one at work.
            reason: why it broke; of no interest if the head has given the generation up.
        """
        with self._changed:
            if generation > self._orders.given_up:
                self._statement.say(break_reason=reason[:_LONGEST_REASON])
            self._orders.give_up(generation)
            self._speak()

    def leave(self, last: int, left: int) -> None:
        """This worker has passed the boundary behind which it is no member.

        Args:
            last: the last generation with it.
            left: the first one without it; `last` if nobody has ordered it to leave.
        """
        with self._changed:
            self._orders.give_up(last)
            self._statement.say(left=left)
            self._speak()

    def _speak(self) -> None:
        # Made and sent in one piece: a status that was made before another one must not be sent behind it.
        self._channel.send(self._statement.status(self._orders, self.progress, self._groups.current))

    def _beats(self) -> None:
        while not self._closed.wait(self.setup.beat_s):
            self.progress.busy_links = self._groups.busy_links()
            with self._changed:
                self._speak()
                if self._passage is not None and self._passage.waits_in_vain():
                    self._groups.interrupt(self._orders.taken, "the others have finished")
                    self._changed.notify_all()
            self.gathering.repeat()

    # ------------------------------------------------------------------------------------------- what the head says

    def _on_message(self, message: ToWorker) -> None:
        with self._changed:
            match message:
                case Start():
                    self._begin(message)
                case Order():
                    self._obey(message)
                case News():
                    self.news.take(message)
                case Heard():
                    self.news.hear(message.silent_s)
                case Gathered():
                    self.gathering.answer(message)
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
        self._groups = Groups(self.gathering, address, ports, grouped=self._grouped)
        self._orders = Orders(start.node, start.slot)
        self._passage = Passage(start, self._changed, self._orders, self._groups, self.news, self.progress, self._speak)
        self._start = start

    def _obey(self, order: Order) -> None:
        moves = self._orders.obey(order)
        self._statement.note(self._orders.newest.noted)
        reason = order.end.reason if order.end is not None else f"the head gives up generation {moves.interrupt}"
        self._groups.interrupt(moves.interrupt, reason)
        if moves.drop is not None:
            self._groups.drop(moves.drop, "the head has given it up")
        if moves.build is not None:
            upcoming = moves.build
            holds = self._statement.facts.has_state
            self._groups.build(upcoming, lambda built: self._take_built(upcoming, built), holds=holds)
        self._speak()

    def _take_built(self, upcoming: Upcoming, built: Built) -> None:
        with self._changed:
            is_wanted = self._orders.upcoming is upcoming
            if is_wanted:
                upcoming.built = built
                self._changed.notify_all()
                self._speak()
        if not is_wanted:
            built.drop("superseded")

    # -------------------------------------------------------------------------------------------- what is asked here

    @property
    def is_main(self) -> bool:
        """As long as this worker is in no generation: it is the main one, as the head last said."""
        return self._orders.newest.is_main and self.start.slot == 0

    @property
    def joins(self) -> bool:
        """Members train already, as the head last said."""
        return self.news.newest is not None and self.news.newest.joins

    @property
    def members_reached(self) -> tuple[int, int]:
        """Where the members are in their data, as the head last said."""
        return self.news.newest.reached if self.news.newest is not None else (0, 0)

    @property
    def computed(self) -> int:
        """The generation in which this worker has computed last, with the whole state; 0: in none."""
        return self._statement.facts.generation

    @property
    def checkpoint_given_up(self) -> tuple[int, int]:
        """(generation, step) of the run's last checkpoint that could not be written."""
        return self._orders.newest.unsaved

    @property
    def switch_offered(self) -> int:
        """Number of the next generation once it is committed and its group stands here; 0: there is none."""
        return self._orders.switch_offered

    @property
    def superseded(self) -> bool:
        """The generation that was taken is over: a newer one is committed, or it was given up, or this worker ends."""
        return self._orders.superseded

    @property
    def ended(self) -> bool:
        """The head has told this worker to end."""
        return self._orders.newest.end is not None

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
            FallowError: the head was silent for its whole patience, or others' scripts have ended; or the device does
                not get rid of the group before (`Group.retire`).
        """
        assert self._passage is not None, "the session is not open"
        return self._passage.await_commit(meanwhile, answers)

    def reap_retired(self) -> None:
        """Take down the groups of earlier generations, which costs time that the pause need not wait for."""
        self._groups.reap_retired()
