"""Benchmarks' own arithmetic, on hand-made observations, and what a careless user types."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from fallow.bench import chaos, checkpoint, device, pause, planner, recovery, steady, steplog, workload
from fallow.bench.main import BENCHES, INTERRUPTED, check_names, main
from fallow.bench.rows import Progress, Row, Settings, ours
from fallow.bench.steplog import Finished
from fallow.cli.main import invoke
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning.asking import Ask
from fallow.core.rules import HarvestRules
from fallow.core.schedule import Action
from fallow.model import ChangeKind, Exit, FallowError, GenerationReport, Parts
from planning import actions

GPU = Path(__file__).parents[2] / "contrib/bench/gpu.py"


def done(process: str, step: int, generation: int, at: float) -> Finished:
    return Finished(process, step, generation, at)


def test_recovery_is_until_the_slowest_survivor_has_finished_a_step_of_the_new_generation() -> None:
    finished = [done(w, s, 1, s + 0.1) for s in range(3) for w in ("n0", "n1")]
    # Killed at 2.5; w1 still ends step 3 of the old generation, which is no recovery.
    finished += [done("n1", 3, 1, 2.6), done("n0", 3, 2, 2.8), done("n1", 4, 2, 2.9), done("n0", 4, 2, 3.0)]
    # The others of that generation tell how long a step takes; a newcomer's generation does not.
    finished += [done(w, 5 + s, 2, 3.25 + 0.25 * s) for s in range(4) for w in ("n0", "n1")]
    finished += [done(w, 9 + s, 3, 6.0 + s) for s in range(20) for w in ("n0", "n1", "n2")]
    (found,) = recovery.recoveries(finished, [2.5])
    assert found == pytest.approx((0.4, 0.25))
    assert recovery.recoveries(finished, [100.0]) == []


def test_useful_is_what_was_finished_once_and_available_what_was_there_and_sound() -> None:
    killed, released = chaos.Node(came=0.0, ready=2.0, gone=10.0), chaos.Node(came=0.0, ready=2.0, gone=14.0)
    newcomers = chaos.Node(came=10.0, ready=12.0), chaos.Node(came=13.0)  # the second is still starting at the end
    never_ready = chaos.Node(came=11.0, gone=12.0)
    nodes = [killed, released, *newcomers, never_ready, chaos.Node(came=-5.0, ready=0.0, gone=10.0)]
    found = chaos.span([9.0, 10.0, 10.5, 12.0, 20.0, 20.5], nodes, 10.0, 20.0, 1.5)
    assert found.useful == pytest.approx(3 * 1.5)
    assert found.available == pytest.approx(4 + 10 + 7 + 1)
    assert found.starting == pytest.approx(2 + 7 + 1)
    assert found.share == pytest.approx(4.5 / 22)


def test_the_figure_of_chaos_is_of_all_node_seconds_together() -> None:
    """Two members; the second fault kills one, and the newcomer in its place starts up for 3 s and waits for 1 s."""
    nodes = [chaos.Node(came=0.0, ready=1.0), chaos.Node(came=0.0, ready=1.0, gone=30.0)]
    nodes.append(chaos.Node(came=30.0, ready=33.0))
    hits = [chaos.Hit(chaos.Fault.RELEASE, 20.0, False), chaos.Hit(chaos.Fault.KILL, 30.0, True)]
    times = [float(at) for at in range(1, 31)] + [30.0 + 2 * step for step in range(1, 3)]
    times += [34.0 + step for step in range(1, 7)]
    row = chaos.row(2, hits, times, nodes, 1.0, "end")
    assert row.ratio == pytest.approx((20 + 16) / 40)
    assert (row.ours.p50, row.ours.n) == (pytest.approx(0.8), 2)
    assert "kill 0.800 (1), release 1.000 (1), the worst 0.800; rank 0 was hit 1 time" in row.note
    assert "start-ups 0.075, all else 0.025; without start-ups 0.973 of" in row.note
    with pytest.raises(FallowError, match=r"over 1\.0 s before the end"):
        chaos.row(2, hits, times[:-1], nodes, 1.0, "end")


def test_standstill_is_what_progress_fell_behind() -> None:
    finished = [done("a", step, 1, float(step)) for step in range(10)]
    finished += [done("b", step, 2, 12.0 + step) for step in range(7, 20)]  # steps 7 to 9 were done again
    # Step 10 was due at 10 and came at 22.
    assert steplog.standstill(finished, 9.5, 30.0) == pytest.approx(12.0)
    assert steplog.standstill(finished, 0.0, 9.5) == pytest.approx(0.0)
    assert steplog.progress(finished)[10] == done("b", 10, 2, 22.0)


def test_a_first_step_is_longer_by_what_is_neither_pause_nor_a_usual_step() -> None:
    finished = [done(w, s, 1, s) for s in range(4) for w in ("n0", "n1")]
    for worker, late in (("n0", 0.0), ("n1", 0.2)):
        finished += [done(worker, 4 + s, 2, 5.5 + late + 1.1 * s) for s in range(3)]
    finished.append(done("n2", 4, 2, 9.0))  # a newcomer
    change = GenerationReport(
        generation=2, kind=ChangeKind.ABSORB, members=[], first_step=4, pause_s=0.9, parts=Parts()
    )
    assert pause.beyond(change, finished) == pytest.approx(2.6 - 0.9 - 1.1)
    assert pause.beyond(change, [one for one in finished if one.step < 5]) is None


def test_a_step_log_is_read_back_without_its_torn_end(tmp_path: Path) -> None:
    log = steplog.StepLog(tmp_path, "n0")
    log.finished(0, 1)
    log.finished(1, 1)
    path = tmp_path / "n0.steps"
    path.write_bytes(path.read_bytes() + b"2 1")
    assert [(one.process, one.step, one.generation) for one in steplog.read(tmp_path)] == [("n0", 0, 1), ("n0", 1, 1)]


def test_arms_are_compared_round_by_round() -> None:
    """What slows a round down for all says nothing of them, nor what hits one of them now and then."""
    theirs = [1.0 + number % 7 for number in range(100)]
    found = steady.ratio(theirs, [1.25 * step for step in theirs])
    assert [found.value, found.low, found.high] == pytest.approx([0.8, 0.8, 0.8])
    hit = [1.25 * step * (9.0 if number % 20 == 0 else 1.0) for number, step in enumerate(theirs)]
    assert steady.ratio(theirs, hit).value == pytest.approx(0.8)


def test_a_plan_of_a_made_up_cluster_is_a_plan() -> None:
    cluster, demands, allocations, curves = planner.situation(400, 8)
    wishes = actions(
        cluster, [replace(d, worth=planner.worth(curves[d.run])) for d in demands], allocations, HarvestRules()
    )
    assert sum(isinstance(wish, Ask) for wish in wishes) == HarvestRules().max_pending
    row = planner.measure(400, 8, 2)
    assert (row.unit, row.ours.n, row.peer) == ("s", 2, None)
    crowded = actions(planner.beside(cluster, 100), demands, allocations, HarvestRules(allow_without_preemption=True))
    assert {type(wish) for wish in crowded} == {GiveBack}, "others need every node"


@pytest.mark.parametrize("members", [2, 4, 8])
def test_schedules_keep_the_world(members: int) -> None:
    there = members
    for item in pause.schedule(members, 32):
        there += 1 if item.action is Action.ADD else -1
        assert members <= there <= members + 1
    kills = [item.member for item in recovery.schedule(members, 20) if item.action is Action.KILL]
    assert len(kills) == len(set(kills)) == 20


@pytest.mark.parametrize(
    "words",
    [
        ["nothing"],
        ["--members", "two"],
        ["--members", "1"],
        ["--members", "2.5"],
        ["--params", "0"],
        ["--n", "1"],
        ["harvest", "pause"],
        ["harvest", "--device", "cuda"],
    ],
)
def test_bad_input_costs_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    check_names(list(BENCHES))
    with pytest.raises(FallowError, match=r"there are pause.*, harvest$"):
        check_names(["pause", "puase"])


@pytest.mark.parametrize(
    ("names", "told"),
    [([], "name some of checkpoint, pause"), (["pause", "chaos"], "name some of"), (["steady"], "torch .* finds")],
)
def test_a_device_is_refused_where_nothing_could_be_measured_on_it(names: list[str], told: str) -> None:
    with pytest.raises(FallowError, match=told):
        check_names(names, "hpu")


def test_workers_share_devices_where_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(dist.Backend.default_device_backend_map)
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", known)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    used: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    monkeypatch.setenv("FALLOW_WORKER", "n3")
    assert device.describe("cuda", 2).startswith("each worker has a cuda: sums on the device;")
    assert device.take("cuda", 2) == torch.device("cuda:1")
    assert known["cuda"] == "nccl"
    assert device.describe("cuda", 3).startswith("3 workers share 2 cuda: sums go through the host;")
    assert device.take("cuda", 3) == torch.device("cuda:1")
    assert "cuda" not in known, "the transport finds no communicator"
    assert used == [1, 1]
    with pytest.raises(FallowError, match=r"3 members beside DDP need 3 devices \(cuda\), this machine has 2"):
        steady.check_devices("cuda", 3)


@pytest.mark.parametrize("names", [[], ["torchrun"], ["planner", "torchft"]])
def test_what_is_not_installed_is_told_before_anything_is_measured(
    names: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "psutil" else there(name))
    assert invoke(["bench", *names]) == 69
    assert "pip install 'fallow[bench]'" in capsys.readouterr().err


def test_help_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "--help"]) == 0
    first = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert first >= {*BENCHES, "harvest"}


def test_a_checkpoints_hold_up_is_what_its_block_took_longer_than_those_beside_it() -> None:
    at, finished = 0.0, []
    for step in range(9 * checkpoint.BLOCK):
        at += 0.1 + 0.5 * (step == 5 * checkpoint.BLOCK + 2)
        finished.append(done("n0", step, 1, at))
    assert checkpoint.holdups(finished, 1) == [pytest.approx(0.5)]
    assert checkpoint.holdups(finished, 3) == [pytest.approx(0.0), pytest.approx(-0.0)]


def test_mixed_training_is_adamw_on_float32_weights_that_are_rounded_at_the_end() -> None:
    model, optimizer = workload.make(20_000, dtype=torch.bfloat16)
    reference = {name: nn.Parameter(weight.detach().float()) for name, weight in model.named_parameters()}
    plain = torch.optim.AdamW(reference.values(), lr=1e-4, weight_decay=0.01, fused=True)
    tokens, targets = workload.Text(model.context)[0]
    for _ in range(3):
        workload.loss_of(model, tokens[None], targets[None]).backward()  # type: ignore[no-untyped-call]
        for name, weight in model.named_parameters():
            assert weight.grad is not None
            reference[name].grad = weight.grad.float()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, reference[name].bfloat16())
    state = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values() if value.ndim)
    assert state == 12 * sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("free_gib", "millions", "smaller"),
    [(79.0, 1000, ""), (46.7, 1000, ""), (39.5, 825, "39.5 GiB are free"), (0.1, 25, "0.1")],
)
def test_the_large_model_fits_into_the_memory_that_is_free(free_gib: float, millions: int, smaller: str) -> None:
    found = runpy.run_path(str(GPU))["large"](free_gib)
    assert f"--params {millions} " in found.command
    assert smaller in found.smaller
    assert bool(smaller) == bool(found.smaller)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (KeyboardInterrupt(), INTERRUPTED),
        (FallowError("no peer", Exit.UNAVAILABLE), Exit.UNAVAILABLE),
        (ValueError("broken"), Exit.SOFTWARE),
    ],
)
def test_rows_outlive_a_benchmark_that_does_not_come_to_its_end(
    end: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(settings: Settings, progress: Progress) -> Iterator[Row]:
        yield from [Row(name="planned pause", members=2, params=None, unit="s", ours=ours([0.5]))][: settings.n]
        raise end

    monkeypatch.setattr(pause, "run", run)
    before, settings = signal.getsignal(signal.SIGTERM), Settings(members=[2], params=[1], n=2)
    try:
        assert main(["pause"], settings, json=True) == code
        told = capsys.readouterr()
        assert [row["name"] for row in json.loads(told.out)] == ["planned pause"]
        assert str(end) in told.err
        if isinstance(end, Exception):
            with pytest.raises(type(end)):
                main(["pause"], replace(settings, n=0), json=True)
            assert not capsys.readouterr().out, "the command line prints the error, and nothing else"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_rows_of_a_benchmark_that_was_cut_off_are_in_the_report_of_the_gpu(tmp_path: Path) -> None:
    found = runpy.run_path(str(GPU))
    session = found["Session"]("fake", dict(os.environ))
    rows = """-c 'import sys; print("[{\\"name\\": \\"pause\\"}]"); sys.exit(130)'"""
    told = session.bench(found["Bench"](rows), 1)
    assert told["rows"] == [{"name": "pause"}]
    assert told["failed"].startswith("exit code 130")
    assert told["note"]
    told = session.bench(found["Bench"]("-c 'import sys; sys.exit(1)'"), 1)
    assert told["rows"] == []
    assert "note" not in told
