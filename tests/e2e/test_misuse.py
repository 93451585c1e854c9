"""Scripts that do what they must not: each is told what is wrong, or it makes no difference."""

import json
from pathlib import Path
from typing import Any

import pytest
from local_rig import Script

SCRIPT = str(Path(__file__).with_name("misuse_cases.py"))

INSIDE = "step 3: an optimizer's step inside the inner loop, or after a break from it"
LEFT = "step 3: the inner loop was left before its end"
UNLIKE = "step 4: the members' weights, learning rates, or what is frozen or in eval() differ"
ALIKE = "on all members: no `if` around it"
PLACES = "the members are in different places of the script"
TWO_LEVELS = "`for update in run.updates(loader)"

REFUSED = {
    "break": [INSIDE],
    "break without a step": [LEFT, "`continue`"],
    "break at the last shard": [INSIDE],
    "step inside": [INSIDE],
    "run.mean inside": ["run.mean inside the inner loop", "update.note"],
    "run.barrier inside": ["run.barrier inside the inner loop"],
    "nested updates": ["run.updates inside of another loop over run.updates"],
    "nested inner loops": ["step 3: ", "inner loop"],
    "weights inside": ["step 3: weights or learning rates were changed inside the inner loop"],
    "rate inside": ["step 3: weights or learning rates were changed inside the inner loop"],
    "inner loop twice": ["step 3: the inner loop runs a second time", "update.phase(name)"],
    "mean of one member": [PLACES, "1 in run.mean", "1 in the next step of a run.updates loop"],
    "one member breaks": ["step 4: 1 of 2 members left the run.updates loop"],
    "backward in front": ["step 3: a backward in front of the inner loop"],
    "step of one member": ["step 4: the members' optimizers have made 0 and 1 steps", ALIKE],
    "rate of one member": [UNLIKE, ALIKE],
    "evaluation of one member": [UNLIKE, ALIKE],
    "samples of one member": ["other samples than the step has", "the dataset must be the same on every node"],
    "note behind": ["update.note belongs inside the inner loop"],
    "mean of nothing": ["update.mean('loss') belongs behind an inner loop with update.note"],
    "forgotten inner loop": ["step 0: an optimizer's step in front of the inner loop"],
    "no inner loop": ["step 0: an update without its inner loop"],
    "closure over a list": ["step 0: no shard made a backward inside the inner loop"],
    "list of an update": ["step 0: no shard made a backward inside the inner loop", "make a list of an update"],
    "list of updates": ["step 0: an update without its inner loop", "make a list of run.updates"],
    "exception in half a backward caught": ["a backward raised and the body went on"],
    "collective inside": ["Default process group has not been initialized"],
    "sparse gradients": ["model.1.weight has a sparse gradient", "sparse=False"],
    "unprepared scaler": ["a GradScaler steps a prepared optimizer and was not prepared itself"],
    "short, without a backward": ["a body of a run.steps loop made no backward", TWO_LEVELS],
    "short, step in front": ["in front of a body's backward", TWO_LEVELS],
    "short, two backwards": ["a second backward in the body of a run.steps loop", TWO_LEVELS],
    "short, closure": ["a closure", TWO_LEVELS],
}
"""Case -> words that both members say."""


def test_each_is_told_what_is_wrong_or_it_makes_no_difference(script: Script) -> None:
    told: dict[str, Any] = dict(map(json.loads, script(SCRIPT).splitlines()))
    for case, words in REFUSED.items():
        for said in told.pop(case):
            assert isinstance(said, str), f"{case}: it was not refused"
            assert [each for each in words if each not in said] == [], (case, said)
    usual = told.pop("usual")[0]
    assert usual["steps"] == 8
    for case in ("zero_grad inside", "forgotten zero_grad", "short", "exception in a backward caught"):
        for said in told.pop(case):
            assert said["weights"] == pytest.approx(usual["weights"], abs=1e-6), case
    # It counts once, on all members alike.
    first, second = told.pop("regularizer behind")
    assert first == second
    assert first["weights"] != pytest.approx(usual["weights"], abs=1e-3)
    # What is left of gradients that a closure has made is no harm.
    assert [said["steps"] for said in told.pop("step with a closure")] == [8, 8]
    # All members may leave the loop early.
    assert told["all break"][0] == told["all break"][1]
    assert (told["all break"][0]["steps"], told["all break"][0]["mean"]) == (4, 0.5)
    # In a fixed world an exception of one member ends all.
    raising = {"one member raises": "ValueError: a sample is broken", "one member has no memory left": "RuntimeError: "}
    for case, words in raising.items():
        other, raiser = told.pop(case)
        assert raiser.startswith(words)
        assert "the connection to another rank is lost" in other
    assert list(told) == ["all break"], "a case that nobody looks at"
