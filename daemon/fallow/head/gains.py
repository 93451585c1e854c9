"""What is known of each run, and of runs like it, for `core.valuing` to say what nodes are worth to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import chain, islice

from fallow.core import fairshare, valuing
from fallow.core.gain import pooled
from fallow.core.spans import held
from fallow.core.valuing import ALIKE, Facts, measured
from fallow.core.worth import Gain
from fallow.head.book import Run
from fallow.head.views import longest_pause
from fallow.model import AllocationState

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
    known: list[Facts] = []
    for run in live:
        # As long as a run has not said what it has, what the newest run of the script has is the best guess.
        model = _model(run) if run.roster.signature is not None else newest.get(_script(run), _model(run))
        known.append(_facts(run, _teachers(run, alike.get(model, [])), at))
    weights = valuing.weights(known, _use(live, runs, at))
    return {each.run: valuing.gain(each, weights[each.run], at, start_s, stay_s) for each in known}


def _script(run: Run) -> str:
    if not run.script_digest:
        run.script_digest = hashlib.sha256(run.spec.script.encode()).hexdigest()
    return run.script_digest


def project(run: Run) -> str:
    """The account that it was submitted for, whichever its harvest jobs run under; empty: the user's default one."""
    return run.spec.harvest_given.get("account", "")


def _use(live: list[Run], runs: list[Run], at: float) -> dict[str, float]:
    """Project -> faded node-seconds that its runs have had, whether or not those have ended."""
    use = {project(run): 0.0 for run in live}
    for run in runs:
        if project(run) in use:
            now = [a for a in run.record.allocations.values() if a.harvested and not a.counted]
            spans = chain.from_iterable(held(allocation, at) for allocation in now)
            use[project(run)] += run.record.harvested.faded(at) + fairshare.faded_use(spans, at)
    return use


def _facts(run: Run, others: list[Run], at: float) -> Facts:
    """What there is to know of a run that has not ended. Args: others: that it learns from; at: Unix time."""
    r, spec = run.roster, run.spec
    slots = run.record.slots or spec.workers_per_node or (others[0].record.slots if others else None) or 1
    shards = r.shards or (others[0].roster.shards if others else None) or spec.max_nodes * slots
    running = [a for a in run.live_allocations() if a.state is AllocationState.RUNNING]
    return Facts(
        run=run.id,
        curve=pooled(run.record.curve, [other.record.curve for other in others], at),
        slots=slots,
        shards=shards,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        base=sum(len(a.nodes) or a.nodes_wanted for a in running if not a.harvested),
        going=r.generation > 0,
        pause_s=longest_pause(run),
        weight=spec.weight,
        project=project(run),
        paid=spec.budget_node_hours is not None,
        created_at=spec.created_at,
        deadline_at=spec.deadline_at,
        total_steps=0 if spec.deadline_at is None else _total_steps(run),
        front=0 if spec.deadline_at is None else r.front,
    )


def _total_steps(run: Run) -> int:
    return run.roster.total_steps or max((b.total_steps or 0 for b in run.beats.values()), default=0)


def _model(run: Run) -> _Model:
    """Runs of a script with the same tensors, shards, global batch and workers per node learn from each other."""
    return _script(run), run.roster.signature, run.roster.shards, run.roster.global_batch, run.record.slots


def _teachers(run: Run, alike: list[Run]) -> list[Run]:
    """Those that it learns from, the newest first; one that was never measured says at least how many shards it had."""
    known = (other for other in alike if other is not run and measured(other.record.curve))
    return list(islice(known, ALIKE)) or [other for other in alike[:2] if other is not run]
