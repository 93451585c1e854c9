"""Run one training under a private head, and carry out each item of a schedule at its step."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import msgspec

from fallow.control.client import ControlClient
from fallow.control.protocol import LocalAllocation, NewRun
from fallow.core.membership.names import member_name, member_number
from fallow.core.submission.schedule import Action, Item
from fallow.files import Paths
from fallow.local.headprocess import HeadProcess
from fallow.model import (
    AllocationState,
    Exit,
    FallowError,
    MemberPhase,
    RunReport,
    RunSpec,
    RunView,
    Snapshot,
)

LOOK_S = 0.02
"""Seconds between two looks at the run's step."""

END_S = 20.0
SETTLE_S = 20.0
"""Most seconds that an item waits for the previous item to take effect."""


class Driver:
    """One `fallow local` session over a folder of its own.

    Args:
        folder: private and empty; for the head's state.
        command: the training's argv.
        members: number of nodes at the start.
        schedule: later changes of the membership, and failures.
        workers_per_node: workers of each member.
        max_members: most members at any time; None: the peak of the schedule.
        output: file for what the main member prints and agents say; None: this process's output and standard error.
        on_view: called with each new view of the run.
        environ: environment of all processes.
        name: name of the run; None: made from the command.
        by_seconds: the command reports no steps, so steps of the schedule mean seconds since the training began.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        members: int,
        schedule: Sequence[Item] = (),
        *,
        workers_per_node: int = 1,
        max_members: int | None = None,
        output: IO[bytes] | int | None = None,
        on_view: Callable[[RunView], None] | None = None,
        environ: Mapping[str, str] = os.environ,
        name: str | None = None,
        by_seconds: bool = False,
    ) -> None:
        self.command = list(command)
        self.members = members
        self.total_nodes = members + sum(item.count for item in schedule if item.action is Action.ADD)
        self.pending_items = list(schedule)
        "items that have not been carried out"
        self._spec = RunSpec(
            run="",
            name=name or name_of(command),
            min_nodes=members,
            max_nodes=max_members or peak(members, schedule),
            workers_per_node=workers_per_node,
            local=True,
        )
        self._output = output
        self._on_view = on_view
        # All workers share this machine's cores, so one thread each, as torchrun does.
        environ = {"OMP_NUM_THREADS": "1", **environ, "FALLOW_MEMBERSHIP__BEAT_S": "0.1"}
        self._head = HeadProcess.private(folder, {**environ, "FALLOW_SLURM__CLIENT": "none"})
        self.paths, self._environ = self._head.paths, self._head.environ
        self._agents: dict[str, asyncio.subprocess.Process] = {}
        "token of an allocation -> its agent; one on each node"
        self._run = ""
        self._control: ControlClient
        self._by_seconds = by_seconds
        self._began_at: float | None = None
        self._pids: dict[str, list[int]] = {}
        "member -> process ids of its workers"
        self._killed_members: set[str] = set()
        self.performed_items: list[tuple[Item, float]] = []
        "items that were carried out, with the time at which they began (time.monotonic)"
        self._settle_end_at = 0.0
        self.absent_nodes = 0
        "number of nodes that ended or were refused before they became members"
        self.absence_reason = ""

    async def train(self) -> RunReport:
        """Train from start to end. Afterwards all processes have ended.

        Raises:
            FallowError: the training could not start.
        """
        self._control = await self._head.start()
        try:
            self._run = (await self._call("create_run", NewRun, spec=msgspec.to_builtins(self._spec))).run
            if await self._start_agents():
                await self._call("grow", run=self._run, by=self.members)
                await self._follow()
            report: RunReport = await self._call("report", RunReport, run=self._run)
            return report
        finally:
            await self._clean_up()

    async def _start_agents(self) -> bool:
        """Start all nodes and wait until no node is starting up. Returns False if the run has ended meanwhile.

        Nodes that join later are started after the first members: the first ready members define the state's layout.
        """
        for count, are_first in ((self.members, True), (self.total_nodes - self.members, False)):
            for _ in range(count):
                await self._start_agent()
            while not (view := await self._look()).status.ended and self._has_starting_nodes(view):
                self._check_agents()
                await asyncio.sleep(LOOK_S)
            if view.status.ended:
                return False
            self.absent_nodes = len(self._agents) - _ready(view)
            self.absence_reason = view.message
            if self.absent_nodes and are_first:
                text = f"{self.absent_nodes} of the first {self.members} members did not reach run.updates()"
                raise FallowError(f"{text}: {view.message}", Exit.SOFTWARE)
        return True

    async def _start_agent(self) -> None:
        place = await self._call("local_allocation", LocalAllocation, run=self._run)
        argv = [sys.executable, "-Pm", "fallow.agent", "--key-file", place.key_file, "--", *self.command]
        self._agents[place.token] = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=self._environ,
            start_new_session=True,
        )

    def _has_starting_nodes(self, view: RunView) -> bool:
        """True if a node is starting up. A node with an ended agent or a released allocation does not count."""
        ready_tokens = {m.token for m in view.members if m.phase is not MemberPhase.STARTING}
        allocated_tokens = {a.token for a in view.allocations if a.state is not AllocationState.RELEASING}
        living_tokens = {token for token, agent in self._agents.items() if agent.returncode is None}
        return bool(living_tokens & allocated_tokens - ready_tokens)

    def _check_agents(self) -> None:
        agents = self._agents.values()
        if agents and all(agent.returncode is not None for agent in agents):
            codes = sorted({str(agent.returncode) for agent in agents})
            hint = "; the schedule has left the run no member" if codes == [str(int(Exit.NO_RESTART))] else ""
            raise FallowError(f"every agent ended (exit {', '.join(codes)}) while the run went on{hint}", Exit.SOFTWARE)

    async def _follow(self) -> None:
        """Carry out each item as soon as its step is finished and the previous item has taken effect."""
        while not (view := await self._look()).status.ended:
            if (
                self.pending_items
                and view.generation
                and self._progress(view) >= self.pending_items[0].step
                and self._is_settled(view)
            ):
                try:
                    await self._carry_out(self.pending_items[0], view)
                except FallowError as error:
                    # The run may have ended since the last look.
                    if error.code is not Exit.USAGE or not (await self._look()).status.ended:
                        raise
                    return
                self._settle_end_at = time.monotonic() + SETTLE_S
                self.pending_items.pop(0)
            self._check_agents()
            await asyncio.sleep(LOOK_S)

    def _progress(self, view: RunView) -> float:
        """Finished steps, or seconds since the first call. Call it only once the training has begun."""
        if self._began_at is None:
            self._began_at = time.monotonic()
        return time.monotonic() - self._began_at if self._by_seconds else view.step

    def _is_settled(self, view: RunView) -> bool:
        """True if no change is under way or about to begin, and all workers' process ids are known, for signals.

        Also true after `SETTLE_S`, since a stopped member may never settle.
        """
        is_calm = view.change is None and all(m.phase is not MemberPhase.LEAVING and m.pids for m in view.training)
        is_full = not _ready(view) or len(view.training) >= view.useful
        are_alive = not self._killed_members.intersection(m.member for m in view.training)
        return (is_calm and is_full and are_alive) or time.monotonic() > self._settle_end_at

    async def _carry_out(self, item: Item, view: RunView) -> None:
        self.performed_items.append((item, time.monotonic()))
        match item.action:
            case Action.ADD:
                # A node that was killed before it was a member has left its place to the next node.
                if view.limit < view.max_nodes:
                    await self._call("grow", run=self._run, by=item.count)
            case Action.RELEASE:
                youngest = sorted((m.member for m in view.training), key=member_number)[-item.count :]
                await self._call("release", run=self._run, members=youngest)
            case Action.RELEASE_MEMBER:
                await self._call("release", run=self._run, members=[_member_of(item)])
            case Action.KILL | Action.STOP | Action.CONT:
                number = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP, Action.CONT: signal.SIGCONT}
                self._signal(_member_of(item), number[item.action])
                if item.action is Action.KILL:
                    self._killed_members.add(_member_of(item))
            case Action.HEAD_KILL:
                self._head.kill()
                await self._control.aclose()
                self._control = await self._head.start()
            case Action.STORE_KILL:
                with contextlib.suppress(
                    ProcessLookupError, FileNotFoundError
                ):  # the store has not been started again yet
                    os.kill(store_pid(self.paths), signal.SIGKILL)

    def _signal(self, member: str, number: signal.Signals) -> None:
        """Send a signal to all workers of a member."""
        for pid in self._pids.get(member, ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def _look(self) -> RunView:
        snapshot: Snapshot = await self._call("status", Snapshot, run=self._run)
        view = snapshot.runs[0]
        self._pids.update({m.member: m.pids for m in view.members if m.pids})
        if self._on_view is not None:
            self._on_view(view)
        return view

    async def _call(self, method: str, type_: Any = Any, **params: Any) -> Any:
        """Send one request to the head. A head that has ended is started again, as a supervisor would do."""
        for _ in range(3):
            try:
                return await self._control.call(method, type_, **params)
            except FallowError as error:
                if error.code is not Exit.UNAVAILABLE:
                    raise
                await self._control.aclose()
                if not self._head.is_running:
                    self._control = await self._head.start()
                else:
                    self._control = await ControlClient.connect(self.paths.head_file)
        raise FallowError(f"the head does not answer; its log: {self._head.log}", Exit.UNAVAILABLE)

    async def _clean_up(self) -> None:
        if self._run:
            with contextlib.suppress(FallowError):
                view = await self._look()
                if not view.status.ended:
                    await self._call("cancel", run=self._run)
        # Stopped workers cannot end by themselves.
        for member in self._pids:
            self._signal(member, signal.SIGCONT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await asyncio.gather(*(agent.wait() for agent in self._agents.values()))
        for agent in self._agents.values():
            if agent.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    agent.kill()
                await agent.wait()
        await self._control.aclose()
        await self._head.stop()


def _ready(view: RunView) -> int:
    return sum(member.phase is MemberPhase.READY for member in view.members)


def _member_of(item: Item) -> str:
    """Name of the member of an item."""
    assert item.member is not None
    return member_name(item.member + 1)


def name_of(command: Sequence[str]) -> str:
    """A run's name from its argv: the script, module or program."""
    words = [word for word in command[1:] if not word.startswith("-")]
    script = next((word for word in command if word.endswith(".py")), [*words, command[0]][0])
    return Path(script).name.removesuffix(".py") or "local"


def peak(members: int, schedule: Sequence[Item]) -> int:
    """Most members at any time of a schedule."""
    leave_actions = (Action.RELEASE_MEMBER, Action.KILL)
    changes = (
        item.count if item.action is Action.ADD else -item.count - (item.action in leave_actions) for item in schedule
    )
    return max(accumulate(changes, initial=members))


def store_pid(paths: Paths) -> int:
    """Process id of the head's private store."""
    return int((paths.redis_dir / "redis.pid").read_text())
