"""How fast runs train, as beats tell it: steps per second in stretches during which nothing changes."""

from __future__ import annotations

from statistics import median

from fallow.head import slow_links
from fallow.head.book import Run, Stretch
from fallow.head.turn import Turn
from fallow.model import Beat, RunStatus

LONG_ENOUGH_S = 15.0
"""A stretch is measured once it is so long ..."""

STEPS = 3
"""... and has so many steps. Beats come twice a second, so the ends of a stretch are known to that."""

WARM = 2
"""Steps after a change that do not count: the state's last part arrives behind them, and caches are cold."""

WRITE_EVERY_S = 60.0
"""Measurements since then are lost when the head is killed."""


def heard(turn: Turn, run: Run, beat: Beat) -> None:
    """Take in a member's beat. Rank 0's are enough: all members take the same steps."""
    r = run.roster
    if not r.members or beat.worker != r.members[0]:
        return
    steady = r.status is RunStatus.TRAINING and r.change is None and not beat.held and not r.finishing
    if not steady or beat.generation != r.generation or _one_machine(run):
        run.stretch = None
        return
    stretch = run.stretch
    if stretch is None or stretch.generation != beat.generation or beat.step < stretch.step:
        run.stretch = Stretch(beat.generation, beat.step)
        return
    if beat.step == stretch.step:
        return
    stretch.warm += beat.step - stretch.step
    stretch.step = beat.step
    if stretch.begin is None:
        if stretch.warm > WARM:
            stretch.begin = turn.at, beat.step
        return
    began_at, first = stretch.begin
    lasted_s, steps = turn.at - began_at, beat.step - first
    if lasted_s >= LONG_ENOUGH_S and steps >= STEPS:
        _measured(turn, run, lasted_s / steps, lasted_s)
        stretch.begin = turn.at, beat.step
        slow_links.look(turn, run, lasted_s / steps, lasted_s)


def _one_machine(run: Run) -> bool:
    """Do several of its nodes share a machine, as on a testbed? They slow each other down: nothing can be learned."""
    members = [run.roster.workers[w] for w in run.roster.members if w in run.roster.workers]
    machines = {member.node: member.address for member in members}
    return len(set(machines.values())) < len(machines)


def _measured(turn: Turn, run: Run, step_s: float, lasted_s: float) -> None:
    curve, members = run.record.curve, run.roster.members
    curve.observe(len(members), step_s, lasted_s, turn.now)
    paces = [run.beats[w].pace_s for w in members if w in run.beats and run.beats[w].pace_s > 0]
    if paces:
        curve.shard_s = median(paces)
    if turn.at - run.curve_written >= WRITE_EVERY_S:
        run.curve_written = turn.at
        turn.dirty.add(run.id)
