"""Messages of agents: each becomes events of the run's membership, and each heartbeat gets an answer."""

from math import inf

from fallow.core.accounting.launch_failures import note_agent_arrival
from fallow.core.allocations import Agent, Allocation
from fallow.core.membership import events as ev
from fallow.core.membership.messages import Gather, Report
from fallow.core.membership.names import member_name, worker_name
from fallow.core.protocol import (
    AgentLeft,
    AgentRefused,
    Beat,
    BeatReply,
    EndAgent,
    Ended,
    EndNoted,
    FromAgent,
    Hello,
    Introduce,
    Progress,
    Setup,
)
from fallow.head.loop.turn import Turn, agent_peer, end_reason
from fallow.head.peers import checkpoints, throughput
from fallow.head.state.registry import Run
from fallow.model import AllocationKind, AllocationState, Exit, MemberPhase
from fallow.wire.router import agent_of, key_of

STAND_IN_S = 120.0
"""Longest time from giving up the head until a stand-in head serves."""

FINAL = frozenset((Exit.OK, Exit.USAGE, Exit.DATA, Exit.NOINPUT, Exit.CONFIG, Exit.NOPERM, Exit.NO_RESTART))
"""Exit codes after which a worker is not restarted: the new worker would exit with the same code."""

LONGEST_S = 64.0
"""Longest pause between a crash and the restart. The first crash on a node has no pause. Later crashes have pauses,
because each restart costs all members a membership change."""


def hear(turn: Turn, peer: str, message: FromAgent, at: float) -> None:
    """Handle one message. The peer's key decides which allocation the message is from.

    Args:
        turn: takes the effects.
        peer: the router's name of the sender.
        message: message of the agent.
        at: time of receipt, on the head's clock.
    """
    allocation = turn.registry.principals.get(key_of(peer))
    if allocation is None:
        return
    turn.registry.hearing.hear(at)
    run = turn.registry.runs[allocation.run]
    if isinstance(message, Hello):
        _handle_hello(turn, run, allocation, peer, message, at)
        return
    host = agent_of(peer)
    if host not in allocation.agents:
        if isinstance(message, Beat) and message.report is not None:
            # The head has forgotten this agent, for example because its job looked requeued.
            turn.messages.append((peer, Introduce(node=message.report.node)))
        return
    if allocation.is_live:
        _note_seen(turn, run, allocation, host, at)
    elif not isinstance(message, AgentLeft):
        # The head has given the allocation up. The exit code that it sent before stays valid.
        _send_end(turn, run, allocation, peer, end_reason(run, allocation))
    match message:
        case Beat():
            _handle_beat(turn, run, allocation, host, message, at)
        case Ended():
            _handle_end(turn, run, allocation, host, message, at)
            turn.messages.append((peer, EndNoted(node=message.node, boot=message.boot)))
        case AgentLeft():
            allocation.left_at = turn.now
            turn.dirty.add(run.id)
            note_agent_end(turn, run, allocation, host, _explain_exit(message.code))
        case Gather():
            if message.node == allocation.agents[host].node:
                answer, nodes = run.gathers.take(message)
                if answer is not None:
                    for node in nodes:
                        turn.tell(run, node, answer)


def _note_seen(turn: Turn, run: Run, allocation: Allocation, host: str, at: float) -> None:
    run.agent_seen[allocation.token, host] = at
    if allocation.agents[host].has_left:
        # The agent was silent, but it lives.
        allocation.agents[host].has_left = False
        turn.dirty.add(run.id)


def _send_end(turn: Turn, run: Run, allocation: Allocation, peer: str, reason: str) -> None:
    code = Exit.NO_RESTART if allocation.end_code is None else allocation.end_code
    if not allocation.told_to_end and allocation.end_code is None:
        allocation.told_to_end = True
        turn.dirty.add(run.id)
    turn.messages.append((peer, EndAgent(term=turn.registry.term, code=code, reason=reason)))


# -- arrival of agents --------------------------------------------------------------------------------------------


def _handle_hello(turn: Turn, run: Run, allocation: Allocation, peer: str, hello: Hello, at: float) -> None:
    if allocation.end_code is not None:
        # The head has told all agents of this allocation to end. The message may have been lost with the link.
        _send_end(turn, run, allocation, peer, end_reason(run, allocation))
        return
    problem = _refusal_reason(run, allocation, hello)
    if problem is not None:
        _refuse(turn, run, allocation, peer, hello, problem)
        return
    is_new = hello.host not in allocation.agents
    if is_new:
        _admit_agent(turn, run, allocation, hello)
    _note_seen(turn, run, allocation, hello.host, at)
    agent = allocation.agents[hello.host]
    if hello.process != agent.process:
        # A node has one agent, so the former agent has ended, and its workers with it.
        agent.process, agent.retry_at = hello.process, None
        agent.boot, agent.node = (agent.boot + 1, 0) if agent.node else (agent.boot, 0)
        turn.record(run, "node", f"{hello.host} has a new agent of {allocation.token}")
    turn.messages.append((peer, _setup_message(turn, run, allocation)))
    if hello.boot < agent.boot:
        # The agent does not know yet that the head wants a newer start of its workers.
        turn.messages.append((peer, _beat_reply(turn, run, allocation, hello.host)))
        return
    _expect_workers(turn, run, allocation, hello, at)
    if is_new and allocation.asked_at is not None and allocation.state is AllocationState.RUNNING:
        # The allocation was to be cancelled as soon as its job appeared.
        turn.release_allocation(run, allocation, allocation.reason)


def _expect_workers(turn: Turn, run: Run, allocation: Allocation, hello: Hello, at: float) -> None:
    """Handle the announcement, maybe repeated, of the start of workers that the head expects."""
    agent = allocation.agents[hello.host]
    former_node, agent.boot = agent.node, hello.boot
    event = ev.Expected(
        at=at,
        host=hello.host,
        token=allocation.token,
        boot=hello.boot,
        slots=hello.slots,
        entry=hello.entry,
        node=hello.node or (allocation.reserved if hello.boot == 1 else 0),
    )
    turn.apply(run, event)
    is_known = agent.node == former_node and former_node in run.roster.nodes
    if not is_known and allocation.state is AllocationState.RELEASING:
        # The node was to be given back before it came.
        turn.apply(run, ev.Release(at=at, nodes=(agent.node,), reason=allocation.reason))


def _refuse(turn: Turn, run: Run, allocation: Allocation, peer: str, hello: Hello, problem: str) -> None:
    is_known = hello.host in allocation.agents or hello.node > 0
    if not (is_known and allocation.told_to_end):
        turn.record(run, "refuse", f"agent on {hello.host}: {problem}")
    if is_known:
        # An agent that was admitted before ignores a refusal, so it is told to end.
        _send_end(turn, run, allocation, peer, problem)
        return
    allocation.told_to_end = True
    turn.dirty.add(run.id)
    turn.messages.append((peer, AgentRefused(code=Exit.NO_RESTART, message=problem)))


def _admit_agent(turn: Turn, run: Run, allocation: Allocation, hello: Hello) -> None:
    """Record an agent that comes for the first time."""
    allocation.job_id = allocation.job_id or hello.job_id
    if run.record.slots is None:
        run.record.slots = hello.slots
    note_agent_arrival(run.record.fruitless, hello.host)
    # Slurm may have requeued the job. Its former workers are on record, so new workers need a new boot number.
    former_boots = [] if hello.node else [node.boot for node in run.roster.at_place(hello.host, allocation.token)]
    allocation.agents[hello.host] = Agent(process=hello.process, boot=max([hello.boot, *(n + 1 for n in former_boots)]))
    if allocation.state in (AllocationState.UNKNOWN, AllocationState.PENDING):
        allocation.state = AllocationState.RUNNING
        allocation.start_at = turn.now
        if allocation.end_at is None and allocation.minutes is not None:
            # Until a poll shows the granted time, assume the requested time.
            allocation.end_at = turn.now + 60.0 * allocation.minutes
    turn.record(run, "node", f"{hello.host} came with {allocation.token}", job=hello.job_id)


def _setup_message(turn: Turn, run: Run, allocation: Allocation) -> Setup:
    config = turn.registry.config
    return Setup(
        run=run.id,
        folder=str(turn.registry.paths.run(run.id).root),
        seed=run.spec.seed,
        max_workers=run.root.maximum * run.workers_per_node,
        beat_s=config.membership.beat_s,
        lease_s=config.membership.lease_s,
        patience_s=_patience_s(run, allocation, config.membership.head_patience_s),
        checkpoint_folder=str(turn.registry.checkpoint_folder(run)),
        checkpoint_s=config.checkpoint.interval_s,
        network=config.network.data,
    )


# -- beats and reports --------------------------------------------------------------------------------------------


def _handle_beat(turn: Turn, run: Run, allocation: Allocation, host: str, beat: Beat, at: float) -> None:
    if beat.warned:
        _handle_warning(turn, run, allocation, beat.warned)
    if beat.report is not None:
        progress = None if beat.brief else beat.progress
        _handle_report(turn, run, allocation, host, beat.report, progress, at)
    if allocation.is_live:
        peer = agent_peer(allocation, host)
        turn.messages.append((peer, _beat_reply(turn, run, allocation, host)))
        if allocation.end_code is not None:
            _send_end(turn, run, allocation, peer, end_reason(run, allocation))


def _handle_report(
    turn: Turn, run: Run, allocation: Allocation, host: str, report: Report, progress: Progress | None, at: float
) -> None:
    node = run.roster.nodes.get(report.node)
    if node is not None and node.token != allocation.token:
        # The store lost this node's record, and its number belongs to a node of another allocation now.
        turn.messages.append((agent_peer(allocation, host), Introduce(node=report.node)))
        return
    report = checkpoints.by_this_clock(run, report, turn.now)
    turn.apply(run, ev.Reported(at=at, host=host, report=report))
    node = run.roster.nodes.get(report.node)
    if node is None or (node.host, node.boot) != (host, report.boot) or not node.alive:
        return
    run.step = max(run.step, node.step)
    if progress is not None:
        run.progress[node.id] = progress
        if node.seat:
            run.reached = max(run.reached, progress.reached)
    if report.generation and allocation.active_at is None:
        allocation.active_at = turn.now
        turn.dirty.add(run.id)
    throughput.observe(turn, run, node.id)


def _beat_reply(turn: Turn, run: Run, allocation: Allocation, host: str) -> BeatReply:
    agent = allocation.agents[host]
    usable_checkpoints = run.roster.checkpoints.usable()
    epochs = [run.progress[n].epoch for n in run.roster.members[:1] if n in run.progress]
    return BeatReply(
        term=turn.registry.term,
        boot=agent.boot,
        ends_in_s=None if allocation.end_at is None else allocation.end_at - turn.now,
        joins=run.joins(agent.node),
        step=run.step,
        epoch=epochs[0] if epochs else (usable_checkpoints[0].epoch if usable_checkpoints else 0),
        reached=run.reached,
        checkpoint_in_s=checkpoints.due_in_s(run, turn.registry.config.checkpoint.interval_s, turn.now),
        checkpoints_asked=run.record.checkpoints_asked,
    )


def _handle_warning(turn: Turn, run: Run, allocation: Allocation, number: int) -> None:
    """Handle a signal with which Slurm warned the node."""
    if run.ended or not allocation.is_live:
        return
    reason = f"warned by Slurm with signal {number}: preempted or cancelled"
    if allocation.end_at is not None and turn.now >= allocation.end_at:
        # Slurm checks time limits every 30 s, so a warning at the limit comes late, never early.
        reason = "walltime"
    # The head's own scancel causes a warning, too.
    if reason != "walltime" and not allocation.was_warned and allocation.asked_at is None:
        is_base = allocation.kind is AllocationKind.BASE
        # Only Slurm knows whether the job was preempted or cancelled, so poll soon.
        turn.poll_soon = turn.poll_soon or allocation.is_harvested or is_base
        allocation.was_warned = True
        turn.dirty.add(run.id)
    turn.release_allocation(run, allocation, reason)


# -- end of workers and agents ------------------------------------------------------------------------------------


def _handle_end(turn: Turn, run: Run, allocation: Allocation, host: str, ended: Ended, at: float) -> None:
    node = run.roster.nodes.get(ended.node)
    if node is None or (node.token, node.host, node.boot) != (allocation.token, host, ended.boot):
        return
    end_text = f"killed by signal {ended.signal}" if ended.signal is not None else f"exited with {ended.code}"
    if ended.slot is not None and node.slots > 1:
        verb = "was " if ended.signal is not None else ""
        end_text = f"worker {worker_name(node.id, ended.slot, node.slots)} {verb}{end_text}"
    last = ended.tail.strip().splitlines()[-1:]
    if ended.code not in (0, None) and last:
        end_text += f" ({last[0][:200]})"
    if node.phase is MemberPhase.GONE and "most recent call first" in ended.tail:
        # The worker was killed because it hung, and it printed its stack.
        name = member_name(node.id)
        turn.record(run, "stack", f"{name} on {host} hung here", node=node.id, stack=ended.tail)
    _schedule_restart(turn, run, allocation, host, ended)
    end = ev.NodeEnded(
        at=at,
        node=ended.node,
        reason=end_text,
        host=host,
        boot=ended.boot,
        code=ended.code,
        signal=ended.signal,
        tail=ended.tail,
        report=None if ended.report is None else checkpoints.by_this_clock(run, ended.report, turn.now),
        is_ordered=ended.is_ordered,
    )
    turn.apply(run, end)
    turn.end_empty_allocations(run)


def _schedule_restart(turn: Turn, run: Run, allocation: Allocation, host: str, end: Ended) -> None:
    """Schedule the restart of a node's workers after their end, unless they must not be restarted."""
    agent = allocation.agents[host]
    node = run.roster.nodes.get(end.node)
    if agent.retry_at is not None or agent.node != end.node or node is None or node.exited:
        return
    if not run.may_restart(allocation, host) or end.code in FINAL:
        return
    wait_s = min(LONGEST_S, 2.0 ** min(agent.restarts, 20)) if agent.restarts else 0.0
    agent.restarts, agent.retry_at = agent.restarts + 1, turn.now + wait_s
    delay_text = f"in {wait_s:g} s" if wait_s else "now"
    turn.record(run, "restart", f"the workers of {member_name(end.node)} on {host} are restarted {delay_text}")


def request_due_restarts(turn: Turn, run: Run, allocation: Allocation) -> None:
    """Request the restarts that are due. The answer to the agent's next heartbeat carries the new boot number."""
    for host, agent in allocation.agents.items():
        if agent.retry_at is None or turn.now < agent.retry_at:
            continue
        agent.retry_at = None
        turn.dirty.add(run.id)
        if allocation.state is AllocationState.RUNNING and host not in run.barred and not agent.has_left:
            agent.boot, agent.node = agent.boot + 1, 0


def note_agent_end(
    turn: Turn,
    run: Run,
    allocation: Allocation,
    host: str,
    reason: str,
    *,
    by_slurm: bool = False,
    node_failed: bool = False,
) -> None:
    """Handle an agent that has certainly ended, with its workers. `by_slurm`: because Slurm took its node."""
    for node in run.roster.at_place(host, allocation.token):
        if not node.exited:
            end = ev.NodeEnded(at=turn.at, node=node.id, reason=reason, by_slurm=by_slurm, node_failed=node_failed)
            turn.apply(run, end)
    give_up_agent(turn, run, allocation, host, reason)


def give_up_agent(turn: Turn, run: Run, allocation: Allocation, host: str, reason: str) -> None:
    """Give up an agent, not its workers. The allocation ends with its last agent."""
    agent = allocation.agents[host]
    if not agent.has_left:
        agent.has_left = True
        turn.dirty.add(run.id)
    if not allocation.hosts and allocation.is_live:
        turn.record(run, "node", f"{allocation.token} ended: {allocation.reason or reason}")
        turn.registry.end_allocation(run, allocation, reason)


def _patience_s(run: Run, allocation: Allocation, patience_s: float) -> float:
    """Seconds that a worker which cannot train on alone waits for a silent head.

    A base job waits until its end. A harvested node waits idle only as long as a stand-in head may need to start.
    """
    if run.spec.local:
        return patience_s
    return inf if allocation.kind is AllocationKind.BASE else patience_s + max(patience_s, STAND_IN_S)


def _refusal_reason(run: Run, allocation: Allocation, hello: Hello) -> str | None:
    """Reason to refuse an agent; None: accept it."""
    if hello.token != allocation.token:
        return f"its key belongs to {allocation.token}, it says {hello.token}"
    if run.ended:
        return f"run {run.id} is {run.root.status}"
    if hello.host in run.barred:
        return f"node {hello.host} is barred from run {run.id}: {run.barred[hello.host]}"
    if not allocation.is_live:
        return f"allocation {allocation.token} has ended ({allocation.reason})"
    if allocation.agents and allocation.job_id not in (None, hello.job_id):
        # A token belongs to one job: the first that came.
        return f"{allocation.token} belongs to job {allocation.job_id}, this is job {hello.job_id}"
    return None


def _explain_exit(code: int) -> str:
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
