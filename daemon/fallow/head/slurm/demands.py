"""What a run could use: how many nodes more, of which kind, in whose name."""

from __future__ import annotations

from collections.abc import Mapping

from fallow.core.allocations import Allocation
from fallow.core.kinds import Kind, likeness
from fallow.core.planning.rules import Demand
from fallow.core.training.restarts import LEAST_MINUTES
from fallow.head.slurm.budgets import left_s
from fallow.head.state.book import Run
from fallow.model import AllocationKind, AllocationState, NodeInfo, RunSpec, RunStatus
from fallow.slurm.parse import count, gpu_types, megabytes
from fallow.slurm.parse import nodes as unfolded


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
