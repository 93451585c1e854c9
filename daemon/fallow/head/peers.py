"""Conversations with agents and workers: messages become events, and questions get answers."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import msgspec

from fallow import __version__
from fallow.config import Checkpoint as CheckpointConfig
from fallow.config import Membership as MembershipConfig
from fallow.core import events as ev
from fallow.core.allocations import Allocation
from fallow.core.duds import came
from fallow.core.lease_clock import RECONNECT_S
from fallow.core.roster import Worker
from fallow.head import again, gauge, missing, neighbours, saved, views
from fallow.head.book import Principal, Run
from fallow.head.forgetting import forget
from fallow.head.turn import Turn
from fallow.model import (
    PROTOCOL,
    Active,
    AgentBeat,
    AgentBeatAck,
    AgentEnd,
    AgentHello,
    AgentLeft,
    Aligned,
    AllocationKind,
    AllocationState,
    Beat,
    BeatAck,
    CheckpointDamaged,
    Checkpointed,
    CheckpointFailed,
    CheckpointNoted,
    Deserted,
    Exit,
    ExitNoted,
    Failed,
    Finished,
    FromPeer,
    Held,
    KeyAccepted,
    KvRequest,
    Left,
    Notice,
    Refused,
    Vote,
    Welcome,
    WorkerExit,
    WorkerHello,
    WorkerKey,
    WorkerPhase,
    WorkerReady,
)
from fallow.text import clean_output
from fallow.wire.router import agent_of, key_of

_JUDGED = frozenset((WorkerPhase.READY, WorkerPhase.MEMBER, WorkerPhase.LEAVING))

STAND_IN_S = 120.0
"""A stand-in head is there so long after the head was given up, at the latest."""

TRACEBACK = 20_000
"""Characters of a traceback that are kept."""


class Peers:
    """Turns what agents and workers say into events for the machines."""

    def __init__(self, config: MembershipConfig, checkpoint: CheckpointConfig) -> None:
        self._config = config
        self._checkpoint = checkpoint

    def hear(self, turn: Turn, peer: str, message: FromPeer) -> None:
        """Handle one message. A peer that speaks for somebody else is ignored: its key decides who it is."""
        principal = turn.book.principals.get(key_of(peer))
        if principal is None:
            return
        run = turn.book.runs[principal.run]
        run.clock.hear(turn.at)
        if principal.worker is None:
            self._hear_agent(turn, run, principal, peer, message)
        elif getattr(message, "worker", principal.worker) == principal.worker:
            self._hear_worker(turn, run, principal.worker, message)

    # -- workers ------------------------------------------------------------------------------------------------

    def _hear_worker(self, turn: Turn, run: Run, worker: str, message: Any) -> None:
        match message:
            case KvRequest():
                turn.reply(run, run.rendezvous.handle(worker, message, turn.at))
            case WorkerHello():
                self._worker_hello(turn, run, worker, message)
            case Beat():
                self._beat(turn, run, worker, message)
            case WorkerReady() | Finished():
                self._take(turn, run, message)
                turn.tell(run, worker, BeatAck(term=turn.book.term, ready=True, reached=run.reached))
            case Checkpointed():
                # By this host's clock: it is told at once, and again only while no head is there.
                saved.take(turn, run, message, max(0.0, turn.now - message.took_s), self._checkpoint.keep)
                turn.tell(run, worker, CheckpointNoted(term=turn.book.term, path=message.path))
            case Failed():
                clean = clean_output(message.traceback, TRACEBACK)
                self._take(turn, run, msgspec.structs.replace(message, traceback=clean))
            case Active():
                allocation = run.allocation_of(worker)
                allocation.active_at = allocation.active_at or turn.now
                self._take(turn, run, message)
            case CheckpointFailed():
                saved.give_up(turn, run, message)
            case Vote() | Held() | Deserted() | Aligned() | Left() | CheckpointDamaged():
                self._take(turn, run, message)

    @staticmethod
    def _take(turn: Turn, run: Run, message: ev.AboutMembership) -> None:
        turn.apply(run, ev.Said(at=turn.at, message=message))

    def _worker_hello(self, turn: Turn, run: Run, worker: str, message: WorkerHello) -> None:
        if message.protocol != PROTOCOL:
            text = f"worker {worker} speaks protocol {message.protocol}, this head {PROTOCOL}; use one Fallow version"
            turn.tell(run, worker, Refused(code=Exit.CONFIG, message=text))
            return
        if not run.roster.alive(worker):
            turn.tell(run, worker, Refused(code=Exit.TEMPFAIL, message=f"worker {worker} was ejected"))
            return
        self._take(turn, run, message)
        usable = run.roster.usable_checkpoints()
        epochs = [run.beats[w].epoch for w in run.roster.members if w in run.beats]
        welcome = Welcome(
            term=turn.book.term,
            run=run.id,
            seed=run.spec.seed,
            max_workers=run.roster.max_members,
            beat_s=self._config.beat_s,
            lease_s=self._config.lease_s,
            head_patience_s=self._patience_s(run, run.allocation_of(worker)),
            folder=str(turn.book.paths.run(run.id).root),
            checkpoint_folder=str(turn.book.checkpoint_folder(run)),
            checkpoint_s=self._checkpoint.interval_s,
            checkpoint_in_s=saved.due_in_s(run, self._checkpoint.interval_s, turn.now),
            epoch=max(epochs) if epochs else (usable[0].epoch if usable else 0),
            reached=run.reached,
            main=run.speaker == worker,
            joins=run.roster.joins(worker),
            step=run.roster.front,
        )
        turn.tell(run, worker, welcome)

    def _patience_s(self, run: Run, allocation: Allocation) -> float:
        """How long a worker that cannot go on by itself waits for a silent head.

        A base job waits to its end. A harvested node is not kept idle for longer than a stand-in head needs to come.
        """
        patience_s = self._config.head_patience_s
        if run.spec.local:
            return patience_s
        return inf if allocation.kind is AllocationKind.BASE else patience_s + max(patience_s, STAND_IN_S)

    def _beat(self, turn: Turn, run: Run, worker: str, beat: Beat) -> None:
        run.beats[worker] = beat
        gauge.heard(turn, run, beat)
        self._take(turn, run, beat)
        known = run.roster.workers.get(worker)
        if known is None or known.phase is WorkerPhase.GONE:
            return
        if known.phase in (WorkerPhase.MEMBER, WorkerPhase.LEAVING):
            run.reached = max(run.reached, beat.reached)
        end = run.allocation_of(worker).end_at
        ack = BeatAck(
            term=turn.book.term,
            ready=known.phase is not WorkerPhase.STARTING,
            deadline_in_s=None if end is None else end - turn.now,
            reached=run.reached,
            checkpoint_in_s=saved.due_in_s(run, self._checkpoint.interval_s, turn.now),
            checkpoint_given_up=run.roster.checkpoint_given_up,
            main=run.speaker == worker,
            joins=run.roster.joins(worker),
        )
        turn.tell(run, worker, ack)

    # -- agents -------------------------------------------------------------------------------------------------

    def _hear_agent(self, turn: Turn, run: Run, principal: Principal, peer: str, message: Any) -> None:
        allocation = run.record.allocations[principal.token]
        node = agent_of(peer)
        if not allocation.live and not isinstance(message, AgentHello | AgentLeft):
            # The head has given it up. What it was told to end with still holds.
            code = Exit.NO_RESTART if allocation.end_code is None else allocation.end_code
            if not allocation.told_to_end:
                allocation.told_to_end = True
                turn.dirty.add(run.id)
            turn.messages.append((peer, AgentEnd(term=turn.book.term, code=code, reason=allocation.reason)))
            return
        if isinstance(message, AgentHello):
            self._agent_hello(turn, run, allocation, peer, message)
            return
        if node not in allocation.agents:
            return
        self._agent_seen(turn, run, allocation, node)
        match message:
            case WorkerKey():
                if message.worker in allocation.agents[node]:
                    old = run.record.worker_keys.get(message.worker)
                    if old is not None and old != message.public_key:
                        turn.book.revoke(old)
                    run.record.worker_keys[message.worker] = message.public_key
                    turn.book.principals[message.public_key] = Principal(run.id, allocation.token, message.worker)
                    turn.dirty.add(run.id)
                    turn.messages.append((peer, KeyAccepted(worker=message.worker)))
            case WorkerExit():
                self._worker_exit(turn, run, allocation, node, message)
                turn.messages.append((peer, ExitNoted(worker=message.worker)))
            case AgentBeat():
                turn.messages.append((peer, AgentBeatAck(term=turn.book.term)))
                stopped = set(message.stopped)
                for worker in tuple(allocation.agents[node]):
                    if worker in stopped:
                        turn.apply(run, ev.WorkerStopped(at=turn.at, worker=worker))
                    elif run.machine.seems_stopped(worker):
                        turn.apply(run, ev.WorkerContinued(at=turn.at, worker=worker))
                if allocation.end_code is not None:
                    again = AgentEnd(term=turn.book.term, code=allocation.end_code, reason=allocation.reason)
                    turn.messages.append((peer, again))
            case Notice():
                self._notice(turn, run, allocation, node, message)
            case AgentLeft():
                allocation.left_at = turn.now
                turn.dirty.add(run.id)
                self.agent_gone(turn, run, allocation, node, _ended(message.code))

    @staticmethod
    def _agent_seen(turn: Turn, run: Run, allocation: Allocation, node: str) -> None:
        at = run.clock.read(turn.at)
        run.agent_seen[allocation.token, node] = at
        for worker in allocation.agents.get(node, ()):
            run.machine.hear_agent(worker, at)

    def _agent_hello(self, turn: Turn, run: Run, allocation: Allocation, peer: str, hello: AgentHello) -> None:
        if allocation.end_code is not None and hello.agent in allocation.agents:
            # It was told to end, and may not have heard so before its link broke.
            end = AgentEnd(term=turn.book.term, code=allocation.end_code, reason=allocation.reason)
            turn.messages.append((peer, end))
            return
        problem = self._agent_problem(run, allocation, hello)
        if problem is not None:
            allocation.told_to_end = True
            turn.dirty.add(run.id)
            turn.record(run, "refuse", f"agent on {hello.node}: {problem}")
            turn.messages.append((peer, Refused(code=Exit.NO_RESTART, message=problem)))
            return
        first = hello.agent not in allocation.agents
        self._agent_seen(turn, run, allocation, hello.agent)
        allocation.job_id = allocation.job_id or hello.job_id
        if run.record.slots is None:
            run.record.slots = hello.slots
            if not run.spec.local:
                run.roster.min_members = run.spec.min_nodes * hello.slots
                run.roster.max_members = run.roster.limit = run.spec.max_nodes * hello.slots
        if first:
            came(run.record.fruitless, hello.node)
            names = [allocation.reserved.pop(0) for _ in range(min(hello.slots, len(allocation.reserved)))]
            while len(names) < hello.slots:
                names.append(f"w{run.roster.next_index + len(names)}")
            allocation.agents[hello.agent] = names
            if allocation.state in (AllocationState.UNKNOWN, AllocationState.PENDING):
                allocation.state = AllocationState.RUNNING
                allocation.start_at = turn.now
                if allocation.end_at is None and allocation.minutes is not None:
                    # Until a poll shows what was granted, what was asked for is the safe guess.
                    allocation.end_at = turn.now + 60.0 * allocation.minutes
            turn.record(run, "node", f"{hello.node} came with {allocation.token}", job=hello.job_id)
            for name in names:
                turn.apply(run, ev.WorkerExpected(at=turn.at, worker=name, token=allocation.token, node=hello.node))
        turn.dirty.add(run.id)
        plan = again.plan_of(turn, run, allocation, hello.agent, self._config.beat_s)
        turn.messages.append((peer, plan))
        turn.choose_speaker(run)
        turn.show_output(run, allocation, hello.agent)
        if allocation.state is AllocationState.RELEASING and first:
            # It was to be given back before it came.
            turn.apply(run, ev.ReleaseWanted(at=turn.at, workers=plan.workers, reason=allocation.reason))
        elif allocation.asked_at is not None and first:
            # It was to be cancelled as soon as its job showed.
            turn.release_allocation(run, allocation, allocation.reason)

    @staticmethod
    def _agent_problem(run: Run, allocation: Allocation, hello: AgentHello) -> str | None:
        if hello.token != allocation.token:
            return f"its key belongs to {allocation.token}, it says {hello.token}"
        if hello.protocol != PROTOCOL:
            return (
                f"it is version {hello.version} (protocol {hello.protocol}), the head is {__version__} "
                f"(protocol {PROTOCOL}); use one Fallow version"
            )
        if run.roster.status.ended:
            return f"run {run.id} is {run.roster.status}"
        if hello.node in run.roster.barred:
            return f"node {hello.node} is barred from run {run.id}: {run.roster.barred[hello.node]}"
        if not allocation.live:
            return f"allocation {allocation.token} has ended ({allocation.reason})"
        if allocation.agents and allocation.job_id not in (None, hello.job_id):
            # One token, one job: the first that came has claimed it.
            return f"{allocation.token} belongs to job {allocation.job_id}, this is job {hello.job_id}"
        return None

    def _worker_exit(self, turn: Turn, run: Run, allocation: Allocation, node: str, exit_: WorkerExit) -> None:
        if exit_.worker not in allocation.agents[node]:
            return
        how = f"killed by signal {exit_.signal}" if exit_.signal is not None else f"exited with {exit_.code}"
        last = exit_.tail.strip().splitlines()[-1:]
        known = run.roster.workers.get(exit_.worker)
        if known is not None and exit_.code not in (0, None) and last:
            how += f" ({last[0][:200]})"
        if not run.roster.alive(exit_.worker) and "most recent call first" in exit_.tail:
            # It was killed because it hung, and said where.
            turn.record(run, "stack", f"{exit_.worker} on {node} hung here", worker=exit_.worker, stack=exit_.tail)
        again.ended(turn, run, allocation, node, exit_)
        gone = ev.WorkerGone(
            at=turn.at, worker=exit_.worker, reason=how, code=exit_.code, signal=exit_.signal, tail=exit_.tail
        )
        turn.apply(run, gone)
        key = run.record.worker_keys.get(exit_.worker)
        if key is not None:
            turn.book.revoke(key)
        turn.let_go_of_empty(run)

    @staticmethod
    def _notice(turn: Turn, run: Run, allocation: Allocation, node: str, notice: Notice) -> None:
        if run.roster.status.ended:
            return
        why = f"warned by Slurm with signal {notice.signal}: preempted or cancelled"
        if allocation.end_at is not None and turn.now >= allocation.end_at:
            # Limits are looked at every 30 s, so this warning comes late, never early.
            why = "walltime"
        is_base = allocation.kind is AllocationKind.BASE
        # Only Slurm knows whether it was preempted or cancelled: the next poll comes soon.
        turn.taken = turn.taken or ((allocation.harvested or is_base) and why != "walltime")
        if why != "walltime" and not allocation.warned:
            allocation.warned = True
            turn.dirty.add(run.id)
        turn.release_allocation(run, allocation, why)

    @staticmethod
    def agent_gone(turn: Turn, run: Run, allocation: Allocation, node: str, reason: str) -> None:
        """An agent ended or its node is lost: so are its workers."""
        if node not in allocation.agents_gone:
            allocation.agents_gone.append(node)
            turn.dirty.add(run.id)
        for worker in allocation.agents.get(node, []):
            if run.roster.alive(worker):
                turn.apply(run, ev.WorkerGone(at=turn.at, worker=worker, reason=reason))
        if not set(allocation.agents) - set(allocation.agents_gone) and allocation.live:
            turn.record(run, "node", f"{allocation.token} ended: {allocation.reason or reason}")
            turn.book.end_allocation(run, allocation, reason)

    def tick(self, turn: Turn) -> None:
        """Deadlines of everybody: leases, votes, rendezvous, walltimes."""
        turn.for_each(turn.book.current.values(), "tick", lambda run: self.tick_run(turn, run))

    def tick_run(self, turn: Turn, run: Run) -> None:
        """Deadlines of one run."""
        hearing = run.clock.tick(turn.at, expects_somebody=_expects_somebody(run))
        if run.roster.status.ended:
            self._end_stragglers(turn, run)
            return
        run.look_how_far()
        turn.reply(run, run.rendezvous.tick(turn.at))
        turn.apply(run, ev.Ticked(at=turn.at, hearing=hearing))
        margin_s = self._config.release_margin_s + views.longest_pause(run) + views.longest_save(run)
        missing.look(turn, run)
        for allocation in run.live_allocations():
            self._watch(turn, run, allocation, margin_s)
            again.due(turn, run, allocation, self._config.beat_s)
        forget(turn, run)

    def _watch(self, turn: Turn, run: Run, allocation: Allocation, margin_s: float) -> None:
        """Release so long before the end; take agents that fell silent for gone."""
        if (
            allocation.state is AllocationState.RUNNING
            and allocation.end_at is not None
            and turn.now >= allocation.end_at - margin_s
        ):
            turn.release_allocation(run, allocation, allocation.ends_because)
        neighbours.hurry(turn, run, allocation)
        for node in set(allocation.agents) - set(allocation.agents_gone):
            silent = self._silent_s(turn, run, allocation, node)
            workers = [run.roster.workers.get(name) for name in allocation.agents[node]]
            # Whether a worker that has a state is lost with its agent is for the membership machine to judge.
            kept = any(worker is not None and worker.phase in _JUDGED for worker in workers)
            if silent > self._config.lease_s and not kept:
                self.agent_gone(turn, run, allocation, node, f"agent on {node} silent for {silent:.0f} s")
            elif run.spec.local and run.clock.is_deaf and _are_processes_gone(workers):
                # No Slurm tells of these nodes, but all of them are on this host.
                self.agent_gone(turn, run, allocation, node, f"the processes of {node} are gone")

    @staticmethod
    def _silent_s(turn: Turn, run: Run, allocation: Allocation, node: str) -> float:
        """For how long an agent was silent while somebody else was heard; 0: its connection may still come back."""
        hearing, at = run.clock.hearing, run.clock.read(turn.at)
        seen_at = run.agent_seen.setdefault((allocation.token, node), at)
        if seen_at < hearing.returned_at and at < hearing.returned_at + RECONNECT_S:
            return 0.0
        return max(0.0, hearing.newest_at - seen_at)

    def _end_stragglers(self, turn: Turn, run: Run) -> None:
        """Forget the agents of an ended run that fell silent."""
        for allocation in run.live_allocations():
            neighbours.hurry(turn, run, allocation)
            for node in set(allocation.agents) - set(allocation.agents_gone):
                if self._silent_s(turn, run, allocation, node) > self._config.lease_s:
                    self.agent_gone(turn, run, allocation, node, "the run is over")


def _expects_somebody(run: Run) -> bool:
    """Agents of the run should be heard."""
    return any(set(a.agents) - set(a.agents_gone) for a in run.live_allocations())


def _are_processes_gone(workers: list[Worker | None]) -> bool:
    pids = [worker.pid for worker in workers if worker is not None and worker.phase is not WorkerPhase.GONE]
    return bool(pids) and all(pid and not _is_running(pid) for pid in pids)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def _ended(code: int) -> str:
    """What an agent's exit code says, in words."""
    match code:
        case Exit.OK:
            return "the run is over, and the rest of its batch script goes on"
        case Exit.NO_RESTART:
            return "given back as planned"
        case Exit.SOFTWARE:
            return "its agent ended: the training failed"
        case Exit.TEMPFAIL:
            return "its agent ended: what had started it was gone, or the head was silent for too long"
        case _ if code > 128:
            return f"its agent was ended by signal {code - 128}"
    return f"its agent ended with code {code}"
