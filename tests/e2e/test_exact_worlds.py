"""`reproducible=True` in fixed worlds of 1 to 8 ranks: one digest, whatever the loop does and whoever has what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_rig import Script

SCRIPT = str(Path(__file__).with_name("exact_world.py"))
DENSE = [
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    *(["Muon"] if hasattr(torch.optim, "Muon") else []),  # came with 2.9
]
"""What torch.optim has without LBFGS (a closure) and SparseAdam (sparse gradients)."""


Results = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def results(script: Script) -> Results:
    """Each case's results, by optimizer."""

    def of(*cases: dict[str, Any]) -> list[dict[str, Any]]:
        printed = script(SCRIPT, json.dumps([{"optimizers": ["AdamW"], **case} for case in cases]))
        return [json.loads(line) for line in printed.splitlines()]

    return of


def test_one_digest_for_every_world(results: Results) -> None:
    """Dropout, batch norm, autocast, clipping, schedule, averages, a partial last step, layers that are seldom used."""
    worlds = [{"world": n} for n in (1, 2, 5, 8)] + [{"world": 3, "shares": 1}, {"world": 4, "shares": 2}]
    first, *others = (result["AdamW"] for result in results(*worlds))
    assert first["steps"] == 6
    assert first["finite"]
    assert first["repeated"] >= 1
    assert others == [first] * 5


@pytest.mark.soak
def test_one_digest_for_the_worlds_between(results: Results) -> None:
    """As above, with more skewed shares."""
    worlds = [{"world": n} for n in (1, 3, 4, 6, 7)] + [{"world": n, "shares": n} for n in (5, 6, 7, 8)]
    first, *others = (result["AdamW"] for result in results(*worlds))
    assert others == [first] * 8


@pytest.mark.soak
def test_floating_sums_would_differ(results: Results) -> None:
    """The trainings above are able to tell."""
    one, three = results({"world": 1, "reproducible": False}, {"world": 3, "reproducible": False})
    assert one["AdamW"]["digest"] != three["AdamW"]["digest"]


def test_scaler_several_backwards_and_an_infinite_loss(results: Results) -> None:
    """A shard's infinity makes every member skip that step; the scale goes down; nothing else is hurt."""
    case = {"scaler": True, "backwards": 2, "spoil": 4}
    one, fine, *others = (
        result["AdamW"]
        for result in results(
            {"world": 1, **case},
            {"world": 1, **case, "spoil": None},
            {"world": 3, "shares": 3, **case},
            {"world": 2, "reborn": True, **case},
        )
    )
    assert one["finite"]
    assert one["scale"] < fine["scale"]
    assert one["digest"] != fine["digest"]
    assert [other["digest"] for other in others] == [one["digest"]] * 2
    assert [other["scale"] for other in others] == [one["scale"]] * 2


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_every_optimizer_with_newcomers_state(dtype: str, results: Results) -> None:
    """All ranks begin anew in the middle, from the state that rank 0 hands over."""
    case = {"optimizers": DENSE, "dtype": dtype, "autocast": False, "steps": 4}
    one, three = results({"world": 1, **case}, {"world": 3, "reborn": True, **case})
    assert len({one[name]["digest"] for name in DENSE}) > 10
    differ = [name for name in DENSE if one[name]["digest"] != three[name]["digest"]]
    assert not differ
