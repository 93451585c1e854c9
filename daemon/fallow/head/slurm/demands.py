"""What a run could use, and may spend: how many nodes more, of which kind, in whose name, within which budget."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from fallow.core.accounting import budget
from fallow.core.accounting.backoff import Asker, Backoff, base_job
from fallow.core.accounting.cancelled import awaits_verdict
from fallow.core.allocations import Allocation
from fallow.core.kinds import Kind, likeness, within
from fallow.core.neighbour.needs import assess
from fallow.core.planning.known import Known
from fallow.core.planning.plan import plan
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.core.planning.situation import Situation
from fallow.core.submission.sbatch_line import base_nodes
from fallow.core.training.restarts import LEAST_MINUTES
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
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
    """What to plan with for a run that has not ended.

    Args:
        run: whose demand it is.
        nodes: of the last poll.
        now: Unix time of the poll.
        asks: False: nothing may be asked for now.
    """
    asks = asks and not run.record.paused and not run.roster.finishing
    wanted = _missing(run)
    homes = [run.roster.nodes[n].host for n in run.roster.present()]
    contract = run.root.contract
    restarts, is_alike = (False, False) if contract is None else (contract.restarts, bool(contract.arithmetic))
    return Demand(
        run=run.id,
        nodes=wanted if asks else min(wanted, 0),
        partitions=tuple(run.spec.harvest_partitions),
        min_minutes=max(run.spec.min_harvest_minutes, LEAST_MINUTES if restarts else 0),
        barred=frozenset((*run.shunned, *unfolded(run.spec.harvest_given.get("exclude", "")))),
        budget_node_s=left_s(run, now),
        kind=kind_of(run.spec, [nodes[home] for home in dict.fromkeys(homes) if home in nodes], alike=is_alike),
        asker=run.asker,
        renew=asks,
    )


def _missing(run: Run) -> int:
    """Nodes that the run could use and neither holds nor has asked for; negative: so many too many."""
    useful = run.useful_members
    if run.root.generation == 0 and run.root.status is RunStatus.WAITING and run.record.slots is None:
        # Nothing of it has run yet: the base allocation shows first that the script works.
        useful = 0 if run.record.base_wanted else useful
    live = [a for a in run.live_allocations() if a.state is not AllocationState.RELEASING or _comes_again(run, a)]
    replaced = {a.replaces for a in live}
    # While its successor starts, a node is counted once.
    staying = [a for a in live if a.token not in replaced]
    return useful - sum(_nodes(a) for a in staying)


def _comes_again(run: Run, allocation: Allocation) -> bool:
    """Will the head submit it again when it is over? What was asked for in its place would be withdrawn then."""
    r = run.record
    return allocation.kind is AllocationKind.BASE and r.base_wanted and not (r.paused or run.held_back)


def _nodes(allocation: Allocation) -> int:
    if allocation.kind is AllocationKind.HARVEST:
        return max(1, len(allocation.agents))
    return max(allocation.nodes_wanted, len(allocation.nodes))


def kind_of(spec: RunSpec, homes: list[NodeInfo], alike: bool = False) -> Kind:
    """Nodes that the run can use: its software's architecture, its GPUs.

    Args:
        spec: of the run.
        homes: its members' nodes.
        alike: bits count, so only nodes like those.
    """
    given = spec.harvest_given
    asked = gpu_types(given.get("gres", "")) or gpu_types(_as_gres(given.get("gpus-per-node", "")))
    typed = [kind for kind in asked if kind]
    gpus = sum(asked.values())
    cpus, memory_mb = _per_node(given, gpus)
    # A job that shares its nodes with nobody finds no room beside others.
    shares = gpus > 0 and "exclusive" not in given
    return Kind(
        arch=next((node.arch for node in homes if node.arch), ""),
        gpus=gpus,
        part_gpus=(spec.workers_per_node or 1) if shares else 0,
        cpus=cpus,
        memory_mb=memory_mb,
        gpu_type=typed[0] if len(typed) == 1 else "",
        constraint=given.get("constraint", ""),
        reservation=given.get("reservation", ""),
        alike=tuple(sorted({likeness(node) for node in homes})) if alike else (),
    )


def _per_node(given: Mapping[str, str], gpus: int) -> tuple[int, int]:
    """CPUs and MiB that a script asks for on a node of so many GPUs; 0: it does not say."""
    tasks = max(1, count(given.get("ntasks-per-node", "")))
    cpus = count(given.get("cpus-per-task", "")) * tasks or count(given.get("cpus-per-gpu", "")) * gpus
    cpus = cpus or (tasks if tasks > 1 else 0)
    by_cpu, by_gpu = megabytes(given.get("mem-per-cpu", "")), megabytes(given.get("mem-per-gpu", ""))
    return cpus, megabytes(given.get("mem", "")) or by_cpu * max(cpus, 1) or by_gpu * gpus


def _as_gres(gpus: str) -> str:
    """`a100:4` as `gpu:a100:4`."""
    return ",".join(f"gpu:{item}" for item in gpus.split(",") if item)


# -- a run that does not exist yet -----------------------------------------------------------------------------------


def estimate(
    cluster: ClusterState,
    spec: RunSpec,
    rules: HarvestRules,
    live: Sequence[Allocation],
    known: Known,
    ordered: Asker | None = None,
) -> Estimate:
    """Plan for this run as if its base job had begun; what other runs want besides is left out.

    Args:
        cluster: one poll.
        spec: what would be submitted.
        rules: what is allowed.
        live: allocations of all runs.
        known: what was learned.
        ordered: account and QOS of harvest jobs, where the configuration says so.
    """
    cluster = within(cluster, [spec.harvest_given.get("reservation", "")])
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
    situation = Situation(cluster, [demand], live, replace(rules, ahead=0), known, assess(cluster, live))
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


def _notes(spec: RunSpec, rules: HarvestRules, allowed: Sequence[str], cluster: ClusterState) -> list[str]:
    notes: list[str] = []
    if spec.max_nodes == spec.min_nodes:
        return notes
    unknown = sorted(set(spec.harvest_partitions) - {p.partition for p in cluster.partitions})
    if unknown:
        notes.append(f"there is no partition {', '.join(unknown)}")
    named = set(spec.harvest_partitions or rules.partitions)
    if not allowed or (named and not named & set(allowed)):
        where = f"partition {', '.join(sorted(named))}" if named else "any partition"
        notes.append(
            f"nothing may be harvested in {where}: it is down, not open to your groups, or nobody would preempt "
            "harvest jobs there and [harvest] allow_without_preemption is off"
        )
    return notes


# -- budgets and base jobs -------------------------------------------------------------------------------------------


def left_s(run: Run, at: float) -> float | None:
    """Node-seconds that may still be asked for; None: no budget. `at`: Unix time of the last poll."""
    hours = run.spec.budget_node_hours
    if hours is None:
        return None
    return budget.left(hours * 3600.0, run.record.spent_node_s, run.allocations.values(), at)


def keep_within_budget(turn: Turn, run: Run, at: float) -> None:
    """Jobs whose granted time is more than the budget has left go in time; what watches walltimes releases them."""
    hours, room = run.spec.budget_node_hours, left_s(run, at)
    if hours is None or room is None or run.ended:
        return
    allocations = list(run.allocations.values())
    waiting = [a for a in allocations if a.live and budget.charged(a) and not a.spans and not a.agents]
    for allocation in sorted(waiting, key=lambda a: -a.requested_at):
        if room >= 0:
            break
        room += budget.booked(allocation, at)
        if allocation.asked_at is None:
            turn.cancel(run, allocation, f"the budget of {hours:g} node-hours does not allow for it")
    end = budget.exhausted_at(hours * 3600.0, run.record.spent_node_s, allocations, at)
    for allocation in allocations:
        running = allocation.state is AllocationState.RUNNING and budget.charged(allocation)
        if end is not None and running and (allocation.end_at is None or end < allocation.end_at):
            allocation.end_at, allocation.ends_because = end, f"the budget of {hours:g} node-hours is used up"
            turn.dirty.add(run.id)


def renew_base(turn: Turn, run: Run, at: float, backoff: Backoff) -> None:
    """Submit the base job again when the last one is over and the script is not finished."""
    record = run.record
    if run.ended or not record.base_wanted or run.roster.finishing or record.paused:
        return
    if not run.bases or any(a.live or awaits_verdict(a, turn.now) for a in run.bases):
        return
    if turn.now < backoff.put_off_until(base_job(run.id)):
        return
    if run.root.limit <= len(run.roster.present()):
        limit = counted(run.root.limit, "node")
        hold_back(turn, run, f"the limit of {limit} leaves no place for it; to raise it: fallow grow {run.id}")
        return
    # It will be granted what the last one was granted.
    limit_s, room, nodes = run.bases[-1].limit_s, left_s(run, at), base_nodes(run.spec)
    if room is not None and (limit_s is None or limit_s * nodes > room):
        needs = "has no time limit" if limit_s is None else f"needs {limit_s * nodes / 3600:.3g}"
        hold_back(turn, run, f"{max(0.0, room) / 3600:.3g} node-hours are left and it {needs}")
        return
    run.held_back = ""
    turn.new_allocation(run, AllocationKind.BASE, nodes_wanted=nodes, renewed=True, limit_s=limit_s)


def hold_back(turn: Turn, run: Run, why: str) -> None:
    """Say once why the base job is not submitted again."""
    text = f"the base job is not submitted again: {why}"
    if text != run.held_back:
        turn.record(run, "budget", text)
    run.held_back = text
