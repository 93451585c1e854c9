"""Gain of each run from further nodes, from its speed curve, its project's share and its deadline."""

from collections.abc import Iterable, Sequence
from itertools import chain, islice

from fallow.core.accounting import fairshare
from fallow.core.accounting.pacing import Schedule, schedule
from fallow.core.accounting.spans import node_periods
from fallow.core.planning.gain import Curve, Gain, pool_curves, speeds
from fallow.core.planning.share import Worth, values
from fallow.core.training.restarts import PAUSE_S as RESTART_S
from fallow.head.state.registry import Run
from fallow.model import AllocationState

ALIKE = 8
"""Number of similar runs, the newest, whose measurements a run uses. A limit keeps the time of a poll bounded."""

PAUSE_S = 0.5
"""Assumed pause at a membership change, until this run has had one."""

Model = tuple[str | int | None, ...]


def gains(all_runs: Iterable[Run], at: float, start_s: float) -> dict[str, Gain]:
    """Gain of every run that has not ended.

    Args:
        all_runs: all runs, including ended ones: runs of one script use each other's measurements.
        at: Unix time.
        start_s: usual time from the request for a node until it trains.
    """
    runs = [run for run in all_runs if not run.spec.local]
    alike: dict[Model, list[Run]] = {}
    newest: dict[str, Run] = {}
    "script -> its newest run with a contract"
    for run in sorted(runs, key=lambda run: -run.spec.created_at):
        if run.root.contract is not None:
            alike.setdefault(_model(run), []).append(run)
            newest.setdefault(run.spec.script, run)
    live = [run for run in runs if not run.ended]
    shares = [(run.id, _project(run), run.spec.weight) for run in live]
    weights = fairshare.weights(shares, _use(live, runs, at))
    gains_by_run: dict[str, Gain] = {}
    for run in live:
        # Until a run has a contract, assume that of the newest run of its script.
        model = newest.get(run.spec.script, run) if run.root.contract is None else run
        gains_by_run[run.id] = _gain(run, _teachers(run, alike.get(_model(model), [])), weights[run.id], at, start_s)
    return gains_by_run


def _model(run: Run) -> Model:
    """Key of similar runs: script, tensors, shards, global batch and workers per node."""
    contract = run.root.contract
    shape = () if contract is None else (contract.signature, contract.shards, contract.global_batch)
    return run.spec.script, *shape, run.record.slots


def _project(run: Run) -> str:
    """Account of the run's own submission, whatever its harvest jobs use; empty: the user's default account."""
    return run.spec.harvest_given.get("account", "")


def _use(live: Sequence[Run], runs: Sequence[Run], at: float) -> dict[str, float]:
    """Project -> decayed node-seconds of its runs, including ended ones."""
    use = dict.fromkeys(map(_project, live), 0.0)
    for run in runs:
        if _project(run) in use:
            now = [a for a in run.allocations.values() if a.is_harvested and not a.is_counted]
            spans = chain.from_iterable(node_periods(allocation, at) for allocation in now)
            use[_project(run)] += run.record.harvested.faded(at) + fairshare.faded_use(spans, at)
    return use


def _gain(run: Run, teachers: Sequence[Run], weight: float, at: float, start_s: float) -> Gain:
    """Gain of one run. Args: teachers: similar runs with measurements; weight: weight among all runs."""
    spec, contract = run.spec, run.root.contract
    slots = run.record.slots or spec.workers_per_node or (teachers[0].record.slots if teachers else None) or 1
    shard_counts = [one.root.contract.shards for one in (run, *teachers[:1]) if one.root.contract is not None]
    shards = next(filter(None, shard_counts), spec.max_nodes * slots)
    restarts = contract is not None and contract.restarts
    curve = pool_curves(run.record.curve, [other.record.curve for other in teachers], at)
    node_speeds = tuple(speeds(curve, shards, slots, spec.max_nodes))
    current_schedule = _schedule(run, curve, at)
    worth = values(
        node_speeds,
        spec.max_nodes,
        weight,
        least=1 if run.root.generation > 0 else spec.min_nodes,
        urgency=1.0 if current_schedule is None else current_schedule.urgency,
        urgent_nodes=0 if current_schedule is None else current_schedule.nodes(node_speeds),
    )
    base_jobs = [a for a in run.live_allocations() if a.state is AllocationState.RUNNING and not a.is_harvested]
    base = sum(len(a.nodes) or a.nodes_wanted for a in base_jobs)
    pause_s = run.longest_pause_s() or (RESTART_S if restarts else PAUSE_S)
    return Gain(Worth(worth, base, spec.min_nodes, start_s, pause_s), node_speeds, curve, current_schedule)


def _schedule(run: Run, curve: Curve, at: float) -> Schedule | None:
    deadline_at = run.spec.deadline_at
    if deadline_at is None or not curve.is_measured or not (total_steps := _total_steps(run)):
        return None
    return schedule(run.spec.created_at, deadline_at, total_steps, run.roster.front, at)


def _total_steps(run: Run) -> int:
    contract_steps = None if run.root.contract is None else run.root.contract.total_steps
    return contract_steps or max((progress.total_steps or 0 for progress in run.progress.values()), default=0)


def _teachers(run: Run, alike: list[Run]) -> list[Run]:
    """Similar runs with measurements, newest first; else some without, for their number of shards."""
    measured_runs = (other for other in alike if other is not run and other.record.curve.is_measured)
    return list(islice(measured_runs, ALIKE)) or [other for other in alike[:2] if other is not run]
