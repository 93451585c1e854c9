"""`fallow check` with real heads, agents and workers: it finds out what one member alone does not show."""

import sys
from pathlib import Path

import pytest
from local_rig import Box, Done, Fork

from fallow.core.submission.suitability import Advice
from fallow.model import Exit

SCRIPT = str(Path(__file__).with_name("checked_training.py"))


def check(box: Box, mistake: str) -> Done:
    box.hurry.touch()
    words = ["check", "--json", "--", sys.executable, SCRIPT, str(box.folder), mistake]
    box.started.append(Fork(box.nursery, words, box.environ, box.folder))
    return box.finish(box.started[-1])


def test_a_suitable_script_has_the_same_weights_whoever_trains(box: Box) -> None:
    done = check(box, "none")
    assert done.code == Exit.OK, (done.stdout, done.stderr)
    assert done.report["suitable"] is True
    trials = done.report["trials"]
    assert [trial["name"] for trial in trials] == ["1 member", "2 members", "changes"]
    assert len({trial["report"]["final_digest"] for trial in trials}) == 1
    assert trials[2]["report"]["generations"][-1]["members"] == ["n2"]
    assert "fallow: training: changes: +1@10,kill:0@20,+1@30,-m1@30\n" in done.stderr
    assert not list(box.folder.glob("fallow-local-*")), "logs of trainings that went well"


@pytest.mark.parametrize(
    ("mistake", "trials", "advice", "problem"),
    [
        ("own shuffle", ["1 member", "2 members", "1 member, repeated"], Advice.STATE, "the final weights differ"),
        ("steps on one member", ["1 member", "2 members"], Advice.REFUSED, "the members' "),
    ],
)
def test_a_script_that_is_not_suitable_is_found_out(
    mistake: str, trials: list[str], advice: Advice, problem: str, box: Box
) -> None:
    done = check(box, mistake)
    assert done.code == Exit.DATA, (done.stdout, done.stderr)
    assert (done.report["suitable"], done.report["trial"], done.report["advice"]) == (False, "2 members", advice)
    assert [trial["name"] for trial in done.report["trials"]] == trials
    assert problem in done.report["problem"]
