"""A small Slurm site of several hosts: a controller, a login node and compute nodes, with a shared home folder.

Every host has an address in 10.77.0.0/24. The login node sees the shared home through a file server that can hang, as
NFS does. Two partitions: `normal` preempts `scavenge`, where harvest jobs go.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from namespaces import SFTP_SERVER, Namespaces, program_path

T = TypeVar("T")

CONTROLLER, LOGIN = "ctl", "login"
ADDRESSES = {CONTROLLER: "10.77.0.2", LOGIN: "10.77.0.3"}
START_S = 240.0
"""From a submission to members on all nodes, on a loaded machine."""
REACT_S = 150.0
TRAINING = Path(__file__).resolve().parents[1] / "e2e" / "slurm_train.py"
GLOBAL_BATCH = 16

_CONF = """\
ClusterName=hosts
SlurmctldHost=ctl(10.77.0.2)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket,cred_expire=5
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SchedulerType=sched/backfill
PriorityType=priority/basic
SchedulerParameters=bf_interval=1,bf_resolution=1,bf_window=1440,bf_continue,sched_interval=2,batch_sched_delay=0
KillWait=5
MinJobAge=300
SlurmctldTimeout=30
SlurmdTimeout=20
MessageTimeout=10
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=normal Nodes={names} MaxTime=1-00:00:00 DefaultTime=30 State=UP Default=YES PriorityTier=10
PartitionName=scavenge Nodes={names} MaxTime=1-00:00:00 DefaultTime=30 State=UP PriorityTier=1 PreemptMode=REQUEUE \
GraceTime=10
"""
_CGROUP = "IgnoreSystemd=yes\nConstrainCores=no\nConstrainRAMSpace=no\nConstrainDevices=no\n"
_SETTINGS = """\
[slurm]
poll_interval_s = 1
queries_per_min = 600
[membership]
beat_s = 0.2
lease_s = 4
release_margin_s = 10
[checkpoint]
interval_s = 0
"""
_SCRIPT = """\
#!/bin/bash
#SBATCH --partition=normal --exclusive --output={output}
#FALLOW workers-per-node=1
export OMP_NUM_THREADS=1
fallow run -- {python} {training} {folder} {steps} {pace}
echo "$SLURM_JOB_ID" >> {folder}/after
"""


class Site:
    """The hosts with their Slurm. Use as a context manager.

    Args:
        nodes: number of compute nodes, named n1, n2, …

    Raises:
        NoHostsError: in words, why hosts cannot be had here.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = [f"n{index}" for index in range(1, nodes + 1)]
        # Below neither /tmp nor /run, of which each host has its own.
        self.folder = Path(tempfile.mkdtemp(prefix="fallow-hosts-", dir="/var/tmp"))
        self.folder.chmod(0o755)
        self.home = self.folder / "home"
        environ = {
            "HOME": str(self.home),
            "USER": "root",
            "LOGNAME": "root",
            "LANG": "C.UTF-8",
            "SHELL": "/bin/bash",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "XDG_RUNTIME_DIR": "/run/user",
            "PATH": program_path(),
        }
        self._file_server: subprocess.Popen[bytes] | None = None
        self._file_client: subprocess.Popen[bytes] | None = None
        self.spared: frozenset[int] = frozenset()
        "processes of the login node that are not the head's"
        try:
            self.hosts = Namespaces(self.folder, environ)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def __enter__(self) -> Site:
        try:
            self._open()
        except BaseException:
            print(self.story())
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts and remove what they have written."""
        self.file_server_goes_on()
        self.hosts.close()
        for process in (self._file_client, self._file_server):
            if process is not None:
                process.kill()
                process.wait(timeout=180)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> None:
        (self.home / ".config" / "fallow").mkdir(parents=True)
        self.home.chmod(0o700)
        file = self.home / ".config" / "fallow" / "config.toml"
        file.touch(mode=0o600)
        file.write_text(_SETTINGS)
        addresses = ADDRESSES | {node: f"10.77.0.{10 + int(node[1:])}" for node in self.nodes}
        for name in addresses:
            # On the login node its own name stands for loopback, as Debian's installer has it.
            seen = addresses | ({LOGIN: "127.0.1.1"} if name == LOGIN else {})
            lines = ["127.0.0.1 localhost", *(f"{address} {other}" for other, address in seen.items())]
            (self.folder / f"{name}.hosts").write_text("\n".join(lines) + "\n")
        node_lines = "\n".join(
            f"NodeName={node} NodeHostname={node} NodeAddr={addresses[node]} CPUs=2 RealMemory=2000"
            for node in self.nodes
        )
        conf = _CONF.format(folder=self.folder, nodes=node_lines, names=",".join(self.nodes))
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "cgroup.conf").write_text(_CGROUP)
        (self.folder / "state").mkdir(mode=0o700)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        for name in (CONTROLLER, LOGIN):
            self.hosts.add(name, ADDRESSES[name])
            self._start_munge(name)
        self.hosts.run(CONTROLLER, "slurmctld", "-c")
        for node in self.nodes:
            self.boot(node)
        self._mount_home_on_login()
        self.spared = frozenset(self.hosts.processes(LOGIN))
        self.wait_for("all nodes are idle", lambda: set(self._node_states()) == {"idle"}, REACT_S)

    def _start_munge(self, name: str) -> None:
        files = ["--socket=/run/munge.socket", "--pid-file=/run/munge.pid", "--seed-file=/run/munge.seed"]
        more = [f"--key-file={self.folder}/munge.key", f"--log-file={self.folder}/munge.{name}.log", "--num-threads=2"]
        self.hosts.run(name, "munged", "--force", *files, *more)

    def boot(self, node: str) -> None:
        """Boot a compute node. The first start of slurmd sometimes ends silently, so it is tried more than once."""
        self.hosts.add(node, f"10.77.0.{10 + int(node[1:])}")
        self._start_munge(node)
        (self.folder / f"spool.{node}").mkdir(exist_ok=True)

        def running() -> bool:
            if any(line.startswith("slurmd") for line in self.hosts.processes(node).values()):
                return True
            self.hosts.run(node, "slurmd", "-N", node)
            return False

        self.wait_for(f"slurmd runs on {node}", running, REACT_S)

    def _mount_home_on_login(self) -> None:
        """The login node's view of the home folder goes through a server process that can be stopped."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._file_server = subprocess.Popen([SFTP_SERVER], stdin=ours, stdout=ours, stderr=subprocess.DEVNULL)
            options = "passive,dir_cache=no,allow_other,attr_timeout=0,entry_timeout=0"
            argv = self.hosts.inside(LOGIN, ("sshfs", f"files:{self.home}", str(self.home), "-f", "-o", options))
            self._file_client = subprocess.Popen(
                argv, env=self.hosts.environ, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL
            )
        self.wait_for("the login node has mounted the home folder", self._home_is_mounted, REACT_S)

    def _home_is_mounted(self) -> bool:
        return f" {self.home} fuse.sshfs " in self.hosts.run(LOGIN, "cat", "/proc/mounts")

    def file_server_hangs(self) -> None:
        """Whatever touches the home folder on the login node waits from now on."""
        assert self._file_server is not None
        os.kill(self._file_server.pid, signal.SIGSTOP)

    def file_server_goes_on(self) -> None:
        """Undo `file_server_hangs`."""
        if self._file_server is not None:
            os.kill(self._file_server.pid, signal.SIGCONT)

    # -- Slurm ------------------------------------------------------------------------------------------------------

    def slurm(self, *argv: str) -> str:
        """Standard output of a Slurm command, given on the controller."""
        return self.hosts.run(CONTROLLER, *argv)

    def _node_states(self) -> list[str]:
        return self.slurm("sinfo", "-h", "-N", "-p", "normal", "-o", "%T").split()

    def job_states(self) -> dict[str, str]:
        """State of each job that Slurm still knows."""
        return dict(line.split() for line in self.slurm("squeue", "-h", "-a", "-t", "all", "-o", "%A %T").splitlines())

    def live_jobs(self) -> list[str]:
        return self.slurm("squeue", "-h", "-o", "%A").split()

    # -- the head and its runs ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def head(self) -> Iterator[Head]:
        """A head on the login node; in the end its runs and jobs are gone, and so is its state."""
        head = Head(self)
        try:
            head.start()
            yield head
        finally:
            self.file_server_goes_on()
            # pytest shows it with a failure and with nothing else.
            print(self.story())
            head.close()
            self._clear()

    def _clear(self) -> None:
        for job in self.live_jobs():
            self.slurm("scancel", job)
        self.wait_for("no job is left", lambda: not self.live_jobs(), REACT_S)
        shutil.rmtree(self.home / ".local", ignore_errors=True)

    def wait_for(self, what: str, condition: Callable[[], T], seconds: float) -> T:
        """The first true answer of `condition`.

        Raises:
            AssertionError: there was none within so many seconds.
        """
        deadline = time.monotonic() + seconds
        while not (answer := condition()):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
            time.sleep(0.1)
        return answer

    def story(self) -> str:
        """Ends of all logs, for whoever asks why a test failed."""
        parts = []
        logs = [*self.folder.glob("*.log"), *self.folder.glob("training*.out")]
        logs += (self.home / ".local").glob("**/*.out")
        for log in logs:
            text = log.read_text(errors="replace").strip() if log.exists() else ""
            if text:
                parts.append(f"--- {log.name}\n{text[-4000:]}")
        return "\n".join(parts)


class Head:
    """A head on the site's login node, and what a user does there."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0

    def start(self) -> None:
        """Start the daemon and wait until it answers."""
        log = self.site.folder / "head.log"
        self._process = self.site.hosts.start(LOGIN, "fallow", "daemon", log=log)

        def answers() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, f"the head ended with {self._process.returncode}"
            with contextlib.suppress(subprocess.CalledProcessError):
                return bool(self.fallow("status"))
            return False

        self.site.wait_for("the head answers", answers, REACT_S)

    def port(self) -> int:
        """The TCP port on which agents and workers reach the head."""
        file = self.site.home / ".local" / "state" / "fallow" / "head.json"
        return int(json.loads(file.read_text())["endpoint"].rsplit(":", 1)[1])

    def close(self) -> None:
        """End the daemon and its store."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=180)
        for pid in self.site.hosts.processes(LOGIN):
            if pid not in self.site.spared:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def fallow(self, *argv: str) -> Any:
        """The JSON that a command prints on the login node."""
        return json.loads(self.site.hosts.run(LOGIN, "fallow", *argv, "--json"))

    def submit(self, *options: str, steps: int = 400, pace_s: float = 0.1) -> Training:
        """Submit a training with `fallow submit` on the login node."""
        self._count += 1
        folder = self.site.home / f"training{self._count}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        script = folder / "train.sbatch"
        text = _SCRIPT.format(
            output=self.site.folder / f"training{self._count}.out",
            python=sys.executable,
            training=TRAINING,
            folder=folder,
            steps=steps,
            pace=pace_s,
        )
        script.write_text(text)
        argv = ("fallow", "submit", "--parsable", *options, str(script))
        job = self.site.hosts.run(LOGIN, *argv, cwd=str(folder)).strip()
        run = next(
            view["run"]
            for view in self.fallow("status")["runs"]
            if any(allocation["job_id"] == job for allocation in view["allocations"])
        )
        return Training(self, folder, run, job, steps, pace_s)


class Training:
    """A submitted run."""

    def __init__(self, head: Head, folder: Path, run: str, job: str, steps: int, pace_s: float) -> None:
        self.head, self.folder, self.run, self.job = head, folder, run, job
        self.steps, self.pace_s = steps, pace_s

    def view(self) -> dict[str, Any]:
        found: dict[str, Any] = self.head.fallow("status", self.run)["runs"][0]
        return found

    def member_nodes(self) -> list[str]:
        """Nodes of the current generation by rank, once no change is under way."""
        view = self.view()
        members = [member for member in view["members"] if member["rank"] is not None]
        if view.get("change") is not None or any(member["phase"] != "member" for member in members):
            return []
        return [member["node"] for member in sorted(members, key=lambda member: member["rank"])]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.head.fallow("events", self.run)
        return [event for event in found if event["kind"] in kinds]

    def step(self) -> int:
        """The newest step that any member has begun, read from what the members write."""
        newest = -1
        for path in self.folder.glob("*.steps"):
            lines = path.read_text().rpartition("\n")[0].splitlines()
            newest = max(newest, int(lines[-1].split()[1]) if lines else -1)
        return newest

    def wait_for(self, what: str, condition: Callable[[], T], seconds: float = REACT_S) -> T:
        return self.head.site.wait_for(f"run {self.run}: {what}", condition, seconds)

    def wait_members(self, count: int) -> list[str]:
        """Wait for exactly so many members; returns their nodes by rank."""

        def settled() -> list[str]:
            nodes = self.member_nodes()
            return nodes if len(nodes) == count else []

        return self.wait_for(f"{count} members", settled, START_S)

    def wait_paced(self, seconds: float) -> None:
        """Let the training go on for that long by its own measure: every step takes its pace at least."""
        self.wait_steps(math.ceil(seconds / self.pace_s))

    def wait_steps(self, count: int = 5) -> None:
        """Wait until the training has gone on by so many steps."""
        start = self.step()
        seconds = REACT_S + 2 * count * self.pace_s
        self.wait_for(f"{count} steps after step {start}", lambda: self.step() >= start + count, seconds)

    def finish(self) -> dict[str, Any]:
        """Let the training run to its end; every sample was used once."""
        (self.folder / "hurry").touch()
        self.wait_for("the end", lambda: self.view()["status"] == "finished", START_S)
        report: dict[str, Any] = self.head.fallow("report", self.run)
        samples = report["samples"]
        assert (samples["consumed"], samples["lost"], samples["duplicated"]) == (self.steps * GLOBAL_BATCH, 0, 0)
        assert report["steps"] == self.steps
        return report
