"""What nodes are worth to each run: its curve, its project's share and its deadline become its gain."""

from collections.abc import Iterable, Sequence
from itertools import chain, islice

from fallow.core.accounting import fairshare
from fallow.core.accounting.pacing import Schedule, schedule
from fallow.core.accounting.spans import held
from fallow.core.planning.gain import Curve, Gain, pool_curves, speeds
from fallow.core.planning.share import Worth, values
from fallow.core.training.restarts import PAUSE_S as RESTART_S
from fallow.head.state.book import Run
from fallow.model import AllocationState

ALIKE = 8
"""A run learns from so many of the newest like it: evidence fades, and each poll would take longer for ever."""

PAUSE_S = 0.5
"""Stall at a change, until this run has had one."""

Model = tuple[str | int | None, ...]


def gains(all_runs: Iterable[Run], at: float, start_s: float) -> dict[str, Gain]:
    """Gain of every run that has not ended.

    Args:
        all_runs: ended ones too: runs of the same script learn from each other.
        at: Unix time.
        start_s: from the request for a node until it trains, as a rule.
    """
    runs = [run for run in all_runs if not run.spec.local]
    alike: dict[Model, list[Run]] = {}
    newest: dict[str, Run] = {}
    "script -> the newest run of it that has said what it trains"
    for run in sorted(runs, key=lambda run: -run.spec.created_at):
        if run.root.contract is not None:
            alike.setdefault(_model(run), []).append(run)
            newest.setdefault(run.spec.script, run)
    live = [run for run in runs if not run.ended]
    shares = [(run.id, _project(run), run.spec.weight) for run in live]
    weights = fairshare.weights(shares, _use(live, runs, at))
    found: dict[str, Gain] = {}
    for run in live:
        # As long as a run has not said what it has, what the newest run of the script has is the best guess.
        like = newest.get(run.spec.script, run) if run.root.contract is None else run
        found[run.id] = _gain(run, _teachers(run, alike.get(_model(like), [])), weights[run.id], at, start_s)
    return found


def _model(run: Run) -> Model:
    """Runs of a script with the same tensors, shards, global batch and workers per node learn from each other."""
    contract = run.root.contract
    said = () if contract is None else (contract.signature, contract.shards, contract.global_batch)
    return run.spec.script, *said, run.record.slots


def _project(run: Run) -> str:
    """The account that it was submitted for, whichever its harvest jobs run under; empty: the user's default one."""
    return run.spec.harvest_given.get("account", "")


def _use(live: Sequence[Run], runs: Sequence[Run], at: float) -> dict[str, float]:
    """Project -> faded node-seconds that its runs have had, whether or not those have ended."""
    use = dict.fromkeys(map(_project, live), 0.0)
    for run in runs:
        if _project(run) in use:
            now = [a for a in run.allocations.values() if a.is_harvested and not a.is_counted]
            spans = chain.from_iterable(held(allocation, at) for allocation in now)
            use[_project(run)] += run.record.harvested.faded(at) + fairshare.faded_use(spans, at)
    return use


def _gain(run: Run, others: Sequence[Run], weight: float, at: float, start_s: float) -> Gain:
    """Gain of one run. Args: others: that it learns from; weight: of its gain beside that of others."""
    spec, contract = run.spec, run.root.contract
    slots = run.record.slots or spec.workers_per_node or (others[0].record.slots if others else None) or 1
    said = [one.root.contract.shards for one in (run, *others[:1]) if one.root.contract is not None]
    shards = next(filter(None, said), spec.max_nodes * slots)
    restarts = contract is not None and contract.restarts
    curve = pool_curves(run.record.curve, [other.record.curve for other in others], at)
    fast = tuple(speeds(curve, shards, slots, spec.max_nodes))
    standing = _schedule(run, curve, at)
    worth = values(
        fast,
        spec.max_nodes,
        weight,
        least=1 if run.root.generation > 0 else spec.min_nodes,
        urgency=1.0 if standing is None else standing.urgency,
        urgent_nodes=0 if standing is None else standing.nodes(fast),
    )
    running = [a for a in run.live_allocations() if a.state is AllocationState.RUNNING and not a.is_harvested]
    base = sum(len(a.nodes) or a.nodes_wanted for a in running)
    pause_s = run.longest_pause_s() or (RESTART_S if restarts else PAUSE_S)
    return Gain(Worth(worth, base, spec.min_nodes, start_s, pause_s), fast, curve, standing)


def _schedule(run: Run, curve: Curve, at: float) -> Schedule | None:
    deadline_at = run.spec.deadline_at
    if deadline_at is None or not curve.is_measured or not (total_steps := _total_steps(run)):
        return None
    return schedule(run.spec.created_at, deadline_at, total_steps, run.roster.front, at)


def _total_steps(run: Run) -> int:
    said = None if run.root.contract is None else run.root.contract.total_steps
    return said or max((progress.total_steps or 0 for progress in run.progress.values()), default=0)


def _teachers(run: Run, alike: list[Run]) -> list[Run]:
    """Those that it learns from, the newest first; one that was never measured says at least how many shards it had."""
    known = (other for other in alike if other is not run and other.record.curve.is_measured)
    return list(islice(known, ALIKE)) or [other for other in alike[:2] if other is not run]
