"""One turn of the head: events go into the machines, effects come out and wait until the state is durable."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog
from msgspec.structs import replace

from fallow.clock import steady
from fallow.core.allocations import Allocation, forgo
from fallow.core.membership import events as ev
from fallow.core.membership.messages import Order
from fallow.core.protocol import Admitted, EndAgent, Introduce, ToAgent
from fallow.head.state.book import Book, Run
from fallow.model import (
    AllocationKind,
    AllocationState,
    ChangeKind,
    Exit,
    FallowError,
    GenerationReport,
    NewEvent,
    RunStatus,
)

log = structlog.get_logger("fallow.head")


@dataclass(frozen=True, slots=True)
class Failure:
    """An unexpected error in a turn."""

    run: str | None
    "the run whose part of the turn it costs"
    source: str
    error: Exception


@dataclass
class Turn:
    """Effects of one turn, in order. `at` is the clock of the membership, `now` Unix time: a head has one for both."""

    book: Book
    at: float
    now: float
    messages: list[tuple[str, ToAgent]] = field(default_factory=list)
    "(peer, message)"
    records: list[NewEvent] = field(default_factory=list)
    "lines for the event log"
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
    poll_soon: bool = False
    "Slurm takes a node from us, or a run trains for the first time"
    failures: list[Failure] = field(default_factory=list)
    "unexpected errors; what the turn holds of their runs is discarded"

    @classmethod
    def begin(cls, book: Book) -> "Turn":
        """A turn of this moment."""
        at = steady()
        return cls(book, at, at)

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
        keys = {a.public_key for a in run.allocations.values()}
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
        """Add a line to the event log. What has changed of its run is written with it."""
        if run is not None:
            self.dirty.add(run.id)
        self.records.append(NewEvent(self.now, None if run is None else run.id, kind, text, data))

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
        """Put an event into a run's machine and take its instructions as effects."""
        newest, unsaved = run.roster.checkpoints.saved[-1:], run.root.unsaved
        instructions = run.machine.handle(event)
        if run.roster.unwritten:
            self.dirty.add(run.id)
        if run.root.unsaved != unsaved:
            run.record.saving.failed(self.now)
        for saved in run.roster.checkpoints.saved[-1:]:
            if saved.usable and [saved] != newest:
                run.record.saving.written(saved.checkpoint.written_at, saved.checkpoint.took_s)
        for instruction in instructions:
            self._take(run, instruction)
        if (ballot := run.machine.ballot) is not None:
            # Take parts of a generation that is voted on from now, or that a head before has committed.
            run.gathers.open(ballot.change.generation, ballot.members)
        if not all(isinstance(instruction, Order | ev.Admitted) for instruction in instructions):
            # Where nodes are only told something, nobody has gone; and in a large run much is told.
            self.let_go_of_empty(run)

    def _take(self, run: Run, instruction: ev.Instruction) -> None:
        match instruction:
            case Order():
                self.tell(run, instruction.node, instruction)
            case ev.Admitted(node, host, token, boot):
                agent = run.allocations[token].agents[host]
                if agent.boot == boot and agent.node != node:
                    agent.node, agent.retry_at = node, None
                    self.dirty.add(run.id)
                self.tell(run, node, Admitted(node=node, boot=boot))
            case ev.Unknown(node, host):
                for allocation in run.live_allocations():
                    if host in allocation.agents:
                        self.messages.append((agent_peer(allocation, host), Introduce(node=node)))
            case ev.Log(kind, text, data):
                self.record(run, kind, text, **data)
            case GenerationReport():
                self._note_complete(run, replace(instruction, at=self.now))
            case ev.RemoveCheckpoint(path):
                self.removals.append(path)
            case ev.Barred(host):
                self._let_go_of_host(run, host)
            case ev.RunEnded(status, message):
                self._end_run(run, status, message)

    def _note_complete(self, run: Run, report: GenerationReport) -> None:
        """Keep the report of a generation that has become complete, as a record of its own."""
        run.generations.append(report)
        self.dirty.add(run.id)
        if report.kind is ChangeKind.START:
            run.record.saving.began(self.now)
            # Nothing was asked for before its script had worked once.
            self.poll_soon = self.poll_soon or len(run.generations) == 1

    def tell(self, run: Run, node: int, message: ToAgent) -> None:
        """Send to the agent of a node, if its record is still there."""
        known = run.roster.nodes.get(node)
        allocation = None if known is None else run.allocations.get(known.token)
        if known is not None and allocation is not None:
            self.messages.append((agent_peer(allocation, known.host), message))

    def release_allocation(self, run: Run, allocation: Allocation, reason: str) -> None:
        """Get every worker of an allocation out at the next boundary; its job ends when they are gone."""
        if allocation.state is AllocationState.RELEASING:
            return
        self.record(run, "release", f"{allocation.token} on {','.join(allocation.agents) or '-'}: {reason}")
        if allocation.state in (AllocationState.UNKNOWN, AllocationState.PENDING) and not allocation.agents:
            self.cancel(run, allocation, reason)
            return
        allocation.state, allocation.asked_at, allocation.reason = AllocationState.RELEASING, self.now, reason
        self.apply(run, ev.Release(at=self.at, nodes=tuple(allocation.members), reason=reason))
        self.let_go_of_empty(run)

    def _let_go_of_host(self, run: Run, host: str) -> None:
        """Release what else of a barred host the run has; an allocation of this host alone ends with it."""
        for allocation in run.live_allocations():
            if host in allocation.agents and not set(allocation.agents) - {host}:
                self.release_allocation(run, allocation, "its node is barred")
            elif host in allocation.agents and (node := allocation.agents[host].node):
                self.apply(run, ev.Release(at=self.at, nodes=(node,), reason=f"{host} is barred"))

    def cancel(self, run: Run, allocation: Allocation, reason: str) -> None:
        """Cancel an allocation's job. A submission of unknown outcome is cancelled once a poll shows it, one that Slurm
        has not heard of ends at once."""
        allocation.asked_at = allocation.asked_at or self.now
        allocation.reason = reason
        self.dirty.add(run.id)
        if allocation.is_queued:
            forgo(allocation)
            self.book.end_allocation(run, allocation, reason)
        elif allocation.job_id is not None and not run.spec.local:
            self.cancels.append((run.id, allocation.token, allocation.job_id))

    def stop_asking(self, run: Run, why: str) -> None:
        """Ask for no more nodes until somebody resumes the run; what it has stays."""
        run.record.harvest_paused = why
        self.record(run, "pause", f"no more nodes are asked for: {why}")

    def let_go_of_empty(self, run: Run) -> None:
        """End allocations all of whose workers are gone, because they left or because they cannot go on."""
        if run.ended:
            return
        # At the end, the one that will run the rest of the batch script stays.
        kept = self._elect(run) if run.roster.finishing else None
        for allocation in run.live_allocations():
            if allocation is kept or not allocation.agents or allocation.end_code is not None:
                continue
            if not any(run.is_coming(allocation, host) for host in allocation.agents):
                self.dirty.add(run.id)
                if allocation.asked_at is None:
                    allocation.asked_at = self.now
                    allocation.reason = allocation.reason or "its workers are gone"
                allocation.state = AllocationState.RELEASING
                self.end_agents(allocation, Exit.NO_RESTART, allocation.reason)

    def end_agents(self, allocation: Allocation, code: int, reason: str, kill_after_s: float = 5.0) -> None:
        """End an allocation's agents; workers that have not exited after `kill_after_s` are killed."""
        allocation.end_code = code
        end = EndAgent(term=self.book.term, code=code, reason=reason, kill_after_s=kill_after_s)
        self.messages += [(agent_peer(allocation, host), end) for host in allocation.agents]

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
            self.end_agents(allocation, code, why_ended(run, allocation))

    @staticmethod
    def _elect(run: Run) -> Allocation | None:
        """A living base allocation, else the one of the main member; one that leaves only if there is no other."""
        living = [a for a in run.live_allocations() if a.hosts]
        alive = [a for a in living if a.state is not AllocationState.RELEASING] or living
        base = [a for a in alive if a.kind is AllocationKind.BASE]
        if base:
            return base[0]
        main = [a for a in alive if (run.root.main or run.root.first) in a.members]
        return next(iter(main or alive), None)


def why_ended(run: Run, allocation: Allocation) -> str:
    """What agents of an allocation are told at their end."""
    if not run.ended:
        return allocation.reason
    # `fallow local` shows the traceback by itself.
    trace = "" if run.spec.local else run.root.traceback.rstrip()
    return "\n".join(part for part in (trace, run.root.message or f"the run is {run.root.status}") if part)


def agent_peer(allocation: Allocation, host: str) -> str:
    """The router's name for an agent: its allocation's key and its own name."""
    return f"{allocation.public_key} {host}"
