"""Extra nodes of normal priority for runs that are behind their deadline, given back once the run is well ahead.

Each extra node is a job of one node, like a harvest job, so that nodes come and go one by one. But the job uses the
base job's partition, QOS and time limit, and no `--nice`. It is not given back to others' waiting jobs.
"""

from collections import Counter
from math import ceil, inf

from fallow.core.accounting.backoff import Asker, Backoff
from fallow.core.accounting.budget import minutes_in
from fallow.core.accounting.pacing import Schedule, extra_nodes, may_release
from fallow.core.planning.rules import HarvestRules
from fallow.head.loop.turn import Turn
from fallow.head.state.registry import Run
from fallow.model import AllocationKind, AllocationState, ClusterState

SPARE_MINUTES = 10
"""Time that is requested beyond the deadline."""

UNKNOWN_MINUTES = 240
"""Time that is requested if no time limit of a base job is known."""


def keep_pace(
    turn: Turn,
    run: Run,
    cluster: ClusterState,
    budget_node_s: float | None,
    max_pending: int,
    backoff: Backoff,
    rules: HarvestRules,
) -> None:
    """Request the extra nodes that the deadline takes, or give back those that it no longer takes.

    Args:
        turn: takes the effects.
        run: a run with the gain of the last plan.
        cluster: the poll of that plan.
        budget_node_s: node-seconds that may still be reserved; None: no budget.
        max_pending: number of such requests that may wait at once.
        backoff: partitions and accounts to avoid.
        rules: harvest rules, whose limits include these nodes.
    """
    schedule = None if run.gain is None else run.gain.schedule
    if run.gain is None or schedule is None or run.roster.finishing:
        return
    speeds = run.gain.speeds
    live = [a for a in run.live_allocations() if a.asked_at is None]
    running_jobs = [a for a in live if a.state is AllocationState.RUNNING]
    waiting_jobs = [a for a in live if a.state is not AllocationState.RUNNING and a.has_normal_priority]
    base_jobs = [a for a in live if a.state is not AllocationState.RUNNING and a.kind is AllocationKind.BASE]
    training_nodes = sum(max(1, len(a.nodes)) for a in running_jobs)
    nodes_held = training_nodes + sum(a.nodes_wanted for a in [*waiting_jobs, *base_jobs])
    requests = [a for a in live if a not in running_jobs and a not in waiting_jobs and a not in base_jobs]
    # The operator may have shrunk the run.
    max_nodes = min(run.spec.max_nodes, run.useful_members)
    for allocation in sorted(waiting_jobs, key=lambda a: -a.requested_at)[: max(0, nodes_held - max_nodes)]:
        turn.release_allocation(run, allocation, "the run may have no more nodes")
    nodes_missing = extra_nodes(schedule, speeds, nodes_held, max_nodes - len(requests))
    if nodes_missing and not run.record.paused:
        for _ in range(min(nodes_missing, max_pending - len(waiting_jobs))):
            minutes = _request_node(turn, run, cluster, schedule, budget_node_s, backoff, rules)
            if not minutes:
                break
            budget_node_s = None if budget_node_s is None else budget_node_s - 60.0 * minutes
    elif schedule.comfortable:
        _give_back(turn, run, schedule, training_nodes)


def _request_node(
    turn: Turn,
    run: Run,
    cluster: ClusterState,
    schedule: Schedule,
    budget_node_s: float | None,
    backoff: Backoff,
    rules: HarvestRules,
) -> int:
    """Request one extra node. Return the requested minutes; 0: no request."""
    # Use the time limit: a budget or a preemption may end a base job before it.
    limits = [a.limit_s for a in run.bases if a.limit_s is not None]
    minutes = round(limits[-1] / 60) if limits else UNKNOWN_MINUTES
    deadline = run.spec.deadline_at or 0.0
    if deadline > cluster.at:
        minutes = min(minutes, ceil((deadline - cluster.at) / 60) + SPARE_MINUTES)
    if budget_node_s is not None:
        minutes = min(minutes, minutes_in(budget_node_s))
    partition = _partition(run, cluster)
    longest_s = min((p.max_time_s or inf for p in cluster.partitions if p.partition == partition), default=inf)
    # Shorter lengths were learned from requests for idle nodes.
    starts = backoff.longest(Asker.of(run.spec), partition, turn.now)
    longest = inf if starts is None else max(starts, rules.max_minutes)
    minutes = int(min(minutes, longest_s / 60, longest))
    if not partition or minutes < max(1, run.spec.min_harvest_minutes):
        return 0
    if backoff.until(Asker.of(run.spec), partition) > turn.now:
        return 0
    allocations = (a for each in turn.registry.on_slurm for a in each.live_allocations())
    nodes_by_partition = Counter(a.partition for a in allocations if a.kind is AllocationKind.HARVEST)
    max_nodes = inf if rules.max_nodes is None else rules.max_nodes
    if nodes_by_partition.total() >= max_nodes or nodes_by_partition[partition] >= rules.partition_nodes.get(
        partition, inf
    ):
        return 0
    allocation = turn.new_allocation(
        run, AllocationKind.HARVEST, partition=partition, minutes=minutes, has_normal_priority=True
    )
    delay = f"{-schedule.ahead_s / 60:.0f} min behind the schedule of its deadline"
    if deadline <= cluster.at:
        delay += ", which has passed; the run keeps the speed that the schedule needed"
    turn.record(run, "hurry", f"{allocation.token}: a node of normal priority in {partition}; the run is {delay}")
    return minutes


def _partition(run: Run, cluster: ClusterState) -> str:
    """Partition of the user's own job; empty: not known."""
    options = [word.partition("=")[2] for word in run.spec.sbatch_options if word.startswith("--partition=")]
    base_partitions = [a.partition for a in run.bases if a.partition]
    default_partitions = [p.partition for p in cluster.partitions if p.default]
    return next(iter([*base_partitions[-1:], *options[-1:], *default_partitions]), "").split(",")[0]


def _give_back(turn: Turn, run: Run, schedule: Schedule, training: int) -> None:
    assert run.gain is not None
    extra_jobs = [a for a in run.live_allocations() if a.has_normal_priority and a.asked_at is None]
    for allocation in sorted(extra_jobs, key=lambda a: -a.requested_at):
        if allocation.state is AllocationState.RUNNING:
            if not may_release(schedule, run.gain.speeds, training, 1):
                break
            training -= 1
        turn.release_allocation(run, allocation, "the run is well ahead of the schedule of its deadline")
