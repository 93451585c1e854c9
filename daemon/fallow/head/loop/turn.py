"""One turn of the head: events go into the runs' state machines, and effects wait until the new state is durable."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from fallow.clock import steady
from fallow.core.allocations import Allocation, forgo
from fallow.core.membership import events as ev
from fallow.core.membership.messages import Order
from fallow.core.protocol import Admitted, EndAgent, Introduce, ToAgent
from fallow.head.state.registry import Registry, Run
from fallow.model import (
    AllocationKind,
    AllocationState,
    ChangeKind,
    Exit,
    GenerationReport,
    NewEvent,
    RunStatus,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An unexpected error in a turn."""

    run: str | None
    "the run whose part of the turn is discarded; None: no run's"
    source: str
    error: Exception


@dataclass
class Turn:
    """Effects of one turn, in order. `at` is the membership's clock, `now` is Unix time; a head uses one clock for
    both."""

    registry: Registry
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
    "records besides those of runs to write, by key"
    removals: list[str] = field(default_factory=list)
    "folders of checkpoints to delete"
    forgotten: list[Run] = field(default_factory=list)
    "ended runs whose records are deleted"
    poll_soon: bool = False
    "True if Slurm takes a node from us, or a run trains for the first time"
    failures: list[Failure] = field(default_factory=list)
    "unexpected errors; the effects on their runs are discarded"

    @classmethod
    def begin(cls, registry: Registry) -> "Turn":
        at = steady()
        return cls(registry, at, at)

    def fail(self, source: str, error: Exception, run: str | None = None) -> None:
        """Note an unexpected error, and the run that it affects."""
        self.failures.append(Failure(run, source, error))

    @property
    def failed(self) -> set[str]:
        """Runs whose part of the turn is discarded."""
        return {failure.run for failure in self.failures if failure.run is not None}

    def for_each(self, runs: Iterable[Run], source: str, act: Callable[[Run], object]) -> None:
        """Call `act` for each run. An unexpected error discards that run's part of the turn, and no other's."""
        for run in list(runs):
            if run.id in self.failed:
                continue
            try:
                act(run)
            except Exception as error:
                self.fail(source, error, run.id)

    @contextlib.contextmanager
    def contain_errors(self, source: str) -> Iterator[None]:
        """Contain unexpected errors of a block that concerns several runs.

        An error ends the block and drops its effects. The runs that only this block had changed count as failed.
        """
        effects: list[list[Any]] = [
            self.messages, self.records, self.submissions, self.cancels, self.ended, self.removals
        ]  # fmt: skip
        dirty_before, lengths = set(self.dirty), [len(part) for part in effects]
        try:
            yield
        except Exception as error:
            for part, length in zip(effects, lengths, strict=True):
                del part[length:]
            for run_id in self.dirty - dirty_before:
                self.fail(source, error, run_id)
            if not self.dirty - dirty_before:
                self.fail(source, error)

    def discard(self, run: Run) -> None:
        """Drop all effects on one run."""
        keys = {a.public_key for a in run.allocations.values()}
        folder = f"{self.registry.checkpoint_folder(run)}/"
        self.messages = [message for message in self.messages if message[0].partition(" ")[0] not in keys]
        self.records = [record for record in self.records if record.run != run.id]
        self.submissions = [one for one in self.submissions if one[0] != run.id]
        self.cancels = [one for one in self.cancels if one[0] != run.id]
        self.ended = [ended for ended in self.ended if ended != run.id]
        self.removals = [path for path in self.removals if not path.startswith(folder)]
        self.dirty.discard(run.id)

    @property
    def has_changes(self) -> bool:
        return bool(self.dirty or self.records or self.notes or self.forgotten)

    def record(self, run: Run | None, kind: str, text: str, **data: Any) -> None:
        """Add a line to the event log, and have the changes of its run written."""
        if run is not None:
            self.dirty.add(run.id)
        self.records.append(NewEvent(self.now, None if run is None else run.id, kind, text, data))

    def new_allocation(self, run: Run, kind: AllocationKind, **fields: object) -> Allocation:
        """Reserve an allocation and have it submitted. `fields`: of the allocation."""
        allocation = self.registry.new_allocation(run, kind, self.now, **fields)
        self.dirty.add(run.id)
        self.submissions.append((run.id, allocation.token))
        return allocation

    def forget(self, run: Run) -> None:
        """Delete the record of an ended run, and have its usage written in the same write."""
        self.registry.forget(run, self.now)
        self.dirty.discard(run.id)
        self.forgotten.append(run)

    def apply(self, run: Run, event: ev.Event) -> None:
        """Put an event into a run's state machine and collect its instructions as effects."""
        newest, unsaved = run.roster.checkpoints.saved[-1:], run.root.unsaved
        instructions = run.machine.handle(event)
        if run.roster.unwritten:
            self.dirty.add(run.id)
        if run.root.unsaved != unsaved:
            run.record.saving.note_failure(self.now)
        for saved in run.roster.checkpoints.saved[-1:]:
            if saved.usable and [saved] != newest:
                run.record.saving.note_written(saved.checkpoint.written_at, saved.checkpoint.took_s)
        for instruction in instructions:
            self._take(run, instruction)
        if (ballot := run.machine.ballot) is not None:
            # Accept parts of the generation that is being voted on, or that an earlier head has committed.
            run.gathers.open(ballot.change.generation, ballot.members)
        if not all(isinstance(instruction, Order | ev.Admitted) for instruction in instructions):
            # Orders alone mean that no node has left. Large runs have many orders, so this check is skipped.
            self.end_empty_allocations(run)

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
                self._release_host(run, host)
            case ev.RunEnded(status, message):
                self._end_run(run, status, message)

    def _note_complete(self, run: Run, report: GenerationReport) -> None:
        """Keep the report of a complete generation, as a record of its own."""
        run.generations.append(report)
        self.dirty.add(run.id)
        if report.kind is ChangeKind.START:
            run.record.saving.note_begin(self.now)
            # A run requests no nodes before its script has worked once.
            self.poll_soon = self.poll_soon or len(run.generations) == 1

    def tell(self, run: Run, node: int, message: ToAgent) -> None:
        """Send a message to the agent of a node, if the node's record exists."""
        target = run.roster.nodes.get(node)
        allocation = None if target is None else run.allocations.get(target.token)
        if target is not None and allocation is not None:
            self.messages.append((agent_peer(allocation, target.host), message))

    def release_allocation(self, run: Run, allocation: Allocation, reason: str) -> None:
        """Make every worker of an allocation leave at the next step boundary. Its job ends after they have left."""
        if allocation.state is AllocationState.RELEASING:
            return
        self.record(run, "release", f"{allocation.token} on {','.join(allocation.agents) or '-'}: {reason}")
        if allocation.state in (AllocationState.UNKNOWN, AllocationState.PENDING) and not allocation.agents:
            self.cancel(run, allocation, reason)
            return
        allocation.state, allocation.asked_at, allocation.reason = AllocationState.RELEASING, self.now, reason
        self.apply(run, ev.Release(at=self.at, nodes=tuple(allocation.members), reason=reason))
        self.end_empty_allocations(run)

    def _release_host(self, run: Run, host: str) -> None:
        """Release the run's nodes on a barred host. An allocation on this host alone is released whole."""
        for allocation in run.live_allocations():
            if host in allocation.agents and not set(allocation.agents) - {host}:
                self.release_allocation(run, allocation, "its node is barred")
            elif host in allocation.agents and (node := allocation.agents[host].node):
                self.apply(run, ev.Release(at=self.at, nodes=(node,), reason=f"{host} is barred"))

    def cancel(self, run: Run, allocation: Allocation, reason: str) -> None:
        """Cancel an allocation's job. A job that was not submitted yet is dropped. If the outcome of its submission is
        unknown, the job is cancelled once a poll shows it."""
        allocation.asked_at = allocation.asked_at or self.now
        allocation.reason = reason
        self.dirty.add(run.id)
        if allocation.is_queued:
            forgo(allocation)
            self.registry.end_allocation(run, allocation, reason)
        elif allocation.job_id is not None and not run.spec.local:
            self.cancels.append((run.id, allocation.token, allocation.job_id))

    def pause_requests(self, run: Run, why: str) -> None:
        """Request no more nodes until somebody resumes the run. The run keeps its nodes."""
        run.record.harvest_paused = why
        self.record(run, "pause", f"no more nodes are requested: {why}")

    def end_empty_allocations(self, run: Run) -> None:
        """End allocations without workers: all have left, or cannot go on."""
        if run.ended:
            return
        # At the end of the run, one allocation stays to run the rest of the batch script.
        elected = self._elect(run) if run.roster.finishing else None
        for allocation in run.live_allocations():
            if allocation is elected or not allocation.agents or allocation.end_code is not None:
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
        end = EndAgent(term=self.registry.term, code=code, reason=reason, kill_after_s=kill_after_s)
        self.messages += [(agent_peer(allocation, host), end) for host in allocation.agents]

    def _end_run(self, run: Run, status: RunStatus, message: str) -> None:
        """End a run: elect the allocation that runs the rest of the batch script, and end the others."""
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
            self.end_agents(allocation, code, end_reason(run, allocation))

    @staticmethod
    def _elect(run: Run) -> Allocation | None:
        """Choose a living base allocation, else that of the main member. Prefer one that is not being released."""
        present = [a for a in run.live_allocations() if a.hosts]
        candidates = [a for a in present if a.state is not AllocationState.RELEASING] or present
        base = [a for a in candidates if a.kind is AllocationKind.BASE]
        if base:
            return base[0]
        main = [a for a in candidates if (run.root.main or run.root.first) in a.members]
        return next(iter(main or candidates), None)


def end_reason(run: Run, allocation: Allocation) -> str:
    """The reason that agents of an allocation get with the order to end."""
    if not run.ended:
        return allocation.reason
    # `fallow local` shows the traceback by itself.
    trace = "" if run.spec.local else run.root.traceback.rstrip()
    return "\n".join(part for part in (trace, run.root.message or f"the run is {run.root.status}") if part)


def agent_peer(allocation: Allocation, host: str) -> str:
    """The router's name for an agent: its allocation's key and its own name."""
    return f"{allocation.public_key} {host}"
