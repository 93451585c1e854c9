"""One turn of the head: events go into the machines, effects come out and wait until the state is durable."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from fallow.core import events as ev
from fallow.core.allocations import Allocation, forgo
from fallow.head.book import Book, Run
from fallow.model import (
    Active,
    AgentEnd,
    AllocationKind,
    AllocationState,
    Beat,
    ChangeKind,
    Exit,
    FallowError,
    Held,
    KvReply,
    RunStatus,
    ShowOutput,
    StopWorker,
    ToAgent,
    ToWorker,
    Vote,
)

log = structlog.get_logger("fallow.head")


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A line for the event log, before it has a number."""

    at: float
    run: str | None
    kind: str
    text: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """An unexpected error in a turn."""

    run: str | None
    "the run whose part of the turn it costs"
    source: str
    error: Exception


@dataclass
class Turn:
    """Effects of one turn, in order. `at` is monotonic, `now` Unix time."""

    book: Book
    at: float
    now: float
    messages: list[tuple[str, ToAgent | ToWorker]] = field(default_factory=list)
    "(peer, message)"
    records: list[NewRecord] = field(default_factory=list)
    dirty: set[str] = field(default_factory=set)
    submissions: list[tuple[str, str]] = field(default_factory=list)
    "(run, token) of allocations to submit"
    cancels: list[tuple[str, str, str]] = field(default_factory=list)
    "(run, token, job id)"
    ended: list[str] = field(default_factory=list)
    notes: dict[str, bytes] = field(default_factory=dict)
    "what the head wants to find again besides its runs, by key"
    removals: list[str] = field(default_factory=list)
    "folders of checkpoints to delete"
    forgotten: list[Run] = field(default_factory=list)
    "ended runs whose records are deleted"
    began: bool = False
    "a run began to train"
    taken: bool = False
    "Slurm takes a node from us"
    failures: list[Failure] = field(default_factory=list)
    "unexpected errors; what the turn holds of their runs is discarded"

    def fail(self, source: str, error: Exception, run: str | None = None) -> None:
        """Note an unexpected error, and what it costs."""
        self.failures.append(Failure(run, source, error))

    @property
    def failed(self) -> set[str]:
        """Runs whose part of the turn is discarded."""
        return {failure.run for failure in self.failures if failure.run is not None}

    def for_each(self, runs: Iterable[Run], source: str, act: Callable[[Run], object]) -> None:
        """Do something for each run. An unexpected error costs that run its part of the turn, and no other run."""
        for run in list(runs):
            if run.id in self.failed:
                continue
            try:
                act(run)
            except Exception as error:
                self.fail(source, error, run.id)

    @contextlib.contextmanager
    def apart(self, source: str) -> Iterator[None]:
        """What is done inside concerns several runs. An unexpected error ends it, and what it did by then is undone:
        its effects are dropped, and runs that only it had changed are failed."""
        effects: list[list[Any]] = [
            self.messages, self.records, self.submissions, self.cancels, self.ended, self.removals
        ]  # fmt: skip
        before, lengths = set(self.dirty), [len(part) for part in effects]
        try:
            yield
        except Exception as error:
            for part, length in zip(effects, lengths, strict=True):
                del part[length:]
            for run_id in self.dirty - before:
                self.fail(source, error, run_id)
            if not self.dirty - before:
                self.fail(source, error)

    def discard(self, run: Run) -> None:
        """Drop all effects on one run."""
        keys = {a.public_key for a in run.record.allocations.values()} | set(run.record.worker_keys.values())
        folder = f"{self.book.checkpoint_folder(run)}/"
        self.messages = [told for told in self.messages if told[0].partition(" ")[0] not in keys]
        self.records = [record for record in self.records if record.run != run.id]
        self.submissions = [one for one in self.submissions if one[0] != run.id]
        self.cancels = [one for one in self.cancels if one[0] != run.id]
        self.ended = [ended for ended in self.ended if ended != run.id]
        self.removals = [path for path in self.removals if not path.startswith(folder)]
        self.dirty.discard(run.id)

    @property
    def changing(self) -> bool:
        """There is something to make durable."""
        return bool(self.dirty or self.records or self.notes or self.forgotten)

    def record(self, run: Run | None, kind: str, text: str, **data: Any) -> None:
        self.records.append(NewRecord(self.now, None if run is None else run.id, kind, text, data))

    def new_allocation(self, run: Run, kind: AllocationKind, **known: object) -> Allocation | None:
        """Reserve an allocation and have it submitted; None: its key file could not be written."""
        try:
            allocation = self.book.new_allocation(run, kind, self.now, **known)
        except FallowError as error:
            log.warning("allocation.unwritten", run=run.id, error=error.message)
            return None
        self.dirty.add(run.id)
        self.submissions.append((run.id, allocation.token))
        return allocation

    def forget(self, run: Run) -> None:
        """Delete the record of a run that has ended, and have what it used written down in the same moment."""
        self.book.forget(run, self.now)
        self.dirty.discard(run.id)
        self.forgotten.append(run)

    def apply(self, run: Run, event: ev.Event) -> None:
        """Put an event into a run's machine and take its instructions as effects.

        The event is dated on the head's clock. The machine sees it on the run's own, which does not count the time for
        which the head was away.
        """
        instructions = run.machine.handle(dataclasses.replace(event, at=run.clock.read(event.at)))
        self._date_newest(run)
        if instructions or self._to_be_written(run, event):
            self.dirty.add(run.id)
            run.unwritten = False
        for instruction in instructions:
            match instruction:
                case ev.Tell(worker, message):
                    self.tell(run, worker, message)
                case ev.Kill(worker, reason, stack):
                    self.stop_worker(run, worker, reason, stack)
                case ev.NodeBarred(node, reason):
                    self._let_go_of_node(run, node, reason)
                case ev.Record(kind, text, data):
                    self.record(run, kind, text, **data)
                case ev.RemoveCheckpoint(path):
                    self.removals.append(path)
                case ev.RunEnded(status, message):
                    self._end_run(run, status, message)
        self.choose_speaker(run)
        if not all(isinstance(instruction, ev.Tell) for instruction in instructions):
            # Where workers are only told something, nobody has gone; and in a large run much is told.
            self.let_go_of_empty(run)

    @staticmethod
    def _to_be_written(run: Run, event: ev.Event) -> bool:
        """Has an event from which nothing follows changed what has to be known of the run?"""
        match event:
            case ev.Said(message=Beat() | Held() | Vote()):
                return False
            case ev.Said(message=Active()):
                # All members switch at the same moment, and their beats say so again: the next tick will do, for all.
                run.unwritten = True
                return False
            case ev.Ticked():
                return run.unwritten
        return True

    def _date_newest(self, run: Run) -> None:
        """The machine has no clock of its own, so a finished change gets its date here."""
        history = run.roster.history
        if history and not history[-1].at:
            history[-1] = msgspec.structs.replace(history[-1], at=self.now)
            if history[-1].kind is ChangeKind.START:
                run.record.saving.began(self.now)
                self.began = True

    def tell(self, run: Run, worker: str, message: ToWorker) -> None:
        key = run.record.worker_keys.get(worker)
        if key is not None:
            self.messages.append((key, message))

    def reply(self, run: Run, replies: list[tuple[str, KvReply]]) -> None:
        for worker, reply in replies:
            self.tell(run, worker, reply)

    def tell_agents(self, allocation: Allocation, message: ToAgent) -> None:
        for node in allocation.agents:
            self.messages.append((agent_peer(allocation, node), message))

    def stop_worker(self, run: Run, worker: str, reason: str, stack: bool = False) -> None:
        allocation = run.allocation_of(worker)
        node = next((n for n, workers in allocation.agents.items() if worker in workers), None)
        if node is not None:
            stop = StopWorker(term=self.book.term, worker=worker, reason=reason, stack=stack)
            self.messages.append((agent_peer(allocation, node), stop))

    def choose_speaker(self, run: Run) -> None:
        """Have one worker's output copied into its job's, from its first line on. Workers that have become members say
        by themselves, in their output, from where on it is shown."""
        speaker = run.roster.speaker(run.speaker)
        if speaker != run.speaker:
            run.speaker = speaker
            for allocation in run.live_allocations():
                for node in allocation.agents:
                    self.show_output(run, allocation, node)

    def show_output(self, run: Run, allocation: Allocation, node: str) -> None:
        """Tell one agent which of its workers is shown, if any."""
        shown = run.speaker if run.speaker in allocation.agents[node] else None
        self.messages.append((agent_peer(allocation, node), ShowOutput(term=self.book.term, worker=shown)))

    def release_allocation(self, run: Run, allocation: Allocation, reason: str) -> None:
        """Get every worker of an allocation out at the next boundary; its job ends when they are gone."""
        if allocation.state is AllocationState.RELEASING:
            return
        self.record(run, "release", f"{allocation.token} on {','.join(allocation.agents) or '-'}: {reason}")
        if allocation.state in (AllocationState.UNKNOWN, AllocationState.PENDING) and not allocation.agents:
            self.cancel(run, allocation, reason)
            return
        allocation.state, allocation.asked_at, allocation.reason = AllocationState.RELEASING, self.now, reason
        self.dirty.add(run.id)
        self.apply(run, ev.ReleaseWanted(at=self.at, workers=allocation.workers, reason=reason))
        self.let_go_of_empty(run)

    def _let_go_of_node(self, run: Run, node: str, reason: str) -> None:
        """Release what else of a barred node the run has; an allocation of this node alone ends with it."""
        for allocation in run.live_allocations():
            if node in allocation.agents and not set(allocation.agents) - {node}:
                self.release_allocation(run, allocation, "its node is barred")
            elif node in allocation.agents:
                workers = allocation.agents[node]
                self.apply(run, ev.ReleaseWanted(at=self.at, workers=list(workers), reason=f"{node} is barred"))

    def cancel(self, run: Run, allocation: Allocation, reason: str) -> None:
        """Cancel an allocation's job. A submission of unknown outcome is cancelled once a poll shows it, one that Slurm
        has not heard of ends at once."""
        allocation.asked_at = allocation.asked_at or self.now
        allocation.reason = reason
        self.dirty.add(run.id)
        if allocation.queued:
            forgo(allocation)
            self.book.end_allocation(run, allocation, reason)
        elif allocation.job_id is not None and not run.spec.local:
            self.cancels.append((run.id, allocation.token, allocation.job_id))

    def stop_asking(self, run: Run, why: str) -> None:
        """Ask for no more nodes until somebody resumes the run; what it has stays."""
        run.record.harvest_paused = why
        self.dirty.add(run.id)
        self.record(run, "pause", f"no more nodes are asked for: {why}")

    def let_go_of_empty(self, run: Run) -> None:
        """End allocations all of whose workers are gone, because they left or because they cannot go on."""
        if run.roster.status.ended:
            return
        # At the end, the one that will run the rest of the batch script stays.
        kept = self._elect(run) if run.roster.finishing else None
        for allocation in run.live_allocations():
            if allocation is kept:
                continue
            workers = allocation.workers
            places = [(node, w) for node, names in allocation.agents.items() for w in names]
            coming = any(run.roster.alive(w) or run.restarts(allocation, node, w) for node, w in places)
            if workers and allocation.end_code is None and not coming:
                self.dirty.add(run.id)
                if allocation.asked_at is None:
                    allocation.asked_at = self.now
                    allocation.reason = allocation.reason or "its workers are gone"
                allocation.state = AllocationState.RELEASING
                self.end_agents(allocation, Exit.NO_RESTART, allocation.reason)

    def end_agents(self, allocation: Allocation, code: int, reason: str, kill_after_s: float = 5.0) -> None:
        """End an allocation's agents; workers that have not exited after `kill_after_s` are killed."""
        allocation.end_code = code
        end = AgentEnd(term=self.book.term, code=code, reason=reason, kill_after_s=kill_after_s)
        self.tell_agents(allocation, end)

    def _end_run(self, run: Run, status: RunStatus, message: str) -> None:
        """The run is over: one allocation is elected to run the rest of the batch script, the others end."""
        run.record.ended_at = self.now
        self.ended.append(run.id)
        self.record(run, status.value, f"run {run.id} is {status}" + (f": {message}" if message else ""))
        elected = self._elect(run) if status is not RunStatus.CANCELLED else None
        for allocation in run.live_allocations():
            if not allocation.agents:
                self.cancel(run, allocation, f"the run is {status}")
                continue
            code: int = Exit.NO_RESTART
            if allocation is elected:
                code = Exit.OK if status is RunStatus.FINISHED else Exit.SOFTWARE
            allocation.state, allocation.asked_at = AllocationState.RELEASING, self.now
            # `fallow local` shows the traceback by itself.
            trace = "" if run.spec.local else run.roster.traceback.rstrip()
            reason = "\n".join(part for part in (trace, message or f"the run is {status}") if part)
            self.end_agents(allocation, code, reason)

    @staticmethod
    def _elect(run: Run) -> Allocation | None:
        """A living base allocation, else the one of the main member."""
        alive = [a for a in run.live_allocations() if set(a.agents) - set(a.agents_gone)]
        base = [a for a in alive if a.kind is AllocationKind.BASE]
        if base:
            return base[0]
        main = [a for a in alive if run.roster.members and run.roster.members[0] in a.workers]
        return next(iter(main or alive), None)


def agent_peer(allocation: Allocation, node: str) -> str:
    """The router's name for an agent: its allocation's key and its own name."""
    return f"{allocation.public_key} {node}"
