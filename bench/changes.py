"""The duration of membership changes.

`pause`, a planned change: time from the end of the last step of the old generation to the start of the first step of
the new one, on the member that waited longest. The youngest and the oldest member leave in turn, so rank 0 changes,
too. `recovery`, a SIGKILL: time from the signal to the end of the next generation's first step on the slowest survivor,
detection included. With a large model on few CPUs that step is most of the figure, so the note has its duration.
"""

from collections.abc import Iterator, Sequence

from bench.rows import Row, Settings, progress, quantile_of, summarize, world_text, worlds
from bench.session import FinishedStep, train, usual_gap
from bench.workload import sums_on
from fallow.core.submission.schedule import Action
from fallow.model import ChangeKind, GenerationReport

CHANGES, CHANGE_STEPS = 32, 3
"""Number of planned changes, and steps from one to the next. A late change delays the later ones."""

KILLS, KILL_STEPS = 20, 6
FIRST_STEP = 6
PARTS = ("drain", "group", "state", "data")
KINDS = {
    "planned pause": set(ChangeKind) - {ChangeKind.START},
    "planned pause, absorb": {ChangeKind.ABSORB},
    "planned pause, release": {ChangeKind.RELEASE},
}


def run_pause(settings: Settings) -> Iterator[Row]:
    """Rows for all planned changes, for absorbs, and for releases, for each world and model."""
    changes, device = settings.n or CHANGES, settings.device
    for params, members in worlds(settings):
        progress(f"pause: {world_text(params, members)}")
        options = {"steps": FIRST_STEP + 6 * changes + 10, "shards": members + 1, "device": device}
        training = train(params, members, alternate_changes(members, changes, CHANGE_STEPS, "-m"), **options)
        for name, kinds in KINDS.items():
            measured = [each for each in training.report.generations if each.kind in kinds and each.pause_s is not None]
            if measured:
                figure, note = summarize([each.pause_s or 0.0 for each in measured]), sums_on(device, training.workers)
                yield Row(name=name, members=members, params=params, ours=figure, note=note + parts_of(measured))


def alternate_changes(members: int, changes: int, gap: int, leave: str) -> str:
    """A schedule in which members join and leave alternately; the youngest and the oldest leave in turn.

    Args:
        members: number of members at the begin.
        changes: number of changes.
        gap: steps from one change to the next.
        leave: `-m` (planned) or `kill:`. A kill comes before the next join, a planned departure after it.
    """
    alive, items = list(range(members)), []
    for number in range(changes):
        if number % 2 == (leave == "kill:"):
            alive.append(members + number // 2)
            what = "+1"
        else:
            what = f"{leave}{alive.pop(0 if number // 2 % 2 else -1)}"
        items.append(f"{what}@{FIRST_STEP + gap * number}")
    return ",".join(items)


def parts_of(changes: Sequence[GenerationReport]) -> str:
    """The parts of the pauses, and the bytes sent in and behind them, for a note."""
    pause_parts = {part: [getattr(change.parts, part) for change in changes] for part in PARTS}
    pause_parts["all but drain"] = [(change.pause_s or 0.0) - change.parts.drain for change in changes]
    words = [
        f"{part} {quantile_of(values, 0.5):.3f}/{quantile_of(values, 0.95):.3f}" for part, values in pause_parts.items()
    ]
    received = [change for change in changes if change.bytes_in_pause]
    if received:
        inside = quantile_of([change.bytes_in_pause / 1e6 for change in received], 0.5)
        behind = quantile_of([change.bytes_behind / 1e6 for change in received], 0.5)
        words.append(f"{inside:.1f} MB in the pause and {behind:.1f} MB behind it")
    return "p50/p95: " + ", ".join(words)


def run_recovery(settings: Settings) -> Iterator[Row]:
    """One row for each world and model."""
    kills, device = settings.n or KILLS, settings.device
    for params, members in worlds(settings):
        progress(f"recovery: {world_text(params, members)}")
        options = {"steps": FIRST_STEP + 4 * KILL_STEPS * kills, "shards": members, "device": device}
        training = train(params, members, alternate_changes(members, 2 * kills, KILL_STEPS, "kill:"), **options)
        killed = [began for item, began in training.schedule_starts if item.action is Action.KILL]
        times = recoveries(training.steps, killed)
        note = f"{sums_on(device, training.workers)}steps done again: {training.report.steps_discarded} "
        note += f"in {len(killed)} kills"
        note += f"; a step that nothing disturbs takes {usual_gap(training.steps):.3f} s"
        yield Row(name="recovery", members=members, params=params, ours=summarize(times), note=note)


def recoveries(log: Sequence[FinishedStep], kills: Sequence[float]) -> list[float]:
    """Seconds from each kill until every survivor has finished a step of the next generation."""
    durations = []
    for killed_at in kills:
        last_generation = max((finished.generation for finished in log if finished.at < killed_at), default=0)
        later_steps = [
            finished for finished in log if finished.at >= killed_at and finished.generation > last_generation
        ]
        first: dict[str, float] = {}
        for finished in later_steps:
            if finished.generation == later_steps[0].generation:
                first.setdefault(finished.worker, finished.at)
        if first:
            durations.append(max(first.values()) - killed_at)
    return durations
