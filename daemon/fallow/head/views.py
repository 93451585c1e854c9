"""What people and programs see: snapshots and reports, derived from the book and the last poll."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from fallow.core.allocations import Allocation, jobs_of
from fallow.core.holes import is_idle
from fallow.core.quantile import quantile
from fallow.core.roster import Saved
from fallow.core.states import ENDED_STATES
from fallow.head.book import Run
from fallow.model import (
    AllocationState,
    AllocationView,
    ChangeKind,
    CheckpointState,
    CheckpointView,
    ClusterState,
    GenerationReport,
    MemberView,
    NodeInfo,
    NodeOwner,
    NodeView,
    PauseReport,
    Quantiles,
    RunReport,
    RunStatus,
    RunView,
    SampleReport,
    SpeedView,
    WorkerPhase,
)

RECENT_PAUSES = 50
"""As many of the last changes decide how early a node is released."""

LATE_S = 60.0
"""After the end of a run its last members may still say something."""


def longest_pause(run: Run) -> float:
    pauses = [g.pause_s for g in run.roster.history[-RECENT_PAUSES:] if g.pause_s is not None]
    return max(pauses, default=0.0)


def longest_save(run: Run) -> float:
    """Seconds that a durable checkpoint took: the last members write one before they leave."""
    return max((saved.written.took_s for saved in run.roster.checkpoints), default=0.0)


def shown(run: Run, at: float, now: float) -> RunView:
    """As `run_view`. That of a run which ended a while ago is kept: there may be thousands, shown twice a second."""
    ended_at = run.record.ended_at
    over = ended_at is not None and now - ended_at > LATE_S and not run.roster.barred and not run.live_allocations()
    if not over:
        return run_view(run, at, now)
    if run.shown is None or run.shown[0] != run.revision:
        run.shown = run.revision, run_view(run, at, now)
    return run.shown[1]


def run_view(run: Run, at: float, now: float) -> RunView:
    r = run.roster
    beats = [run.beats[w] for w in r.members if w in run.beats]
    front = max(beats, key=lambda beat: beat.step, default=None)
    step = max((beat.step for beat in beats), default=r.front)
    return RunView(
        run=run.id,
        name=run.spec.name,
        status=r.status,
        min_nodes=run.spec.min_nodes,
        max_nodes=run.spec.max_nodes,
        limit=r.limit,
        useful=r.useful_members,
        barred={node: _why_barred(run, node, at) for node in r.barred},
        drained=run.record.drained,
        generation=r.generation,
        step=r.final.steps if r.final is not None else step,
        total_steps=r.total_steps or (front.total_steps if front is not None else None),
        epoch=front.epoch if front is not None else 0,
        loss=front.loss if front is not None else None,
        samples_per_s=front.samples_per_s if front is not None and r.members and not r.status.ended else 0.0,
        members=_member_views(run, at, now),
        allocations=[_allocation_view(a, now) for a in run.live_allocations()],
        change=None if r.change is None else f"generation {r.change.generation}: {r.change.reason}",
        scalars={**front.scalars} if front is not None else {},
        message=_waits_for(run, at) or r.checkpoint_problem,
        without_agent=list(run.without_agent.values()),
        paused=run.record.paused,
        checkpoints=checkpoint_views(run),
        created_at=run.spec.created_at,
        speeds=_speed_views(run),
        target=None if r.status.ended else run.target,
        weight=run.spec.weight,
        deadline_at=run.spec.deadline_at,
        ahead_s=None if run.gain is None or run.gain.schedule is None else run.gain.schedule.ahead_s,
    )


def _waits_for(run: Run, at: float) -> str:
    """What somebody must know or do, the most pressing thing."""
    record = run.record
    absent = "; ".join(run.without_agent.values())
    needed = record.harvest_paused or _only_barred(run, at) or absent or run.roster.message
    slow_link = run.slow_link if run.roster.status is RunStatus.TRAINING else ""
    return needed or record.paused or run.held_back or run.machine.put_off(at) or slow_link


def _why_barred(run: Run, node: str, at: float) -> str:
    left_s = max(0.0, run.roster.bars[node].until - at) if node in run.roster.bars else 0.0
    return f"for another {left_s / 60:.0f} min: {run.roster.barred[node]}"


def _only_barred(run: Run, at: float) -> str:
    """What a run without members waits for if nodes that it had are barred."""
    r = run.roster
    if r.members or r.status.ended or not r.barred:
        return ""
    first = min(r.barred, key=lambda node: r.bars[node].until if node in r.bars else 0.0)
    many = f"{len(r.barred)} nodes are barred, the first" if len(r.barred) > 1 else "a node is barred"
    return f"waits for nodes; {many}: {first} {_why_barred(run, first, at)}"


def _speed_views(run: Run) -> list[SpeedView]:
    if run.gain is None or not run.gain.known:
        return []
    slots = run.record.slots or 1
    return [
        SpeedView(nodes=nodes, steps_per_s=speed, measured=nodes * slots in run.gain.measured)
        for nodes, speed in run.gain.speeds
    ]


def checkpoint_views(run: Run) -> list[CheckpointView]:
    """All checkpoints of a run that are on disk, newest first."""
    found = [
        CheckpointView(
            step=saved.written.step,
            generation=saved.written.generation,
            epoch=saved.written.epoch,
            written_at=saved.written.written_at,
            nbytes=saved.written.nbytes,
            path=saved.written.path,
            state=_state(saved),
            asked=saved.written.asked,
            problem=saved.problem,
        )
        for saved in run.roster.checkpoints
    ]
    return sorted(found, key=lambda view: (view.step, view.generation), reverse=True)


def _state(saved: Saved) -> CheckpointState:
    if saved.problem:
        return CheckpointState.DAMAGED
    return CheckpointState.ASIDE if saved.aside else CheckpointState.USABLE


def _shown_workers(run: Run) -> list[str]:
    if run.roster.status.ended:
        return []
    return [w.worker for w in run.roster.workers.values() if w.phase is not WorkerPhase.GONE]


def _member_views(run: Run, at: float, now: float) -> list[MemberView]:
    ranks = {worker: rank for rank, worker in enumerate(run.roster.members)}
    return [_member_view(run, worker, ranks.get(worker), at, now) for worker in _shown_workers(run)]


def _member_view(run: Run, worker: str, rank: int | None, at: float, now: float) -> MemberView:
    known = run.roster.workers[worker]
    allocation = run.allocation_of(worker)
    shows = run.clock.read(at)
    beat = None if rank is None else run.beats.get(worker)
    return MemberView(
        worker=worker,
        node=known.node,
        token=known.token,
        allocation=allocation.kind,
        phase=known.phase,
        rank=rank,
        step=known.step,
        ends_in_s=None if allocation.end_at is None else allocation.end_at - now,
        last_seen_s=max(0.0, shows - (run.machine.seen(worker) or shows)),
        pid=known.pid,
        shards=0 if beat is None else beat.shards,
        pace_s=0.0 if beat is None else beat.pace_s,
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
    """All nodes of the last poll, each with whose it is; `unused`: node -> why it is not used."""
    if cluster is None:
        return []
    ours: dict[str, tuple[Run, Allocation]] = {}
    for run in runs:
        for allocation in run.live_allocations():
            if allocation.state in (AllocationState.RUNNING, AllocationState.RELEASING):
                for node in [*allocation.nodes, *allocation.agents]:
                    ours[node] = (run, allocation)
    for node, holder in _going(cluster, runs):
        ours.setdefault(node, holder)
    planned = {n for job in cluster.jobs if job.state == "PENDING" for n in job.planned_nodes}
    return [
        _node_view(node, ours.get(node.node), node.node in planned, now, unused.get(node.node, ""))
        for node in cluster.nodes
    ]


def _going(cluster: ClusterState, runs: Collection[Run]) -> Iterator[tuple[str, tuple[Run, Allocation]]]:
    """Nodes of jobs of ours that are over for us, but not for Slurm when it was polled: they are no others'."""
    over = {
        allocation.job_id: (run, allocation)
        for run in runs
        for allocation in run.record.allocations.values()
        if not allocation.live and not allocation.settled and allocation.job_id is not None
    }
    if over:
        for job in cluster.jobs:
            holder = over.get(job.het_job_id or "") or over.get(job.job_id)
            if holder is not None and job.state not in ENDED_STATES and jobs_of(holder[1], [job]):
                for node in job.nodes:
                    yield node, holder


def _node_view(node: NodeInfo, ours: tuple[Run, Allocation] | None, planned: bool, now: float, unused: str) -> NodeView:
    if ours is not None:
        owner = NodeOwner.OURS
    elif node.state in ("DOWN", "UNKNOWN", "ERROR", "FUTURE"):
        owner = NodeOwner.DOWN
    elif node.state in ("ALLOCATED", "MIXED") or "COMPLETING" in node.flags:
        owner = NodeOwner.OTHERS
    elif not is_idle(node):
        owner = NodeOwner.DOWN
    else:
        owner = NodeOwner.PLANNED if planned else NodeOwner.IDLE
    ending = ours is not None and not ours[1].live
    end = None if ours is None or ending else ours[1].end_at
    return NodeView(
        node=node.node,
        partitions=node.partitions,
        state="+".join([node.state, *node.flags]),
        owner=owner,
        run=None if ours is None else ours[0].id,
        gpus=node.gpus,
        ends_in_s=None if end is None else end - now,
        ending=ending,
        unused=unused if owner in (NodeOwner.IDLE, NodeOwner.PLANNED) else "",
    )


def run_report(run: Run, history: list[GenerationReport], samples: SampleReport) -> RunReport:
    """The JSON report of DESIGN section 6 for one run, ended or not; `history`: of all its generations."""
    r = run.roster
    return RunReport(
        run=run.id,
        status=r.status,
        steps=r.final.steps if r.final is not None else r.front,
        samples=samples,
        final_digest=None if r.final is None else r.final.digest,
        final_loss=None if r.final is None else r.final.loss,
        generations=history,
        pause_s=PauseReport(planned=_pauses(history, False), unplanned=_pauses(history, True)),
        steps_discarded=r.steps_discarded,
        rolled_back=list(r.rollbacks),
        message=r.message,
        traceback=r.traceback,
        rest_in=next((a.token for a in run.record.allocations.values() if a.elected), ""),
        reproducible=bool(r.arithmetic),
        steps_repeated=0 if r.final is None else r.final.repeated,
    )


def _pauses(history: list[GenerationReport], unplanned: bool) -> Quantiles:
    values = [
        g.pause_s
        for g in history
        if g.pause_s is not None and g.kind is not ChangeKind.START and (g.kind is ChangeKind.EJECT) == unplanned
    ]
    return Quantiles(p50=quantile(values, 0.5), p95=quantile(values, 0.95), max=max(values, default=None))
