"""The wheel is whole: what people need is in it, and works outside of the source tree."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2]
SECONDS = 300


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source tree, unpacked into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    patient = {**os.environ, "PIP_RETRIES": "10", "PIP_DEFAULT_TIMEOUT": "60"}  # the build backend comes from the index
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", folder, SOURCE], check=True, timeout=SECONDS, env=patient
    )
    (wheel,) = folder.glob("fallow-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True, timeout=SECONDS, cwd=folder
    )
    return folder / "site"


@pytest.fixture
def fallow(installed: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs a command of the installed package; returns what it prints."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "PATH": f"{installed / 'bin'}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "FALLOW_STATE_DIR": str(tmp_path / "state"),
    }

    def run(*words: str) -> str:
        done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_what_people_need_is_in_the_wheel(installed: Path) -> None:
    for name in (
        "fallow/py.typed",
        "fallow_tui/py.typed",
        "fallow/examples/gpt_stdlib.py",
        "fallow/traces/README.md",
        "fallow/systemd/fallow-user.service",
        "fallow_tui/app.tcss",
        "bin/fallow-sbatch",
    ):
        assert (installed / name).is_file(), name
    assert os.access(installed / "bin" / "fallow-sbatch", os.X_OK)
    assert not list(installed.rglob("*bench*")), "benchmarks are for a checkout"


def test_the_package_alone_has_what_its_commands_need(installed: Path, fallow: Callable[..., str]) -> None:
    where = fallow(sys.executable, "-c", "import fallow; print(fallow.__file__)")
    assert Path(where.strip()).is_relative_to(installed), "it is the source tree's"
    command = [sys.executable, "-m", "fallow"]
    assert "fallow submit" in fallow("fallow-sbatch", "--help")
    unit = json.loads(fallow(*command, "service", "install", "--user", "--json"))["unit"]
    assert "ExecStart=" in Path(unit).read_text()
    played = json.loads(fallow(*command, "simulate", "--trace", "summit", "--days", "0.05", "--json"))
    assert played["policies"]
