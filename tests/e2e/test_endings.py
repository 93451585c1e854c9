"""The end of loops and of scripts: what happens there happens on all members, or the run says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil")

sys.path.insert(0, str(Path(__file__).parent))
from test_local import PLAIN, RUN_S, Box, Done, box

__all__ = ["box"]

SCRIPT = str(Path(__file__).parent / "ending_training.py")


def train(box: Box, harm: str, members: int) -> Done:
    return box.finish(box.local(SCRIPT, "--folder", str(box.folder), "--harm", harm, members=members))


def test_what_is_done_together_has_one_result_though_members_are_lost_in_the_middle_of_it(box: Box) -> None:
    alone = box.folder / "alone"
    alone.mkdir()
    words = [sys.executable, SCRIPT, "--folder", str(alone)]
    subprocess.run(words, check=True, timeout=RUN_S, capture_output=True, env=box.environ | PLAIN)
    done = train(box, "links", members=3).trained(12, 192)
    assert done.result == json.loads((alone / "result.json").read_text()), "one rate, one model, to the last bit"
    zero, one = (json.loads((box.folder / f"told-n{number}").read_text()) for number in (0, 1))
    assert zero["told"] == one["told"] == [0.375], "the mean outside of the loop"
    assert (zero["main"], one["main"]) == (True, False)
    assert zero["rate"] == one["rate"]
    reasons = [generation["reason"] for generation in done.report["generations"][1:]]
    assert "killed by signal 9" in reasons[0]
    assert len(one["cuts"]) == 4, reasons


def test_a_member_that_alone_leaves_the_loop_is_found_at_once(box: Box) -> None:
    done = train(box, "break", members=2)
    assert (done.code, done.report["status"]) == (70, "failed")
    assert "step 4: 1 of 2 members left the run.updates loop" in done.report["message"]
    assert done.report["generations"][0]["members"] == ["n0", "n1"]


def test_who_is_a_step_behind_when_the_others_leave_the_loop_does_once_what_comes_after_it(box: Box) -> None:
    alone = box.folder / "alone"
    alone.mkdir()
    words = [sys.executable, SCRIPT, "--folder", str(alone), "--harm", "behind"]
    subprocess.run(words, check=True, timeout=RUN_S, capture_output=True, env=box.environ)
    done = train(box, "behind", members=2).trained(10, 160)
    assert done.result == json.loads((alone / "result.json").read_text()), "one rate, one model, to the last bit"
    assert [generation["first_step"] for generation in done.report["generations"]] == [0, 4]


@pytest.mark.parametrize(
    ("harm", "steps"), [pytest.param("late", 12, marks=pytest.mark.soak), ("late alone", 12), ("late break", 10)]
)
def test_an_exception_of_the_main_member_after_the_loop_fails_the_run(box: Box, harm: str, steps: int) -> None:
    done = train(box, harm, members=2)
    assert (done.code, done.report["status"], done.report["steps"]) == (70, "failed", steps)
    assert "the main member n0" in done.report["message"]
    assert "ValueError: the disk is full, say" in done.report["message"]
    assert "raise ValueError" in done.report["traceback"]
    told = json.loads((box.folder / "told-n1").read_text())
    assert not told["main"], "what the main member had to do after the loop is done by nobody else"


@pytest.mark.soak
def test_after_an_exception_of_the_main_member_between_two_loops_nobody_does_again_what_it_did_there(box: Box) -> None:
    done = train(box, "between", members=2).trained(12, 192)
    assert [path.name for path in box.folder.glob("between-*")] == ["between-n0"]
    assert "the disk is full, say" in done.report["generations"][1]["reason"]
    assert json.loads((box.folder / "told-n1").read_text())["main"], "in the second loop it is the main member"


@pytest.mark.parametrize(("harm", "code"), [("exit0", 0), pytest.param("exit3", 70, marks=pytest.mark.soak)])
def test_the_main_members_exit_value_is_the_runs(box: Box, harm: str, code: int) -> None:
    done = train(box, harm, members=2)
    assert done.code == code, done.stderr
    if harm == "exit0":
        assert (done.report["status"], done.report["steps"], done.report["message"]) == ("finished", 10, "")
        assert done.report["samples"] == {"consumed": 160, "lost": 0, "duplicated": 0}
    else:
        assert (done.report["status"], done.report["steps"]) == ("failed", 12)
        assert "the main member n0" in done.report["message"]
        assert "failed after the training: exited with 3" in done.report["message"]


def test_a_process_that_does_not_end_after_its_script_holds_the_run_up_for_its_lease(box: Box) -> None:
    words = [SCRIPT, "--folder", str(box.folder), "--harm", "hang"]
    done = box.finish(box.local(*words, members=2, FALLOW_MEMBERSHIP__LEASE_S="4"))
    assert (done.code, done.report["status"], done.report["steps"]) == (0, "finished", 12)
    assert "its process was still there 4 s after its script had ended" in done.report["message"]


def test_a_member_whose_script_ends_inside_of_the_loop_is_refused(box: Box) -> None:
    done = train(box, "desert", members=2)
    assert (done.code, done.report["status"]) == (70, "failed")
    assert "n1" in done.report["message"]
    assert "inside of the run.updates loop while the others go on" in done.report["message"]


@pytest.mark.soak
def test_a_member_that_deserts_is_refused_however_long_its_process_takes_to_end(box: Box) -> None:
    """Longer than the others wait for its vote on a group in place of the broken one."""
    words = [SCRIPT, "--folder", str(box.folder), "--harm", "linger"]
    done = box.finish(box.local(*words, members=2, FALLOW_MEMBERSHIP__LEASE_S="60"))
    assert (done.code, done.report["status"]) == (70, "failed")
    assert "n1" in done.report["message"]
    assert "inside of the run.updates loop while the others go on" in done.report["message"]


def test_members_that_leave_for_good_in_the_step_in_which_another_dies_finish_the_run(box: Box) -> None:
    done = train(box, "last", members=3)
    assert (done.code, done.report["status"], done.report["steps"]) == (0, "finished", 10), done.report["message"]


@pytest.mark.parametrize("harm", ["mean alone", pytest.param("barrier alone", marks=pytest.mark.soak)])
def test_a_mean_that_one_member_alone_asks_for_is_refused_at_once(box: Box, harm: str) -> None:
    done = train(box, harm, members=2)
    assert (done.code, done.report["status"], done.report["steps"]) == (70, "failed", 4)
    assert done.report["generations"][0]["members"] == ["n0", "n1"]
    assert len(done.report["generations"]) == 1, "nobody was to blame, and nothing was built anew"
    assert "the members are in different places of the script" in done.report["message"]
    assert f"1 in run.{harm.split()[0]}, 1 in the next step" in done.report["message"]
