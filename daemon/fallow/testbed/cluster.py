"""A testbed: start, look at and end a private Slurm.

    with Testbed.up(nodes=4) as testbed:
        subprocess.run(["sinfo"], env=os.environ | testbed.env())

Everything lives in one folder: configuration, logs, state, MUNGE key and socket. The daemons put themselves
into the background and outlive the process that called `up`; `Testbed.load(folder).down()` ends them.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

from fallow.model import Exit, FallowError, Struct
from fallow.testbed import registry
from fallow.testbed.conf import Layout, Profile
from fallow.testbed.daemons import logs, make_folder, start_daemons, start_slurmctld, write_files
from fallow.testbed.host import (
    check_host_name,
    clean_environment,
    find_commands,
    free_ports,
    owned_processes,
    parse_version,
    signal_all,
    wait_until,
)

UP_DEADLINE_S = 30.0
"From start to all nodes idle; measured 1 to 3 s."
COMMAND_DEADLINE_S = 5.0
_PATIENCE_S = 3.0
"With what ends in order; usually it takes a tenth of that. After it comes SIGKILL."
_MAX_NODES = 64


class TestbedStatus(Struct, frozen=True):
    """What `fallow testbed status` shows."""

    folder: str
    conf: str
    profile: str
    slurm_version: str
    nodes: dict[str, int]
    "number of nodes by state, e.g. {'idle': 7, 'mixed': 1}; empty when slurmctld does not answer"
    jobs: dict[str, int]
    "number of jobs by state, ended ones left out"
    processes: int
    up: bool
    "slurmctld answers and no node is down"
    started_at: float


class Testbed:
    """A running private Slurm. Made by `up` or `load`, never directly."""

    __test__ = False
    "pytest: this is no test class"

    def __init__(self, record: registry.Record, commands: dict[str, str]) -> None:
        self.record = record
        self.layout = _layout(record)
        self._commands = commands

    # -- making and finding -------------------------------------------------------------------------------------

    @classmethod
    def up(
        cls,
        folder: Path | None = None,
        *,
        nodes: int = 8,
        gpus: int = 4,
        profile: Profile | str = Profile.PREEMPT,
        bf_interval: int = 1,
        deadline_s: float = UP_DEADLINE_S,
    ) -> Testbed:
        """Start a testbed and wait until all its nodes are idle.

        `folder` must be new or empty; None: a fresh one under /tmp. `bf_interval` is the cycle of Slurm's
        backfill scheduler in seconds (sites have 30 and more).
        """
        profile = _check(nodes, gpus, profile, bf_interval)
        commands = find_commands()
        check_host_name()
        version = parse_version(_run_plain([commands["slurmctld"], "-V"]))
        place = make_folder(folder)
        try:
            with registry.locked():
                ports = [range(r.first_port, r.first_port + r.nodes + 1) for r in registry.records()]
                record = registry.Record(
                    folder=str(place),
                    user=_user_name(),
                    nodes=nodes,
                    gpus=gpus,
                    profile=profile.value,
                    bf_interval=bf_interval,
                    first_port=free_ports(nodes + 1, ports),
                    version=version,
                    started_at=time.time(),
                )
                registry.write_record(record)
                testbed = cls(record, commands)
                write_files(testbed.layout)
                start_daemons(testbed.layout, commands)
                testbed._wait_idle(deadline_s)
        except BaseException:
            if registry.read_record(place) is None:
                shutil.rmtree(place, ignore_errors=True)
            else:
                cls.load(place).down()
            raise
        return testbed

    @classmethod
    def load(cls, folder: Path) -> Testbed:
        """The testbed that lives in `folder`."""
        folder = folder.absolute()
        record = registry.read_record(folder)
        if record is None:
            raise FallowError(f"{folder}: no testbed here; `fallow testbed status` lists those there are", Exit.NOINPUT)
        return cls(record, find_commands())

    # -- looking ------------------------------------------------------------------------------------------------

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

    def slurm(self, *command: str, timeout_s: float = COMMAND_DEADLINE_S) -> str:
        """Standard output of one of Slurm's client commands, run on this testbed."""
        argv = [self._commands.get(command[0], command[0]), *command[1:]]
        try:
            done = subprocess.run(
                argv,
                env=clean_environment(self.conf),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise FallowError(
                f"testbed {self.folder}: {' '.join(command)} did not end within {timeout_s:g} s; "
                f"see {self.folder}/slurmctld.log",
                Exit.UNAVAILABLE,
            ) from None
        if done.returncode != 0:
            raise FallowError(
                f"testbed {self.folder}: {' '.join(command)} failed ({done.stderr.strip() or done.returncode}); "
                f"see {self.folder}/slurmctld.log",
                Exit.UNAVAILABLE,
            )
        return done.stdout

    def processes(self) -> set[int]:
        """Living processes of the testbed: daemons, job steps and their tasks."""
        return owned_processes(self.folder, self.conf)

    def daemon_pid(self, name: str) -> int:
        """Process id of `slurmctld`, of `munged`, or of a node's slurmd (`n3`), for tests that stop or kill it."""
        path = {"slurmctld": "slurmctld.pid", "munged": "munge/pid"}.get(name, f"slurmd.{name}.pid")
        try:
            return int((self.folder / path).read_text())
        except (OSError, ValueError) as error:
            raise FallowError(
                f"testbed {self.folder}: {name} is not running ({error}); take the testbed down",
                Exit.UNAVAILABLE,
            ) from error

    def restart_slurmctld(self) -> None:
        """Start slurmctld again once it has ended, for tests that killed it."""
        start_slurmctld(self.layout, self._commands)

    def status(self) -> TestbedStatus:
        """What runs now. Never fails because Slurm does not answer: then `up` is false."""
        nodes: dict[str, int] = {}
        jobs: dict[str, int] = {}
        answered = True
        try:
            for state in self.slurm("sinfo", "-h", "-N", "-p", "normal", "-o", "%T").split():
                nodes[state] = nodes.get(state, 0) + 1
            for state in self.slurm("squeue", "-h", "-a", "-r", "-o", "%T").split():
                jobs[state.lower()] = jobs.get(state.lower(), 0) + 1
        except FallowError:
            answered = False
        bad = any(state.rstrip("*").startswith(("down", "unknown", "drain")) for state in nodes)
        return TestbedStatus(
            folder=str(self.folder),
            conf=str(self.conf),
            profile=self.layout.profile.value,
            slurm_version=f"{self.layout.version[0]}.{self.layout.version[1]:02d}",
            nodes=nodes,
            jobs=jobs,
            processes=len(self.processes()),
            up=answered and bool(nodes) and not bad,
            started_at=self.record.started_at,
        )

    # -- ending -------------------------------------------------------------------------------------------------

    def down(self) -> None:
        """End all jobs and daemons and remove the folder. Leaves no process and no file; may be repeated.

        Jobs first: a slurmd that ends leaves slurmstepd and the tasks behind.
        """
        if registry.read_record(self.folder) is None:
            registry.forget(self.folder)
            return
        self._cancel_jobs()
        processes = self.processes()
        signal_all(processes, signal.SIGCONT)  # a test may have stopped one
        signal_all(processes, signal.SIGTERM)
        wait_until(lambda: not self.processes(), _PATIENCE_S)
        ended = wait_until(self._kill_all, 10.0)
        shutil.rmtree(self.folder, ignore_errors=True)
        if not ended or self.folder.exists():
            raise FallowError(
                f"testbed {self.folder}: processes {sorted(self.processes())} or files are left; "
                "end them by hand and repeat",
                Exit.OSERR,
            )
        registry.forget(self.folder)

    def _kill_all(self) -> bool:
        signal_all(left := self.processes(), signal.SIGKILL)
        return not left

    def _cancel_jobs(self) -> None:
        try:
            # steps and batch scripts at once; the state is thrown away, nobody needs the grace
            self.slurm("scancel", "--quiet", "--full", "--signal=KILL", "--state=RUNNING", timeout_s=_PATIENCE_S)
            for state in ("PENDING", "SUSPENDED", "RUNNING"):
                self.slurm("scancel", "--quiet", f"--state={state}", timeout_s=_PATIENCE_S)
            wait_until(lambda: not self.slurm("squeue", "-h", "-a", "-o", "%A").strip(), _PATIENCE_S)
        except FallowError:
            return  # slurmctld is gone or hangs; the processes are killed one by one then

    def __enter__(self) -> Testbed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def _wait_idle(self, seconds: float) -> None:
        def idle() -> bool:
            try:
                states = self.slurm("sinfo", "-h", "-N", "-p", "normal", "-o", "%T").split()
            except FallowError:
                return False
            return len(states) == self.layout.nodes and all(state == "idle" for state in states)

        if not wait_until(idle, seconds):
            raise FallowError(
                f"testbed: the nodes did not become idle within {seconds:g} s; what the daemons say:\n"
                f"{logs(self.layout)}",
                Exit.UNAVAILABLE,
            )


def _layout(record: registry.Record) -> Layout:
    return Layout(
        folder=Path(record.folder),
        user=record.user,
        nodes=record.nodes,
        gpus=record.gpus,
        profile=Profile(record.profile),
        bf_interval=record.bf_interval,
        first_port=record.first_port,
        version=record.version,
    )


def _check(nodes: int, gpus: int, profile: Profile | str, bf_interval: int) -> Profile:
    if not 1 <= nodes <= _MAX_NODES or not 0 <= gpus <= 16 or not 1 <= bf_interval <= 600:
        raise FallowError(
            f"testbed: nodes={nodes} gpus={gpus} bf_interval={bf_interval} is out of range; "
            f"use 1 to {_MAX_NODES} nodes, 0 to 16 gpus, bf_interval 1 to 600",
            Exit.USAGE,
        )
    try:
        return Profile(profile)
    except ValueError:
        known = ", ".join(Profile)
        raise FallowError(f"testbed: unknown profile {profile!r}; choose one of {known}", Exit.USAGE) from None


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise FallowError(
            f"testbed: uid {os.getuid()} has no entry in /etc/passwd, and Slurm asks for a user name; add one",
            Exit.CONFIG,
        ) from None


def _run_plain(argv: list[str]) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout + done.stderr
