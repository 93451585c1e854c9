"""How long does training stand still when the membership changes as planned?

A pause is from the end of the last step in the old generation to the start of the first one in the new, on the member
that waited longest. Members come and go in turn: the youngest and the oldest leave alternately, so that rank 0 changes
hands, too. Head, store, agents and workers are real; the groups are gloo over loopback.

A part of the state comes to newcomers while the others are at work in the new generation's first step, so the note also
tells how much longer that step took than a usual one, on those who were members before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from fallow.bench import rows, session
from fallow.bench.rows import Progress, Row, Settings
from fallow.bench.steplog import Finished
from fallow.core.quantile import quantile
from fallow.core.schedule import Item, parse_schedule
from fallow.model import ChangeKind, GenerationReport

PARTS = ("drain", "group", "state", "data")
FIRST_STEP = 6
SPACING = 3
"""Steps between two changes. A change that comes late delays those after it."""

CHANGES = 32


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Rows for all planned changes, and for absorbs and releases by themselves, per world and model."""
    for params, members in settings.worlds:
        progress(f"pause: {members} members, {params / 1e6:g} M parameters")
        yield from measure(members, params, settings.n or CHANGES, settings.device)


def measure(members: int, params: int, changes: int, device: str = "cpu") -> list[Row]:
    """One run with that many planned changes around `members` members."""
    steps = FIRST_STEP + 6 * changes + 10
    items = schedule(members, changes)
    done, finished = session.train_noting(params, steps, members, items, most=members + 1, device=device)
    generations = [g for g in done.report.generations if g.kind is not ChangeKind.START and g.pause_s is not None]
    wanted = {
        "planned pause": set(ChangeKind),
        "planned pause, absorb": {ChangeKind.ABSORB},
        "planned pause, release": {ChangeKind.RELEASE},
    }
    found = []
    for name, kinds in wanted.items():
        some = [generation for generation in generations if generation.kind in kinds]
        if some:
            found.append(_row(name, some, finished, members, params, done.sums))
    return found


def schedule(members: int, changes: int) -> tuple[Item, ...]:
    """One comes, one goes: the youngest and the oldest in turn."""
    words = []
    there = list(range(members))
    born = members
    for number in range(changes):
        step = FIRST_STEP + SPACING * number
        if number % 2 == 0:
            there.append(born)
            born += 1
            words.append(f"+1@{step}")
        elif number % 4 == 1:
            there.pop()
            words.append(f"-1@{step}")
        else:
            words.append(f"-m{there.pop(0)}@{step}")
    return parse_schedule(",".join(words), members)


def beyond(change: GenerationReport, finished: Sequence[Finished]) -> float | None:
    """Seconds by which a generation's first step took longer than its others, the pause not counted.

    The median over those who also finished the step before it; None if there is no other step to compare with.
    """
    first = change.first_step
    assert first is not None
    ends = {(one.process, one.step): one for one in finished}
    usual = [
        after.at - before.at
        for one, before in ends.items()
        if before.generation == change.generation
        and (after := ends.get((one[0], one[1] + 1))) is not None
        and after.generation == change.generation
    ]
    took = [
        one.at - before.at
        for (process, step), one in ends.items()
        if step == first and (before := ends.get((process, first - 1))) is not None
    ]
    if not usual or not took:
        return None
    return median(took) - (change.pause_s or 0.0) - median(usual)


def _row(
    name: str, changes: Sequence[GenerationReport], finished: Sequence[Finished], members: int, params: int, sums: str
) -> Row:
    pauses = [change.pause_s or 0.0 for change in changes]
    words = [*([sums] if sums else []), f"max {max(pauses):.3f}"]
    for part in PARTS:
        values = [getattr(change.parts, part) for change in changes]
        words.append(f"{part} {quantile(values, 0.5):.3f}/{quantile(values, 0.95):.3f}")
    still = [change.pause_s - change.parts.drain for change in changes if change.pause_s is not None]
    words.append(f"all but drain {quantile(still, 0.5):.3f}/{quantile(still, 0.95):.3f}")
    more = [value for change in changes if (value := beyond(change, finished)) is not None]
    if more:
        words.append(f"first step longer by {quantile(more, 0.5):.3f}/{quantile(more, 0.95):.3f}")
    received = [change for change in changes if change.bytes_in_pause]
    if received:
        inside = quantile([change.bytes_in_pause / 1e6 for change in received], 0.5)
        behind = quantile([change.bytes_behind / 1e6 for change in received], 0.5)
        words.append(f"{inside:.1f} MB in the pause and {behind:.1f} MB behind it")
    return Row(
        name=name, members=members, params=params, unit="s", ours=rows.ours(pauses), note="p50/p95: " + ", ".join(words)
    )
