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
from fallow.head.state.archive import Archive, Lesson, Model, lesson_of, project_of
from fallow.head.state.book import Run
from fallow.model import AllocationState


def gains(all_runs: Iterable[Run], at: float, start_s: float, archive: Archive | None = None) -> dict[str, Gain]:
    """Gain of every run that has not ended.

    Args:
        all_runs: ended ones too: runs of the same script learn from each other.
        at: Unix time.
        start_s: from the request for a node until it trains, as a rule.
        archive: has the runs that are not among them any more.
    """
    archive = archive or Archive()
    runs = [run for run in all_runs if not run.spec.local]
    own = {run.id: lesson_of(run) for run in runs}
    alike: dict[Model, list[Lesson]] = {}
    newest: dict[str, Lesson] = {}
    "script -> the newest of its lessons"
    said = (lesson for lesson in own.values() if lesson.signature is not None)
    for lesson in sorted([*said, *archive.lessons], key=lambda lesson: -lesson.created_at):
        alike.setdefault(lesson.model, []).append(lesson)
        newest.setdefault(lesson.script, lesson)
    live = [run for run in runs if not run.ended]
    known: list[Facts] = []
    for run in live:
        lesson = own[run.id]
        if lesson.signature is None:
            # As long as a run has not said what it has, what the newest run of the script has is the best guess.
            lesson = newest.get(lesson.script, lesson)
        known.append(_facts(run, _teachers(run, alike.get(lesson.model, [])), at))
    weights = valuing.weights(known, _use(live, runs, archive, at))
    return {each.run: valuing.gain(each, weights[each.run], at, start_s) for each in known}


def _use(live: Sequence[Run], runs: Sequence[Run], archive: Archive, at: float) -> dict[str, float]:
    """Project -> faded node-seconds that its runs have had, whether or not those have ended."""
    use = {project: archive.faded(project, at) for project in map(project_of, live)}
    for run in runs:
        if project_of(run) in use:
            now = [a for a in run.allocations.values() if a.harvested and not a.counted]
            spans = chain.from_iterable(held(allocation, at) for allocation in now)
            use[project_of(run)] += run.record.harvested.faded(at) + fairshare.faded_use(spans, at)
    return use


def _facts(run: Run, others: list[Lesson], at: float) -> Facts:
    """What there is to know of a run that has not ended. Args: others: that it learns from; at: Unix time."""
    spec, contract = run.spec, run.root.contract
    slots = run.record.slots or spec.workers_per_node or (others[0].slots if others else None) or 1
    shards = None if contract is None else contract.shards
    shards = shards or (others[0].shards if others else None) or spec.max_nodes * slots
    running = [a for a in run.live_allocations() if a.state is AllocationState.RUNNING]
    return Facts(
        run=run.id,
        curve=pooled(run.record.curve, [other.curve for other in others], at),
        slots=slots,
        shards=shards,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        base=sum(len(a.nodes) or a.nodes_wanted for a in running if not a.harvested),
        going=run.root.generation > 0,
        pause_s=run.longest_pause_s() or (PAUSE_S if contract is not None and contract.restarts else 0.0),
        weight=spec.weight,
        project=project_of(run),
        created_at=spec.created_at,
        deadline_at=spec.deadline_at,
        total_steps=0 if spec.deadline_at is None else _total_steps(run),
        front=0 if spec.deadline_at is None else run.roster.front,
    )


def _total_steps(run: Run) -> int:
    said = None if run.root.contract is None else run.root.contract.total_steps
    return said or max((progress.total_steps or 0 for progress in run.progress.values()), default=0)


def _teachers(run: Run, alike: list[Lesson]) -> list[Lesson]:
    """Those that it learns from, the newest first; one that was never measured says at least how many shards it had."""
    known = (other for other in alike if other.run != run.id and measured(other.curve))
    return list(islice(known, ALIKE)) or [other for other in alike[:2] if other.run != run.id]
