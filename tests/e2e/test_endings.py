"""The end of loops and of scripts: what happens there happens on all members, or the run says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from local_rig import Box, Done, Plain

SCRIPT = str(Path(__file__).parent / "ending_training.py")


def train(box: Box, harm: str, members: int = 2, **environ: str) -> Done:
    return box.finish(box.local(SCRIPT, "--folder", str(box.folder), "--harm", harm, members=members, **environ))


def test_what_is_done_together_has_one_result_though_members_are_lost_in_the_middle_of_it(
    box: Box, plain: Plain
) -> None:
    done = train(box, "links", members=3).trained(12, 192)
    assert done.result == plain(SCRIPT, "--folder", "FOLDER"), "one rate, one model, to the last bit"
    zero, one = (json.loads((box.folder / f"told-n{number}").read_text()) for number in (0, 1))
    assert zero["told"] == one["told"] == [0.375], "the mean outside of the loop"
    assert (zero["main"], one["main"]) == (True, False)
    assert zero["rate"] == one["rate"]
    reasons = [generation["reason"] for generation in done.report["generations"][1:]]
    assert "killed by signal 9" in reasons[0]
    assert len(one["cuts"]) == 4, reasons


def test_a_member_that_alone_leaves_the_loop_is_found_at_once(box: Box) -> None:
    done = train(box, "break")
    assert (done.code, done.report["status"]) == (70, "failed")
    assert "step 4: 1 of 2 members left the run.updates loop" in done.report["message"]
    assert done.report["generations"][0]["members"] == ["n0", "n1"]


def test_who_is_a_step_behind_when_the_others_leave_the_loop_does_once_what_comes_after_it(
    box: Box, plain: Plain
) -> None:
    done = train(box, "behind").trained(10, 160)
    wanted = plain(SCRIPT, "--folder", "FOLDER", "--harm", "behind")
    assert done.result == wanted, "one rate, one model, to the last bit"
    assert [generation["first_step"] for generation in done.report["generations"]] == [0, 4]


@pytest.mark.parametrize(("harm", "steps"), [("late alone", 12), ("late break", 10)])
def test_an_exception_of_the_main_member_after_the_loop_fails_the_run(box: Box, harm: str, steps: int) -> None:
    done = train(box, harm)
    assert (done.code, done.report["status"], done.report["steps"]) == (70, "failed", steps)
    assert "the main member n0" in done.report["message"]
    assert "ValueError: the disk is full, say" in done.report["message"]
    assert "raise ValueError" in done.report["traceback"]
    told = json.loads((box.folder / "told-n1").read_text())
    assert not told["main"], "what the main member had to do after the loop is done by nobody else"


@pytest.mark.soak
def test_after_an_exception_of_the_main_member_between_two_loops_nobody_does_again_what_it_did_there(box: Box) -> None:
    done = train(box, "between").trained(12, 192)
    assert [path.name for path in box.folder.glob("between-*")] == ["between-n0"]
    assert "the disk is full, say" in done.report["generations"][1]["reason"]
    assert json.loads((box.folder / "told-n1").read_text())["main"], "in the second loop it is the main member"


def test_a_script_that_ends_by_exit_0_in_its_loop_has_finished(box: Box) -> None:
    done = train(box, "exit0").trained(10, 160)
    assert done.code == 0, done.stderr


def test_a_process_that_does_not_end_after_its_script_holds_the_run_up_for_its_lease(box: Box) -> None:
    done = train(box, "hang", FALLOW_MEMBERSHIP__LEASE_S="2")
    assert (done.code, done.report["status"], done.report["steps"]) == (0, "finished", 12)
    assert "its process was still there 2 s after its script had ended" in done.report["message"]


def test_a_member_whose_script_ends_inside_of_the_loop_is_refused(box: Box) -> None:
    done = train(box, "desert")
    assert (done.code, done.report["status"]) == (70, "failed")
    assert "n1" in done.report["message"]
    assert "inside of the run.updates loop while the others go on" in done.report["message"]


def test_members_that_leave_for_good_in_the_step_in_which_another_dies_finish_the_run(box: Box) -> None:
    done = train(box, "last", members=3)
    assert (done.code, done.report["status"], done.report["steps"]) == (0, "finished", 10), done.report["message"]


def test_a_mean_that_one_member_alone_asks_for_is_refused_at_once(box: Box) -> None:
    done = train(box, "mean alone")
    assert (done.code, done.report["status"], done.report["steps"]) == (70, "failed", 4)
    assert done.members == [["n0", "n1"]], "nobody was to blame, and nothing was built anew"
    assert "the members are in different places of the script" in done.report["message"]
    assert "1 in run.mean, 1 in the next step" in done.report["message"]
