"""What is known of each run, and of runs like it, for `core.valuing` to say what nodes are worth to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

from fallow.core.accounting import fairshare
from fallow.core.accounting.spans import held
from fallow.core.planning import valuing
from fallow.core.planning.gain import pooled
from fallow.core.planning.valuing import ALIKE, Facts, Gain, measured
from fallow.core.training.restarts import PAUSE_S
from fallow.head.state.book import Run
from fallow.model import AllocationState

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
    known: list[Facts] = []
    for run in live:
        # As long as a run has not said what it has, what the newest run of the script has is the best guess.
        like = newest.get(run.spec.script, run) if run.root.contract is None else run
        known.append(_facts(run, _teachers(run, alike.get(_model(like), [])), at))
    weights = valuing.weights(known, _use(live, runs, at))
    return {each.run: valuing.gain(each, weights[each.run], at, start_s) for each in known}


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
            now = [a for a in run.allocations.values() if a.harvested and not a.counted]
            spans = chain.from_iterable(held(allocation, at) for allocation in now)
            use[_project(run)] += run.record.harvested.faded(at) + fairshare.faded_use(spans, at)
    return use


def _facts(run: Run, others: list[Run], at: float) -> Facts:
    """What there is to know of a run that has not ended. Args: others: that it learns from; at: Unix time."""
    spec, contract = run.spec, run.root.contract
    slots = run.record.slots or spec.workers_per_node or (others[0].record.slots if others else None) or 1
    said = [one.root.contract.shards for one in (run, *others[:1]) if one.root.contract is not None]
    shards = next(filter(None, said), spec.max_nodes * slots)
    running = [a for a in run.live_allocations() if a.state is AllocationState.RUNNING]
    return Facts(
        run=run.id,
        curve=pooled(run.record.curve, [other.record.curve for other in others], at),
        slots=slots,
        shards=shards,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        base=sum(len(a.nodes) or a.nodes_wanted for a in running if not a.harvested),
        going=run.root.generation > 0,
        pause_s=run.longest_pause_s() or (PAUSE_S if contract is not None and contract.restarts else 0.0),
        weight=spec.weight,
        project=_project(run),
        created_at=spec.created_at,
        deadline_at=spec.deadline_at,
        total_steps=0 if spec.deadline_at is None else _total_steps(run),
        front=0 if spec.deadline_at is None else run.roster.front,
    )


def _total_steps(run: Run) -> int:
    said = None if run.root.contract is None else run.root.contract.total_steps
    return said or max((progress.total_steps or 0 for progress in run.progress.values()), default=0)


def _teachers(run: Run, alike: list[Run]) -> list[Run]:
    """Those that it learns from, the newest first; one that was never measured says at least how many shards it had."""
    known = (other for other in alike if other is not run and measured(other.record.curve))
    return list(islice(known, ALIKE)) or [other for other in alike[:2] if other is not run]
