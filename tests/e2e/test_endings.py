"""The end of loops and of scripts: what happens there happens on all members, or the run says why not."""

import json
from pathlib import Path

from local_rig import Box, Done, Plain

SCRIPT = str(Path(__file__).parent / "ending_training.py")


def train(box: Box, harm: str, members: int = 2) -> Done:
    return box.finish(box.local(SCRIPT, "--folder", str(box.folder), "--harm", harm, members=members))


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


def test_an_exception_of_the_main_member_after_the_loop_fails_the_run(box: Box) -> None:
    done = train(box, "late")
    assert (done.code, done.report["status"], done.report["steps"]) == (70, "failed", 12)
    assert "the main member n0" in done.report["message"]
    assert "ValueError: the disk is full, say" in done.report["message"]
    assert "raise ValueError" in done.report["traceback"]
    told = json.loads((box.folder / "told-n1").read_text())
    assert not told["main"], "what the main member had to do after the loop is done by nobody else"
