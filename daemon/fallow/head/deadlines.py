"""What a tick brings for each run: walltimes, starts of workers that are due, agents that are silent or do not come.

Nodes are judged by the membership machine. What it does not see is an agent on whose node no worker is alive.
"""

from math import inf

from fallow.config import Membership
from fallow.core.allocations import Allocation
from fallow.core.membership import events as ev
from fallow.head.loop.turn import Turn
from fallow.head.peers.agents import agent_gone, give_up_agent, restart_due
from fallow.head.slurm import neighbours
from fallow.head.state.book import Run
from fallow.model import AllocationState, MemberPhase
from fallow.processes import find_process

MARGIN_PART = 1 / 3
"""Of a job's time that a run may need to leave it."""

CLOSE_S = 1.0
"""Ends that differ by less are the same: they are on two clocks."""

MISSING_S = 30.0
"""From the start of a job until somebody is told that no agent has come: scripts load modules and prepare their data
before `fallow run`."""

_NAMED = 3
"""Nodes that are named at most."""


def tick(turn: Turn) -> None:
    """Look at every run. All that was received until `turn.at` must have been handled."""
    turn.for_each(turn.book.current.values(), "tick", lambda run: tick_run(turn, run))


def tick_run(turn: Turn, run: Run) -> None:
    """Look at one run."""
    if run.ended:
        _end_stragglers(turn, run)
        return
    run.look_how_far()
    watch_time(turn, run)
    turn.apply(run, ev.Ticked(at=turn.at))
    _look_for_agents(turn, run)
    for allocation in run.live_allocations():
        for host in allocation.hosts:
            _watch_agent(turn, run, allocation, host)
        restart_due(turn, run, allocation)
    forget(turn, run)


def _watch_agent(turn: Turn, run: Run, allocation: Allocation, host: str) -> None:
    """Give up a silent agent on whose node nothing is left, or of which all processes are known to have ended."""
    seen_at = run.agent_seen.setdefault((allocation.token, host), turn.at)
    if run.spec.local:
        # No Slurm tells of this node, but it is on this host.
        if turn.at - seen_at > turn.book.config.membership.lease_s and _is_killed(run, allocation, host):
            agent_gone(turn, run, allocation, host, f"the processes of {host} are gone")
        return
    silent_s = turn.book.hearing.silent_s(seen_at, turn.at)
    if silent_s > _patience_s(run, allocation, host, turn.book.config.membership):
        give_up_agent(turn, run, allocation, host, f"agent on {host} silent for {silent_s:.0f} s")
        turn.let_go_of_empty(run)


def _end_stragglers(turn: Turn, run: Run) -> None:
    """Forget the agents of an ended run that fell silent."""
    for allocation in run.live_allocations():
        neighbours.hurry(turn, run, allocation)
        for host in allocation.hosts:
            seen_at = run.agent_seen.setdefault((allocation.token, host), turn.at)
            if turn.at - seen_at > turn.book.config.membership.lease_s:
                give_up_agent(turn, run, allocation, host, "the run is over")


def watch_time(turn: Turn, run: Run) -> None:
    """Release nodes so long before they go away, and end what has not left in time."""
    config = turn.book.config.membership
    for allocation in run.live_allocations():
        if allocation.end_at is not None:
            _tell_end(turn, run, allocation, allocation.end_at + turn.at - turn.now)
            if allocation.state is AllocationState.RUNNING and turn.now >= _leaves_at(run, allocation, config):
                turn.release_allocation(run, allocation, allocation.ends_because)
        neighbours.hurry(turn, run, allocation)


def next_at(run: Run, config: Membership) -> float:
    """Unix time at which `watch_time` has something to do, as things are; infinity: never."""
    live = run.live_allocations()
    ends = [_leaves_at(run, a, config) for a in live if a.state is AllocationState.RUNNING]
    return min([inf, *ends, *(a.gone_by for a in live if a.gone_by is not None)])


def _leaves_at(run: Run, allocation: Allocation, config: Membership) -> float:
    """When a node is released; infinity: nobody knows when it ends.

    A short job trains for most of its time whatever the run needs to leave: after one slow checkpoint it would be left
    as soon as it comes, and asked for again without end.
    """
    if allocation.end_at is None:
        return inf
    margin_s = run.longest_pause_s() + run.longest_save_s()
    if allocation.start_at is not None:
        part_s = MARGIN_PART * (allocation.end_at - allocation.start_at) - config.release_margin_s
        margin_s = min(margin_s, max(0.0, part_s))
    return allocation.end_at - config.release_margin_s - margin_s


def _tell_end(turn: Turn, run: Run, allocation: Allocation, ends_at: float) -> None:
    """Tell the membership when nodes go away. Args: ends_at: on the head's clock."""
    for node in [run.roster.nodes[n] for n in allocation.members if n in run.roster.nodes]:
        if node.alive and (node.ends_at is None or abs(node.ends_at - ends_at) > CLOSE_S):
            turn.apply(run, ev.Ends(at=turn.at, node=node.id, ends_at=ends_at))


def _patience_s(run: Run, allocation: Allocation, host: str, config: Membership) -> float:
    """How long a silent agent is waited for: without end while one of its nodes may be a member."""
    nodes = [node for node in run.roster.at_place(host, allocation.token) if node.phase is not MemberPhase.GONE]
    if any(node.alive or node.seat for node in nodes):
        return inf
    # A standby that is not heard may come back; it waits no longer for us.
    return config.head_patience_s if nodes else config.lease_s


def _look_for_agents(turn: Turn, run: Run) -> None:
    """Find the jobs whose agents should have come by now: in all likelihood their nodes do not reach the head.

    The event log has each once.
    """
    before, run.without_agent = run.without_agent, {}
    for allocation in () if run.spec.local else run.live_allocations():
        nodes = [node for node in allocation.nodes if node not in allocation.agents]
        since_s = turn.now - (turn.now if allocation.start_at is None else allocation.start_at)
        if not nodes or since_s <= MISSING_S or allocation.state is not AllocationState.RUNNING:
            continue
        names = ", ".join(nodes[:_NAMED]) + (f" and {len(nodes) - _NAMED} more nodes" if len(nodes) > _NAMED else "")
        text = run.without_agent[allocation.token] = (
            f"job {allocation.job_id or allocation.token} runs on {names} since {since_s:.0f} s, no agent has come: "
            f"check that {nodes[0] if len(nodes) == 1 else 'these nodes'} can reach {turn.book.endpoint} ([head] "
            f"address, [head] port, firewall); its output: {turn.book.output_of(run, allocation)}"
        )
        if allocation.token not in before:
            turn.record(run, "network", text, job=allocation.job_id)


def forget(turn: Turn, run: Run) -> None:
    """Drop what nodes that are forgotten had said, and nodes of `fallow local` that nothing is left of."""
    for node in [node for node in run.progress if node not in run.roster.nodes]:
        del run.progress[node]
    if run.spec.local:
        known = {node.token for node in run.roster.nodes.values()}
        for token, allocation in list(run.allocations.items()):
            if not allocation.live and token not in known:
                del run.allocations[token]
                turn.dirty.add(run.id)
    for place in [place for place in run.agent_seen if place[0] not in run.allocations]:
        del run.agent_seen[place]
    for token in [token for token in run.shown_at if token not in run.allocations]:
        del run.shown_at[token]


def _is_killed(run: Run, allocation: Allocation, host: str) -> bool:
    """Have an agent of `fallow local` and its workers ended? Outside of Slurm the id of its job names its process."""
    progress = run.progress.get(allocation.agents[host].node)
    pids = [pid for pid in (progress.pids if progress is not None else ()) if pid]
    kind, _, number = (allocation.job_id or "").partition("-")
    if kind == "local" and number.isdecimal():
        pids.append(int(number))
    return bool(pids) and not any(map(find_process, pids))
