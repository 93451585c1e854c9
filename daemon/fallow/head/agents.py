"""Conversations with agents: what they say becomes events of the run's membership, and each heartbeat is answered."""

from __future__ import annotations

from math import inf
from pathlib import Path

from fallow.config import Checkpoint as CheckpointConfig
from fallow.config import Membership as MembershipConfig
from fallow.core.allocations import Agent, Allocation
from fallow.core.duds import came
from fallow.core.nodes import checkpoints
from fallow.core.nodes import events as ev
from fallow.core.nodes.messages import Gather
from fallow.core.nodes.names import member_name
from fallow.core.protocol.agents import Beat, EndAgent, Ended, EndNoted, FromAgent, Hello, Left, News, Refused, Setup
from fallow.head import again, gauge, missing, neighbours, saved, views
from fallow.head.book import Run
from fallow.head.forgetting import forget
from fallow.head.turn import Turn, agent_peer
from fallow.model import AllocationKind, AllocationState, Exit, MemberPhase
from fallow.wire.router import agent_of, key_of

STAND_IN_S = 120.0
"""A stand-in head is there so long after the head was given up, at the latest."""

CLOSE_S = 1.0
"""Ends that differ by less are the same: they are on two clocks."""


class Agents:
    """Turns what agents say into events for the machines."""

    def __init__(self, config: MembershipConfig, checkpoint: CheckpointConfig) -> None:
        self._config = config
        self._checkpoint = checkpoint

    def hear(self, turn: Turn, peer: str, message: FromAgent, at: float) -> None:
        """Handle one message. Its key decides for which allocation it speaks.

        Args:
            turn: takes the effects.
            peer: the router's name of who says it.
            message: what is said.
            at: when it was received, on the head's clock.
        """
        principal = turn.book.principals.get(key_of(peer))
        if principal is None:
            return
        run = turn.book.runs[principal.run]
        allocation = run.allocations[principal.token]
        if isinstance(message, Hello):
            self._hello(turn, run, allocation, peer, message, at)
            return
        host = agent_of(peer)
        if host not in allocation.agents:
            return
        if not allocation.live and not isinstance(message, Left):
            # The head has given it up. What it was told to end with still holds.
            code = Exit.NO_RESTART if allocation.end_code is None else allocation.end_code
            if not allocation.told_to_end:
                allocation.told_to_end = True
                turn.dirty.add(run.id)
            turn.messages.append((peer, EndAgent(term=turn.book.term, code=code, reason=allocation.reason)))
        else:
            run.agent_seen[allocation.token, host] = at
        match message:
            case Beat():
                self._beat(turn, run, allocation, host, message, at)
            case Ended():
                self._ended(turn, run, allocation, host, message, at)
                turn.messages.append((peer, EndNoted(node=message.node, boot=message.boot)))
            case Left():
                allocation.left_at = turn.now
                turn.dirty.add(run.id)
                self.agent_gone(turn, run, allocation, host, _left_with(message.code))
            case Gather():
                if message.node in allocation.members:
                    answer, nodes = run.gathers.take(message)
                    for node in nodes if answer is not None else ():
                        turn.tell(run, node, answer)

    # -- it comes -----------------------------------------------------------------------------------------------------

    def _hello(self, turn: Turn, run: Run, allocation: Allocation, peer: str, hello: Hello, at: float) -> None:
        if allocation.end_code is not None and hello.host in allocation.agents:
            # It was told to end, and may not have heard so before its link broke.
            end = EndAgent(term=turn.book.term, code=allocation.end_code, reason=allocation.reason)
            turn.messages.append((peer, end))
            return
        problem = _problem(run, allocation, hello)
        if problem is not None:
            allocation.told_to_end = True
            turn.dirty.add(run.id)
            turn.record(run, "refuse", f"agent on {hello.host}: {problem}")
            turn.messages.append((peer, Refused(code=Exit.NO_RESTART, message=problem)))
            return
        is_new = hello.host not in allocation.agents
        if is_new:
            self._come(turn, run, allocation, hello)
        agent = allocation.agents[hello.host]
        agent.gone = False
        run.agent_seen[allocation.token, hello.host] = at
        turn.messages.append((peer, self._setup(turn, run, allocation)))
        number = hello.node or (allocation.reserved if hello.boot == 1 else 0)
        turn.apply(
            run,
            ev.Expected(
                at=at,
                host=hello.host,
                token=allocation.token,
                boot=hello.boot,
                slots=hello.slots,
                entry=hello.entry,
                node=number,
            ),
        )
        if agent.node in run.roster.nodes:
            # What it was sent before its connection broke, or its head was another one, it may not have heard.
            turn.messages.append((peer, run.machine.order(agent.node)))
        if is_new and allocation.state is AllocationState.RELEASING:
            # It was to be given back before it came.
            turn.apply(run, ev.Release(at=at, nodes=tuple(allocation.members), reason=allocation.reason))
        elif is_new and allocation.asked_at is not None:
            # It was to be cancelled as soon as its job showed.
            turn.release_allocation(run, allocation, allocation.reason)

    @staticmethod
    def _come(turn: Turn, run: Run, allocation: Allocation, hello: Hello) -> None:
        """An agent is there for the first time."""
        allocation.job_id = allocation.job_id or hello.job_id
        if run.record.slots is None:
            run.record.slots = hello.slots
        came(run.record.fruitless, hello.host)
        allocation.agents[hello.host] = Agent(boot=hello.boot)
        if allocation.state in (AllocationState.UNKNOWN, AllocationState.PENDING):
            allocation.state = AllocationState.RUNNING
            allocation.start_at = turn.now
            if allocation.end_at is None and allocation.minutes is not None:
                # Until a poll shows what was granted, what was asked for is the safe guess.
                allocation.end_at = turn.now + 60.0 * allocation.minutes
        turn.dirty.add(run.id)
        turn.record(run, "node", f"{hello.host} came with {allocation.token}", job=hello.job_id)

    def _setup(self, turn: Turn, run: Run, allocation: Allocation) -> Setup:
        return Setup(
            run=run.id,
            folder=str(turn.book.paths.run(run.id).root),
            seed=run.spec.seed,
            max_workers=run.root.maximum * run.workers_per_node,
            beat_s=self._config.beat_s,
            lease_s=self._config.lease_s,
            patience_s=self._patience_s(run, allocation),
            checkpoint_folder=str(turn.book.checkpoint_folder(run)),
            checkpoint_s=self._checkpoint.interval_s,
            network=turn.book.network,
        )

    def _patience_s(self, run: Run, allocation: Allocation) -> float:
        """How long a worker that cannot go on by itself waits for a silent head.

        A base job waits to its end. A harvested node is not kept idle for longer than a stand-in head needs to come.
        """
        patience_s = self._config.head_patience_s
        if run.spec.local:
            return patience_s
        return inf if allocation.kind is AllocationKind.BASE else patience_s + max(patience_s, STAND_IN_S)

    # -- it is there --------------------------------------------------------------------------------------------------

    def _beat(self, turn: Turn, run: Run, allocation: Allocation, host: str, beat: Beat, at: float) -> None:
        report = beat.report
        if beat.warned:
            self._warned(turn, run, allocation, beat.warned)
        if report is not None:
            report = saved.by_this_clock(run, report, turn.now)
            known, failed = run.roster.nodes.get(report.node), run.root.unsaved
            before = len(run.roster.checkpoints.saved)
            turn.apply(run, ev.Reported(at=at, host=host, report=report))
            if len(run.roster.checkpoints.saved) != before or run.root.unsaved != failed:
                saved.note(run, report, failed=run.root.unsaved != failed, now=turn.now)
                turn.dirty.add(run.id)
            if known is not None and known.host == host and known.alive:
                run.progress[report.node] = beat.progress
                if known.seat:
                    run.reached = max(run.reached, beat.progress.reached)
                if report.generation and allocation.active_at is None:
                    allocation.active_at = turn.now
                    turn.dirty.add(run.id)
                gauge.heard(turn, run, report.node)
        if allocation.live:
            turn.messages.append((agent_peer(allocation, host), self._news(turn, run, allocation, host)))
            if allocation.end_code is not None:
                end = EndAgent(term=turn.book.term, code=allocation.end_code, reason=allocation.reason)
                turn.messages.append((agent_peer(allocation, host), end))

    def _news(self, turn: Turn, run: Run, allocation: Allocation, host: str) -> News:
        agent = allocation.agents[host]
        usable = checkpoints.usable(run.roster)
        epochs = [run.progress[n].epoch for n in run.roster.members[:1] if n in run.progress]
        due_in_s = saved.due_in_s(run, self._checkpoint.interval_s, turn.now)
        return News(
            term=turn.book.term,
            boot=agent.boot,
            ends_in_s=None if allocation.end_at is None else allocation.end_at - turn.now,
            joins=run.joins(agent.node),
            step=run.roster.front,
            epoch=epochs[0] if epochs else (usable[0].epoch if usable else 0),
            reached=run.reached,
            checkpoint_in_s=due_in_s,
            checkpoints_asked=run.record.checkpoints_asked,
        )

    @staticmethod
    def _warned(turn: Turn, run: Run, allocation: Allocation, number: int) -> None:
        """Slurm has warned the node."""
        if run.ended or not allocation.live:
            return
        why = f"warned by Slurm with signal {number}: preempted or cancelled"
        if allocation.end_at is not None and turn.now >= allocation.end_at:
            # Limits are looked at every 30 s, so this warning comes late, never early.
            why = "walltime"
        if why != "walltime" and not allocation.warned:
            is_base = allocation.kind is AllocationKind.BASE
            # Only Slurm knows whether it was preempted or cancelled: the next poll comes soon.
            turn.taken = turn.taken or allocation.harvested or is_base
            allocation.warned = True
            turn.dirty.add(run.id)
        turn.release_allocation(run, allocation, why)

    # -- it goes ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _ended(turn: Turn, run: Run, allocation: Allocation, host: str, ended: Ended, at: float) -> None:
        how = f"killed by signal {ended.signal}" if ended.signal is not None else f"exited with {ended.code}"
        last = ended.tail.strip().splitlines()[-1:]
        known = run.roster.nodes.get(ended.node)
        if known is None or (known.host, known.boot) != (host, ended.boot):
            return
        if ended.code not in (0, None) and last:
            how += f" ({last[0][:200]})"
        if known.phase is MemberPhase.GONE and "most recent call first" in ended.tail:
            # It was killed because it hung, and said where.
            name = member_name(known.id)
            turn.record(run, "stack", f"{name} on {host} hung here", node=known.id, stack=ended.tail)
        again.ended(turn, run, allocation, host, ended)
        gone = ev.Gone(
            at=at,
            node=ended.node,
            reason=how,
            host=host,
            boot=ended.boot,
            code=ended.code,
            signal=ended.signal,
            tail=ended.tail,
            report=ended.report,
            is_ordered=ended.is_ordered,
        )
        turn.apply(run, gone)
        turn.let_go_of_empty(run)

    @staticmethod
    def agent_gone(
        turn: Turn, run: Run, allocation: Allocation, host: str, reason: str, *, node_failed: bool = False
    ) -> None:
        """An agent ended or its node is lost: so are its workers."""
        agent = allocation.agents[host]
        if not agent.gone:
            agent.gone = True
            turn.dirty.add(run.id)
        known = run.roster.nodes.get(agent.node)
        if known is not None and not known.exited:
            turn.apply(run, ev.Gone(at=turn.at, node=known.id, reason=reason, node_failed=node_failed))
        if not allocation.hosts and allocation.live:
            turn.record(run, "node", f"{allocation.token} ended: {allocation.reason or reason}")
            turn.book.end_allocation(run, allocation, reason)

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self, turn: Turn) -> None:
        """Deadlines of everybody: leases, votes, walltimes."""
        turn.for_each(turn.book.current.values(), "tick", lambda run: self.tick_run(turn, run))

    def tick_run(self, turn: Turn, run: Run) -> None:
        """Deadlines of one run."""
        if run.ended:
            self._end_stragglers(turn, run)
            return
        run.look_how_far()
        turn.apply(run, ev.Ticked(at=turn.at))
        margin_s = self._config.release_margin_s + views.longest_pause(run) + views.longest_save(run)
        missing.look(turn, run)
        for allocation in run.live_allocations():
            self._watch(turn, run, allocation, margin_s)
            again.due(turn, run, allocation)
        forget(turn, run)

    def _watch(self, turn: Turn, run: Run, allocation: Allocation, margin_s: float) -> None:
        """Tell the membership when nodes go away, and release them so long before."""
        ends_at = allocation.end_at
        if ends_at is not None:
            at = ends_at + turn.at - turn.now
            for node in [run.roster.nodes[n] for n in allocation.members if n in run.roster.nodes]:
                if node.alive and (node.ends_at is None or abs(node.ends_at - at) > CLOSE_S):
                    turn.apply(run, ev.Ends(at=turn.at, node=node.id, ends_at=at))
            if allocation.state is AllocationState.RUNNING and turn.now >= ends_at - margin_s:
                turn.release_allocation(run, allocation, allocation.ends_because)
        neighbours.hurry(turn, run, allocation)
        for host in allocation.hosts if run.spec.local else ():
            # No Slurm tells of these nodes, but all of them are on this host.
            is_silent = self._silent_s(turn, run, allocation, host) > self._config.lease_s
            if is_silent and _is_killed(run, allocation, host):
                self.agent_gone(turn, run, allocation, host, f"the processes of {host} are gone")

    @staticmethod
    def _silent_s(turn: Turn, run: Run, allocation: Allocation, host: str) -> float:
        return turn.at - run.agent_seen.setdefault((allocation.token, host), turn.at)

    def _end_stragglers(self, turn: Turn, run: Run) -> None:
        """Forget the agents of an ended run that fell silent."""
        for allocation in run.live_allocations():
            neighbours.hurry(turn, run, allocation)
            for host in allocation.hosts:
                if self._silent_s(turn, run, allocation, host) > self._config.lease_s:
                    self.agent_gone(turn, run, allocation, host, "the run is over")


def _problem(run: Run, allocation: Allocation, hello: Hello) -> str | None:
    """Why an agent is refused."""
    if hello.token != allocation.token:
        return f"its key belongs to {allocation.token}, it says {hello.token}"
    if run.ended:
        return f"run {run.id} is {run.root.status}"
    if hello.host in run.barred:
        return f"node {hello.host} is barred from run {run.id}: {run.barred[hello.host]}"
    if not allocation.live:
        return f"allocation {allocation.token} has ended ({allocation.reason})"
    if allocation.agents and allocation.job_id not in (None, hello.job_id):
        # One token, one job: the first that came has claimed it.
        return f"{allocation.token} belongs to job {allocation.job_id}, this is job {hello.job_id}"
    return None


def _is_killed(run: Run, allocation: Allocation, host: str) -> bool:
    progress = run.progress.get(allocation.agents[host].node)
    pids = progress.pids if progress is not None else ()
    return bool(pids) and not any(map(_is_running, pids))


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def _left_with(code: int) -> str:
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
