"""The work of a tick for each run: walltimes, due restarts of workers, silent agents, and agents that do not come.

The membership's state machine judges nodes by their workers. This module judges agents without living workers.
"""

from math import inf

from fallow.config import Membership
from fallow.core.allocations import Allocation
from fallow.core.membership import events as ev
from fallow.head.loop.turn import Turn
from fallow.head.peers.agents import give_up_agent, note_agent_end, request_due_restarts
from fallow.head.slurm import neighbours
from fallow.head.state.registry import Run
from fallow.model import AllocationState, MemberPhase
from fallow.processes import find_process

MARGIN_PART = 1 / 3
"""Largest part of a job's time that may be reserved for leaving the job."""

CLOSE_S = 1.0
"""Two end times that differ by less are equal: they come from two clocks."""

MISSING_S = 30.0
"""Time from the start of a job until the user is told that no agent has come. Scripts load modules and prepare data
before `fallow run`."""

_NAMED = 3
"""Largest number of nodes that a message names."""


def tick(turn: Turn) -> None:
    """Check every run. All messages that were received until `turn.at` must have been handled."""
    turn.for_each(turn.registry.current.values(), "tick", lambda run: tick_run(turn, run))


def tick_run(turn: Turn, run: Run) -> None:
    if run.ended:
        _end_stragglers(turn, run)
        return
    run.update_position()
    watch_time(turn, run)
    turn.apply(run, ev.Ticked(at=turn.at))
    _look_for_agents(turn, run)
    for allocation in run.live_allocations():
        for host in allocation.hosts:
            _watch_agent(turn, run, allocation, host)
        request_due_restarts(turn, run, allocation)
    drop_stale_records(turn, run)


def _watch_agent(turn: Turn, run: Run, allocation: Allocation, host: str) -> None:
    """Give up a silent agent without workers, or one whose processes have all ended."""
    seen_at = run.agent_seen.setdefault((allocation.token, host), turn.at)
    if run.spec.local:
        # There is no Slurm, but the node's processes run on this host.
        if turn.at - seen_at > turn.registry.config.membership.lease_s and _is_killed(run, allocation, host):
            note_agent_end(turn, run, allocation, host, f"the processes of {host} are gone")
        return
    silent_s = turn.registry.hearing.silent_s(seen_at, turn.at)
    if silent_s > _patience_s(run, allocation, host, turn.registry.config.membership):
        give_up_agent(turn, run, allocation, host, f"agent on {host} silent for {silent_s:.0f} s")
        turn.end_empty_allocations(run)


def _end_stragglers(turn: Turn, run: Run) -> None:
    """Forget the agents of an ended run that fell silent."""
    for allocation in run.live_allocations():
        neighbours.enforce_departure(turn, run, allocation)
        for host in allocation.hosts:
            seen_at = run.agent_seen.setdefault((allocation.token, host), turn.at)
            if turn.at - seen_at > turn.registry.config.membership.lease_s:
                give_up_agent(turn, run, allocation, host, "the run is over")


def watch_time(turn: Turn, run: Run) -> None:
    """Release nodes before their jobs end, and end the jobs that have not left in time."""
    config = turn.registry.config.membership
    for allocation in run.live_allocations():
        if allocation.end_at is not None:
            _tell_end(turn, run, allocation, allocation.end_at + turn.at - turn.now)
            if allocation.state is AllocationState.RUNNING and turn.now >= _leaves_at(run, allocation, config):
                turn.release_allocation(run, allocation, allocation.ends_because)
        neighbours.enforce_departure(turn, run, allocation)


def next_at(run: Run, config: Membership) -> float:
    """Unix time at which `watch_time` has something to do, as far as is known now; infinity: never."""
    live = run.live_allocations()
    ends = [_leaves_at(run, a, config) for a in live if a.state is AllocationState.RUNNING]
    return min([inf, *ends, *(a.kill_at for a in live if a.kill_at is not None)])


def _leaves_at(run: Run, allocation: Allocation, config: Membership) -> float:
    """Unix time at which a node is released; infinity: its end is unknown.

    The margin for leaving is at most `MARGIN_PART` of a job's time. Otherwise one slow checkpoint would make the run
    leave short jobs as soon as they start, and request them again without end.
    """
    if allocation.end_at is None:
        return inf
    margin_s = run.longest_pause_s() + run.longest_save_s()
    if allocation.start_at is not None:
        part_s = MARGIN_PART * (allocation.end_at - allocation.start_at) - config.release_margin_s
        margin_s = min(margin_s, max(0.0, part_s))
    return allocation.end_at - config.release_margin_s - margin_s


def _tell_end(turn: Turn, run: Run, allocation: Allocation, ends_at: float) -> None:
    """Tell the membership when an allocation's nodes end; `ends_at`: on the head's clock."""
    for node in [run.roster.nodes[n] for n in allocation.members if n in run.roster.nodes]:
        if node.alive and (node.ends_at is None or abs(node.ends_at - ends_at) > CLOSE_S):
            turn.apply(run, ev.Ends(at=turn.at, node=node.id, ends_at=ends_at))


def _patience_s(run: Run, allocation: Allocation, host: str, config: Membership) -> float:
    """Patience with a silent agent, in seconds; infinity while one of its nodes may be a member."""
    nodes = [node for node in run.roster.at_place(host, allocation.token) if node.phase is not MemberPhase.GONE]
    if any(node.alive or node.seat for node in nodes):
        return inf
    # A silent standby node may come back, but it waits no longer than this for the head.
    return config.head_patience_s if nodes else config.lease_s


def _look_for_agents(turn: Turn, run: Run) -> None:
    """Find jobs whose agents should have come by now. Most likely their nodes cannot reach the head.

    Each job is logged once.
    """
    reported, run.without_agent = run.without_agent, {}
    for allocation in () if run.spec.local else run.live_allocations():
        nodes = [node for node in allocation.nodes if node not in allocation.agents]
        since_s = turn.now - (turn.now if allocation.start_at is None else allocation.start_at)
        if not nodes or since_s <= MISSING_S or allocation.state is not AllocationState.RUNNING:
            continue
        names = ", ".join(nodes[:_NAMED]) + (f" and {len(nodes) - _NAMED} more nodes" if len(nodes) > _NAMED else "")
        job = allocation.job_id or allocation.token
        text = run.without_agent[allocation.token] = (
            f"job {job} has run on {names} for {since_s:.0f} s and no agent has come: "
            f"check that {nodes[0] if len(nodes) == 1 else 'these nodes'} can reach {turn.registry.endpoint} ([head] "
            f"address, [head] port, firewall); its output: {turn.registry.output_of(run, allocation)}"
        )
        if allocation.token not in reported:
            turn.record(run, "network", text, job=allocation.job_id)


def drop_stale_records(turn: Turn, run: Run) -> None:
    """Drop reports of nodes whose records are gone, and ended allocations of `fallow local`."""
    for node in [node for node in run.progress if node not in run.roster.nodes]:
        del run.progress[node]
    if run.spec.local:
        roster_tokens = {node.token for node in run.roster.nodes.values()}
        for token, allocation in list(run.allocations.items()):
            if not allocation.is_live and token not in roster_tokens:
                del run.allocations[token]
                turn.dirty.add(run.id)
    for place in [place for place in run.agent_seen if place[0] not in run.allocations]:
        del run.agent_seen[place]
    for token in [token for token in run.shown_at if token not in run.allocations]:
        del run.shown_at[token]


def _is_killed(run: Run, allocation: Allocation, host: str) -> bool:
    """True if an agent of `fallow local` and its workers have ended. The id of its job holds the agent's pid."""
    progress = run.progress.get(allocation.agents[host].node)
    pids = [pid for pid in (progress.pids if progress is not None else ()) if pid]
    kind, _, number = (allocation.job_id or "").partition("-")
    if kind == "local" and number.isdecimal():
        pids.append(int(number))
    return bool(pids) and not any(map(find_process, pids))
