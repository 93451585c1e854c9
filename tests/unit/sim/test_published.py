"""The simulation against published figures: the policy of which they are, on holes as on Summit.

Known: scores of BFTrainer's own simulator (arXiv 2106.12091, GitHub BFTrainer/Replayer) on the recorded holes, which
start what is asked for at once; here it takes a backfill cycle of a second and a poll of five.
"""

from __future__ import annotations

import pytest

from fallow.model import SimReport
from fallow.sim.simulate import Setup, simulate

KNOWN = {"250-250": 0.423, "60-60": 0.734, "18-12": 0.907, "5-3": 0.973, "2-1": 0.989}
"""Costs of a restart -> score."""


def score(costs: str, days: float) -> SimReport:
    return simulate(
        Setup(
            trace="summit",
            policies=("restart",),
            costs=costs,
            start_up_s=0.0,
            profile="nograce",
            days=days,
            bf_interval_s=1.0,
            poll_s=5.0,
        )
    )


def test_the_dearer_a_restart_the_less_is_left() -> None:
    """A part of a day is poor or rich in holes, so its scores are not the known ones."""
    found = [score(costs, 0.05).ideal_ratio for costs in KNOWN]
    assert found == sorted(found)
    assert found[0] < 0.7 < 0.9 < found[-1]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("costs", KNOWN)
def test_known_scores(costs: str) -> None:
    assert score(costs, 10).ideal_ratio == pytest.approx(KNOWN[costs], abs=0.03)
