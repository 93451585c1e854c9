"""One start of a node's workers, from the first process to the end of the last.

The workers of a node belong together, and the first of them that ends decides. If it has not come to the end of its
script, was not asked to leave and was not told to end, the others are killed at once. If it has ended in order, the
others may take as long as their scripts need: the main worker evaluates and saves. They have `EXIT_S` to end once all
of them have come to their last words, and `GRACE_S` once one has failed. How the node has ended is how that first
worker has.
"""

import asyncio
import contextlib
import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass

from fallow.agent.launch import Launch
from fallow.agent.merge import Facts, NodeGathers
from fallow.agent.worker import Worker
from fallow.core.membership.messages import End, Gather, Gathered, Order, Report
from fallow.core.membership.names import worker_name
from fallow.core.protocol import Ended, Heard, News, Part, Setup, Start
from fallow.model import STACK_SIGNAL

GRACE_S = 30.0
"A worker has so long to end once another one of its node has failed, or has ended as all had to."
EXIT_S = 300.0
"The same once all workers of the node have ended or said their last words. Libraries may still upload their logs."
KILL_AFTER_S = 5.0
"A worker that is ordered to end has so long to do it by itself."
STACK_S = 3.0
"A worker that hangs has so long to write its stack before it is killed."
TAIL_S = 5.0
"The last output of workers that have ended is waited for at most so long: their logs may be on a slow disk."


class Crew:
    """One start of workers. To be made in the main thread, in the agent's loop, where all methods are called.

    Args:
        node: number that the head has given to them.
        setup: from the head.
        launch: how workers are started.
        news: the newest.
        order: the newest for this node.
        on_change: called when something changes in the `facts`.
        on_gather: called with what the head has to gather.
        on_end: called once, when all have ended.

    Raises:
        OSError: no more files can be opened; no worker is left.
    """

    def __init__(
        self,
        node: int,
        setup: Setup,
        launch: Launch,
        news: News | None,
        order: Order | None,
        *,
        on_change: Callable[[], None],
        on_gather: Callable[[Gather], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_change, self._on_gather, self._on_end = on_change, on_gather, on_end
        self._loop = asyncio.get_running_loop()
        self._workers: list[Worker] = []
        "by slot"
        self._order = order
        self._gathers = NodeGathers(node, launch.slots)
        self._ending = _Ending()
        self._killing: asyncio.TimerHandle | None = None
        try:
            for slot in range(launch.slots):
                start = Start(
                    worker=worker_name(node, slot, launch.slots),
                    node=node,
                    slot=slot,
                    slots=launch.slots,
                    address=launch.address,
                    setup=setup,
                )
                worker = Worker(
                    launch,
                    start,
                    shown=self._is_shown(slot),
                    on_change=self._on_change,
                    on_part=functools.partial(self._take_part, slot),
                    drained=self._drained,
                )
                self._workers.append(worker)
                for message in (news, order):
                    if message is not None:
                        worker.channel.send(message)
        except OSError:  # of these workers nobody would know
            self.kill()
            raise
        self._loop.call_soon(self.look)  # they may not even have begun
        on_change()
        if order is not None and order.end is not None:
            self._obey_end(order.end)

    # -- what workers are told ----------------------------------------------------------------------------------------

    def tell(self, message: News | Heard | Gathered) -> None:
        """Tell it to all of them."""
        for worker in self._workers:
            worker.channel.send(message)

    def obey(self, order: Order) -> None:
        """Hand an order to all workers, unless it came before or a newer one did, and do the agent's part of it."""
        before = self._order
        if before is not None and (order.term, order.edition) <= (before.term, before.edition):
            return
        self._order = order
        for slot, worker in enumerate(self._workers):
            worker.output.shown = self._is_shown(slot)
            worker.channel.send(order)
        if order.end is not None:
            self._obey_end(order.end)

    def _obey_end(self, end: End) -> None:
        kill_after_s = KILL_AFTER_S
        if end.kill:
            kill_after_s = STACK_S if end.stack else 0.0
        if end.stack and not self._ending.is_ordered:
            for worker in self._workers:
                worker.process.send_signal(STACK_SIGNAL)  # it writes its stack to its log, if it still can
        self.end(kill_after_s)

    def _is_shown(self, slot: int) -> bool:
        return slot == 0 and self._order is not None and self._order.is_main

    # -- gathers ------------------------------------------------------------------------------------------------------

    def gather_again(self) -> None:
        """Say again what waits for the head's answer."""
        for gather in self._gathers.unanswered():
            self._on_gather(gather)

    def take_answer(self, gathered: Gathered) -> None:
        """The head has gathered the parts of all nodes."""
        if (answer := self._gathers.hear(gathered)) is not None:
            self.tell(answer)

    def _take_part(self, slot: int, part: Part) -> None:
        match self._gathers.take(slot, part):
            case Gather() as gather, _:
                self._on_gather(gather)
            case Gathered() as answer, slots:
                for slot in slots:
                    self._workers[slot].channel.send(answer)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Notice workers that have ended, were stopped or go on. To be called at SIGCHLD."""
        for worker in self._workers:
            if worker.look():
                self._note_end(worker)
        is_over = all(worker.process.has_ended or worker.is_orderly for worker in self._workers)
        if self._ending.decisive is not None and is_over and self.is_alive:
            self._kill_after(EXIT_S)

    def _note_end(self, worker: Worker) -> None:
        if not self._ending.note(worker):
            self.kill()
        elif not (worker.is_orderly and worker.is_clean):
            self._kill_after(GRACE_S)
        self._on_change()
        if not self.is_alive:
            self._loop.call_later(TAIL_S, self._end)
            self._end_if_drained()

    def _drained(self) -> None:
        """In the thread of a worker's output."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end_if_drained)

    def _end_if_drained(self) -> None:
        if not self.is_alive and not any(worker.output.is_alive() for worker in self._workers):
            self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, lambda: None
        if self._killing is not None:
            self._killing.cancel()
        on_end()

    def warn(self) -> None:
        """SIGTERM: Slurm takes this node, and no head is there to release the workers."""
        self._ending.is_wanted = True
        for worker in self._workers:
            worker.process.send_signal(signal.SIGTERM)

    def end(self, kill_after_s: float) -> None:
        """They are told to end: kill those that have not by then."""
        self._ending.is_wanted = self._ending.is_ordered = True
        self._kill_after(kill_after_s)

    def kill(self) -> None:
        """SIGKILL to all of them."""
        self._ending.is_wanted = self._ending.is_forced = True
        for worker in self._workers:
            worker.process.kill()

    def _kill_after(self, seconds: float) -> None:
        if seconds <= 0.0:
            self.kill()
        elif self._killing is None or self._killing.when() > self._loop.time() + seconds:
            if self._killing is not None:
                self._killing.cancel()
            self._killing = self._loop.call_later(seconds, self.kill)

    # -- how things stand ---------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """One of the workers has not ended."""
        return not all(worker.process.has_ended for worker in self._workers)

    @property
    def is_stopped(self) -> bool:
        """The process of one of the workers is stopped."""
        return any(worker.is_stopped for worker in self._workers)

    @property
    def waited_for(self) -> set[int]:
        """Processes whose end `look` asks for."""
        return set[int]().union(*(worker.process.waited_for for worker in self._workers))

    def facts(self) -> list[Facts]:
        """What is known of each worker, by slot; also of those that have ended."""
        return [worker.facts() for worker in self._workers]

    def ended(self, report: Report) -> Ended:
        """What the head is told when all have ended; `report` is the last one."""
        first = self._ending.decisive
        assert first is not None
        return Ended(
            node=report.node,
            boot=report.boot,
            code=first.process.code,
            signal=first.process.ended_by,
            tail=first.tail(),
            report=report,
            is_ordered=self._ending.was_ordered,
        )


@dataclass(slots=True)
class _Ending:
    """Which worker's end counts as the node's, and whether it was to be expected."""

    is_wanted: bool = False
    "no worker should go on"
    is_ordered: bool = False
    "an order says so"
    is_forced: bool = False
    "they were killed"
    was_ordered: bool = False
    "an order had said so before the first of them ended"
    decisive: Worker | None = None
    "the worker whose end counts; None: all run"

    def note(self, worker: Worker) -> bool:
        """A worker has ended. True: the others may end by themselves."""
        is_expected = self.is_wanted or worker.is_orderly
        if self.decisive is None:
            self.decisive, self.was_ordered = worker, self.is_ordered
        elif self.decisive.is_clean and not worker.is_clean and not (self.is_ordered or self.is_forced):
            self.decisive = worker  # a failure after the training says more than the success of another one
        self.is_wanted = True
        return is_expected
