"""One start of a node's workers, from the start of the first process to the end of the last one.

The first worker that ends decides for the node, and its exit status is the node's:
- It failed (its script was not at the end, and nobody had asked it to leave or to end): the others are killed at once.
- It ended in order: the others may take as long as their scripts need, since the main worker evaluates and saves.
  Once all workers have reached the end of their scripts they have `EXIT_S` to exit, and `GRACE_S` once one has failed.
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
from fallow.core.protocol import BeatReply, Ended, HeadSilence, Part, Setup, Start
from fallow.model import STACK_SIGNAL

GRACE_S = 30.0
"Time for a worker to end after another worker of its node has failed."
EXIT_S = 300.0
"Time for a worker to exit once all workers of the node are at the end of their scripts. Libraries may upload logs."
KILL_AFTER_S = 5.0
"Time for a worker to end by itself after an order to end."
STACK_S = 3.0
"Time for a worker that hangs to write its stack before it is killed."
TAIL_S = 5.0
"Maximum time to wait for the last output of workers that have ended: their logs may be on a slow disk."


class Crew:
    """One start of workers. Create it, and call its methods, in the agent's event loop in the main thread.

    Args:
        node: node number that the head has given to the workers.
        setup: the head's settings for this run.
        launch: command and environment of the workers.
        beat_reply: the head's newest answer to a beat.
        order: newest order for this node.
        on_change: called when the `facts` change.
        on_gather: called with each gather for the head.
        on_end: called once, when all workers have ended.

    Raises:
        OSError: the limit on open files is reached; no worker runs.
    """

    def __init__(
        self,
        node: int,
        setup: Setup,
        launch: Launch,
        beat_reply: BeatReply | None,
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
                    is_shown=self._is_shown(slot),
                    on_change=self._on_change,
                    on_part=functools.partial(self._take_part, slot),
                    on_drained=self._note_drained,
                )
                self._workers.append(worker)
                for message in (beat_reply, order):
                    if message is not None:
                        worker.channel.send(message)
        except OSError:  # the head would not know of these workers
            self.kill()
            raise
        self._loop.call_soon(self.look)  # a process may have failed to start
        on_change()
        if order is not None and order.end is not None:
            self._obey_end(order.end)

    # -- messages to workers ------------------------------------------------------------------------------------------

    def tell(self, message: BeatReply | HeadSilence | Gathered) -> None:
        """Send a message to all workers."""
        for worker in self._workers:
            worker.channel.send(message)

    def obey(self, order: Order) -> None:
        """Pass a new order to all workers and do the agent's part of it. Old and repeated orders are ignored."""
        before = self._order
        if before is not None and (order.term, order.edition) <= (before.term, before.edition):
            return
        self._order = order
        for slot, worker in enumerate(self._workers):
            worker.output.is_shown = self._is_shown(slot)
            worker.channel.send(order)
        if order.end is not None:
            self._obey_end(order.end)

    def _obey_end(self, end: End) -> None:
        kill_after_s = KILL_AFTER_S
        if end.kill:
            kill_after_s = STACK_S if end.stack else 0.0
        if end.stack and not self._ending.is_ordered:
            for worker in self._workers:
                worker.process.send_signal(STACK_SIGNAL)  # the worker writes its stack to its log
        self.end(kill_after_s)

    def _is_shown(self, slot: int) -> bool:
        return slot == 0 and self._order is not None and self._order.is_main

    # -- gathers ------------------------------------------------------------------------------------------------------

    def gather_again(self) -> None:
        """Repeat the gathers that the head has not answered."""
        for gather in self._gathers.unanswered():
            self._on_gather(gather)

    def take_answer(self, gathered: Gathered) -> None:
        """Pass the head's answer to a gather to all workers."""
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
        """Notice workers that have ended, stopped or continued. Call it at SIGCHLD."""
        ended = [worker for worker in self._workers if worker.look()]
        for worker in sorted(ended, key=lambda worker: worker.over_at):
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

    def _note_drained(self) -> None:
        """Called in the thread that reads a worker's output."""
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
        """Send SIGTERM to all workers: Slurm takes this node, and the head is silent."""
        self._ending.is_wanted = True
        for worker in self._workers:
            worker.process.send_signal(signal.SIGTERM)

    def end(self, kill_after_s: float) -> None:
        """The workers have an order to end: kill those that have not ended in `kill_after_s` seconds."""
        self._ending.is_wanted = self._ending.is_ordered = True
        self._kill_after(kill_after_s)

    def kill(self) -> None:
        """Send SIGKILL to all workers."""
        self._ending.is_wanted = self._ending.is_forced = True
        for worker in self._workers:
            worker.kill()

    def _kill_after(self, seconds: float) -> None:
        if seconds <= 0.0:
            self.kill()
        elif self._killing is None or self._killing.when() > self._loop.time() + seconds:
            if self._killing is not None:
                self._killing.cancel()
            self._killing = self._loop.call_later(seconds, self.kill)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """True while one of the workers has not ended."""
        return not all(worker.process.has_ended for worker in self._workers)

    @property
    def is_stopped(self) -> bool:
        """True while the process of one of the workers is stopped (SIGSTOP)."""
        return any(worker.is_stopped for worker in self._workers)

    @property
    def awaited_pids(self) -> set[int]:
        """Ids of the processes that `look` reaps."""
        return set[int]().union(*(worker.process.awaited_pids for worker in self._workers))

    def facts(self) -> list[Facts]:
        """State of each worker, by slot, including workers that have ended."""
        return [worker.facts() for worker in self._workers]

    def ended(self, report: Report) -> Ended:
        """The message to the head when all workers have ended. `report` is the node's last report."""
        first = self._ending.decisive
        assert first is not None
        return Ended(
            node=report.node,
            boot=report.boot,
            code=first.process.code,
            signal=first.process.ended_by,
            tail=first.tail(),
            slot=self._workers.index(first),
            report=report,
            is_ordered=self._ending.was_ordered,
        )


@dataclass(slots=True)
class _Ending:
    """The worker whose end counts as the node's end, and whether that end was expected."""

    is_wanted: bool = False
    "all workers should end"
    is_ordered: bool = False
    "an order tells the workers to end"
    is_forced: bool = False
    "the workers were killed"
    was_ordered: bool = False
    "`is_ordered` at the end of the first worker"
    decisive: Worker | None = None
    "worker whose end counts; None: all workers run"

    def note(self, worker: Worker) -> bool:
        """Note the end of a worker. Returns True if the others may end by themselves."""
        is_expected = self.is_wanted or worker.is_orderly
        if self.decisive is None:
            self.decisive, self.was_ordered = worker, self.is_ordered
        elif self.decisive.is_clean and not worker.is_clean and not (self.is_ordered or self.is_forced):
            self.decisive = worker  # a failure after the training counts more than the success of another worker
        self.is_wanted = True
        return is_expected
