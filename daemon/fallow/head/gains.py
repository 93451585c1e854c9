"""What is known of each run's gain from nodes: its curve, weight and deadline become what nodes are worth to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import islice

from fallow.core import fairshare, pacing
from fallow.core.allocations import Allocation
from fallow.core.gain import Curve, fit, pooled, with_losses
from fallow.core.pacing import Schedule
from fallow.core.worth import Gain, Worth
from fallow.head.book import Run
from fallow.head.views import longest_pause
from fallow.model import AllocationState

ALIKE = 8
"""A run learns from so many of the newest like it: evidence fades, and each poll would take longer for ever."""

PAUSE_S = 0.5
"""Stall at a change, until this run has had one."""

_Model = tuple[str, str | None, int | None, int | None, int | None]


def gains(all_runs: Iterable[Run], at: float, start_s: float, stay_s: float) -> dict[str, Gain]:
    """Gain of every run that has not ended.

    Args:
        all_runs: ended ones too: runs of the same script learn from each other.
        at: Unix time.
        start_s: from the request for a node until it trains, as a rule.
        stay_s: for so long nodes stay.
    """
    runs = [run for run in all_runs if not run.spec.local]
    told = [run for run in runs if run.roster.signature is not None]
    alike: dict[_Model, list[Run]] = {}
    newest: dict[str, _Model] = {}
    for run in sorted(told, key=lambda run: -run.spec.created_at):
        alike.setdefault(_model(run), []).append(run)
        newest.setdefault(_script(run), _model(run))
    live = [run for run in runs if not run.roster.status.ended]
    weights = _weights(live, runs, at)
    found: dict[str, Gain] = {}
    for run in live:
        # As long as a run has not said what it has, what the newest run of the script has is the best guess.
        model = _model(run) if run.roster.signature is not None else newest.get(_script(run), _model(run))
        others = _teachers(run, alike.get(model, []))
        found[run.id] = _gain(run, others, weights[run.id], at, start_s, stay_s)
    return found


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


def _gain(run: Run, others: list[Run], weight: float, at: float, start_s: float, stay_s: float) -> Gain:
    r, spec = run.roster, run.spec
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


def _model(run: Run) -> _Model:
    """Runs of a script with the same tensors, shards, global batch and workers per node learn from each other."""
    return _script(run), run.roster.signature, run.roster.shards, run.roster.global_batch, run.record.slots


def _teachers(run: Run, alike: list[Run]) -> list[Run]:
    """Those that it learns from, the newest first; one that was never measured says at least how many shards it had."""
    measured = (other for other in alike if other is not run and _known(other.record.curve))
    return list(islice(measured, ALIKE)) or [other for other in alike[:2] if other is not run]


def _known(curve: Curve) -> bool:
    return bool(curve.seen) or curve.shard_s is not None


def _schedule(run: Run, curve: Curve, at: float) -> Schedule | None:
    spec, r = run.spec, run.roster
    total = r.total_steps or max((b.total_steps or 0 for b in run.beats.values()), default=0)
    if spec.deadline_at is None or not total or not _known(curve):
        return None
    return pacing.schedule(spec.created_at, spec.deadline_at, total, r.front, at)
