"""Demand of a run: number and kind of further nodes, account and QOS of its requests, and budget. Also base jobs."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from fallow.core.accounting import budget
from fallow.core.accounting.backoff import Asker, Backoff, base_job
from fallow.core.accounting.cancelled import awaits_verdict
from fallow.core.allocations import Allocation
from fallow.core.kinds import Kind, likeness, with_reservations
from fallow.core.neighbour.needs import assess
from fallow.core.planning.knowledge import Knowledge
from fallow.core.planning.plan import plan
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.core.planning.situation import Situation
from fallow.core.submission.sbatch_line import base_nodes
from fallow.core.training.restarts import LEAST_MINUTES
from fallow.head.loop.turn import Turn
from fallow.head.state.registry import Run
from fallow.model import (
    AllocationKind,
    AllocationState,
    ClusterState,
    Estimate,
    NodeInfo,
    RunSpec,
    RunStatus,
    WouldAsk,
)
from fallow.slurm.parse import count, gpu_types, megabytes
from fallow.slurm.parse import nodes as unfolded
from fallow.text import counted

UNBOUNDED = 1_000_000


def demand(run: Run, nodes: Mapping[str, NodeInfo], now: float, *, asks: bool) -> Demand:
    """Demand of a run that has not ended, for the planner.

    Args:
        run: the run.
        nodes: node name -> node, of the last poll.
        now: Unix time of the poll.
        asks: False if the run may request nothing now.
    """
    asks = asks and not run.record.paused and not run.roster.finishing
    nodes_wanted = _missing_nodes(run)
    homes = [run.roster.nodes[n].host for n in run.roster.present()]
    contract = run.root.contract
    restarts, is_alike = (False, False) if contract is None else (contract.restarts, bool(contract.arithmetic))
    return Demand(
        run=run.id,
        nodes=nodes_wanted if asks else min(nodes_wanted, 0),
        partitions=tuple(run.spec.harvest_partitions),
        min_minutes=max(run.spec.min_harvest_minutes, LEAST_MINUTES if restarts else 0),
        excluded_nodes=frozenset((*run.avoided_nodes, *unfolded(run.spec.harvest_given.get("exclude", "")))),
        budget_node_s=budget_left_node_s(run, now),
        kind=kind_of(run.spec, [nodes[home] for home in dict.fromkeys(homes) if home in nodes], alike=is_alike),
        asker=run.asker,
        can_renew=asks,
    )


def _missing_nodes(run: Run) -> int:
    """Number of nodes that the run could use beyond those that it holds or has requested; negative: a surplus."""
    useful = run.useful_members
    if run.root.generation == 0 and run.root.status is RunStatus.WAITING and run.record.slots is None:
        # Nothing has run yet. First the base job must show that the script works.
        useful = 0 if run.record.base_wanted else useful
    live = [
        a for a in run.live_allocations() if a.state is not AllocationState.RELEASING or _will_be_resubmitted(run, a)
    ]
    replaced = {a.replaces for a in live}
    # While the successor of a node starts, both count as one node.
    remaining_allocations = [a for a in live if a.token not in replaced]
    return useful - sum(_nodes(a) for a in remaining_allocations)


def _will_be_resubmitted(run: Run, allocation: Allocation) -> bool:
    """True if the head will submit this job again after its end, so that no other node should replace it."""
    r = run.record
    return allocation.kind is AllocationKind.BASE and r.base_wanted and not (r.paused or run.base_hold_reason)


def _nodes(allocation: Allocation) -> int:
    if allocation.kind is AllocationKind.HARVEST:
        return max(1, len(allocation.agents))
    return max(allocation.nodes_wanted, len(allocation.nodes))


def kind_of(spec: RunSpec, homes: list[NodeInfo], alike: bool = False) -> Kind:
    """The kind of nodes that the run can use: architecture, GPUs, CPUs, memory and constraints.

    Args:
        spec: specification of the run.
        homes: nodes of its members.
        alike: True if results must be bit-identical, so that only nodes like `homes` will do.
    """
    options = spec.harvest_given
    gpu_counts = gpu_types(options.get("gres", "")) or gpu_types(_as_gres(options.get("gpus-per-node", "")))
    typed = [kind for kind in gpu_counts if kind]
    gpus = sum(gpu_counts.values())
    cpus, memory_mb = _per_node(options, gpus)
    # An exclusive job cannot use a part of a node.
    shares = gpus > 0 and "exclusive" not in options
    return Kind(
        arch=next((node.arch for node in homes if node.arch), ""),
        gpus=gpus,
        part_gpus=(spec.workers_per_node or 1) if shares else 0,
        cpus=cpus,
        memory_mb=memory_mb,
        gpu_type=typed[0] if len(typed) == 1 else "",
        constraint=options.get("constraint", ""),
        reservation=options.get("reservation", ""),
        alike=tuple(sorted({likeness(node) for node in homes})) if alike else (),
    )


def _per_node(options: Mapping[str, str], gpus: int) -> tuple[int, int]:
    """CPUs and MiB of memory that a script requests on a node with `gpus` GPUs; 0: it does not say."""
    tasks = max(1, count(options.get("ntasks-per-node", "")))
    cpus = count(options.get("cpus-per-task", "")) * tasks or count(options.get("cpus-per-gpu", "")) * gpus
    cpus = cpus or (tasks if tasks > 1 else 0)
    by_cpu, by_gpu = megabytes(options.get("mem-per-cpu", "")), megabytes(options.get("mem-per-gpu", ""))
    return cpus, megabytes(options.get("mem", "")) or by_cpu * max(cpus, 1) or by_gpu * gpus


def _as_gres(gpus: str) -> str:
    """`a100:4` as `gpu:a100:4`."""
    return ",".join(f"gpu:{item}" for item in gpus.split(",") if item)


# -- estimate for a new run ------------------------------------------------------------------------------------------


def estimate(
    cluster: ClusterState,
    spec: RunSpec,
    rules: HarvestRules,
    live: Sequence[Allocation],
    knowledge: Knowledge,
    ordered: Asker | None = None,
) -> Estimate:
    """Plan for this run as if its base job had started. Other runs' demand is left out.

    Args:
        cluster: a poll.
        spec: specification of the new run.
        rules: rules for harvest requests.
        live: live allocations of all runs.
        knowledge: the planner's experience.
        ordered: account and QOS of harvest jobs, if the configuration sets them.
    """
    cluster = with_reservations(cluster, [spec.harvest_given.get("reservation", "")])
    budget_s = None if spec.budget_node_hours is None else spec.budget_node_hours * 3600.0
    demand = Demand(
        run="",
        nodes=spec.max_nodes - spec.min_nodes,
        partitions=tuple(spec.harvest_partitions),
        min_minutes=spec.min_harvest_minutes,
        budget_node_s=budget_s,
        kind=kind_of(spec, []),
        asker=Asker.of(spec, ordered),
    )
    situation = Situation(cluster, [demand], live, replace(rules, max_ahead=0), knowledge, assess(cluster, live))
    unbounded = replace(situation.rules, max_pending=UNBOUNDED, max_waiting=UNBOUNDED)
    asks, all_asks = (plan(some).asks for some in (situation, dataclasses.replace(situation, rules=unbounded)))
    return Estimate(
        polled_at=cluster.at,
        idle_nodes=len({hole.node for hole in situation.holes if hole.part is None}),
        asks=[
            WouldAsk(partition=partition, minutes=minutes, nodes=nodes)
            for (partition, minutes), nodes in sorted(Counter((ask.partition, ask.minutes) for ask in asks).items())
        ],
        nodes=spec.min_nodes + len(all_asks),
        notes=_notes(spec, rules, list(situation.partitions), cluster),
    )


def _notes(spec: RunSpec, rules: HarvestRules, usable_partitions: Sequence[str], cluster: ClusterState) -> list[str]:
    notes: list[str] = []
    if spec.max_nodes == spec.min_nodes:
        return notes
    unknown_partitions = sorted(set(spec.harvest_partitions) - {p.partition for p in cluster.partitions})
    if unknown_partitions:
        notes.append(f"there is no partition {', '.join(unknown_partitions)}")
    named_partitions = set(spec.harvest_partitions or rules.partitions)
    if not usable_partitions or (named_partitions and not named_partitions & set(usable_partitions)):
        where_text = f"partition {', '.join(sorted(named_partitions))}" if named_partitions else "any partition"
        notes.append(
            f"nothing may be harvested in {where_text}: it is down, not open to your groups, or nobody would preempt "
            "harvest jobs there and [harvest] allow_without_preemption is off"
        )
    return notes


# -- budgets and base jobs -------------------------------------------------------------------------------------------


def budget_left_node_s(run: Run, at: float) -> float | None:
    """Node-seconds of the budget that may still be reserved; None: no budget. `at`: Unix time of the last poll."""
    hours = run.spec.budget_node_hours
    if hours is None:
        return None
    return budget.remaining_node_s(hours * 3600.0, run.record.spent_node_s, run.allocations.values(), at)


def keep_within_budget(turn: Turn, run: Run, at: float) -> None:
    """Cancel waiting jobs and shorten running ones as the budget demands. `deadlines.watch_time` releases them."""
    hours, remaining_node_s = run.spec.budget_node_hours, budget_left_node_s(run, at)
    if hours is None or remaining_node_s is None or run.ended:
        return
    allocations = list(run.allocations.values())
    waiting_jobs = [a for a in allocations if a.is_live and budget.is_charged(a) and not a.spans and not a.agents]
    for allocation in sorted(waiting_jobs, key=lambda a: -a.requested_at):
        if remaining_node_s >= 0:
            break
        remaining_node_s += budget.booked_node_s(allocation, at)
        if allocation.asked_at is None:
            turn.cancel(run, allocation, f"the budget of {hours:g} node-hours does not allow for it")
    end = budget.exhausted_at(hours * 3600.0, run.record.spent_node_s, allocations, at)
    for allocation in allocations:
        is_charged = allocation.state is AllocationState.RUNNING and budget.is_charged(allocation)
        if end is not None and is_charged and (allocation.end_at is None or end < allocation.end_at):
            allocation.end_at, allocation.ends_because = end, f"the budget of {hours:g} node-hours is used up"
            turn.dirty.add(run.id)


def renew_base(turn: Turn, run: Run, at: float, backoff: Backoff) -> None:
    """Submit the base job again if the last one has ended and the script is not finished."""
    record = run.record
    if run.ended or not record.base_wanted or run.roster.finishing or record.paused:
        return
    if not run.bases or any(a.is_live or awaits_verdict(a, turn.now) for a in run.bases):
        return
    if turn.now < backoff.put_off_until(base_job(run.id)):
        return
    if run.root.limit <= len(run.roster.present()):
        limit = counted(run.root.limit, "node")
        note_base_hold(turn, run, f"the limit of {limit} has no place for it; to raise the limit: fallow grow {run.id}")
        return
    # Assume that Slurm grants the time of the last base job.
    limit_s, remaining_node_s, nodes = run.bases[-1].limit_s, budget_left_node_s(run, at), base_nodes(run.spec)
    if remaining_node_s is not None and (limit_s is None or limit_s * nodes > remaining_node_s):
        needs = "has no time limit" if limit_s is None else f"needs {limit_s * nodes / 3600:.3g}"
        note_base_hold(turn, run, f"{max(0.0, remaining_node_s) / 3600:.3g} node-hours are left and the job {needs}")
        return
    run.base_hold_reason = ""
    turn.new_allocation(run, AllocationKind.BASE, nodes_wanted=nodes, was_renewed=True, limit_s=limit_s)


def note_base_hold(turn: Turn, run: Run, why: str) -> None:
    text = f"the base job is not submitted again: {why}"
    if text != run.base_hold_reason:
        turn.record(run, "budget", text)
    run.base_hold_reason = text
