"""`fallow local` with a real head, store, agents and workers, judged by its report.

`Box.exec_local` starts it as its users do; `Box.local` starts it as a fork, which takes half the processor time.

What `tests/elastic` goes through as well is left to `make soak` here.

The undisturbed run to compare with is the same script under plain `python`. Another order of a sum moves the last digit
and training amplifies that slowly: in float64 to about 1e-9 after some hundred steps, and 1e-6 is allowed; in float32
the GPT, which has no kinks, may be 1e-5 apart after its 90 steps. A lost or repeated sample would show at about 1e-3.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nursery_client import MARK, OWN_MARK, NurseryClient

torch = pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

from fallow.control.client import call  # noqa: E402
from fallow.model import Exit, FallowError, KeyFile, RunView, Snapshot  # noqa: E402
from fallow.testbed.host import free_ports  # noqa: E402

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "contrib" / "examples"
CASES_OF_MISUSE = str(HERE / "loop_cases.py")
GAN = str(HERE / "gan_training.py")
SETTINGS = str(HERE / "settings_training.py")
TINY = str(HERE / "local_training.py")
PROBE = str(HERE / "example_probe.py")
GPT = ["--steps", "90", "--global-batch", "32"]
SAMPLES, BATCH = 250, 32
"""Data set and global batch of the tiny training: the last step of an epoch is a partial one."""

RUN_S = 400.0
COUNT = itertools.count()
PLAIN = {"PUT_OFF_COMPILER": "1"}
"""For scripts without a head: see `tests/start`."""


@dataclass
class Done:
    """A finished `fallow local`."""

    code: int
    stdout: str
    stderr: str
    result: dict[str, Any]
    "what the script's main member wrote"

    @functools.cached_property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.stdout)
        return found

    @property
    def members(self) -> list[list[str]]:
        return [generation["members"] for generation in self.report["generations"]]

    @property
    def kinds(self) -> list[str]:
        return [generation["kind"] for generation in self.report["generations"]]

    def trained(self, steps: int, samples: int) -> Done:
        """Finished, with every sample used exactly once."""
        assert self.code == 0, self.stderr
        assert self.report["status"] == "finished"
        assert self.report["steps"] == steps
        assert self.report["samples"] == {"consumed": samples, "lost": 0, "duplicated": 0}
        assert self.report["message"] == ""
        firsts = [generation["first_step"] for generation in self.report["generations"]]
        assert firsts == sorted(firsts)
        assert firsts[0] == 0
        return self


class Fork:
    """The part of `subprocess.Popen` that is used here, for a `fallow local` that the nursery started."""

    def __init__(self, nursery: NurseryClient, argv: list[str], environ: dict[str, str], folder: Path) -> None:
        self._nursery = nursery
        self._files = [folder / f"{name}-{next(COUNT)}" for name in ("out", "error")]
        self.pid = nursery.start_local(argv, environ, folder, *self._files)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.exit_code(self.pid)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; returns its standard output and error."""
        wait(lambda: self.poll() is not None, timeout)
        out, error = (path.read_text() for path in self._files)
        return out, error


@dataclass
class Box:
    """A folder of its own, and a mark in the environment by which everything that was started is found."""

    folder: Path
    nursery: NurseryClient
    started: list[subprocess.Popen[str] | Fork] = field(default_factory=list)

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FALLOW_", "SLURM_"))}
        return {**kept, "TMPDIR": str(self.folder), MARK: OWN_MARK, "OMP_NUM_THREADS": "1"}

    def local(
        self, *command: str, members: int = 2, workers_per_node: int = 1, schedule: str = "", **environ: str
    ) -> Fork:
        """Start `fallow local --json` as a fork, and so its agents and workers: torch need not be imported."""
        words = self._words(*command, members=members, schedule=schedule)
        words[1:1] = ["--workers-per-node", str(workers_per_node)]
        self.started.append(Fork(self.nursery, words, self.environ | environ, self.folder))
        return self.started[-1]

    def exec_local(self, *command: str, members: int = 2, schedule: str = "", **environ: str) -> subprocess.Popen[str]:
        """Start `fallow local --json` as its users do."""
        words = self._words(*command, members=members, schedule=schedule)
        return self.start(sys.executable, "-m", "fallow.cli.main", *words, **environ)

    def _words(self, *command: str, members: int, schedule: str) -> list[str]:
        words = ["local", "--members", str(members), "--schedule", schedule, "--json", "--"]
        return [*words, sys.executable, *command]

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str] | Fork) -> Done:
        stdout, stderr = process.communicate(timeout=RUN_S)
        written = self.folder / "result.json"
        return Done(process.returncode, stdout, stderr, json.loads(written.read_text()) if written.exists() else {})

    def ranks(self, size: int, *command: str, last: dict[str, str] | None = None) -> list[subprocess.Popen[str]]:
        """Start a fixed world of so many, as srun would. Args: last: variables of the last one."""
        # Not one that the kernel gives out: another test's connection may have it before the first rank listens.
        port = str(free_ports(1))
        world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **PLAIN}
        others = [{}] * (size - 1) + [last or {}]
        return [
            self.start(sys.executable, *command, RANK=str(rank), **world, **other) for rank, other in enumerate(others)
        ]

    def fixed(self, size: int, *command: str) -> Done:
        """A fixed world to its end, with what all of them said."""
        ended = [self.finish(process) for process in self.ranks(size, *command)]
        stderr = "".join(done.stderr for done in ended)
        return Done(max(done.code for done in ended), ended[0].stdout, stderr, ended[0].result)

    def tiny(self, *options: str, steps: int = 90, **how: Any) -> Done:
        """The tiny training under `fallow local`, to its end; `how`: as for `local`."""
        return self.finish(self.local(*self.tiny_words(*options, steps=steps), **how))

    def tiny_words(self, *options: str, steps: int = 90) -> list[str]:
        return [TINY, "--steps", str(steps), "--result", str(self.folder / "result.json"), *options]

    def processes(self) -> list[Any]:
        """All living processes that carry the mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get(MARK) == OWN_MARK and process.pid != self.nursery.pid
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def worker(self, name: str) -> Any:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("FALLOW_WORKER") == name:
                    return process
        return None

    def nothing_left(self) -> bool:
        return not self.processes()

    @property
    def logs(self) -> str:
        """What all workers wrote."""
        return "\n".join(log.read_text() for log in self.folder.glob("fallow-local-*/state/runs/*/logs/*.log"))

    def look(self) -> RunView | None:
        """The run, as the head sees it now."""
        for head_file in self.folder.glob("fallow-local-*/state/head.json"):
            with contextlib.suppress(FallowError):
                for run in call(head_file, "status", Snapshot).runs:
                    return run
        return None

    def until(self, condition: Callable[[RunView], bool]) -> None:
        def holds() -> bool:
            view = self.look()
            return view is not None and condition(view)

        wait(holds)


def wait(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Until `condition` holds; fails after `seconds`."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the wait was in vain"
        pause.wait(0.05)


@pytest.fixture
def box(tmp_path: Path, nursery: NurseryClient) -> Iterator[Box]:
    made = Box(tmp_path, nursery)
    yield made
    try:
        wait(made.nothing_left, 20.0)
    finally:
        for process in made.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in made.started:
            process.communicate(timeout=180)


def expected_samples(steps: int) -> int:
    """Of the tiny training."""
    per_epoch = -(-SAMPLES // BATCH)
    return steps // per_epoch * SAMPLES + steps % per_epoch * BATCH


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What a script's main member writes under plain `python`; each command is run once."""

    @functools.cache
    def run(*words: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("plain")
        result = folder / "result.json"
        argv = [word.replace("RESULT", str(result)) for word in words]
        environ = os.environ | PLAIN
        subprocess.run([sys.executable, *argv], cwd=folder, check=True, timeout=RUN_S, capture_output=True, env=environ)
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    return run


@pytest.fixture(scope="module")
def tiny(plain: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda steps=90: plain(TINY, "--pace", "0", "--steps", str(steps), "--result", "RESULT")


def same(done: Done, reference: dict[str, Any]) -> None:
    """The history of the membership shows nowhere in the result."""
    assert done.result["steps"] == reference["steps"]
    assert done.result["loss"] == pytest.approx(reference["loss"], abs=1e-6)
    assert done.report["final_loss"] == pytest.approx(reference["loss"], abs=1e-6)
    for name, value in reference["weights"].items():
        flat = [pytest.approx(row, abs=1e-6) for row in value] if isinstance(value, list) else value
        assert done.result["weights"][name] == flat, name


# ------------------------------------------------------------------------------------------------- the two examples

SCHEDULE = "+2@20,-1@40,-m0@60"
EXPECTED = [["n0", "n1"], ["n0", "n1", "n2", "n3"], ["n0", "n1", "n2"], ["n1", "n2"]]

CASES = [
    pytest.param(["gpt_stdlib.py", *GPT], 90 * 32, 1e-5, id="gpt"),
    pytest.param(["--double", "digits_cnn.py", "--epochs", "6"], 6 * 1500, 1e-6, id="digits"),
]


def probe(words: list[str], result: str) -> list[str]:
    return [PROBE, result, *(str(EXAMPLES / word) if word.endswith(".py") else word for word in words)]


@pytest.mark.soak
@pytest.mark.parametrize(("words", "samples", "tolerance"), CASES)
def test_an_example_comes_out_the_same_whoever_computes_it(
    words: list[str], samples: int, tolerance: float, box: Box, plain: Callable[..., dict[str, Any]]
) -> None:
    alone = plain(*probe(words, "RESULT"))
    result = str(box.folder / "result.json")
    done = box.finish(box.local(*probe(words, result), schedule=SCHEDULE)).trained(90, samples)
    assert done.members == EXPECTED
    assert done.kinds == ["start", "absorb", "release", "release"]
    for generation, item in zip(done.report["generations"][1:], (20, 40, 60), strict=True):
        assert generation["first_step"] >= item
        assert 0 < generation["pause_s"] < 20
        assert sum(generation["parts"].values()) == pytest.approx(generation["pause_s"], rel=0.2, abs=0.02)
    assert (alone["steps"], alone["samples"]) == (90, samples)
    assert done.report["final_loss"] == pytest.approx(alone["loss"], abs=tolerance)
    assert len(done.report["final_digest"]) == 64


@pytest.mark.soak
def test_an_example_under_torchrun(box: Box, plain: Callable[..., dict[str, Any]]) -> None:
    words = ["gpt_stdlib.py", "--steps", "10", "--global-batch", "32"]
    alone = plain(*probe(words, "RESULT"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = box.finish(box.start(*launcher, *probe(words, str(box.folder / "result.json")), **PLAIN))
    assert done.code == 0, done.stderr
    assert (done.result["steps"], done.result["samples"]) == (10, 10 * 32)
    assert done.result["loss"] == pytest.approx(alone["loss"], abs=1e-5)


@pytest.mark.soak
def test_members_that_do_not_act_alike_are_told_so(box: Box, plain: Callable[..., dict[str, Any]]) -> None:
    alone = plain(CASES_OF_MISUSE, "RESULT")
    done = box.fixed(2, CASES_OF_MISUSE, str(box.folder / "result.json"))
    assert done.code == 0, done.stderr
    for fine in ("usual", "skips", "left", "evaluation"):
        assert done.result[fine] == pytest.approx(alone[fine], abs=1e-12), fine
    assert done.result["stream"] == pytest.approx(done.result["usual"], abs=1e-12)
    for wrong in ("counts bodies", "is_main", "own rate", "own freezing", "own evaluation"):
        assert done.result[wrong].startswith("step 1: the members' "), wrong
        assert "on all members: no `if` around it" in done.result[wrong], wrong
    assert isinstance(done.result["own weights"], list), "brought together"
    assert "this member's weights were not those of the others at step" in done.stderr
    assert "step 2: 1 of 2 members left the run.updates loop" in done.result["left by one"]
    assert "different places of the script: 1 in run.mean, 1 in run.barrier" in done.result["mean of one"]
    for longer in ("one sample more", "two steps more", "one batch less"):
        assert "the dataset must be the same on every node" in done.result[f"{longer} on rank 1"], longer
    assert "other samples than the step has" in done.result["another order on rank 1"]


# ------------------------------------------------------------------------------------------------------------ faults


@pytest.mark.soak
def test_killed_members_the_first_one_too(box: Box, tiny: Callable[..., Any]) -> None:
    done = box.tiny(members=3, schedule="kill:1@20,kill:0@45").trained(90, expected_samples(90))
    assert done.members == [["n0", "n1", "n2"], ["n0", "n2"], ["n2"]]
    assert done.kinds == ["start", "eject", "eject"]
    assert done.report["steps_discarded"] <= 2
    assert done.report["pause_s"]["unplanned"]["max"] < 20
    assert "killed by signal 9" in done.report["generations"][1]["reason"]
    same(done, tiny())


@pytest.mark.soak
def test_a_gan_comes_out_the_same_whoever_computes_it(box: Box, plain: Callable[..., dict[str, Any]]) -> None:
    alone = plain(GAN, "--pace", "0", "--result", "RESULT")
    command = [GAN, "--result", str(box.folder / "result.json")]
    done = box.finish(box.local(*command, schedule="+2@10,kill:1@20,-m0@30")).trained(40, 580)
    assert done.kinds == ["start", "absorb", "eject", "release"]
    for name, rows in alone["weights"].items():
        ours, theirs = (torch.tensor(x, dtype=torch.float64) for x in (done.result["weights"][name], rows))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_a_gan_is_reproducible(box: Box, plain: Callable[..., dict[str, Any]]) -> None:
    words = [GAN, "--steps", "15", "--pace", "0", "--reproducible", "--result"]
    done = box.fixed(3, *words, str(box.folder / "result.json"))
    assert done.code == 0, done.stderr
    assert done.result == plain(*words, "RESULT")


def test_what_scripts_do_beside_the_training(box: Box, tiny: Callable[..., Any]) -> None:
    """run.log, run.barrier, @run.on_resize; evaluation on the main member alone, while the others wait, and on all."""
    process = box.local(*box.tiny_words("--extras"), schedule="+1@20,kill:1@40,-m0@60")
    box.until(lambda view: view.scalars.get("evaluated", 0) >= 1)
    done = box.finish(process).trained(90, expected_samples(90))
    assert done.kinds == ["start", "absorb", "eject", "release"]
    generations = [generation for generation in done.report["generations"] if "n2" in generation["members"]]
    # The main member at the end came with the second generation.
    sizes, steps = [told[:2] for told in done.result["resized"]], [told[2] for told in done.result["resized"]]
    assert sizes == [[len(g["members"]), g["members"].index("n2")] for g in generations]
    joined, after_kill, left = (generation["first_step"] for generation in generations)
    # Behind a kill it may be in the step whose sums only another one has: it goes on by those.
    assert steps in ([joined, after_kill, left], [joined, after_kill - 1, left])
    same(done, tiny())


@pytest.mark.parametrize("at_end", [False, True])
def test_settings_between_loops_count_once_for_newcomers(
    box: Box, plain: Callable[..., dict[str, Any]], at_end: bool
) -> None:
    """Its script runs lines that the received state has already: another group of parameters, a smaller rate.

    One that comes while the members end a loop has state from before the lines behind that loop.
    """
    command = [SETTINGS, "--result", str(box.folder / "result.json"), *["--newcomer-at-end"] * at_end]
    # One that is wanted earlier may be there before the loop's last step, step 15, begins.
    schedule = "+1@15,-m0@24" if at_end else "+1@14,-m0@24"
    done = box.finish(box.local(*command, schedule=schedule)).trained(32, 512)
    assert done.kinds == ["start", "absorb", "release"]
    assert not at_end or done.report["generations"][1]["first_step"] == 16
    assert done.result == plain(SETTINGS, "--pace", "0", "--result", "RESULT")


@pytest.mark.soak
def test_a_kill_while_somebody_is_being_absorbed(box: Box, tiny: Callable[..., Any]) -> None:
    done = box.tiny(schedule="+1@20,kill:1@20").trained(90, expected_samples(90))
    assert done.members[0] == ["n0", "n1"]
    assert done.members[-1] == ["n0", "n2"]
    same(done, tiny())


def test_nodes_of_several_workers_come_and_go_as_a_whole(box: Box, tiny: Callable[..., Any]) -> None:
    schedule = "+1@20,kill:1@40,-m0@60"
    done = box.tiny(workers_per_node=2, schedule=schedule).trained(90, expected_samples(90))
    assert done.members == [["n0", "n1"], ["n0", "n1", "n2"], ["n0", "n2"], ["n2"]]
    assert done.kinds == ["start", "absorb", "eject", "release"]
    same(done, tiny())


@pytest.mark.soak
def test_a_stopped_member_is_ejected_and_wakes_up_to_nothing(box: Box, tiny: Callable[..., Any]) -> None:
    done = box.tiny(members=3, schedule="stop:1@20,cont:1@50").trained(90, expected_samples(90))
    assert done.members == [["n0", "n1", "n2"], ["n0", "n2"]]
    assert "one of its processes is stopped" in done.report["generations"][1]["reason"]
    same(done, tiny())


@pytest.mark.soak
def test_a_node_that_was_frozen_as_a_whole_does_no_harm_when_it_thaws(box: Box, tiny: Callable[..., Any]) -> None:
    """Agent and worker are stopped, so nobody can kill the zombie while it sleeps; woken, both end by themselves."""
    process = box.exec_local(*box.tiny_words(steps=400), members=3, FALLOW_MEMBERSHIP__LEASE_S="1.5")
    box.until(lambda view: view.step >= 20)
    zombie = box.worker("n1")
    node = [zombie, zombie.parent()]
    for part in node:
        part.suspend()
    box.until(lambda view: [m.member for m in view.members if m.rank is not None] == ["n0", "n2"])
    for part in node:
        part.resume()
    psutil.wait_procs(node, timeout=180)
    assert not any(part.is_running() and part.status() != psutil.STATUS_ZOMBIE for part in node)
    done = box.finish(process).trained(400, expected_samples(400))
    assert done.members == [["n0", "n1", "n2"], ["n0", "n2"]]
    same(done, tiny(400))


@pytest.mark.soak
@pytest.mark.parametrize("what", ["head-kill", "store-kill"])
def test_training_goes_on_without_head_or_store(what: str, box: Box, tiny: Callable[..., Any]) -> None:
    done = box.tiny(steps=300, schedule=f"{what}@20,+1@40,-m0@60").trained(300, expected_samples(300))
    assert done.members == [["n0", "n1"], ["n0", "n1", "n2"], ["n1", "n2"]]
    assert done.report["steps_discarded"] == 0
    same(done, tiny(300))


@pytest.mark.soak
def test_a_schedule_goes_on_where_a_newcomer_is_killed_and_a_store_twice(box: Box, tiny: Callable[..., Any]) -> None:
    schedule = "+1@11,kill:2@12,+1@13,store-kill@40,store-kill@41,-m0@60"
    done = box.tiny(steps=300, schedule=schedule).trained(300, expected_samples(300))
    assert done.members[-2:] == [["n0", "n1", "n3"], ["n1", "n3"]]
    same(done, tiny(300))


@pytest.mark.soak
def test_members_beyond_the_shards_are_standbys_that_take_over(box: Box) -> None:
    began = time.monotonic()
    done = box.tiny("--global-batch", "8", members=4, schedule="kill:0@20,kill:1@50").trained(90, 708)
    assert done.members == [["n0", "n1"], ["n1"], ["n1", "n2"], ["n2"], ["n2", "n3"]]
    assert time.monotonic() - began < 40, "the schedule waited for standbys to become members"


@pytest.mark.soak
def test_loader_processes(box: Box, tiny: Callable[..., Any]) -> None:
    done = box.tiny("--num-workers", "2", schedule="+1@20,-m0@40").trained(90, expected_samples(90))
    assert done.members == [["n0", "n1"], ["n0", "n1", "n2"], ["n1", "n2"]]
    same(done, tiny())


@pytest.mark.parametrize(("processes", "samples"), [pytest.param("0", 250, marks=pytest.mark.soak), ("2", 252)])
def test_a_stream_comes_out_the_same_whoever_computes_it(
    processes: str, samples: int, box: Box, plain: Callable[..., dict[str, Any]]
) -> None:
    """Eight steps an epoch; with two loader processes the last one has two small batches."""
    words = ["--stream", "--num-workers", processes, "--samples", str(samples), "--float32", "--reproducible"]
    done = box.tiny(*words, schedule="+1@20,kill:1@40,-m0@60").trained(90, 11 * samples + 2 * BATCH)
    assert done.kinds == ["start", "absorb", "eject", "release"]
    assert done.members[-1] == ["n2"]
    assert done.result == plain(TINY, *words, "--pace", "0", "--result", "RESULT")


# --------------------------------------------------------------------------------------------- what users get wrong


def test_an_exception_in_the_script_ends_the_run_with_its_traceback(box: Box) -> None:
    done = box.tiny("--fail-at", "10")
    assert done.code == Exit.SOFTWARE
    assert (done.report["status"], done.report["steps"]) == ("failed", 10)
    assert "ValueError: sample in step 10 is broken" in done.report["message"]
    assert "ValueError: sample in step 10 is broken" in done.stderr.splitlines()[-1]
    assert "Traceback (most recent call last)" in done.stderr, "the main member's own output is shown"
    assert "fallow agent: Traceback" not in done.stderr, "and once more at the end"
    assert 'raise ValueError(f"sample in step' in box.logs
    assert len(done.members) <= 2, "it was tried again and again"
    assert box.logs.count("ValueError: sample") <= 2


@pytest.mark.parametrize(
    ("early", "message"),
    [
        ("return", "the script ended without reaching run.updates(); call fallow.init(), run.prepare(...) and loop"),
        pytest.param("no-loop", "the script ended without reaching run.updates()", marks=pytest.mark.soak),
        ("raise", "ended before its training loop: exited with 1 (RuntimeError: the data are not where they were)"),
        pytest.param("exit", "ended before its training loop: exited with 5", marks=pytest.mark.soak),
    ],
)
def test_a_script_that_never_reaches_the_loop(early: str, message: str, box: Box) -> None:
    done = box.tiny("--early", early, members=1)
    assert done.code == Exit.SOFTWARE
    assert done.report["status"] == "failed"
    assert message in done.report["message"]
    assert message in done.stderr.splitlines()[-1]
    assert ("Traceback (most recent call last)" in done.stderr) == (early == "raise")
    assert done.report["generations"] == []


def test_a_newcomer_with_another_model_is_refused_and_the_others_finish(box: Box, tiny: Callable[..., Any]) -> None:
    done = box.tiny("--odd", "n2", schedule="+1@20").trained(90, expected_samples(90))
    assert done.members == [["n0", "n1"]]
    (line,) = [line for line in done.stderr.splitlines() if "did not take part" in line]
    assert "n2" in line
    assert "it has model.0.4.weight float64[4, 16], they have model.0.4.weight float64[3, 16]" in line
    same(done, tiny())


ODD_LATER = """
import os, time, torch, fallow
from torch.utils.data import DataLoader, TensorDataset
run = fallow.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.prepare(model, optimizer)
data = TensorDataset(torch.ones(64, 4))
sizes = (4, 2 if os.environ["FALLOW_WORKER"] in ("n2", "n3") else 4)
loaders = [run.prepare(DataLoader(data, size), global_batch=16) for size in sizes]
for loader, steps in zip(loaders, (12, 40)):
    for update in run.updates(loader, epochs=10, max_steps=steps):
        for (x,) in update:
            time.sleep(0.02)
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_newcomers_with_another_loader_in_a_later_loop_are_refused_and_the_others_finish(box: Box) -> None:
    """One is a member when the second loop begins; the other comes in the middle of it: found in a step."""
    done = box.finish(box.local("-c", ODD_LATER, schedule="+1@3,+1@20"))
    assert done.code == 0, done.stderr
    assert (done.report["status"], done.report["steps"]) == ("finished", 52)
    assert done.report["samples"] == {"consumed": 52 * 16, "lost": 0, "duplicated": 0}
    assert done.kinds == ["start", "absorb", "eject", "absorb", "eject"]
    assert done.members[-1] == ["n0", "n1"]
    assert done.report["generations"][2]["first_step"] == 12
    for generation in done.report["generations"][2::2]:
        reason = generation["reason"]
        assert "rank 2 cuts a step into 8 shards of 2 samples, rank 0 into 4 of 4: give the DataLoader" in reason


def test_first_members_that_differ_do_not_start(box: Box) -> None:
    done = box.tiny("--odd", "n1")
    assert done.code == Exit.SOFTWARE
    message = json.loads(done.stdout)["error"]["message"]
    assert "1 of the first 2 members did not come to run.updates()" in message
    assert "model.0.4.weight float64[4, 16]" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "20", "--drop-last"], "20 samples are fewer than the global batch of 32: no step would be left"),
        pytest.param(
            *(["--global-batch", "30"], "global_batch=30 is not a multiple of the DataLoader's batch_size=4"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_batches_that_do_not_fit(options: list[str], message: str, box: Box) -> None:
    done = box.tiny(*options, members=1)
    assert done.code == Exit.SOFTWARE
    assert message in done.report["message"]
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.soak
def test_drop_last_and_partial_steps(box: Box) -> None:
    """The arithmetic is tested without processes; these add a kill."""
    done = box.tiny("--samples", "40", "--drop-last", "--pace", "0.1", steps=30, members=2, schedule="kill:1@10")
    done.trained(30, 30 * BATCH)
    assert done.members == [["n0", "n1"], ["n0"]]


# ------------------------------------------------------------------------------------- what is left, shown and open


def test_ctrl_c_leaves_nothing_and_a_run_shows_and_opens_nothing(box: Box) -> None:
    process = box.exec_local(*box.tiny_words(steps=100_000), members=2)
    box.until(lambda view: view.step >= 10)
    seen = box.processes()
    names = [" ".join(one.cmdline()) for one in seen]
    assert sum("fallow.head" in name for name in names) == 1
    assert sum("fallow.agent" in name for name in names) == 2
    secrets = [
        json.loads(file.read_text(), object_hook=lambda made: made)["secret_key"]
        for file in box.folder.glob("fallow-local-*/state/runs/*/keys/*.json")
    ]
    secrets += [file.read_text().strip() for file in box.folder.glob("fallow-local-*/state/head.key")]
    assert len(secrets) == 3
    assert "secret_key" in KeyFile.__struct_fields__
    for one in seen:
        shown = "\0".join([*one.cmdline(), *(f"{name}={value}" for name, value in one.environ().items())])
        assert not [secret for secret in secrets if secret in shown], one.cmdline()
    worker = box.worker("n0")
    ours = {name for name in worker.environ() if name.startswith("FALLOW_")} - {MARK}
    assert ours == {
        *("FALLOW_WORKER", "FALLOW_RUN", "FALLOW_CHANNEL_FD", "FALLOW_STATE_DIR", "FALLOW_CONFIG"),
        *("FALLOW_SLURM__CLIENT", "FALLOW_HEAD__ADDRESS", "FALLOW_MEMBERSHIP__BEAT_S", "FALLOW_OUTPUT_PIPES"),
    }
    listening = {
        connection.laddr.ip
        for one in seen
        for connection in one.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}

    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 130
    assert "logs are kept in" in stderr
    assert "Traceback" not in stderr
    wait(box.nothing_left, 10.0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_ended_or_killed_it_leaves_no_process(number: signal.Signals, code: int, box: Box) -> None:
    process = box.exec_local(*box.tiny_words(steps=100_000), members=2)
    box.until(lambda view: view.step >= 5)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == code
    assert "Traceback" not in stderr
    wait(box.nothing_left, 15.0)


SHAKEN = "+1@15,kill:0@30,-m1@45,+2@60"


def test_reproducible_bits(box: Box, plain: Callable[..., dict[str, Any]]) -> None:
    """Absorb, a kill of rank 0, a release of rank 0, uneven shares: the digest of plain `python`, to the last bit."""
    words = ["--members", "2", "--schedule", SHAKEN, "--reproducible", "--json", "--"]
    command = box.start(
        sys.executable, "-m", "fallow.cli.main", "local", *words, sys.executable, *box.tiny_words("--float32")
    )
    done = box.finish(command).trained(90, expected_samples(90))
    assert len(done.kinds) == 5
    assert done.report["reproducible"] is True
    assert done.report["steps_repeated"] >= 1
    assert done.result == plain(TINY, "--float32", "--reproducible", "--pace", "0", "--result", "RESULT")


TURNED = """
import hashlib, json, os, sys, torch, fallow
from torch.utils.data import DataLoader, TensorDataset
class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.halves = torch.nn.ModuleList(torch.nn.Linear(600, 600) for _ in range(2))
    def forward(self, x):
        first = os.environ.get("FALLOW_WORKER", "n0") != "n0" or os.environ.get("RANK", "0") != "0"
        y = {number: self.halves[number](x) for number in (first, not first)}
        return y[0] + 2 * y[1]
run = fallow.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = Halves()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.rand(64, 600))
model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 4), global_batch=16, reproducible=True)
for update in run.updates(loader, epochs=10):
    for (x,) in update:
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
json.dump({"weights": weights}, open(sys.argv[1], "w"))
"""


def test_members_whose_gradients_come_in_another_order(box: Box, plain: Callable[..., dict[str, Any]]) -> None:
    """Buckets are laid out as the gradients came on one of the first members; here the others' come the other way."""
    done = box.finish(box.local("-c", TURNED, str(box.folder / "result.json"), schedule="+1@10,kill:0@20"))
    done.trained(40, 640)
    assert done.members == [["n0", "n1"], ["n0", "n1", "n2"], ["n1", "n2"]]
    assert done.result == plain("-c", TURNED, "RESULT")


def test_ranks_of_a_fixed_world_whose_gradients_come_in_another_order(
    box: Box, plain: Callable[..., dict[str, Any]]
) -> None:
    """Which tells it in its first step."""
    done = box.fixed(2, "-c", TURNED, str(box.folder / "result.json"))
    assert done.code == 0, done.stderr
    assert done.result == plain("-c", TURNED, "RESULT")


def test_an_odd_member_of_a_reproducible_run_is_refused(box: Box) -> None:
    words = ["local", "--members", "1", "--schedule", "+1@10", "--reproducible", "--json", "--", sys.executable]
    command = box.start(
        sys.executable, "-m", "fallow.cli.main", *words, *box.tiny_words("--many-threads", "n1", steps=20)
    )
    done = box.finish(command)
    assert done.code == 0, done.stderr
    assert done.kinds == ["start"]
    assert "it computes with 2 thread(s), the members with 1 thread(s)" in done.stderr
