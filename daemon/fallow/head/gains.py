"""What is known of each run's gain from nodes: its curve, weight and deadline become what nodes are worth to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fallow.core import fairshare, pacing
from fallow.core.allocations import Allocation
from fallow.core.gain import Curve, fit, pooled, with_losses
from fallow.core.pacing import Schedule
from fallow.core.worth import Gain, Worth
from fallow.head.book import Run
from fallow.head.views import longest_pause
from fallow.model import AllocationState

PAUSE_S = 0.5
"""Stall at a change, until this run has had one."""


def gains(all_runs: Iterable[Run], at: float, start_s: float, stay_s: float) -> dict[str, Gain]:
    """Gain of every run that has not ended.

    Args:
        all_runs: ended ones too: runs of the same script learn from each other.
        at: Unix time.
        start_s: from the request for a node until it trains, as a rule.
        stay_s: for so long nodes stay.
    """
    runs = [run for run in all_runs if not run.spec.local]
    alike: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: -run.spec.created_at):
        alike.setdefault(_script(run), []).append(run)
    live = [run for run in runs if not run.roster.status.ended]
    weights = _weights(live, runs, at)
    return {run.id: _gain(run, alike[_script(run)], weights[run.id], at, start_s, stay_s) for run in live}


def _script(run: Run) -> str:
    if not run.script_digest:
        run.script_digest = hashlib.sha256(run.spec.script.encode()).hexdigest()
    return run.script_digest


def project(run: Run) -> str:
    """The account that it was submitted for, whichever its harvest jobs run under; empty: the user's default one."""
    return run.spec.harvest_given.get("account", "")


def _weights(live: list[Run], runs: list[Run], at: float) -> dict[str, float]:
    """A project's part does not depend on the number of its runs, nor on whether those that had nodes have ended."""
    sums: dict[str, float] = {}
    for run in live:
        sums[project(run)] = sums.get(project(run), 0.0) + run.spec.weight
    use = dict.fromkeys(sums, 0.0)
    for run in runs:
        if project(run) in use:
            held = [_held(a, at) for a in run.record.allocations.values() if a.harvested and not a.counted]
            use[project(run)] += run.record.harvested.faded(at) + fairshare.faded_use(filter(None, held), at)
    factors = fairshare.factors(use)
    return {run.id: factors[project(run)] * run.spec.weight / sums[project(run)] for run in live}


def _held(allocation: Allocation, at: float) -> tuple[float, float] | None:
    if allocation.start_at is None:
        return None
    ended = not allocation.live and allocation.end_at is not None
    return allocation.start_at, min(at, allocation.end_at or at) if ended else at


def _gain(run: Run, alike: list[Run], weight: float, at: float, start_s: float, stay_s: float) -> Gain:
    r, spec = run.roster, run.spec
    others = _same_model(run, alike)
    curve = pooled(run.record.curve, [other.record.curve for other in others], at)
    slots = run.record.slots or spec.workers_per_node or (others[0].record.slots if others else None) or 1
    shards = r.shards or (others[0].roster.shards if others else None) or spec.max_nodes * slots
    speeds = tuple(fit(curve, shards, at).speeds(slots, spec.max_nodes))
    # Who pays for nodes gets none that only stand by.
    most = min(spec.max_nodes, -(-shards // slots)) if spec.budget_node_hours is None else 0
    loss = min(0.5, start_s / stay_s)
    running = [a for a in run.live_allocations() if a.state is AllocationState.RUNNING]
    schedule = _schedule(run, curve, at)
    worth = Worth(
        speeds=tuple(with_losses(speeds, loss, most)) if most else speeds,
        weight=weight,
        base=sum(len(a.nodes) or a.nodes_wanted for a in running if not a.harvested),
        least=spec.min_nodes,
        going=r.generation > 0,
        start_s=start_s,
        pause_s=longest_pause(run) or PAUSE_S,
        urgent_nodes=0 if schedule is None else schedule.nodes(speeds),
        urgency=1.0 if schedule is None else schedule.urgency,
    )
    return Gain(worth, speeds, frozenset(curve.seen), schedule, known=_known(curve))


def _same_model(run: Run, alike: list[Run]) -> list[Run]:
    """Runs of its script with the same tensors, shards, global batch and workers per node.

    As long as a run has not said what it has, those of the newest run of the script are the best guess.
    """
    mine = _model(run)
    known = [(other, _model(other)) for other in alike if other is not run and other.roster.signature is not None]
    if run.roster.signature is None and known:
        mine = known[0][1]
    return [other for other, model in known if model == mine]


def _model(run: Run) -> tuple[str | None, int | None, int | None, int | None]:
    return run.roster.signature, run.roster.shards, run.roster.global_batch, run.record.slots


def _known(curve: Curve) -> bool:
    return bool(curve.seen) or curve.shard_s is not None


def _schedule(run: Run, curve: Curve, at: float) -> Schedule | None:
    spec, r = run.spec, run.roster
    total = r.total_steps or max((b.total_steps or 0 for b in run.beats.values()), default=0)
    if spec.deadline_at is None or not total or not _known(curve):
        return None
    return pacing.schedule(spec.created_at, spec.deadline_at, total, r.front, at)
