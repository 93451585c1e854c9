"""Nodes of normal priority for runs that are behind their deadline, and their return once they are well ahead.

They are one-node jobs like those for idle nodes, so that they come and go one by one, but in the base job's partition
and QOS, for as long, and without `--nice`; nobody else's waiting job takes them away.
"""

from collections import Counter
from math import ceil, inf

from fallow.core.accounting.backoff import Asker, Backoff
from fallow.core.accounting.budget import minutes_in
from fallow.core.accounting.pacing import Schedule, dispensable, extra_nodes
from fallow.core.planning.rules import HarvestRules
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
from fallow.model import AllocationKind, AllocationState, ClusterState

SPARE_MINUTES = 10
"""Asked for beyond the deadline."""

UNKNOWN_MINUTES = 240
"""Asked for while no base job has shown its time limit, or it has none."""


def keep_pace(
    turn: Turn,
    run: Run,
    cluster: ClusterState,
    budget_node_s: float | None,
    max_pending: int,
    backoff: Backoff,
    rules: HarvestRules,
) -> None:
    """Ask for what the deadline takes, or give back what it no longer takes.

    Args:
        turn: takes the effects.
        run: its gain is that of the last plan.
        cluster: the poll that the plan was made from.
        budget_node_s: what may still be reserved; None: no budget.
        max_pending: requests of this sort that may wait at once.
        backoff: what is left alone.
        rules: whose caps count for these nodes, too.
    """
    standing = None if run.gain is None else run.gain.schedule
    if run.gain is None or standing is None or run.roster.finishing:
        return
    speeds = run.gain.speeds
    live = [a for a in run.live_allocations() if a.asked_at is None]
    running = [a for a in live if a.state is AllocationState.RUNNING]
    waiting = [a for a in live if a.state is not AllocationState.RUNNING and a.has_normal_priority]
    coming = [a for a in live if a.state is not AllocationState.RUNNING and a.kind is AllocationKind.BASE]
    training = sum(max(1, len(a.nodes)) for a in running)
    held = training + sum(a.nodes_wanted for a in [*waiting, *coming])
    asked = [a for a in live if a not in running and a not in waiting and a not in coming]
    # As few as an operator has shrunk it to.
    most = min(run.spec.max_nodes, run.useful_members)
    for allocation in sorted(waiting, key=lambda a: -a.requested_at)[: max(0, held - most)]:
        turn.release_allocation(run, allocation, "the run may have no more nodes")
    missing = extra_nodes(standing, speeds, held, most - len(asked))
    if missing and not run.record.paused:
        for _ in range(min(missing, max_pending - len(waiting))):
            minutes = _ask(turn, run, cluster, standing, budget_node_s, backoff, rules)
            if not minutes:
                break
            budget_node_s = None if budget_node_s is None else budget_node_s - 60.0 * minutes
    elif standing.comfortable:
        _give_back(turn, run, standing, training)


def _ask(
    turn: Turn,
    run: Run,
    cluster: ClusterState,
    standing: Schedule,
    budget_node_s: float | None,
    backoff: Backoff,
    rules: HarvestRules,
) -> int:
    """Minutes asked for; 0: nothing was."""
    # Not from when it ends: a budget or a preemption may have it end sooner.
    limits = [a.limit_s for a in run.bases if a.limit_s is not None]
    minutes = round(limits[-1] / 60) if limits else UNKNOWN_MINUTES
    deadline = run.spec.deadline_at or 0.0
    if deadline > cluster.at:
        minutes = min(minutes, ceil((deadline - cluster.at) / 60) + SPARE_MINUTES)
    if budget_node_s is not None:
        minutes = min(minutes, minutes_in(budget_node_s))
    partition = _partition(run, cluster)
    longest_s = min((p.max_time_s or inf for p in cluster.partitions if p.partition == partition), default=inf)
    # What is known of shorter ones is known of idle nodes.
    starts = backoff.longest(Asker.of(run.spec), partition, turn.now)
    longest = inf if starts is None else max(starts, rules.max_minutes)
    minutes = int(min(minutes, longest_s / 60, longest))
    if not partition or minutes < max(1, run.spec.min_harvest_minutes):
        return 0
    if backoff.until(Asker.of(run.spec), partition) > turn.now:
        return 0
    every = (a for each in turn.book.on_slurm for a in each.live_allocations())
    held = Counter(a.partition for a in every if a.kind is AllocationKind.HARVEST)
    most = inf if rules.max_nodes is None else rules.max_nodes
    if held.total() >= most or held[partition] >= rules.partition_nodes.get(partition, inf):
        return 0
    allocation = turn.new_allocation(
        run, AllocationKind.HARVEST, partition=partition, minutes=minutes, has_normal_priority=True
    )
    if allocation is None:
        return 0
    late = f"{-standing.ahead_s / 60:.0f} min behind the schedule of its deadline"
    if deadline <= cluster.at:
        late += ", which has passed; it is held to the speed that the schedule took"
    turn.record(run, "hurry", f"{allocation.token}: a node of normal priority in {partition}; the run is {late}")
    return minutes


def _partition(run: Run, cluster: ClusterState) -> str:
    """Where the user's own job went, or would go; empty: nobody knows."""
    given = [word.partition("=")[2] for word in run.spec.sbatch_options if word.startswith("--partition=")]
    seen = [a.partition for a in run.bases if a.partition]
    usual = [p.partition for p in cluster.partitions if p.default]
    return next(iter([*seen[-1:], *given[-1:], *usual]), "").split(",")[0]


def _give_back(turn: Turn, run: Run, standing: Schedule, training: int) -> None:
    assert run.gain is not None
    extra = [a for a in run.live_allocations() if a.has_normal_priority and a.asked_at is None]
    for allocation in sorted(extra, key=lambda a: -a.requested_at):
        if allocation.state is AllocationState.RUNNING:
            if not dispensable(standing, run.gain.speeds, training, 1):
                break
            training -= 1
        turn.release_allocation(run, allocation, "the run is well ahead of the schedule of its deadline")
