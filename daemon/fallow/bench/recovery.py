"""How long do the others need after a SIGKILL?

From the signal to the end of the first step of the new generation, on the slowest survivor, detection included. Oldest
and youngest members are killed in turn, so rank 0 too; each time another worker joins before the next one dies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fallow.bench import rows, session, steplog
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
        yield measure(members, params, settings.n or KILLS)


def measure(members: int, params: int, kills: int) -> Row:
    """One run in which `kills` members die."""
    steps = FIRST_STEP + 4 * SPACING * kills
    done, finished = session.train_noting(params, steps, members, schedule(members, kills), most=members)
    killed = [at for item, at in done.happened if item.action is Action.KILL]
    times = recoveries(finished, killed)
    discarded = done.report.steps_discarded
    note = f"max {max(times):.3f}, a step usually {steplog.usual_gap(finished):.3f}; "
    note += f"steps done again: {discarded} in {len(killed)} kills; samples lost, repeated: 0, 0"
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


def recoveries(finished: Sequence[Finished], kills: Sequence[float]) -> list[float]:
    """Per kill: seconds until every survivor has finished a step in the first generation after it."""
    times = []
    for at in kills:
        before = [done.generation for done in finished if done.at < at]
        if not before:
            continue
        after = [done for done in finished if done.at >= at and done.generation > max(before)]
        if not after:
            continue
        new = after[0].generation
        first: dict[str, float] = {}
        for done in after:
            if done.generation == new:
                first.setdefault(done.process, done.at)
        times.append(max(first.values()) - at)
    return times
