"""Holes as on Summit: against what is published of the source, and of a greedy policy whose changes restart the run.

Known: scores of BFTrainer's own simulator (arXiv 2106.12091, GitHub BFTrainer/Replayer) on the recorded holes, which
starts what is asked for at once; here a backfill cycle comes each second, and a poll every five.
"""

import pytest

from fallow.config import Slurm
from fallow.model import Score
from fallow.sim.greedy import Greedy
from fallow.sim.published import DEFAULT, parse_runs, restart_costs
from fallow.sim.simulate import play
from fallow.sim.slurm import SlurmSim
from fallow.sim.traces import open_trace
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.shipped import SUMMIT_NODES
from fallow.sim.types import Options, Scheduler

DAYS = 5.0
DAY_S = 86400.0

PUBLISHED_SCORES = {"250-250": 0.423, "60-60": 0.734, "18-12": 0.907, "5-3": 0.973, "2-1": 0.989}
"""Costs of a restart -> score."""


def score(words: str, days: float) -> Score:
    at_once = Scheduler(bf_interval_s=1.0, pass_s=0.0)
    holes = open_trace("summit", Window(days=days, profile="nograce", scheduler=at_once))
    engine = SlurmSim(holes.site, 0, holes.begin, changes=holes.changes)
    runs, costs = parse_runs(DEFAULT, ("scavenge",)), restart_costs(words, (0.0, 0.0))
    head = Greedy(engine, runs, Options(costs=costs, slurm=Slurm(poll_interval_s=5.0, submits_per_min=1e9)))
    play(head, holes.end)
    return head.meter.score()


def test_the_dearer_a_restart_the_less_is_left() -> None:
    """A part of a day is poor or rich in holes, so its scores are not the known ones."""
    scores = [score(words, 0.05).ideal_ratio for words in PUBLISHED_SCORES]
    assert scores == sorted(scores)
    assert scores[0] < 0.7 < 0.9 < scores[-1]


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("words", PUBLISHED_SCORES)
def test_known_scores(words: str) -> None:
    """With the dearest restarts it matters most that nodes of one batch start in several cycles here."""
    assert score(words, 3).ideal_ratio == pytest.approx(
        PUBLISHED_SCORES[words], abs=0.06 if words == "250-250" else 0.03
    )


def test_five_days_are_as_the_source_and_nodes_come_and_go_in_turn() -> None:
    holes = open_trace("summit", Window(days=DAYS))
    assert holes.changes is not None
    events, since, lengths, node_s, last = [], dict[int, float](), list[float](), 0.0, holes.begin
    for at, joined, claimed in holes.changes:
        assert (holes.begin <= last < at < holes.end or not events) and (at - holes.begin) % 10 == 0
        node_s += len(since) * (at - last)
        lengths += [at - begun for begun in map(since.pop, claimed) if begun > holes.begin]
        assert since.keys().isdisjoint(joined) and set(joined) <= set(range(SUMMIT_NODES))
        since.update(dict.fromkeys(joined, at))
        events.append((bool(joined), bool(claimed)))
        last = at
    node_s += len(since) * (holes.end - last)
    lengths.sort()

    quantiles = {0.1: 91, 0.25: 162, 0.5: 475, 0.75: 1397, 0.9: 3269, 0.95: 4723}
    assert {part: lengths[int(part * len(lengths))] for part in quantiles} == pytest.approx(quantiles, rel=0.15)
    usable = {10: 0.992, 30: 0.975, 60: 0.950, 120: 0.903, 300: 0.798, 600: 0.669}
    usable_shares = {cost: sum(max(0.0, length - cost) for length in lengths) / sum(lengths) for cost in usable}
    assert usable_shares == pytest.approx(usable, abs=0.015)
    assert node_s / (DAYS * DAY_S) == pytest.approx(391, rel=0.15)
    assert len(lengths) / DAYS == pytest.approx(28367, rel=0.1)
    assert len(events) / DAYS == pytest.approx(23883 / 14.9, rel=0.1)
    joins, leaves = map(sum, zip(*events, strict=True))
    assert joins / DAYS == pytest.approx(14691 / 14.9, rel=0.1)
    assert leaves / DAYS == pytest.approx(11015 / 14.9, rel=0.15)
