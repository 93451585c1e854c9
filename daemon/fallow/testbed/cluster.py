"""A testbed: start, look at and end a private Slurm.

    with Testbed.up(nodes=4) as testbed:
        subprocess.run(["sinfo"], env=os.environ | testbed.env())

Everything lives in one folder: configuration, logs, state, MUNGE key and socket. The daemons put themselves
into the background and outlive the process that called `up`; `Testbed.find(folder).down()` ends them.
"""

import os
import pwd
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

import msgspec

from fallow.model import Exit, FallowError, Struct
from fallow.testbed import registry
from fallow.testbed.conf import NODES, PARTITION, Layout, Profile
from fallow.testbed.daemons import logs, make_folder, spawn, start_daemons, write_files
from fallow.testbed.host import (
    check_commands,
    check_host_name,
    clean_environment,
    owned_processes,
    reserved_ports,
    signal_all,
    slurm_version,
    wait_until,
)

UP_DEADLINE_S = 120.0
"From start to all nodes idle; measured 1 to 3 s. A busy machine may need ten times as long."
COMMAND_DEADLINE_S = 60.0
"Slurm's commands give up by themselves sooner where slurmctld does not answer."
_KILL_DEADLINE_S = 60.0


class TestbedStatus(Struct, frozen=True):
    """What `fallow testbed status` shows."""

    folder: str
    conf: str
    profile: Profile
    slurm_version: str
    nodes: dict[str, int]
    "number of nodes by state, e.g. {'idle': 7, 'mixed': 1}; empty when slurmctld does not answer"
    jobs: dict[str, int]
    "number of jobs by state, without ended jobs"
    up: bool
    "slurmctld answers and no node is down"


class Testbed:
    """A running private Slurm. Made by `up` or `find`, never directly."""

    __test__ = False
    "pytest: this is no test class"

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    # -- construction --------------------------------------------------------------------------------------------

    @classmethod
    def up(cls, folder: Path | None = None, **options: Any) -> Self:
        """Start a testbed and wait until all its nodes are idle, a few seconds at most.

        Args:
            folder: must be new or empty; None: a fresh one under /tmp.
            options: fields of `Layout` that have defaults.

        Raises:
            FallowError: packages are missing, the folder is in use, or daemons do not come up (with their logs' ends).
        """
        check_commands()
        check_host_name()
        user, version = _user_name(), slurm_version()
        with reserved_ports(options.get("nodes", NODES) + 1) as first_port:
            required: dict[str, Any] = {"place": str(make_folder(folder)), "user": user, "first_port": first_port}
            layout = msgspec.convert({**required, "version": version, "started_at": time.time(), **options}, Layout)
            registry.remember(layout)
            testbed = cls(layout)
            try:
                write_files(layout)
                start_daemons(layout)
                testbed._wait_idle()
            except BaseException:
                testbed.down()
                raise
        return testbed

    @classmethod
    def find(cls, folder: Path | None = None) -> Self:
        """The testbed that lives in `folder`. Without a folder there must be exactly one."""
        if folder is not None:
            layout = registry.read_layout(folder.absolute())
            if layout is None:
                raise FallowError(
                    f"{folder}: no testbed here; `fallow testbed status` lists the testbeds", Exit.NOINPUT
                )
            return cls(layout)
        testbeds = cls.all()
        if not testbeds:
            raise FallowError("there is no testbed; start one with `fallow testbed up`", Exit.NOINPUT)
        if len(testbeds) > 1:
            names = ", ".join(str(testbed.folder) for testbed in testbeds)
            raise FallowError(f"there are several testbeds ({names}); name the folder", Exit.USAGE)
        return testbeds[0]

    @classmethod
    def all(cls) -> list[Self]:
        """All testbeds of this user on this host, oldest first."""
        return [cls(layout) for layout in registry.layouts()]

    # -- queries ------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.layout.folder

    @property
    def conf(self) -> Path:
        """Path of slurm.conf."""
        return self.layout.conf

    def env(self) -> dict[str, str]:
        """What to add to the environment so that Slurm's commands and libraries use this testbed."""
        return {"SLURM_CONF": str(self.conf)}

    def slurm(self, *command: str) -> str:
        """Standard output of one of Slurm's client commands, run on this testbed."""
        try:
            process = subprocess.run(
                command,
                env=clean_environment(self.conf),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_DEADLINE_S,
                check=False,
            )
            problem = f"failed ({process.stderr.strip() or process.returncode})" if process.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"did not end within {COMMAND_DEADLINE_S:g} s"
        if problem:
            raise FallowError(
                f"testbed {self.folder}: {' '.join(command)} {problem}; see {self.folder}/slurmctld.log",
                Exit.UNAVAILABLE,
            )
        return process.stdout

    def processes(self) -> set[int]:
        """Living processes of the testbed: daemons, job steps and their tasks."""
        return owned_processes(self.folder, self.conf)

    def daemon_pid(self, name: str) -> int:
        """Process id of `slurmctld`, of `munged`, or of a node's slurmd (`n3`), for tests that stop or kill it."""
        path = {"slurmctld": "slurmctld.pid", "munged": "munge/pid"}.get(name, f"slurmd.{name}.pid")
        return int((self.folder / path).read_text())

    def restart_slurmctld(self) -> None:
        """Start slurmctld again once it has ended, for tests that killed it; returns when it answers."""
        spawn(self.layout, ["slurmctld"])  # with the state that it saved
        wait_until(lambda: self.status().up, UP_DEADLINE_S)

    def status(self) -> TestbedStatus:
        """Numbers of nodes and jobs now. If Slurm does not answer, `up` is false, and nothing is raised."""
        nodes, jobs = Counter[str](), Counter[str]()
        try:
            nodes.update(self._node_states())
            jobs.update(self.slurm("squeue", "-h", "-a", "-r", "-o", "%T").lower().split())
            has_bad_nodes = any(state.startswith(("down", "unknown", "drain")) for state in nodes)
        except FallowError:
            has_bad_nodes = True
        return TestbedStatus(
            folder=str(self.folder),
            conf=str(self.conf),
            profile=self.layout.profile,
            slurm_version=f"{self.layout.version[0]}.{self.layout.version[1]:02d}",
            nodes=dict(nodes),
            jobs=dict(jobs),
            up=not has_bad_nodes and bool(nodes),
        )

    # -- the end -------------------------------------------------------------------------------------------------

    def down(self) -> None:
        """End all jobs and daemons and remove the folder. Leaves no process and no file; may be repeated.

        Kills all processes: their state is thrown away, so they need no time to end in order.
        """
        if registry.read_layout(self.folder) is None:
            registry.forget(self.folder)
            return
        has_ended = wait_until(self._kill_all, _KILL_DEADLINE_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        if not has_ended or self.folder.exists():
            raise FallowError(
                f"testbed {self.folder}: processes {sorted(self.processes())} or files remain; "
                "remove them by hand and repeat",
                Exit.OSERR,
            )
        registry.forget(self.folder)

    def _kill_all(self) -> bool:
        signal_all(pids := self.processes(), signal.SIGKILL)
        return not pids

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def _node_states(self) -> list[str]:
        return self.slurm("sinfo", "-h", "-N", "-p", PARTITION, "-o", "%T").split()

    def _wait_idle(self) -> None:
        def are_idle() -> bool:
            try:
                return self._node_states() == ["idle"] * self.layout.nodes
            except FallowError:
                return False

        if not wait_until(are_idle, UP_DEADLINE_S):
            raise FallowError(
                f"testbed: the nodes did not become idle within {UP_DEADLINE_S:g} s; what the daemons say:\n"
                f"{logs(self.layout)}",
                Exit.UNAVAILABLE,
            )


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise FallowError(
            f"testbed: uid {os.getuid()} has no entry in /etc/passwd, and Slurm asks for a user name; add one",
            Exit.CONFIG,
        ) from None
