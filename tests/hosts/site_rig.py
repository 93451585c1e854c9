"""A small Slurm site of several hosts: a controller, a login node with a head, and compute nodes; they share a home.

Two partitions: `normal` preempts `scavenge`, where harvest jobs go.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from namespaces import Namespaces

from fallow.model import Snapshot
from network import address, program_path
from slurm_training import REACT_S, Training, train_words
from waiting import wait_for

CONTROLLER, LOGIN = "ctl", "login"

_CONF = """\
ClusterName=hosts
SlurmctldHost=ctl({controller})
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
SchedulerParameters=bf_interval=1,bf_resolution=1,bf_window=1440,bf_continue,sched_interval=2,batch_sched_delay=0
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
lease_s = 10
[checkpoint]
interval_s = 0
"""
_SCRIPT = """\
#!/bin/bash
#SBATCH --partition=normal --exclusive --output={folder}/output
#FALLOW workers-per-node=1
export OMP_NUM_THREADS=1
fallow run -- {python} {train}
echo "$SLURM_JOB_ID" >> {folder}/after
"""


class Site:
    """The hosts with their Slurm, and a head on the login node. Use as a context manager.

    Args:
        nodes: number of compute nodes, named n1, n2, …

    Raises:
        NoNetworkError: in words, why hosts cannot be had here.
    """

    def __init__(self, nodes: int) -> None:
        # Below neither /tmp nor /run, of which each host has its own.
        self.folder = Path(tempfile.mkdtemp(prefix="fallow-hosts-", dir="/var/tmp"))
        self.folder.chmod(0o755)
        self.home = self.folder / "home"
        self._nodes = [f"n{index}" for index in range(1, nodes + 1)]
        environ = {
            "HOME": str(self.home),
            "USER": "root",
            "LOGNAME": "root",
            "LANG": "C.UTF-8",
            "SHELL": "/bin/bash",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "XDG_RUNTIME_DIR": "/run/user",
            "PATH": program_path(),
            "PYTHONPATH": str(Path(__file__).parents[1] / "start"),
        }
        try:
            self.hosts = Namespaces(self.folder, environ, [CONTROLLER, LOGIN, *self._nodes])
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def __enter__(self) -> "Site":
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all hosts and remove what they have written; pytest shows the story with a failure and nothing else."""
        print(self.story())
        self.hosts.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> None:
        settings = self.home / ".config" / "fallow" / "config.toml"
        settings.parent.mkdir(parents=True)
        self.home.chmod(0o700)
        settings.touch(mode=0o600)
        settings.write_text(_SETTINGS)
        addresses = {name: address(number) for number, name in enumerate(self.hosts.names)}
        for name in addresses:
            # On the login node its own name stands for loopback, as Debian's installer has it.
            seen = addresses | ({LOGIN: "127.0.1.1"} if name == LOGIN else {})
            lines = ["127.0.0.1 localhost", *(f"{at} {other}" for other, at in seen.items())]
            (self.folder / f"{name}.hosts").write_text("\n".join(lines) + "\n")
        node_lines = "\n".join(
            f"NodeName={node} NodeHostname={node} NodeAddr={addresses[node]} CPUs=2 RealMemory=2000"
            for node in self._nodes
        )
        names, controller = ",".join(self._nodes), addresses[CONTROLLER]
        conf = _CONF.format(folder=self.folder, controller=controller, nodes=node_lines, names=names)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "cgroup.conf").write_text(_CGROUP)
        (self.folder / "state").mkdir(mode=0o700)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        munge = ["--socket=/run/munge.socket", "--pid-file=/run/munge.pid", "--seed-file=/run/munge.seed"]
        munge += [f"--key-file={key}", "--num-threads=2"]
        for name in addresses:
            self.hosts.boot(name)
            self.hosts.run(name, "munged", "--force", *munge, f"--log-file={self.folder}/munge.{name}.log")
        self.hosts.run(CONTROLLER, "slurmctld", "-c")
        for node in self._nodes:
            (self.folder / f"spool.{node}").mkdir()
            wait_for(f"slurmd runs on {node}", lambda: self._start_slurmd(node), REACT_S)  # noqa: B023
        wait_for("all nodes are idle", lambda: set(self._node_states()) == {"idle"}, REACT_S)
        self._head = self.hosts.start(LOGIN, "fallow", "daemon", log=self.folder / "head.log")
        wait_for("the head answers", self._answers, REACT_S)

    def _start_slurmd(self, node: str) -> bool:
        """Start it; it writes its number down when it is in the background. The first start sometimes ends silently."""
        runs = "for _ in $(seq 100); do kill -0 $(cat /run/slurmd.pid) && exit; sleep 0.1; done; exit 1"
        try:
            self.hosts.run(node, "sh", "-c", f"slurmd -N {node}; {runs}")
        except subprocess.CalledProcessError:
            return False
        return True

    def _node_states(self) -> list[str]:
        return self.hosts.run(CONTROLLER, "sinfo", "-h", "-N", "-p", "normal", "-o", "%T").split()

    def _answers(self) -> bool:
        assert self._head.poll() is None, f"the head ended with {self._head.returncode}"
        try:
            return bool(self.status().head.pid)
        except subprocess.CalledProcessError:
            return False

    # -- what a `Training` asks ---------------------------------------------------------------------------------------

    def status(self, *run: str) -> Snapshot:
        return self.ask("status", Snapshot, *run)

    def ask(self, command: str, type_: Any, *words: str, run: str = "", limit: int = 0) -> Any:
        """The JSON that a command prints on the login node."""
        words = (command, *words, *([run] if run else []), "--json")
        return msgspec.convert(json.loads(self.hosts.run(LOGIN, "fallow", *words)), type_)

    def job_states(self) -> dict[str, str]:
        """State of each job that Slurm still knows."""
        lines = self.hosts.run(CONTROLLER, "squeue", "-h", "-a", "-t", "all", "-o", "%A %T").splitlines()
        return dict(line.split() for line in lines)

    def story(self) -> str:
        """Ends of all logs, for whoever asks why a test failed."""
        logs = [*self.folder.glob("*.log"), *self.home.glob("**/output"), *self.home.glob("**/*.out")]
        texts = ((log, log.read_text(errors="replace").strip()) for log in logs)
        return "\n".join(f"--- {log.name}\n{text[-4000:]}" for log, text in texts if text)

    def submit(self, *options: str, steps: int, pace_s: float) -> Training:
        """Submit a training with `fallow submit` on the login node."""
        folder = self.home / "training"
        folder.mkdir(mode=0o700)
        text = _SCRIPT.format(folder=folder, python=sys.executable, train=train_words(folder, steps, pace_s))
        (folder / "train.sbatch").write_text(text)
        argv = ("fallow", "submit", "--parsable", *options, "train.sbatch")
        job = self.hosts.run(LOGIN, *argv, cwd=str(folder)).strip()
        (run,) = self.status().runs
        return Training(self, folder, run.run, job, steps)
