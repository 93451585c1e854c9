"""The simulation against published figures: a greedy policy whose changes restart the run, on holes as on Summit.

Known: scores of BFTrainer's own simulator (arXiv 2106.12091, GitHub BFTrainer/Replayer) on the recorded holes, which
starts what is asked for at once; here a backfill cycle comes each second, and a poll every five.
"""

from __future__ import annotations

import pytest

from fallow.config import Slurm
from fallow.model import Score
from fallow.sim.costs import restart
from fallow.sim.curves import DEFAULT, plans
from fallow.sim.greedy import Greedy
from fallow.sim.play import play
from fallow.sim.slurm import SlurmSim
from fallow.sim.traces import open_trace
from fallow.sim.traces.recorded import Window
from fallow.sim.types import Options, Scheduler

KNOWN = {"250-250": 0.423, "60-60": 0.734, "18-12": 0.907, "5-3": 0.973, "2-1": 0.989}
"""Costs of a restart -> score."""


def score(words: str, days: float) -> Score:
    at_once = Scheduler(bf_interval_s=1.0, pass_s=0.0)
    holes = open_trace("summit", Window(days=days, profile="nograce", scheduler=at_once))
    engine = SlurmSim(holes.site, 0, holes.begin, changes=holes.changes)
    runs, costs = plans(DEFAULT, ("scavenge",)), restart(words, (0.0, 0.0))
    head = Greedy(engine, runs, Options(costs=costs, slurm=Slurm(poll_interval_s=5.0, submits_per_min=1e9)))
    play(head, holes.end)
    return head.meter.score()


def test_the_dearer_a_restart_the_less_is_left() -> None:
    """A part of a day is poor or rich in holes, so its scores are not the known ones."""
    found = [score(words, 0.05).ideal_ratio for words in KNOWN]
    assert found == sorted(found)
    assert found[0] < 0.7 < 0.9 < found[-1]


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("words", KNOWN)
def test_known_scores(words: str) -> None:
    """With the dearest restarts it matters most that nodes of one batch start in several cycles here."""
    assert score(words, 3).ideal_ratio == pytest.approx(KNOWN[words], abs=0.06 if words == "250-250" else 0.03)
