"""Durable checkpoints of real runs: taken beside the training, gone back to by hand, and all that is left after a loss.

Judged as everything under `fallow local`: the result is that of the undisturbed script, every sample is used once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from test_local import TINY, Box, box, expected_samples, plain, same, wait  # noqa: F401

from fallow.control.client import call
from fallow.model import (
    CheckpointState,
    CheckpointView,
    EventRecord,
    Exit,
    FallowError,
    RunStatus,
    RunView,
)
from fallow.worker.checkpoint.restore import load


def usable(view: RunView) -> list[CheckpointView]:
    return [one for one in view.checkpoints if one.state is CheckpointState.USABLE]


class Head:
    """The head of a box's run."""

    def __init__(self, box: Box) -> None:  # noqa: F811
        (self.file,) = box.folder.glob("fallow-local-*/state/head.json")
        view = box.look()
        assert view is not None
        self.run = view.run
        self.environ = box.environ | {"FALLOW_STATE_DIR": str(self.file.parent)}

    def ask(self, method: str, **params: Any) -> Any:
        return call(self.file, method, Any, run=self.run, **params)

    def events(self, kind: str) -> list[EventRecord]:
        found: list[EventRecord] = call(self.file, "events", list[EventRecord], since=0, limit=1000)
        return [event for event in found if event.kind == kind]

    def fallow(self, *words: str) -> str:
        argv = [sys.executable, "-m", "fallow.cli.main", *words]
        return subprocess.run(argv, env=self.environ, check=True, capture_output=True, text=True, timeout=180).stdout


def test_back_to_a_checkpoint_of_an_earlier_epoch_and_on(box: Box, plain: Callable[..., Any]) -> None:  # noqa: F811
    """Periodic ones come and go, one asked for by hand stays; the same processes go back to it, and on."""
    words = [TINY, "--steps", "400", "--by-epoch", "--pace", "0.02", "--result", str(box.folder / "result.json")]
    process = box.local(*words, schedule="+1@60", FALLOW_CHECKPOINT__INTERVAL_S="0.5")
    box.until(lambda view: view.step >= 20)
    head = Head(box)
    assert "at the next step boundary" in head.fallow("checkpoint", head.run)
    box.until(lambda view: any(one.asked for one in view.checkpoints))
    (kept,) = [one for one in box.look().checkpoints if one.asked]  # type: ignore[union-attr]
    box.until(
        lambda view: view.step >= 100 and len(usable(view)) == 3 and min(o.step for o in usable(view)) == kept.step
    )
    assert load(Path(kept.path))["plain"]["position"]["step"] == kept.step

    listed = head.fallow("status", head.run)
    assert f"step {kept.step} " in listed
    assert "by hand" in listed
    (row,) = json.loads(head.fallow("status", head.run, "--json"))["runs"]
    assert len(row["checkpoints"]) >= 3
    with pytest.raises(
        FallowError, match=rf"no usable checkpoint of step 7; there are those of {kept.step}, "
    ) as caught:
        head.ask("rollback", step=7)
    assert caught.value.code is Exit.NOINPUT

    before = box.look()
    assert before is not None
    head.fallow("rollback", head.run, "--to", str(kept.step))
    box.until(lambda view: view.generation > before.generation and view.step < before.step)
    assert len(head.events("rollback")) == 1
    done = box.finish(process)
    report = done.report
    assert (done.code, report["status"], report["steps"]) == (0, "finished", 400), done.stderr
    assert report["samples"] == {"consumed": expected_samples(400), "lost": 0, "duplicated": 0}
    assert [back["to_step"] for back in report["rolled_back"]] == [kept.step]
    assert report["steps_discarded"] == 0, "they went back in the middle of a step"
    for back in report["rolled_back"]:
        (first,) = [g for g in report["generations"] if g["generation"] == back["generation"]]
        assert (first["kind"], first["first_step"]) == ("start", kept.step)
        assert back["from_step"] > kept.step
    same(done, plain(*[word if word != words[-1] else "RESULT" for word in words]))


@pytest.mark.soak
def test_every_member_is_lost_and_the_newest_checkpoint_is_damaged(box: Box, plain: Callable[..., Any]) -> None:  # noqa: F811
    words = box.tiny_words(steps=200)
    process = box.local(*words, schedule="kill:0@90,kill:1@90,+2@9999", FALLOW_CHECKPOINT__INTERVAL_S="0.3")
    box.until(lambda view: view.status is RunStatus.SUSPENDED)
    head, view = Head(box), box.look()
    assert view is not None
    newest, older = usable(view)
    part = Path(newest.path) / "__0_0.distcp"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    head.ask("grow", by=2)
    box.until(lambda view: any(o.state is CheckpointState.DAMAGED for o in view.checkpoints))
    (told,) = head.events("damaged")
    assert "__0_0.distcp does not match its SHA-256" in told.text
    assert f"step {older.step} is used" in told.text
    done = box.finish(process)
    assert (done.code, done.report["status"], done.report["steps"]) == (0, "finished", 200), done.stderr
    assert done.report["samples"] == {"consumed": expected_samples(200), "lost": 0, "duplicated": 0}
    assert done.members[-1] == ["n2", "n3"]
    assert done.report["generations"][-1]["first_step"] == older.step
    same(done, plain(*[word if word != words[-1] else "RESULT" for word in words]))
