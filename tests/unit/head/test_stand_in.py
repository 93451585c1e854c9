"""When an agent starts a head, with which environment, and how that head ends."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fallow.agent.stand_in import RETRY_S, TURN_S, StandIn, head_environment
from fallow.config import Config, HeadSection, Membership
from fallow.files import Paths, private_dir, write_struct
from fallow.head.main import FILES, allow_connections, main, serving_alone
from fallow.head.stand_in import former_config
from fallow.model import Exit, FallowError, HeadFile

WAITS = "import sys; open(sys.argv[1], 'w').write('up'); sys.stdin.read()"
FAILS = "import sys; sys.exit('another head serves it')"


def made(tmp_path: Path, code: str, **environ: str) -> StandIn:
    command = (sys.executable, "-c", code)
    return StandIn(tmp_path, str(tmp_path / "started"), 600.0, tmp_path / "head.log", environ, command)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("place", "silent_s"), [("0", 600.0), ("2", 600.0 + 2 * TURN_S)])
def test_a_head_is_started_when_none_was_heard_for_long_enough(tmp_path: Path, place: str, silent_s: float) -> None:
    stand_in = made(tmp_path, WAITS, SLURM_PROCID=place)
    log = tmp_path / "head.log"
    stand_in.tend(1.0, silent_s - 1.0)
    assert not log.exists()
    stand_in.tend(2.0, silent_s)
    until((tmp_path / "started").exists)
    assert log.stat().st_mode & 0o777 == 0o600
    stand_in.stop()


def test_a_head_that_cannot_serve_is_tried_again_ever_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: object, **options: object) -> subprocess.Popen[bytes]:
        starts.append(popen(*args, **options))  # type: ignore[call-overload]
        return starts[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    stand_in = made(tmp_path, FAILS)
    log = tmp_path / "head.log"
    times = []
    for now in range(600):
        before = len(starts)
        stand_in.tend(float(now), 600.0)
        if len(starts) > before:
            times.append(now)
            starts[-1].wait(120)
    # The end is seen a second after the start; then the wait begins.
    waits = [after - before - 1 for before, after in itertools.pairwise(times)]
    assert waits[:5] == [5, 10, 20, 40, 60]
    assert set(waits[4:]) == {RETRY_S[1]}
    assert caplog.text.count(f"the stand-in head has ended with 1: another head serves it; its log: {log}") == 1


def test_a_head_that_cannot_even_be_started_is_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python = tmp_path / "python"
    command = (str(python), "-c", WAITS)
    stand_in = StandIn(tmp_path, str(tmp_path / "started"), 600.0, tmp_path / "head.log", {}, command)
    stand_in.tend(1.0, 600.0)
    assert f"cannot be started: [Errno 2] No such file or directory: '{python}'" in caplog.text
    python.symlink_to(sys.executable)  # the file system is back
    stand_in.tend(RETRY_S[0], 600.0)
    assert not (tmp_path / "started").exists()
    stand_in.tend(1.0 + RETRY_S[0], 600.0)
    until((tmp_path / "started").exists)
    stand_in.stop()


def test_a_head_inside_of_a_job_has_nothing_of_the_job_in_its_environment() -> None:
    job = {
        "SLURM_JOB_ID": "7",
        "SBATCH_QOS": "q",
        "SRUN_CPUS_PER_TASK": "2",
        "FALLOW_TOKEN": "t",
        "FALLOW_HEAD__ADDRESS": "10.0.0.1",
        "CUDA_VISIBLE_DEVICES": "0",
        "NOTIFY_SOCKET": "/run/x",
    }
    kept = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "HOME": "/home/ada"}
    assert head_environment({**job, **kept}) == kept


def test_a_stand_in_head_has_the_configuration_of_the_head_before_it(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "state", tmp_path / "run").create()
    with pytest.raises(FallowError, match=r"head-config\.json: missing; start a head with `fallow daemon`") as caught:
        former_config(paths, "10.0.0.7")
    assert caught.value.code is Exit.NOINPUT
    former = Config(
        head=HeadSection(address="10.0.0.1", port=4711, redis_url="redis://r", prometheus_port=9000),
        membership=Membership(head_patience_s=7.0),
    )
    write_struct(paths.head_config, former)
    config = former_config(paths, "10.0.0.7")
    assert config.head == HeadSection(address="10.0.0.7", redis_url="redis://r")
    assert msgspec.structs.replace(config, head=former.head) == former


def head_file(*, stand_in: bool) -> HeadFile:
    where = {"host": "n1", "pid": 1, "endpoint": "tcp://10.0.0.7:1", "control": "/c"}
    return HeadFile(version="1", term=1, public_key="k" * 40, started_at=0.0, stand_in=stand_in, **where)


def test_a_head_that_starts_asks_a_stand_in_head_to_give_way_and_no_other(tmp_path: Path) -> None:
    paths = Paths(private_dir(tmp_path / "state"), private_dir(tmp_path / "run")).create()
    write_struct(paths.head_file, head_file(stand_in=False))
    with serving_alone(paths):
        with (
            pytest.raises(FallowError, match=rf"another head \(pid {os.getpid()} on ") as caught,
            serving_alone(paths, wait_s=60.0),
        ):
            pass
        assert caught.value.code is Exit.CANTCREAT, "systemd does not"
        assert not paths.head_wanted.exists()
        write_struct(paths.head_file, head_file(stand_in=True))
        with (
            pytest.raises(FallowError, match=r"stand-in head does not end") as caught,
            serving_alone(paths, wait_s=1.0),
        ):
            pass
        assert caught.value.code is Exit.TEMPFAIL, "systemd starts the head again"
        assert paths.head_wanted.exists()
    with serving_alone(paths, wait_s=60.0):
        assert not paths.head_wanted.exists()


@pytest.mark.parametrize("missing", ["state", "head.lease.1"])
def test_a_head_whose_folder_is_not_there_yet_is_started_again(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code 73 says that another head serves: systemd does not start a head again after it."""
    mount = tmp_path / "mount"
    monkeypatch.setenv("FALLOW_STATE_DIR", str(mount / "state"))
    monkeypatch.setenv("FALLOW_SLURM__CLIENT", "none")
    if missing == "state":
        mount.write_text("")
    else:
        (private_dir(mount / "state") / missing).mkdir()
    with pytest.raises(FallowError) as caught:
        main()
    assert caught.value.message.startswith(str(mount / "state"))
    assert caught.value.code is Exit.TEMPFAIL


def test_a_log_on_a_full_disk_costs_its_lines_only() -> None:
    code = """
import structlog
from fallow.head.main import set_up_logging
set_up_logging()
structlog.get_logger("test").warning("something")
print("goes on", flush=True)
"""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, timeout=180, check=False
        )
    assert done.stdout == b"goes on\n"


def test_a_head_may_open_as_many_files_as_the_site_lets_it() -> None:
    """With the usual 1024 a stranger who opens as many connections keeps it from opening any file."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(FILES, before[1]), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
