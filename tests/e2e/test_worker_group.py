"""Real worker processes and real gloo groups under a scripted head: the result must not depend on who came and went.

What `tests/elastic` goes through as well, with a real head, is left to `make soak` here.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from fake_head import FakeHead

BASE = {"samples": 200, "batch_size": 8, "global_batch": 32, "epochs": 4}
STEPS = 28  # ceil(200 / 32) = 7 an epoch; the last step of each has 8 samples, one shard
SAMPLES = 800


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


@pytest.mark.soak
def test_fixed_two(make, reference) -> None:
    head = make()
    head.start("w0", "w1")
    head.ready("w0", "w1")
    head.change(["w0", "w1"])
    check(head, reference, "w0", "w1")


@pytest.mark.soak
def test_absorb_then_release(make, reference) -> None:
    head = make(stops={9: "all", 17: "all"})
    head.start("w0", "w1", "w2")
    head.ready("w0", "w1", "w2")
    head.change(["w0"])
    head.at(9, "w0")
    head.change(["w0", "w1", "w2"])
    head.go(9)
    head.at(17, "w0", "w1", "w2")
    head.change(["w0", "w2"])
    head.go(17)
    head.left("w1")
    assert head.exit_code("w1") == 0
    check(head, reference, "w0", "w2")
    assert head.result("w2")["epochs"] == [0, 1, 2, 3]


@pytest.mark.soak
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


@pytest.mark.soak
def test_uneven_shards(make, reference) -> None:
    """Three members and four shards; in the last step of an epoch two of them have nothing that counts."""
    head = make()
    head.start("w0", "w1", "w2")
    head.ready("w0", "w1", "w2")
    head.change(["w0", "w1", "w2"])
    check(head, reference, "w0", "w1", "w2")


@pytest.mark.soak
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


@pytest.mark.soak
def test_suspend_and_resume(make, reference) -> None:
    head = make(stops={10: "all"})
    head.start("w0", "w1")
    head.ready("w0", "w1")
    head.change(["w0", "w1"])
    head.at(10, "w0", "w1")
    head.change([])
    head.go(10)
    saved = head.checkpointed("w0", "w1")
    head.left("w0", "w1")
    assert saved.step >= 11, "the boundary may come a step later where a message is late"
    assert os.stat(saved.path).st_mode & 0o777 == 0o700
    head.checkpoint = saved.path
    head.start("w2", "w3")
    head.ready("w2", "w3")
    head.change(["w2", "w3"])
    check(head, reference, "w2", "w3")


def test_two_kills_one_after_the_other_and_an_aborted_attempt(make, reference) -> None:
    head = make(stops={5: "w1", 15: "w3"})
    head.start("w0", "w1", "w2", "w3")
    head.ready("w0", "w1", "w2", "w3")
    head.change(["w0", "w1", "w2", "w3"])
    head.at(5, "w1")
    head.kill("w1")
    head.interrupt()
    head.held("w0", "w2", "w3")
    takers = head.prepare(["w0", "w2", "w3"], interrupt=True)
    head.votes(takers)
    head.abort(takers)
    head.change(["w0", "w2", "w3"], interrupt=True)
    head.at(15, "w3")
    head.kill("w3")
    head.change(["w0", "w2"], interrupt=True)
    check(head, reference, "w0", "w2")


@pytest.mark.soak
def test_a_stopped_member_wakes_up_and_harms_nobody(make, reference) -> None:
    head = make(stops={5: "w1", 12: "w0"})
    head.start("w0", "w1", "w2")
    head.ready("w0", "w1", "w2")
    head.change(["w0", "w1", "w2"])
    head.at(5, "w1")
    head.processes["w1"].send_signal(signal.SIGSTOP)
    head.go(5)
    head.change(["w0", "w2"], interrupt=True)
    head.active("w0", "w2")
    head.processes["w1"].send_signal(signal.SIGCONT)
    head.dismiss("w1", 75)
    assert head.exit_code("w1") == 75
    head.go(12)
    check(head, reference, "w0", "w2")


def test_a_kill_before_the_planned_boundary_is_reached(make, reference) -> None:
    """The commit of an absorb is known, then a member dies: survivors go over without waiting for the boundary."""
    head = make(stops={8: "all"})
    head.start("w0", "w1", "w2")
    head.ready("w0", "w1", "w2")
    head.change(["w0", "w1"])
    head.at(8, "w0", "w1")
    head.change(["w0", "w1", "w2"])
    head.kill("w1")
    head.go(8)
    head.change(["w0", "w2"], interrupt=True)
    check(head, reference, "w0", "w2")


def test_a_kill_in_a_newcomers_first_step(make, reference) -> None:
    """Its standstill begins when it is a member, not when it began to wait for that."""
    head = make(stops={8: "all", 9: "all", 10: "all"})
    head.start("w0", "w1", "w2")
    head.ready("w0", "w1", "w2")
    head.change(["w0", "w1"])
    head.at(8, "w0", "w1")
    asked = time.monotonic()
    head.change(["w0", "w1", "w2"])
    head.go(8)
    head.at(9, "w0", "w1")
    head.kill("w1")
    head.go(9)
    head.change(["w0", "w2"], interrupt=True)
    head.active("w0", "w2")
    stood = time.monotonic() - asked
    head.go(10)
    check(head, reference, "w0", "w2")
    assert all(switch.pause_s < stood for switch in head.switches("w2"))


@pytest.mark.soak
def test_kills_while_the_optimizer_state_is_on_its_way(make) -> None:
    """First the newcomer, in the middle of receiving, then, with another newcomer, a donor in the middle of sending."""
    wide = {"width": 4096, "epochs": 3}
    alone = make(**wide)
    alone.start("w0")
    alone.ready("w0")
    alone.change(["w0"])
    alone.finished("w0")
    reference = alone.result("w0")

    head = make(**wide, stops={6: "all", 13: "all"}, stall_late={"w0": 2, "w1": 4})
    head.start("w0", "w1", "w2", "w3")
    head.ready("w0", "w1", "w2", "w3")
    head.change(["w0", "w1"])
    head.at(6, "w0", "w1")
    head.change(["w0", "w1", "w2"])
    head.go(6)
    head.file("late-2")
    head.kill("w2")
    head.go("late-2")
    head.change(["w0", "w1"], interrupt=True)
    head.at(13, "w0", "w1")
    head.change(["w0", "w1", "w3"])
    head.go(13)
    head.file("late-4")
    head.kill("w1")
    head.go("late-4")
    head.change(["w0", "w3"], interrupt=True)

    finished = head.finished("w0", "w3")
    assert finished["w0"].digest == finished["w3"].digest
    for name, value in head.result("w3")["state"].items():
        wanted = torch.tensor(reference["state"][name])
        torch.testing.assert_close(torch.tensor(value), wanted, rtol=1e-4, atol=1e-5, msg=name)
    report = head.audit(21, 32)
    assert (report.consumed, report.lost, report.duplicated) == (600, 0, 0)
    assert not head.switches("w2"), "it never had the whole state"
    assert [switch.generation for switch in head.switches("w3")] == [5]


@pytest.mark.parametrize("style", ["range", "passes"])
def test_other_loop_styles_put_a_newcomer_in_the_right_place(make, reference, style) -> None:
    head = make(style=style, stops={17: "all"})
    head.start("w0", "w1")
    head.ready("w0", "w1")
    head.change(["w0"])
    head.at(17, "w0")
    head.change(["w0", "w1"])
    head.go(17)
    finished = head.finished("w0", "w1")
    assert finished["w0"].digest == finished["w1"].digest
    one, two = head.result("w0"), head.result("w1")
    assert one["steps"] == two["steps"] == STEPS
    assert one["lr"] == two["lr"]
    if style == "range":
        same(one, reference)
    # The group is built behind the training: the switch comes at the first step's end that finds it ready.
    first = min(step for _, step in two["seen"])
    assert first >= 18
    assert first == min(step for generation, step in one["seen"] if generation == head.generation)


@pytest.mark.soak
def test_loader_processes_follow_the_plan(make, reference) -> None:
    """Prefetched batches, augmentation drawn in the dataset: nothing differs from num_workers=0."""
    head = make(num_workers=2, stops={9: "all", 16: "all", 23: "w1"})
    head.start("w0", "w1", "w2")
    head.ready("w0", "w1", "w2")
    head.change(["w0"])
    head.at(9, "w0")
    head.change(["w0", "w1", "w2"])
    head.go(9)
    head.at(16, "w0", "w1", "w2")
    head.change(["w0", "w1"])
    head.go(16)
    head.at(23, "w1")
    head.kill("w1")
    head.change(["w0"], interrupt=True)
    check(head, reference, "w0")


def test_a_member_gives_up_on_a_silent_head(make) -> None:
    head = make(stops={5: "w1"})
    head.patience_s = 1.0
    head.start("w0", "w1")
    head.ready("w0", "w1")
    head.change(["w0", "w1"])
    head.at(5, "w1")
    head.silent = True
    head.kill("w1")
    assert head.exit_code("w0") == 75
    assert "the head was silent for 1 s" in head.log("w0")


@pytest.mark.soak
def test_training_goes_on_while_the_head_is_silent(make, reference) -> None:
    head = make(stops={5: "all"})
    head.patience_s = 2.0
    head.start("w0", "w1")
    head.ready("w0", "w1")
    head.change(["w0", "w1"])
    head.at(5, "w0", "w1")
    head.active("w0", "w1")
    head.silent = True
    head.go(5)
    assert head.exit_code("w0") == head.exit_code("w1") == 0
    same(head.result("w0"), reference)


def test_an_exception_in_the_script_is_reported_and_keeps_its_code(make) -> None:
    head = make(fail_at=3)
    head.start("w0")
    head.ready("w0")
    head.change(["w0"])
    failed = head.failure("w0")
    assert failed.code == head.exit_code("w0") == 1
    assert failed.message == "ValueError: on purpose"
    assert "Traceback" in failed.traceback
    assert "Traceback" in head.log("w0")


def test_a_standby_that_is_not_needed_ends_quietly(make) -> None:
    head = make()
    head.start("w0", "w1")
    head.ready("w0", "w1")
    head.dismiss("w0", 0)
    head.dismiss("w1", 93)
    assert (head.exit_code("w0"), head.exit_code("w1")) == (0, 93)
    assert "Traceback" not in head.log("w0") + head.log("w1")


@pytest.mark.soak
def test_a_newcomer_compiles_its_model_before_it_is_ready_and_never_again(make, reference) -> None:
    head = make(compile=True, stops={9: "w0"})
    head.start("w0")
    head.ready("w0")
    head.change(["w0"])
    head.start("w1")
    head.ready("w1")
    head.at(9, "w0")
    head.change(["w0", "w1"])
    head.go(9)
    check(head, reference, "w0", "w1")
    compiled = [set(head.result(worker)["compiled_in"]) for worker in ("w0", "w1")]
    assert compiled == [{1}, {0}], "the newcomer in its rehearsal, before its first generation"
