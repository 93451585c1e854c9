"""Level 0: scripts that are restarted at every change. When that may be, how torchrun finds us, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fallow.agent.restart import under_torchrun
from fallow.core import events as ev
from fallow.core.membership import Membership
from fallow.core.restarts import ATTEMPTS, EVERY_S, WELL_S, Attempts, wait_s
from fallow.core.roster import Roster
from fallow.core.timing import Timing
from fallow.local import main as local
from fallow.model import (
    Active,
    AllocationKind,
    ChangeKind,
    Commit,
    Exit,
    FallowError,
    Left,
    Parts,
    Prepare,
    Vote,
    WorkerReady,
)

ROOT = Path(__file__).parents[2]


def test_newcomers_wait_until_the_scripts_have_run_for_a_while_and_nobody_else_does() -> None:
    roster = Roster(run="r", min_members=1, max_members=4, limit=4, restarts=True)
    assert wait_s(roster, ChangeKind.ABSORB, 10.0) == EVERY_S - 10.0
    assert wait_s(roster, ChangeKind.ABSORB, EVERY_S) == 0.0
    for kind in (ChangeKind.START, ChangeKind.RELEASE, ChangeKind.MIXED, ChangeKind.EJECT):
        assert wait_s(roster, kind, 0.0) == 0.0
    roster.scripted = True
    assert wait_s(roster, ChangeKind.ABSORB, 0.0) == 0.0


def test_attempts_count_generations_of_the_same_members_that_do_not_last() -> None:
    attempts = Attempts()
    for at in range(ATTEMPTS + 1):
        assert not attempts.spent(float(at))
        attempts.began(["w0", "w1"], float(at))
    assert attempts.spent(9.0)
    assert not attempts.spent(ATTEMPTS + WELL_S)
    attempts.began(["w1"], 10.0)
    assert not attempts.spent(10.0)


class Run:
    """A machine whose workers do at once what they are told."""

    def __init__(self) -> None:
        roster = Roster(run="r", min_members=1, max_members=4, limit=4)
        self.machine = Membership(roster, term=1, timing=Timing(lease_s=1e9), at=0.0, validate=True)

    def handle(self, event: ev.Event) -> None:
        due = [event]
        while due:
            for told in self.machine.handle(due.pop(0)):
                if not isinstance(told, ev.Tell):
                    continue
                worker, answer = told.worker, None
                match told.message:
                    case Prepare(generation=number):
                        answer = Vote(worker=worker, generation=number, ok=True)
                    case Commit(generation=number) if worker in self.members:
                        answer = Active(worker=worker, generation=number, first_step=0, pause_s=0.0, parts=Parts())
                    case Commit(generation=number):
                        answer = Left(worker=worker, generation=number, step=0)
                if answer is not None:
                    due.append(ev.Said(at=event.at, message=answer))

    def come(self, worker: str, at: float) -> None:
        self.handle(ev.WorkerExpected(at=at, worker=worker, token=worker, node=worker))
        ready = WorkerReady(worker=worker, signature="s", layout=["s"], shards=4, global_batch=4, restarts=True)
        self.handle(ev.Said(at=at, message=ready))

    @property
    def members(self) -> list[str]:
        return self.machine.roster.members


def test_a_newcomer_is_let_in_after_a_while_or_with_the_next_restart() -> None:
    run = Run()
    run.come("w0", 0.0)
    run.come("w1", 10.0)
    run.handle(ev.Ticked(at=EVERY_S - 1.0))
    assert run.members == ["w0"]
    run.handle(ev.Ticked(at=EVERY_S + 0.1))
    assert run.members == ["w0", "w1"]
    run.come("w2", EVERY_S + 20.0)
    assert run.members == ["w0", "w1"]
    run.handle(ev.WorkerGone(at=EVERY_S + 30.0, worker="w0", reason="killed", signal=9))
    assert run.members == ["w1", "w2"]
    run.come("w3", EVERY_S + 40.0)
    run.handle(ev.ReleaseWanted(at=EVERY_S + 50.0, workers=["w1"], reason="asked"))
    assert run.members == ["w2", "w3"]


def test_who_is_put_off_for_how_long_and_why_is_said() -> None:
    run = Run()
    run.come("w0", 0.0)
    assert run.machine.put_off(10.0) == ""
    run.come("w1", 30.0)
    run.come("w2", 40.0)
    why = "a newcomer restarts the script everywhere, which has to run for 5 min from one such restart to the next"
    assert run.machine.put_off(60.0) == f"w1 (w1), w2 (w2) wait for another 4 min: {why}"
    run.handle(ev.LimitChanged(at=61.0, limit=2, reason="asked"))
    assert run.machine.put_off(120.0) == f"w1 (w1) waits for another 3 min: {why}"
    run.handle(ev.Ticked(at=EVERY_S + 0.1))
    assert run.members == ["w0", "w1"]
    assert run.machine.put_off(EVERY_S + 1.0) == "", "nobody is wanted"


def test_e2_torchrun_finds_the_backend_and_says_where_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry, rendezvous_handler_registry

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torchrun.handlers"]
    installed = tmp_path / "elsewhere-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1\n")
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (installed / "entry_points.txt").write_text(f"[torchrun.handlers]\n{lines}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(rendezvous_handler_registry, "_registry", {})
    monkeypatch.delenv("FALLOW_WORKER", raising=False)
    registry._register_out_of_tree_handlers()
    parameters = RendezvousParameters(backend="fallow", endpoint="", run_id="x", min_nodes=1, max_nodes=1)
    with pytest.raises(SystemExit) as refused:
        registry.get_rendezvous_handler(parameters)
    assert refused.value.code == Exit.USAGE
    assert "fallow run -- torchrun" in capsys.readouterr().err


def test_a_command_goes_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    ours = [sys.executable, "-m", "fallow.worker.torchrun.restart"]
    assert under_torchrun([str(script), "--lr=1"]) == [*ours, sys.executable, str(script), "--lr=1"]
    assert under_torchrun(["sh", "-c", "x"]) == [*ours, "sh", "-c", "x"]
    for command, words in (
        (["torchrun", "train.py"], "leave --restart out"),
        ([str(tmp_path / "no.py")], "no such file"),
        (["no-such-program"], "not found"),
    ):
        with pytest.raises(FallowError, match=words):
            under_torchrun(command)


def test_fallow_run_has_its_agents_start_that(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from fallow.cli import run as cli

    steps: list[list[str]] = []
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    monkeypatch.setattr(cli, "find_allocation", lambda: (AllocationKind.BASE, Path("/key")))
    monkeypatch.setattr(cli, "wait_for_step", lambda argv, _: steps.append(argv) or Exit.OK)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    assert cli.run.main(["--restart", "--", "sh", "-c", "x"], standalone_mode=False) == Exit.OK
    words = steps[0][steps[0].index("fallow.agent") :]
    assert words == ["fallow.agent", "--key-file", "/key", "--", *under_torchrun(["sh", "-c", "x"])]


def test_a_command_that_is_refused_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(FallowError, match="no such file"):
        local.main([str(tmp_path / "no.py")], 2, restart=True)
    assert list(tmp_path.iterdir()) == []


def test_restart_without_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FallowError, match="has no PyTorch"):
        under_torchrun(["sh"])


def test_a_script_that_follows_by_itself_is_told_to_leave_restart_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import fallow

    monkeypatch.setenv("FALLOW_RESTART", "1")
    with pytest.raises(FallowError, match="leave --restart"):
        fallow.init()


def test_a_tied_command_dies_with_its_parent_and_is_not_started_without_it() -> None:
    tied = str(ROOT / "daemon" / "fallow" / "worker" / "torchrun" / "child_process.py")
    code = (
        "import subprocess, sys, os\n"
        f"child = subprocess.Popen([sys.executable, {tied!r}, str(os.getpid()), 'sh', '-c', 'echo here; sleep 60'],"
        " stdout=subprocess.PIPE, start_new_session=True)\n"
        "assert child.stdout.readline() == b'here\\n'\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=180)
    end = time.monotonic() + 120
    while _runs(int(done.stdout)):
        assert time.monotonic() < end
        time.sleep(0.01)
    alone = subprocess.run([sys.executable, tied, "1", "true"], timeout=180)
    assert alone.returncode == 127


def _runs(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"
