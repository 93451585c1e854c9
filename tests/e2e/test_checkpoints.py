"""Durable checkpoints of real runs: taken beside the training, and gone back to by hand.

Judged as everything under `fallow local`: the result is that of the undisturbed script, every sample is used once.
"""

from pathlib import Path

import pytest
from local_rig import TINY, Box, Plain, expected_samples, same

from command_line import Fallow
from fallow.control.client import call
from fallow.model import CheckpointState, CheckpointView, EventRecord, Exit, RunView
from fallow.worker.checkpoint.restore import load
from waiting import wait_for


def usable(view: RunView) -> list[CheckpointView]:
    return [one for one in view.checkpoints if one.state is CheckpointState.USABLE]


def head_file(box: Box) -> Path:
    (file,) = box.folder.glob("fallow-local-*/state/head.json")
    return file


def test_back_to_a_checkpoint_of_an_earlier_epoch_and_on(
    box: Box, plain: Plain, fallow: Fallow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Periodic ones come and go, one asked for by hand stays; the same processes go back to it, and on."""
    words = [TINY, "--steps", "200", "--by-epoch", "--result"]
    own = [*words, str(box.folder / "result.json"), "--pace", "0.1", "--hurry", str(box.hurry)]
    process = box.local(*own, schedule="+1@20", FALLOW_CHECKPOINT__INTERVAL_S="0.5")
    run = box.until(lambda view: view.step >= 10).run
    monkeypatch.setenv("FALLOW_STATE_DIR", str(head_file(box).parent))
    assert fallow("checkpoint", run).code == 0
    (kept,) = (one for one in box.until(lambda view: any(o.asked for o in view.checkpoints)).checkpoints if one.asked)

    def others_come_and_go(view: RunView) -> bool:
        there = sorted(one.step for one in usable(view))
        return view.step >= 40 and len(there) == 3 and there[0] == kept.step

    box.until(others_come_and_go)
    assert load(Path(kept.path))["plain"]["position"]["step"] == kept.step
    listed = fallow("status", run).out
    assert f"step {kept.step} " in listed
    assert "by hand" in listed
    (row,) = fallow("status", run, "--json").json["runs"]
    assert len(row["checkpoints"]) >= 3
    refused = fallow("rollback", run, "--to", "7")
    assert refused.code == Exit.NOINPUT
    assert f"usable: {kept.step}, " in refused.err

    assert fallow("rollback", run, "--to", str(kept.step)).code == 0

    def kinds() -> list[str]:
        events: list[EventRecord] = call(head_file(box), "events", list[EventRecord], since=0, limit=1000)
        return [event.kind for event in events]

    wait_for("they begin again", lambda: kinds().count("start") == 2)
    assert kinds().count("rollback") == 1
    box.hurry.touch()
    done = box.finish(process)
    report = done.report
    assert (done.code, report["status"], report["steps"]) == (0, "finished", 200), done.stderr
    assert report["samples"] == {"consumed": expected_samples(200), "lost": 0, "duplicated": 0}
    (back,) = report["rolled_back"]
    assert back["to_step"] == kept.step < back["from_step"]
    assert report["steps_discarded"] == 0, "they went back in the middle of a step"
    (first,) = (g for g in report["generations"] if g["generation"] == back["generation"])
    assert (first["kind"], first["first_step"]) == ("start", kept.step)
    same(done, plain(*words, "RESULT", "--pace", "0"))
