"""Runs one training under a private head and makes the scheduled things happen at their steps."""

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
"""How often the driver looks at the run's step."""

END_S = 20.0
SETTLE_S = 20.0
"""An item waits at most this long for the one before it to take effect."""


class Driver:
    """One `fallow local` session over a folder of its own.

    Args:
        folder: private and empty; holds the head's state.
        command: the training's argv.
        members: nodes that it starts with.
        schedule: what happens then.
        workers_per_node: workers of each member.
        max_members: most members at any time; None: the peak of the schedule.
        output: takes the main member's output.
        on_view: called with each look at the run.
        environ: environment of everything that is started.
        name: of the run; None: the command's.
        by_seconds: the command tells no steps, so those of the schedule are seconds since the training began.
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
        "items whose step has not come"
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
        "by the token of their allocation: one on each node"
        self._run = ""
        self._control: ControlClient
        self._by_seconds = by_seconds
        self._began: float | None = None
        self._pids: dict[str, list[int]] = {}
        "of each member's workers"
        self._killed: set[str] = set()
        self.performed_items: list[tuple[Item, float]] = []
        "items that were carried out, and when they began (time.monotonic)"
        self._settle_until = 0.0
        self.absent_nodes = 0
        "nodes that ended or were refused before they could become members"
        self.absence_reason = ""

    async def train(self) -> RunReport:
        """From start to end of the training; everything that was started is gone afterwards.

        Raises:
            FallowError: it could not start.
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
        """Start all nodes and wait until none is starting up any more; False if the run has ended by then.

        Newcomers come after the first members: those who are ready first decide what a member's state looks like.
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
            env=self._environ,
            start_new_session=True,
        )

    def _has_starting_nodes(self, view: RunView) -> bool:
        """Is any node still on its way? One that has ended is not: its agent has, or its allocation is given up."""
        ready = {m.token for m in view.members if m.phase is not MemberPhase.STARTING}
        allocated = {a.token for a in view.allocations if a.state is not AllocationState.RELEASING}
        living = {token for token, agent in self._agents.items() if agent.returncode is None}
        return bool(living & allocated - ready)

    def _check_agents(self) -> None:
        agents = self._agents.values()
        if agents and all(agent.returncode is not None for agent in agents):
            codes = sorted({str(agent.returncode) for agent in agents})
            why = "; the schedule has left it no member" if codes == [str(int(Exit.NO_RESTART))] else ""
            raise FallowError(f"every agent ended (exit {', '.join(codes)}) while the run went on{why}", Exit.SOFTWARE)

    async def _follow(self) -> None:
        """Make each item happen as soon as its step is finished and the item before it has taken effect."""
        while not (view := await self._look()).status.ended:
            if (
                self.pending_items
                and view.generation
                and self._progress(view) >= self.pending_items[0].step
                and self._is_settled(view)
            ):
                try:
                    await self._do(self.pending_items[0], view)
                except FallowError as error:
                    # The run may have ended since the last look.
                    if error.code is not Exit.USAGE or not (await self._look()).status.ended:
                        raise
                    return
                self._settle_until = time.monotonic() + SETTLE_S
                self.pending_items.pop(0)
            self._check_agents()
            await asyncio.sleep(LOOK_S)

    def _progress(self, view: RunView) -> float:
        """The step, or the second, that the training is in; it has begun."""
        if self._began is None:
            self._began = time.monotonic()
        return time.monotonic() - self._began if self._by_seconds else view.step

    def _is_settled(self, view: RunView) -> bool:
        """No change is under way or about to begin, and members' processes are known, as signals are for those.

        Given up after `SETTLE_S`: a stopped member may never settle.
        """
        calm = view.change is None and all(m.phase is not MemberPhase.LEAVING and m.pids for m in view.training)
        full = not _ready(view) or len(view.training) >= view.useful
        alive = not self._killed.intersection(m.member for m in view.training)
        return (calm and full and alive) or time.monotonic() > self._settle_until

    async def _do(self, item: Item, view: RunView) -> None:
        self.performed_items.append((item, time.monotonic()))
        match item.action:
            case Action.ADD:
                # One killed before it was a member has left its place to whoever comes now.
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
                    self._killed.add(_member_of(item))
            case Action.HEAD_KILL:
                self._head.kill()
                await self._control.aclose()
                self._control = await self._head.start()
            case Action.STORE_KILL:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # the one before is not back yet
                    os.kill(store_pid(self.paths), signal.SIGKILL)

    def _signal(self, member: str, number: signal.Signals) -> None:
        """Send it to all workers of the member."""
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
        """One request; a head that ended by itself is started again, as a supervisor would."""
        for _ in range(3):
            try:
                return await self._control.call(method, type_, **params)
            except FallowError as error:
                if error.code is not Exit.UNAVAILABLE:
                    raise
                await self._control.aclose()
                if not self._head.running:
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
    """Of the member that an item is about."""
    assert item.member is not None
    return member_name(item.member + 1)


def name_of(command: Sequence[str]) -> str:
    """A run's name from its argv: the script, module or program."""
    words = [word for word in command[1:] if not word.startswith("-")]
    script = next((word for word in command if word.endswith(".py")), [*words, command[0]][0])
    return Path(script).name.removesuffix(".py") or "local"


def peak(members: int, schedule: Sequence[Item]) -> int:
    """Most members at any time of a schedule."""
    leaves = (Action.RELEASE_MEMBER, Action.KILL)
    changes = (item.count if item.action is Action.ADD else -item.count - (item.action in leaves) for item in schedule)
    return max(accumulate(changes, initial=members))


def store_pid(paths: Paths) -> int:
    """Process id of the head's private store."""
    return int((paths.redis_dir / "redis.pid").read_text())
