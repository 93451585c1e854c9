"""Level 0: scripts that are restarted at every change. How often, how torchrun finds us, and what is refused."""

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fallow.agent.launch import under_torchrun
from fallow.core.training.restarts import ATTEMPTS, WELL_S, Attempts
from fallow.model import Exit, FallowError
from waiting import gone

ROOT = Path(__file__).parents[3]


def test_attempts_count_generations_of_the_same_members_that_do_not_last() -> None:
    attempts = Attempts()
    for at in range(ATTEMPTS + 1):
        assert not attempts.is_exhausted(float(at))
        attempts.begin(["n0", "n1"], float(at))
    assert attempts.is_exhausted(9.0)
    assert not attempts.is_exhausted(ATTEMPTS + WELL_S)
    attempts.begin(["n1"], 10.0)
    assert not attempts.is_exhausted(10.0)


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


def test_a_command_goes_under_torchrun_unless_it_does_so_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    ours = [sys.executable, "-Pm", "fallow.worker.torchrun.restart"]
    assert under_torchrun([str(script), "--lr=1"]) == [*ours, sys.executable, str(script), "--lr=1"]
    assert under_torchrun(["sh", "-c", "x"]) == [*ours, "sh", "-c", "x"]
    for command, words in (
        (["torchrun", "train.py"], "leave --restart out"),
        ([str(tmp_path / "no.py")], "no such file"),
        (["no-such-program"], "not found"),
    ):
        with pytest.raises(FallowError, match=words):
            under_torchrun(command)
    pytest.importorskip("torch")
    import fallow

    monkeypatch.setenv("FALLOW_RESTART", "1")
    with pytest.raises(FallowError, match="without --restart"):
        fallow.init()  # a script that follows by itself


def test_a_tied_command_dies_with_its_parent_and_is_not_started_without_it() -> None:
    tied = str(ROOT / "daemon" / "fallow" / "worker" / "torchrun" / "child_process.py")
    code = (
        "import subprocess, sys, os\n"
        f"child = subprocess.Popen([sys.executable, {tied!r}, str(os.getpid()), 'sh', '-c', 'echo here; sleep 1000'],"
        " stdout=subprocess.PIPE, start_new_session=True)\n"
        "assert child.stdout.readline() == b'here\\n'\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=180)
    end = time.monotonic() + 120
    while not gone(int(done.stdout)):
        assert time.monotonic() < end
        time.sleep(0.01)
    alone = subprocess.run([sys.executable, tied, "1", "true"], timeout=180)
    assert alone.returncode == 127
