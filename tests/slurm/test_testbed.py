"""The testbed itself: it comes up, plays the sites it says it plays, and leaves nothing behind."""

import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fallow.cli.main import invoke
from fallow.model import FallowError
from fallow.testbed import registry
from fallow.testbed.cluster import Testbed
from fallow.testbed.conf import GRACE_S
from fallow.testbed.host import check_commands, owned_processes
from slurm_training import REACT_S
from waiting import wait_for

pytestmark = pytest.mark.slurm
MakeTestbed = Callable[..., Testbed]
# Lengths of sleep that no other test session on this host uses, to know our jobs' processes by.
NAPS = [str(100_000 + 10 * os.getpid() + index) for index in range(4)]


def sbatch(testbed: Testbed, script: str, *options: str) -> str:
    process = subprocess.run(
        ["sbatch", "--parsable", "--output=/dev/null", *options],
        input=script,
        env={"PATH": os.environ["PATH"], **testbed.env()},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout.strip()


def state_of(testbed: Testbed, job_id: str) -> str:
    return testbed.slurm("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T").strip()


def test_up_and_down_leaves_no_process_and_no_file(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(nodes=3)
    status = testbed.status()
    assert status.up and status.nodes == {"idle": 3} and status.jobs == {}
    # a job whose task ignores SIGTERM, one of its children with no environment, and an orphan
    script = (
        f"#!/bin/sh\ntrap '' TERM\nsetsid sleep {NAPS[0]} &\n"
        f"srun --ntasks=1 sh -c 'trap \"\" TERM; env -i sleep {NAPS[1]}; :'\n"
    )
    job_id = sbatch(testbed, script, "--nodes=1")
    wait_for("its processes run", lambda: _sleepers() >= set(NAPS[:2]), REACT_S)
    assert state_of(testbed, job_id) == "RUNNING"
    assert testbed.status().jobs == {"running": 1}
    with subprocess.Popen(["sleep", NAPS[3]], env={"PATH": os.environ["PATH"], **testbed.env()}) as looker:
        testbed.down()
        assert looker.poll() is None, "a shell that only looks at the testbed is left alone"
        looker.kill()
    assert not testbed.folder.exists()
    assert owned_processes(testbed.folder, testbed.conf) == set()
    assert not _sleepers() & set(NAPS[:2])
    assert registry.layouts() == []
    testbed.down()


def test_down_of_a_testbed_whose_controller_is_gone_or_hangs(make_testbed: MakeTestbed) -> None:
    first, second = make_testbed(nodes=1), make_testbed(nodes=1)
    sbatch(first, f"#!/bin/sh\nexec sleep {NAPS[2]}\n")
    wait_for("its process runs", lambda: NAPS[2] in _sleepers(), REACT_S)
    os.kill(first.daemon_pid("slurmctld"), signal.SIGKILL)
    os.kill(second.daemon_pid("slurmctld"), signal.SIGSTOP)
    first.down()
    second.down()
    assert NAPS[2] not in _sleepers() and registry.layouts() == []


def test_three_side_by_side_each_of_its_profile(make_testbed: MakeTestbed) -> None:
    profiles = {
        "plain": {"normal": ("1", "OFF", "0")},
        "nograce": {"normal": ("10", "REQUEUE", "0"), "scavenge": ("1", "REQUEUE", "0")},
        "preempt": {"normal": ("10", "REQUEUE", "0"), "scavenge": ("1", "REQUEUE", str(GRACE_S))},
    }
    testbeds = [make_testbed(nodes=n, gpus=n, profile=name, bf_interval=30) for n, name in enumerate(profiles, 1)]
    ports = [range(t.layout.first_port, t.layout.first_port + t.layout.nodes + 1) for t in testbeds]
    assert len({port for each in ports for port in each}) == sum(map(len, ports))
    assert [testbed.folder for testbed in Testbed.all()] == [testbed.folder for testbed in testbeds]
    for testbed, partitions in zip(testbeds, profiles.values(), strict=True):
        shown_partitions = {}
        for line in testbed.slurm("scontrol", "-o", "show", "partition").splitlines():
            values = dict(word.partition("=")[::2] for word in line.split())
            shown_partitions[values["PartitionName"]] = (
                values["PriorityTier"],
                values["PreemptMode"],
                values["GraceTime"],
            )
        assert shown_partitions == partitions
        assert "bf_interval=30" in testbed.slurm("scontrol", "show", "config")
    job = sbatch(testbeds[1], "#!/bin/sh\nexec sleep 600\n")
    wait_for("the job runs", lambda: state_of(testbeds[1], job) == "RUNNING", REACT_S)
    with pytest.raises(FallowError, match="several"):
        Testbed.find()
    Testbed.find(testbeds[0].folder).down()
    assert state_of(testbeds[1], job) == "RUNNING"
    assert invoke(["testbed", "down", "--all"]) == 0
    assert Testbed.all() == []


def test_errors_say_what_to_do(make_testbed: MakeTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not in pytest's folder, whose path may be too long itself.
    with tempfile.TemporaryDirectory(dir="/tmp") as full:
        Path(full, "file").touch()
        with pytest.raises(FallowError, match="not empty"):
            Testbed.up(Path(full))
    with pytest.raises(FallowError, match="too long"):
        Testbed.up(Path("/tmp") / ("x" * 80))
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(FallowError, match="/etc/hosts"):
        Testbed.up()
    monkeypatch.undo()
    monkeypatch.setattr("fallow.testbed.host._SBIN", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FallowError, match=r"apt-get install .*munge .*slurm-client .*slurmctld"):
        check_commands()


def test_a_failed_start_shows_the_logs_and_leaves_nothing(
    make_testbed: MakeTestbed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fallow.testbed.daemons.slurm_conf", lambda layout: "ClusterName=broken\nNonsense=1\n")
    folder = Path(tempfile.mkdtemp(prefix="fallow-"))
    with pytest.raises(FallowError, match=r"(?s)slurmctld.*Nonsense"):
        Testbed.up(folder)
    assert not folder.exists() and registry.layouts() == []
    assert owned_processes(folder, folder / "slurm.conf") == set()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which only root can")
def test_an_ordinary_user_has_a_testbed_of_their_own() -> None:
    nobody = pwd.getpwnam("nobody")
    code = (
        "from fallow.testbed.cluster import Testbed\n"
        "with Testbed.up(nodes=1) as testbed:\n"
        "    testbed.slurm('sbatch', '--parsable', '--output=/dev/null', '--chdir=/tmp', '--wrap=true')\n"
        "    while testbed.slurm('squeue', '-h', '-t', 'all', '-o', '%T %u').split() != ['COMPLETED', 'nobody']:\n"
        "        pass\n"
        "print(testbed.folder.exists())\n"
    )
    with tempfile.TemporaryDirectory(prefix="fallow-") as place:
        os.chown(place, nobody.pw_uid, nobody.pw_gid)
        python = _python_for_all(nobody)
        environ = {
            "PATH": "/usr/bin:/bin",  # the caller's may lead through folders that are closed to others
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if "packages" in path or "daemon" in path),
            "FALLOW_STATE_DIR": f"{place}/state",
            "HOME": place,
        }
        probe = [python, "-c", "import fallow.testbed.cluster"]
        if subprocess.run(probe, env=environ, cwd="/tmp", capture_output=True, check=False, **_as(nobody)).returncode:
            pytest.skip("this checkout or its environment lies in a folder that is closed to other users")
        process = subprocess.run(
            [python, "-c", code],
            env=environ,
            cwd="/tmp",
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            **_as(nobody),
        )
    assert process.stdout.split() == ["False"], process.stderr


def _as(user: pwd.struct_passwd) -> dict[str, Any]:
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _python_for_all(user: pwd.struct_passwd) -> str:
    """A Python of our version that another user can run: ours may lie below a closed home folder."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable, f"/usr/local/bin/python{version}", f"/usr/bin/python{version}"):
        try:
            subprocess.run([path, "-c", ""], cwd="/tmp", env={}, check=True, capture_output=True, **_as(user))
        except (OSError, subprocess.CalledProcessError):
            continue
        return path
    pytest.skip(f"no Python {version} here that other users can run")


def _sleepers() -> set[str]:
    """Arguments of all living `sleep` processes."""
    listed = subprocess.run(["ps", "-eo", "state=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return {row[2] for row in rows if len(row) == 3 and row[1] == "sleep" and row[0] != "Z"}
