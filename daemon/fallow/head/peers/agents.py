"""Conversations with agents: what they say becomes events of the run's membership, and each heartbeat is answered."""

from math import inf

from fallow.core.accounting.duds import came
from fallow.core.allocations import Agent, Allocation
from fallow.core.membership import events as ev
from fallow.core.membership.messages import Gather, Report
from fallow.core.membership.names import member_name
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
from fallow.head.loop.turn import Turn, agent_peer, why_ended
from fallow.head.peers import checkpoints, throughput
from fallow.head.state.book import Run
from fallow.model import AllocationKind, AllocationState, Exit, MemberPhase
from fallow.wire.router import agent_of, key_of

STAND_IN_S = 120.0
"""A stand-in head is there so long after the head was given up, at the latest."""

FINAL = frozenset((Exit.OK, Exit.USAGE, Exit.DATA, Exit.NOINPUT, Exit.CONFIG, Exit.NOPERM, Exit.NO_RESTART))
"""Exit codes of a worker that another one in its place would end with, too."""

LONGEST_S = 64.0
"""Between a crash and the next start. The first one on a node is made good at once; where one follows another, each
start costs everybody a change of the membership."""


def hear(turn: Turn, peer: str, message: FromAgent, at: float) -> None:
    """Handle one message. Its key decides for which allocation it speaks.

    Args:
        turn: takes the effects.
        peer: the router's name of who says it.
        message: what is said.
        at: when it was received, on the head's clock.
    """
    allocation = turn.book.principals.get(key_of(peer))
    if allocation is None:
        return
    turn.book.hearing.hear(at)
    run = turn.book.runs[allocation.run]
    if isinstance(message, Hello):
        _hello(turn, run, allocation, peer, message, at)
        return
    host = agent_of(peer)
    if host not in allocation.agents:
        if isinstance(message, Beat) and message.report is not None:
            # It was forgotten, as when its job was taken for requeued, and does not know.
            turn.messages.append((peer, Introduce(node=message.report.node)))
        return
    if allocation.live:
        _see(turn, run, allocation, host, at)
    elif not isinstance(message, AgentLeft):
        # The head has given it up. What it was told to end with still holds.
        _end(turn, run, allocation, peer, why_ended(run, allocation))
    match message:
        case Beat():
            _beat(turn, run, allocation, host, message, at)
        case Ended():
            _ended(turn, run, allocation, host, message, at)
            turn.messages.append((peer, EndNoted(node=message.node, boot=message.boot)))
        case AgentLeft():
            allocation.left_at = turn.now
            turn.dirty.add(run.id)
            agent_gone(turn, run, allocation, host, _left_with(message.code))
        case Gather():
            if message.node == allocation.agents[host].node:
                answer, nodes = run.gathers.take(message)
                if answer is not None:
                    for node in nodes:
                        turn.tell(run, node, answer)


def _see(turn: Turn, run: Run, allocation: Allocation, host: str, at: float) -> None:
    run.agent_seen[allocation.token, host] = at
    if allocation.agents[host].gone:
        # It was only silent.
        allocation.agents[host].gone = False
        turn.dirty.add(run.id)


def _end(turn: Turn, run: Run, allocation: Allocation, peer: str, reason: str) -> None:
    """Tell an agent to end."""
    code = Exit.NO_RESTART if allocation.end_code is None else allocation.end_code
    if not allocation.told_to_end and allocation.end_code is None:
        allocation.told_to_end = True
        turn.dirty.add(run.id)
    turn.messages.append((peer, EndAgent(term=turn.book.term, code=code, reason=reason)))


# -- it comes -----------------------------------------------------------------------------------------------------


def _hello(turn: Turn, run: Run, allocation: Allocation, peer: str, hello: Hello, at: float) -> None:
    if allocation.end_code is not None:
        # The run has let go of all its agents. This one may not have heard so before its link broke.
        _end(turn, run, allocation, peer, why_ended(run, allocation))
        return
    problem = _problem(run, allocation, hello)
    if problem is not None:
        _turn_away(turn, run, allocation, peer, hello, problem)
        return
    is_new = hello.host not in allocation.agents
    if is_new:
        _come(turn, run, allocation, hello)
    _see(turn, run, allocation, hello.host, at)
    agent = allocation.agents[hello.host]
    if hello.process != agent.process:
        # The one before has ended, and its workers with it: there is one agent on a node.
        agent.process, agent.again_at = hello.process, None
        agent.boot, agent.node = (agent.boot + 1, 0) if agent.node else (agent.boot, 0)
        turn.record(run, "node", f"{hello.host} has another agent of {allocation.token} now")
    turn.messages.append((peer, _setup(turn, run, allocation)))
    if hello.boot < agent.boot:
        # It does not know yet which start of its workers is wanted.
        turn.messages.append((peer, _news(turn, run, allocation, hello.host)))
        return
    _expect(turn, run, allocation, hello, at)
    if is_new and allocation.asked_at is not None and allocation.state is AllocationState.RUNNING:
        # It was to be cancelled as soon as its job showed.
        turn.release_allocation(run, allocation, allocation.reason)


def _expect(turn: Turn, run: Run, allocation: Allocation, hello: Hello, at: float) -> None:
    """The start of workers that is wanted has come, or is announced again."""
    agent = allocation.agents[hello.host]
    before, agent.boot = agent.node, hello.boot
    expected = ev.Expected(
        at=at,
        host=hello.host,
        token=allocation.token,
        boot=hello.boot,
        slots=hello.slots,
        entry=hello.entry,
        node=hello.node or (allocation.reserved if hello.boot == 1 else 0),
    )
    turn.apply(run, expected)
    is_known = agent.node == before and before in run.roster.nodes
    if not is_known and allocation.state is AllocationState.RELEASING:
        # It was to be given back before it came.
        turn.apply(run, ev.Release(at=at, nodes=(agent.node,), reason=allocation.reason))


def _turn_away(turn: Turn, run: Run, allocation: Allocation, peer: str, hello: Hello, problem: str) -> None:
    is_known = hello.host in allocation.agents or hello.node > 0
    if not (is_known and allocation.told_to_end):
        turn.record(run, "refuse", f"agent on {hello.host}: {problem}")
    if is_known:
        # One that was admitted before would train on if it was only refused.
        _end(turn, run, allocation, peer, problem)
        return
    allocation.told_to_end = True
    turn.dirty.add(run.id)
    turn.messages.append((peer, AgentRefused(code=Exit.NO_RESTART, message=problem)))


def _come(turn: Turn, run: Run, allocation: Allocation, hello: Hello) -> None:
    """An agent is there for the first time."""
    allocation.job_id = allocation.job_id or hello.job_id
    if run.record.slots is None:
        run.record.slots = hello.slots
    came(run.record.fruitless, hello.host)
    # Slurm may have requeued the job: the workers of its first attempt are on record, and their number is taken.
    before = [] if hello.node else [node.boot for node in run.roster.at_place(hello.host, allocation.token)]
    allocation.agents[hello.host] = Agent(process=hello.process, boot=max([hello.boot, *(n + 1 for n in before)]))
    if allocation.state in (AllocationState.UNKNOWN, AllocationState.PENDING):
        allocation.state = AllocationState.RUNNING
        allocation.start_at = turn.now
        if allocation.end_at is None and allocation.minutes is not None:
            # Until a poll shows what was granted, what was asked for is the safe guess.
            allocation.end_at = turn.now + 60.0 * allocation.minutes
    turn.record(run, "node", f"{hello.host} came with {allocation.token}", job=hello.job_id)


def _setup(turn: Turn, run: Run, allocation: Allocation) -> Setup:
    config = turn.book.config
    return Setup(
        run=run.id,
        folder=str(turn.book.paths.run(run.id).root),
        seed=run.spec.seed,
        max_workers=run.root.maximum * run.workers_per_node,
        beat_s=config.membership.beat_s,
        lease_s=config.membership.lease_s,
        patience_s=_patience_s(run, allocation, config.membership.head_patience_s),
        checkpoint_folder=str(turn.book.checkpoint_folder(run)),
        checkpoint_s=config.checkpoint.interval_s,
        network=config.network.data,
    )


# -- it is there --------------------------------------------------------------------------------------------------


def _beat(turn: Turn, run: Run, allocation: Allocation, host: str, beat: Beat, at: float) -> None:
    if beat.warned:
        _warned(turn, run, allocation, beat.warned)
    if beat.report is not None:
        progress = None if beat.brief else beat.progress
        _report(turn, run, allocation, host, beat.report, progress, at)
    if allocation.live:
        peer = agent_peer(allocation, host)
        turn.messages.append((peer, _news(turn, run, allocation, host)))
        if allocation.end_code is not None:
            _end(turn, run, allocation, peer, why_ended(run, allocation))


def _report(
    turn: Turn, run: Run, allocation: Allocation, host: str, report: Report, progress: Progress | None, at: float
) -> None:
    known = run.roster.nodes.get(report.node)
    if known is not None and known.token != allocation.token:
        # The store has lost it, and its number belongs to a node of another allocation now, maybe on this host.
        turn.messages.append((agent_peer(allocation, host), Introduce(node=report.node)))
        return
    report = checkpoints.by_this_clock(run, report, turn.now)
    turn.apply(run, ev.Reported(at=at, host=host, report=report))
    known = run.roster.nodes.get(report.node)
    if known is None or (known.host, known.boot) != (host, report.boot) or not known.alive:
        return
    run.step = max(run.step, known.step)
    if progress is not None:
        run.progress[known.id] = progress
        if known.seat:
            run.reached = max(run.reached, progress.reached)
    if report.generation and allocation.active_at is None:
        allocation.active_at = turn.now
        turn.dirty.add(run.id)
    throughput.heard(turn, run, known.id)


def _news(turn: Turn, run: Run, allocation: Allocation, host: str) -> BeatReply:
    agent = allocation.agents[host]
    usable = run.roster.checkpoints.usable()
    epochs = [run.progress[n].epoch for n in run.roster.members[:1] if n in run.progress]
    return BeatReply(
        term=turn.book.term,
        boot=agent.boot,
        ends_in_s=None if allocation.end_at is None else allocation.end_at - turn.now,
        joins=run.joins(agent.node),
        step=run.step,
        epoch=epochs[0] if epochs else (usable[0].epoch if usable else 0),
        reached=run.reached,
        checkpoint_in_s=checkpoints.due_in_s(run, turn.book.config.checkpoint.interval_s, turn.now),
        checkpoints_asked=run.record.checkpoints_asked,
    )


def _warned(turn: Turn, run: Run, allocation: Allocation, number: int) -> None:
    """Slurm has warned the node."""
    if run.ended or not allocation.live:
        return
    why = f"warned by Slurm with signal {number}: preempted or cancelled"
    if allocation.end_at is not None and turn.now >= allocation.end_at:
        # Limits are looked at every 30 s, so this warning comes late, never early.
        why = "walltime"
    # The scancel of the head itself warns, too.
    if why != "walltime" and not allocation.warned and allocation.asked_at is None:
        is_base = allocation.kind is AllocationKind.BASE
        # Only Slurm knows whether it was preempted or cancelled: the next poll comes soon.
        turn.poll_soon = turn.poll_soon or allocation.harvested or is_base
        allocation.warned = True
        turn.dirty.add(run.id)
    turn.release_allocation(run, allocation, why)


# -- it goes ------------------------------------------------------------------------------------------------------


def _ended(turn: Turn, run: Run, allocation: Allocation, host: str, ended: Ended, at: float) -> None:
    known = run.roster.nodes.get(ended.node)
    if known is None or (known.token, known.host, known.boot) != (allocation.token, host, ended.boot):
        return
    how = f"killed by signal {ended.signal}" if ended.signal is not None else f"exited with {ended.code}"
    last = ended.tail.strip().splitlines()[-1:]
    if ended.code not in (0, None) and last:
        how += f" ({last[0][:200]})"
    if known.phase is MemberPhase.GONE and "most recent call first" in ended.tail:
        # It was killed because it hung, and said where.
        name = member_name(known.id)
        turn.record(run, "stack", f"{name} on {host} hung here", node=known.id, stack=ended.tail)
    _take_place(turn, run, allocation, host, ended)
    gone = ev.NodeEnded(
        at=at,
        node=ended.node,
        reason=how,
        host=host,
        boot=ended.boot,
        code=ended.code,
        signal=ended.signal,
        tail=ended.tail,
        report=None if ended.report is None else checkpoints.by_this_clock(run, ended.report, turn.now),
        is_ordered=ended.is_ordered,
    )
    turn.apply(run, gone)
    turn.let_go_of_empty(run)


def _take_place(turn: Turn, run: Run, allocation: Allocation, host: str, end: Ended) -> None:
    """A node's workers have ended: note when others take their place, if any do."""
    agent = allocation.agents[host]
    known = run.roster.nodes.get(end.node)
    if agent.again_at is not None or agent.node != end.node or known is None or known.exited:
        return
    if not run.may_restart(allocation, host) or end.code in FINAL:
        return
    wait_s = min(LONGEST_S, 2.0 ** min(agent.restarts, 20)) if agent.restarts else 0.0
    agent.restarts, agent.again_at = agent.restarts + 1, turn.now + wait_s
    when = f"in {wait_s:g} s" if wait_s else "now"
    turn.record(run, "restart", f"other workers take the place of {member_name(end.node)} on {host} {when}")


def restart_due(turn: Turn, run: Run, allocation: Allocation) -> None:
    """Want other workers where their time has come; the answer to an agent's next heartbeat says so."""
    for host, agent in allocation.agents.items():
        if agent.again_at is None or turn.now < agent.again_at:
            continue
        agent.again_at = None
        turn.dirty.add(run.id)
        if allocation.state is AllocationState.RUNNING and host not in run.barred and not agent.gone:
            agent.boot, agent.node = agent.boot + 1, 0


def agent_gone(
    turn: Turn,
    run: Run,
    allocation: Allocation,
    host: str,
    reason: str,
    *,
    taken: bool = False,
    node_failed: bool = False,
) -> None:
    """An agent has ended for certain, or (taken) Slurm has taken its node: so have its workers."""
    for node in run.roster.at_place(host, allocation.token):
        if not node.exited:
            end = ev.NodeEnded(at=turn.at, node=node.id, reason=reason, by_slurm=taken, node_failed=node_failed)
            turn.apply(run, end)
    give_up_agent(turn, run, allocation, host, reason)


def give_up_agent(turn: Turn, run: Run, allocation: Allocation, host: str, reason: str) -> None:
    """Expect no more of an agent. This says nothing about its workers. With its last agent an allocation ends."""
    agent = allocation.agents[host]
    if not agent.gone:
        agent.gone = True
        turn.dirty.add(run.id)
    if not allocation.hosts and allocation.live:
        turn.record(run, "node", f"{allocation.token} ended: {allocation.reason or reason}")
        turn.book.end_allocation(run, allocation, reason)


def _patience_s(run: Run, allocation: Allocation, patience_s: float) -> float:
    """How long a worker that cannot go on by itself waits for a silent head.

    A base job waits to its end. A harvested node is not kept idle for longer than a stand-in head needs to come.
    """
    if run.spec.local:
        return patience_s
    return inf if allocation.kind is AllocationKind.BASE else patience_s + max(patience_s, STAND_IN_S)


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
