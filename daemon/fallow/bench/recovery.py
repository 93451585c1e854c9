"""How long do the others need after a SIGKILL?

From the signal to the end of the first step of the new generation, on the slowest survivor, detection included. That
step is a whole one, as long as the survivors' others, which with a large model on few processors is most of the figure;
so the note tells both parts, the survivors' usual step and the rest: detection, regrouping, what is done again.

Oldest and youngest members are killed in turn, so rank 0 too; each time another one joins before the next one dies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from fallow.bench import rows, session
from fallow.bench.rows import Progress, Row, Settings
from fallow.bench.steplog import Finished
from fallow.core.schedule import Action, Item, parse_schedule

KILLS = 20
FIRST_STEP = 6
SPACING = 6


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """One row per world and model."""
    for params, members in settings.worlds:
        progress(f"recovery: {members} members, {params / 1e6:g} M parameters")
        yield measure(members, params, settings.n or KILLS, settings.device)


def measure(members: int, params: int, kills: int, device: str = "cpu") -> Row:
    """One run in which `kills` members die."""
    steps = FIRST_STEP + 4 * SPACING * kills
    done, finished = session.train_noting(params, steps, members, schedule(members, kills), most=members, device=device)
    killed = [at for item, at in done.happened if item.action is Action.KILL]
    found = recoveries(finished, killed)
    times = [one.took for one in found]
    rest, step = rows.ours([one.took - one.step for one in found]), rows.ours([one.step for one in found])
    discarded = done.report.steps_discarded
    note = f"max {max(times):.3f}; p50/p95: a step of the survivors {step.p50:.3f}/{step.p95:.3f}, "
    note += f"detection, regrouping and all else {rest.p50:.3f}/{rest.p95:.3f}; "
    note += f"steps done again: {discarded} in {len(killed)} kills; samples lost, repeated: 0, 0"
    note += f"; {done.sums}" if done.sums else ""
    return Row(name="recovery", members=members, params=params, unit="s", ours=rows.ours(times), note=note)


def schedule(members: int, kills: int) -> tuple[Item, ...]:
    """Kill the oldest or the youngest, then let another one in."""
    there, born, words = list(range(members)), members, []
    for number in range(kills):
        step = FIRST_STEP + 2 * SPACING * number
        words.append(f"kill:{there.pop(0 if number % 2 else -1)}@{step}")
        words.append(f"+1@{step + SPACING}")
        there.append(born)
        born += 1
    return parse_schedule(",".join(words), members)


class Recovery(NamedTuple):
    """After one kill, in seconds."""

    took: float
    "until every survivor has finished a step in the first generation after it"
    step: float
    "a later step of that generation: the median over its survivors and their steps"


def recoveries(finished: Sequence[Finished], kills: Sequence[float]) -> list[Recovery]:
    """Those kills that the training outlived by two steps."""
    found = []
    for at in kills:
        before = [done.generation for done in finished if done.at < at]
        after = [done for done in finished if done.at >= at and done.generation > max(before, default=0)]
        if not before or not after:
            continue
        ends: dict[str, list[float]] = {}
        for done in after:
            if done.generation == after[0].generation:
                ends.setdefault(done.process, []).append(done.at)
        usual = [later - earlier for times in ends.values() for earlier, later in pairwise(times)]
        if usual:
            found.append(Recovery(max(times[0] for times in ends.values()) - at, median(usual)))
    return found
