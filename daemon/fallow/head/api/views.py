"""Views of runs, members and nodes for people and programs, derived from the registry and the last poll."""

from collections.abc import Collection, Iterator, Mapping

from fallow.core.allocations import Allocation, PolledJobs
from fallow.core.holes import is_idle
from fallow.core.membership.names import member_name
from fallow.core.membership.records import Saved
from fallow.core.protocol import Progress
from fallow.core.states import ENDED_STATES
from fallow.head.state.registry import Run
from fallow.model import (
    AllocationState,
    AllocationView,
    CheckpointState,
    CheckpointView,
    ClusterState,
    MemberPhase,
    MemberView,
    NodeInfo,
    NodeOwner,
    NodeView,
    RunStatus,
    RunView,
    SpeedView,
)


def run_view(run: Run, at: float, now: float) -> RunView:
    """View of a run; `at`: now on the head's clock, `now`: Unix time."""
    r, root = run.roster, run.root
    front = _foremost_progress(run)
    total_steps = root.contract.total_steps if root.contract is not None else None
    return RunView(
        run=run.id,
        name=run.spec.name,
        status=root.status,
        min_nodes=run.spec.min_nodes,
        max_nodes=run.spec.max_nodes,
        limit=root.limit,
        useful=run.useful_members,
        barred={host: _why_barred(run, host, at) for host in run.barred},
        drained=run.record.drained,
        generation=root.generation,
        step=root.final.steps if root.final is not None else r.front,
        total_steps=total_steps or front.total_steps,
        epoch=front.epoch,
        loss=front.loss,
        samples_per_s=front.samples_per_s if r.present() and not run.ended else 0.0,
        members=_member_views(run, now),
        allocations=[_allocation_view(a, now) for a in run.live_allocations()],
        change=_change(run),
        scalars={**front.scalars},
        message=_message(run, at) or root.unsaved_reason,
        without_agent=list(run.without_agent.values()),
        paused=run.record.paused,
        checkpoints=checkpoint_views(run),
        created_at=run.spec.created_at,
        speeds=_speed_views(run),
        target=None if run.ended else run.target,
        weight=run.spec.weight,
        deadline_at=run.spec.deadline_at,
        ahead_s=None if run.gain is None or run.gain.schedule is None else run.gain.schedule.ahead_s,
    )


def _foremost_progress(run: Run) -> Progress:
    reporters = [n for n in run.roster.members if n in run.progress]
    return run.progress[max(reporters, key=lambda n: run.roster.nodes[n].step)] if reporters else Progress()


def _change(run: Run) -> str | None:
    ballot = run.machine.ballot
    return None if ballot is None else f"generation {ballot.change.generation}: {ballot.change.reason}"


def _message(run: Run, at: float) -> str:
    """The most urgent message for the user."""
    record = run.record
    absent = "; ".join(run.without_agent.values())
    reason = record.harvest_paused or _only_barred(run, at) or absent or run.root.message
    slow_link = run.slow_link if run.root.status is RunStatus.TRAINING else ""
    return reason or record.paused or run.base_hold_reason or run.machine.waiting() or slow_link


def _why_barred(run: Run, host: str, at: float) -> str:
    bar = run.roster.failures.bars[host]
    return f"for another {max(0.0, bar.until - at) / 60:.0f} min: {bar.reason}"


def _only_barred(run: Run, at: float) -> str:
    """Message for a run that has no members and whose nodes are barred; empty otherwise."""
    barred, bars = list(run.barred), run.roster.failures.bars
    if run.roster.present() or run.ended or not barred:
        return ""
    first = min(barred, key=lambda host: bars[host].until)
    subject = f"{len(barred)} nodes are barred, the first" if len(barred) > 1 else "a node is barred"
    return f"waits for nodes; {subject}: {first} {_why_barred(run, first, at)}"


def _speed_views(run: Run) -> list[SpeedView]:
    if run.gain is None or not run.gain.curve.is_measured:
        return []
    return [
        SpeedView(nodes=nodes, steps_per_s=speed, measured=nodes * run.workers_per_node in run.gain.curve.measurements)
        for nodes, speed in run.gain.speeds
    ]


def checkpoint_views(run: Run) -> list[CheckpointView]:
    """All checkpoints of a run on disk, newest first."""
    views = [
        CheckpointView(
            step=saved.checkpoint.step,
            generation=saved.checkpoint.generation,
            epoch=saved.checkpoint.epoch,
            written_at=saved.checkpoint.written_at,
            nbytes=saved.checkpoint.nbytes,
            path=saved.checkpoint.path,
            state=_state(saved),
            asked=saved.checkpoint.by_hand,
            problem=saved.problem,
        )
        for saved in run.roster.checkpoints.saved
    ]
    return sorted(views, key=lambda view: (view.step, view.generation), reverse=True)


def _state(saved: Saved) -> CheckpointState:
    if saved.problem:
        return CheckpointState.DAMAGED
    return CheckpointState.ASIDE if saved.aside else CheckpointState.USABLE


def _member_views(run: Run, now: float) -> list[MemberView]:
    """All present nodes in order of their numbers, whether or not they compute yet."""
    if run.ended:
        return []
    ranks, rank = {}, 0
    for n in run.roster.members:
        ranks[n], rank = rank, rank + run.roster.nodes[n].slots
    numbers = [n for n, node in sorted(run.roster.nodes.items()) if node.phase is not MemberPhase.GONE]
    return [_member_view(run, n, ranks.get(n), now) for n in numbers]


def _member_view(run: Run, number: int, rank: int | None, now: float) -> MemberView:
    node, progress = run.roster.nodes[number], run.progress.get(number, Progress())
    allocation = run.allocations[node.token]
    return MemberView(
        member=member_name(number),
        node=node.host,
        token=node.token,
        allocation=allocation.kind,
        phase=node.phase,
        rank=rank,
        workers=node.slots,
        step=node.step,
        ends_in_s=None if allocation.end_at is None else allocation.end_at - now,
        last_seen_s=run.machine.watch.unheard_s(number),
        pids=list(progress.pids),
        shards=0 if rank is None else progress.shards,
        pace_s=0.0 if rank is None else progress.pace_s,
    )


def _allocation_view(allocation: Allocation, now: float) -> AllocationView:
    return AllocationView(
        token=allocation.token,
        kind=allocation.kind,
        state=allocation.state,
        job_id=allocation.job_id,
        partition=allocation.partition,
        nodes=sorted(allocation.agents) or allocation.nodes,
        ends_in_s=None if allocation.end_at is None else allocation.end_at - now,
        reason=allocation.reason,
    )


def node_views(
    cluster: ClusterState | None, runs: Collection[Run], now: float, unused: Mapping[str, str]
) -> list[NodeView]:
    """All nodes of the last poll with their owners; `unused`: node -> reason why no run uses it."""
    if cluster is None:
        return []
    our_nodes: dict[str, tuple[Run, Allocation]] = {}
    for run in runs:
        for allocation in run.live_allocations():
            if allocation.state in (AllocationState.RUNNING, AllocationState.RELEASING):
                for node in [*allocation.nodes, *allocation.agents]:
                    our_nodes[node] = (run, allocation)
    for node, holder in _ending_nodes(cluster, runs):
        our_nodes.setdefault(node, holder)
    planned = {n for job in cluster.jobs if job.state == "PENDING" for n in job.planned_nodes}
    return [
        _node_view(node, our_nodes.get(node.node), node.node in planned, now, unused.get(node.node, ""))
        for node in cluster.nodes
    ]


def _ending_nodes(cluster: ClusterState, runs: Collection[Run]) -> Iterator[tuple[str, tuple[Run, Allocation]]]:
    """Nodes of our jobs that are over for us and not for Slurm: they still count as ours."""
    ending = [(run, a) for run in runs for a in run.allocations.values() if not a.is_live and not a.is_settled]
    polled_jobs = PolledJobs(cluster.jobs if ending else [])
    for holder in ending:
        for job in polled_jobs.jobs_of(holder[1]):
            if job.state not in ENDED_STATES:
                for node in job.nodes:
                    yield node, holder


def _node_view(
    node: NodeInfo, holder: tuple[Run, Allocation] | None, planned: bool, now: float, unused: str
) -> NodeView:
    if holder is not None:
        owner = NodeOwner.OURS
    elif node.state in ("DOWN", "UNKNOWN", "ERROR", "FUTURE"):
        owner = NodeOwner.DOWN
    elif node.state in ("ALLOCATED", "MIXED") or "COMPLETING" in node.flags:
        owner = NodeOwner.OTHERS
    elif not is_idle(node):
        owner = NodeOwner.DOWN
    else:
        owner = NodeOwner.PLANNED if planned else NodeOwner.IDLE
    ending = holder is not None and not holder[1].is_live
    end = None if holder is None or ending else holder[1].end_at
    return NodeView(
        node=node.node,
        partitions=node.partitions,
        state="+".join([node.state, *node.flags]),
        owner=owner,
        run=None if holder is None else holder[0].id,
        gpus=node.gpus,
        ends_in_s=None if end is None else end - now,
        ending=ending,
        unused=unused if owner in (NodeOwner.IDLE, NodeOwner.PLANNED) else "",
    )
