"""Real worker processes and real gloo groups under a scripted head: the result must not depend on who came and went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from fake_head import SCRIPT, FakeHead

BASE = {"samples": 200, "batch_size": 8, "global_batch": 32, "epochs": 4}
STEPS = 28  # ceil(200 / 32) = 7 an epoch; the last step of each has 8 samples, one shard
SAMPLES = 800


def single(tmp_path: Path, **config: object) -> dict:
    folder = tmp_path / "single"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps({"folder": str(folder), **BASE, **config}))
    environment = {k: v for k, v in os.environ.items() if k not in ("TEST_WORKER", "TEST_FD")}
    environment["FALLOW_TEST_SEED"] = "5"
    subprocess.run([sys.executable, str(SCRIPT), str(path)], check=True, env=environment, timeout=120)
    return json.loads((folder / "single.json").read_text())


@pytest.fixture
def make(tmp_path: Path) -> Iterator:
    heads: list[FakeHead] = []

    def build(**config: object) -> FakeHead:
        folder = tmp_path / f"run{len(heads)}"
        folder.mkdir()
        head = FakeHead(folder, **{**BASE, **config})
        heads.append(head)
        return head

    yield build
    for head in heads:
        head.stop()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The same training, all of it on one member of one generation."""
    folder = tmp_path_factory.mktemp("reference")
    head = FakeHead(folder, **BASE)
    try:
        head.start("w0")
        head.ready("w0")
        head.change(["w0"])
        head.finished("w0")
        return head.result("w0")
    finally:
        head.stop()


def same(left: dict, right: dict) -> None:
    assert left["steps"] == right["steps"] == STEPS
    assert left["lr"] == pytest.approx(right["lr"])
    for name, value in left["state"].items():
        torch.testing.assert_close(
            torch.tensor(value), torch.tensor(right["state"][name]), rtol=1e-4, atol=1e-5, msg=name
        )


def check(head: FakeHead, reference: dict, *workers: str) -> None:
    finished = head.finished(*workers)
    assert len({f.digest for f in finished.values()}) == 1
    assert {f.samples for f in finished.values()} == {SAMPLES}
    for worker in workers:
        same(head.result(worker), reference)
    report = head.audit(STEPS, 32)
    assert (report.consumed, report.lost, report.duplicated) == (SAMPLES, 0, 0)


def test_fixed_two(make, reference) -> None:
    head = make()
    head.start("w0", "w1")
    head.ready("w0", "w1")
    head.change(["w0", "w1"])
    check(head, reference, "w0", "w1")


def test_absorb_then_release(make, reference) -> None:
    head = make(stops={9: "all", 17: "all"})
    head.start("w0", "w1", "w2")
    head.ready("w0", "w1", "w2")
    head.change(["w0"])
    head.at(9, "w0")
    head.change(["w0", "w1", "w2"])
    head.go(9)
    head.at(17, "w0", "w1", "w2")
    assert head.find("w1", object)
    head.change(["w0", "w2"])
    head.go(17)
    head.left("w1")
    assert head.exit_code("w1") == 0
    check(head, reference, "w0", "w2")
    assert head.result("w2")["epochs"] == [0, 1, 2, 3]


def test_rank_0_leaves(make, reference) -> None:
    head = make(stops={6: "all", 12: "all"})
    head.start("w0", "w1")
    head.ready("w0", "w1")
    head.change(["w0"])
    head.at(6, "w0")
    head.change(["w0", "w1"])
    head.go(6)
    head.at(12, "w0", "w1")
    head.change(["w1"])
    head.go(12)
    head.left("w0")
    check(head, reference, "w1")


def test_uneven_shards(make, reference) -> None:
    """Three members and four shards; in the last step of an epoch two of them have nothing that counts."""
    head = make()
    head.start("w0", "w1", "w2")
    head.ready("w0", "w1", "w2")
    head.change(["w0", "w1", "w2"])
    check(head, reference, "w0", "w1", "w2")


def test_kill_in_the_middle_of_a_step(make, reference) -> None:
    head = make(stops={11: "w1"})
    head.start("w0", "w1", "w2")
    head.ready("w0", "w1", "w2")
    head.change(["w0", "w1", "w2"])
    head.at(11, "w1")
    head.kill("w1")
    head.interrupt()
    head.held("w0", "w2")
    head.change(["w0", "w2"], interrupt=True)
    check(head, reference, "w0", "w2")


def test_suspend_and_resume(make, reference) -> None:
    head = make(stops={10: "all"})
    head.start("w0", "w1")
    head.ready("w0", "w1")
    head.change(["w0", "w1"])
    head.at(10, "w0", "w1")
    head.change([])
    head.go(10)
    saved = head.checkpointed("w0")
    head.left("w0", "w1")
    assert saved.step == 11
    assert os.stat(saved.path).st_mode & 0o777 == 0o600
    head.checkpoint = saved.path
    head.start("w2", "w3")
    head.ready("w2", "w3")
    head.change(["w2", "w3"])
    check(head, reference, "w2", "w3")
