"""Scripts that do what they must not: each is told what is wrong, or it makes no difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from local_rig import Script

SCRIPT = str(Path(__file__).with_name("misuse_cases.py"))

INSIDE = "step 3: an optimizer's step inside the inner loop, or behind a break from it"
LEFT = "step 3: the inner loop was left before its end"
CHANGED = "step 3: weights or learning rates were changed inside the inner loop"
UNLIKE = "step 4: the members' weights, learning rates, or what is frozen or in eval() differ"
ALIKE = "on all members: no `if` around it"
PLACES = "the members are in different places of the script"
TWO_LEVELS = "`for update in run.updates(loader)"

REFUSED = {
    "break": [INSIDE],
    "break in the last body": [INSIDE],
    "break without a step": [LEFT, "`continue`"],
    "step inside": [INSIDE],
    "collective inside": ["ValueError: Default process group has not been initialized"],
    "run.mean inside": ["run.mean inside the inner loop", "update.note"],
    "run.barrier inside": ["run.barrier inside the inner loop"],
    "half a backward caught": ["a backward raised and the body went on"],
    "nested updates": ["run.updates inside of another loop over run.updates"],
    "nested inner loops": ["step 3: ", "inner loop"],
    "weights inside": [CHANGED],
    "rate inside": [CHANGED],
    "inner loop twice": ["step 3: the inner loop runs a second time", "update.phase(name)"],
    "mean of one member": [PLACES, "1 in run.mean", "1 in the next step of a run.updates loop"],
    "one member breaks": ["step 4: 1 of 2 members left the run.updates loop"],
    "backward in front": ["step 3: a backward in front of the inner loop"],
    "step of one member": ["step 4: the members' optimizers have made 0 and 1 steps", ALIKE],
    "rate of one member": [UNLIKE, ALIKE],
    "freezing of one member": [UNLIKE, ALIKE],
    "evaluation of one member": [UNLIKE, ALIKE],
    "samples of one member": ["other samples than the step has", "the dataset must be the same on every node"],
    "note behind": ["update.note belongs inside the inner loop"],
    "mean of nothing": ["update.mean('loss') belongs behind an inner loop with update.note"],
    "forgotten inner loop": ["step 0: an optimizer's step in front of the inner loop"],
    "no inner loop": ["step 0: an update without its inner loop"],
    "list of an update": ["step 0: no shard made a backward inside the inner loop"],
    "list of updates": ["step 0: an update without its inner loop"],
    "unprepared scaler": ["a GradScaler steps a prepared optimizer and was not prepared itself"],
    "short, two backwards": ["a second backward in the body of a run.steps loop", TWO_LEVELS],
    "short, without a backward": ["a body of a run.steps loop made no backward", TWO_LEVELS],
    "short, step in front": ["in front of a body's backward", TWO_LEVELS],
    "short, closure": ["a closure", TWO_LEVELS],
}
"""Case -> words that both members say."""

SAME_AS_USUAL = ["zero_grad inside", "forgotten zero_grad", "short"]


@pytest.fixture(scope="module")
def told(script: Script) -> dict[str, Any]:
    """Case -> what each of the two members says."""
    return dict(map(json.loads, script(SCRIPT).splitlines()))


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_words(case: str, told: dict[str, Any]) -> None:
    for said in told[case]:
        assert isinstance(said, str), "it was not refused"
        for words in REFUSED[case]:
            assert words in said


@pytest.mark.parametrize("case", SAME_AS_USUAL)
def test_it_makes_no_difference(case: str, told: dict[str, Any]) -> None:
    assert told["usual"][0]["steps"] == 8
    for said in told[case]:
        assert said["weights"] == pytest.approx(told["usual"][0]["weights"], abs=1e-6)


def test_a_backward_that_failed_as_a_whole_counts_nothing(told: dict[str, Any]) -> None:
    zero, one = told["exception in a backward caught"]
    assert zero == one
    assert zero["weights"] != pytest.approx(told["usual"][0]["weights"], abs=1e-6)


def test_a_regularizer_behind_the_inner_loop_counts_once(told: dict[str, Any]) -> None:
    zero, one = told["regularizer behind"]
    assert zero == one
    assert zero["weights"] != pytest.approx(told["usual"][0]["weights"], abs=1e-6)


def test_all_members_may_leave_the_loop_early(told: dict[str, Any]) -> None:
    zero, one = told["all break"]
    assert zero == one
    assert (zero["steps"], zero["mean"]) == (4, 0.5)


def test_in_a_fixed_world_an_exception_of_one_member_ends_all(told: dict[str, Any]) -> None:
    other, raiser = told["one member raises"]
    assert raiser == "ValueError: a sample is broken"
    assert "the connection to another rank is lost" in other


def test_every_case_is_looked_at(told: dict[str, Any]) -> None:
    others = {"usual", "exception in a backward caught", "regularizer behind", "all break", "one member raises"}
    assert set(told) == set(REFUSED) | set(SAME_AS_USUAL) | others
