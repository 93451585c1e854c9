"""One real run, piece by piece: a head with its store, agents and workers as forks of the nursery.

`Rig` is a head, `Elastic` one run of it. What they do to a run is what an operator, Slurm or a fault would: requests to
the control socket, agents that come, signals to processes. Every wait has a deadline and fails with what the run looks
like then.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from fallow.control.client import ControlClient
from fallow.control.protocol import LocalAllocation, NewRun
from fallow.core.membership.roster import Roster
from fallow.files import Paths
from fallow.local.driver import store_pid
from fallow.local.headprocess import HeadProcess
from fallow.model import (
    EventRecord,
    MemberPhase,
    MemberView,
    RunReport,
    RunSpec,
    RunStatus,
    RunView,
    Snapshot,
)
from fallow.store.client import Store
from fallow.worker.checkpoint.manifest import complete_checkpoints
from history import check_history
from nursery_client import NurseryClient
from waiting import gone, until

TRAINING = str(Path(__file__).parent / "elastic_training.py")
WAIT_S = 180.0
LOOK_S = 0.05


class Rig:
    """A head over a folder of its own.

    Args:
        nursery: starts the agents.
        folder: private and empty.
        undisturbed: what the runs are compared with.
        config: the head's configuration, e.g. `membership__lease_s=1.5`.
    """

    def __init__(
        self, nursery: NurseryClient, folder: Path, undisturbed: "Undisturbed | None" = None, **config: object
    ) -> None:
        self.folder = folder
        self.undisturbed = undisturbed
        self.nursery = nursery
        (folder / "config.toml").touch()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FALLOW_", "SLURM_"))}
        self.environ = {
            **kept,
            "OMP_NUM_THREADS": "1",
            "FALLOW_STATE_DIR": str(folder / "state"),
            "FALLOW_CONFIG": str(folder / "config.toml"),
            "FALLOW_SLURM__CLIENT": "none",
            "FALLOW_HEAD__ADDRESS": "127.0.0.1",
            "FALLOW_MEMBERSHIP__BEAT_S": "0.1",
            **{f"FALLOW_{key.upper()}": str(value) for key, value in config.items()},
        }
        self.paths = Paths.default(self.environ).create()
        self.head = HeadProcess(self.paths, self.environ, folder / "head.log")
        self.agent_patience_s = 600
        "agents without work end when the head was silent for so long"
        self.agents: list[int] = []
        self.workers: set[int] = set()
        "process ids of all workers that were seen"
        self._control: ControlClient

    async def __aenter__(self) -> "Rig":
        await self.start_head()
        return self

    async def __aexit__(self, *_: object) -> None:
        for pid in self.workers:
            send(pid, signal.SIGCONT)
        for pid in self.agents:
            send(pid, signal.SIGCONT)
            send(pid, signal.SIGKILL)
        await self._control.aclose()
        await self.head.stop()
        await until(lambda: all(map(gone, [*self.agents, *self.workers])), "an agent or a worker is still there")

    async def call(self, method: str, **params: Any) -> Any:
        """One request to the head."""
        return await self._control.call(method, **params)

    async def run(
        self, *options: object, members: int = 1, most: int = 4, scripted: bool = True, **spec: Any
    ) -> "Elastic":
        """A new run of the training; in a scripted one members are let in by `grow` alone."""
        wanted = RunSpec(
            **{"run": "", "name": "elastic", "min_nodes": members, "max_nodes": most, "workers_per_node": 1, **spec},
            local=scripted,
        )
        made = msgspec.convert(await self.call("create_run", spec=msgspec.to_builtins(wanted)), NewRun)
        gates = self.folder / f"gates-{made.run}"
        gates.mkdir()
        command = [sys.executable, TRAINING, "--gates", str(gates), *map(str, options)]
        return Elastic(self, made, command, gates, scripted, options)

    async def agent_ends(self, pid: int) -> int:
        """The exit code of an agent, when it has ended."""
        await until(lambda: self.nursery.exit_code(pid) is not None, f"agent {pid} goes on")
        code = self.nursery.exit_code(pid)
        assert code is not None
        return code

    async def kill_head(self) -> None:
        """As a crash would; it stays away."""
        await self._control.aclose()
        self.head.kill()
        await until(lambda: not self.head.is_running, "the head is still there")

    async def listen(self) -> None:
        """Talk to whichever head there is now."""
        control = await ControlClient.connect(self.paths.head_file)
        await control.call("status")
        self._control = control

    async def start_head(self) -> None:
        """Have it come, or come back."""
        with self.nursery.forks_for_asyncio():
            self._control = await self.head.start()

    async def kill_store(self) -> None:
        """As a crash would; the head starts it again, and has done so with one that was killed before."""
        await until(self.store_there, "the store does not come back")
        os.kill(store_pid(self.paths), signal.SIGKILL)

    def store_there(self) -> bool:
        """Its process is."""
        try:
            return not gone(store_pid(self.paths))
        except FileNotFoundError:
            return False  # it is being started


class Elastic:
    """One run."""

    def __init__(
        self, rig: Rig, made: NewRun, command: list[str], gates: Path, scripted: bool, options: tuple[object, ...]
    ) -> None:
        self.rig = rig
        self.options = options
        self.id = made.run
        self.command = command
        self.gates = gates
        self.folder = Path(made.folder)
        self.agent_of: dict[str, int] = {}
        "process id of the agent of a member"
        self._key_file = made.key_file
        self._scripted = scripted
        self.pids: dict[str, int] = {}
        self.known: list[str] = []
        "members in rank order, when they were last waited for"
        self._pauses = itertools.count()

    # -- what happens to it -----------------------------------------------------------------------------------------

    async def arrive(
        self, count: int = 1, *, ready: bool = True, workers: int = 1, namespace: str | None = None, **environ: str
    ) -> list[str]:
        """Start that many agents with so many workers each; returns the members' names.

        Args:
            count: agents to start.
            ready: wait until all are standbys (or members) and their processes are known.
            workers: of each agent; their number is up to the run's `workers_per_node` and the environment.
            namespace: the agents' network namespace, see `network.py`.
            environ: added to the agents' environment.
        """
        names = []
        for _ in range(count):
            pid = await self.knock(workers=workers, namespace=namespace, **environ)
            came = f"n{len(self.agent_of)}"
            self.agent_of[came] = pid
            names.append(came)
            if not self._scripted:
                # Names are given in the order of the agents' hellos.
                await self.until(lambda view, came=came: phase(view, came) is not None, f"no agent for {came}")
        if ready:
            await self.until(
                lambda view: all(
                    phase(view, name) not in (None, MemberPhase.STARTING) and name in self.pids for name in names
                ),
                f"{names} are not ready",
            )
        return names

    async def knock(self, *, workers: int = 1, namespace: str | None = None, **environ: str) -> int:
        """Start an agent, whatever the head makes of it; returns its process id."""
        if self._scripted:
            place = await self.rig.call("local_allocation", run=self.id)
            self._key_file = msgspec.convert(place, LocalAllocation).key_file
        node = (
            {}
            if self._scripted
            else {
                "SLURM_JOB_ID": "7",
                "SLURMD_NODENAME": f"node{len(self.agent_of)}",
                "SLURM_PROCID": str(len(self.agent_of)),
            }
        )
        pid = self.rig.nursery.start(
            ["--key-file", self._key_file, "--patience", str(self.rig.agent_patience_s), "--", *self.command],
            {**self.rig.environ, **node, **environ},
            self.rig.folder / "agents.log",
            eggs=2 * workers,  # they may be started again
            namespace=namespace,
        )
        self.rig.agents.append(pid)
        return pid

    async def begin(self, members: int) -> "Elastic":
        """Have so many workers come and make them the first generation."""
        await self.arrive(members)
        if self._scripted:
            await self.grow(members)
        await self.becomes([f"n{i}" for i in range(members)])
        return self

    async def absorb(self, count: int = 1) -> None:
        """So many newcomers come and are let in."""
        there = ranked(await self.view())
        names = await self.arrive(count)
        await self.grow(count)
        await self.becomes([*there, *names])

    async def grow(self, by: int = 1) -> None:
        await self.rig.call("grow", run=self.id, by=by)

    async def commits_unheard(self, newcomer: str) -> None:
        """Let this newcomer in, and stop its agent between its vote and the commit."""
        committed, agent = (await self.roster()).root.generation, self.agent_of[newcomer]
        send(agent, signal.SIGSTOP)
        if self._scripted:
            await self.grow()

        deadline = time.monotonic() + WAIT_S
        while (await self.roster()).root.generation == committed:
            assert time.monotonic() < deadline, f"nothing is committed with {newcomer}"
            store = store_pid(self.rig.paths)
            send(store, signal.SIGSTOP)  # nothing is committed while all vote
            try:
                send(agent, signal.SIGCONT)
                await asyncio.sleep(0.5)
                send(agent, signal.SIGSTOP)
            finally:
                send(store, signal.SIGCONT)
            await asyncio.sleep(0.5)

    async def release(self, *members: str) -> None:
        await self.rig.call("release", run=self.id, members=list(members))

    def signal(self, worker: str, number: signal.Signals) -> None:
        """To the worker's process."""
        send(self.pids[worker], number)

    def kill(self, worker: str) -> None:
        self.signal(worker, signal.SIGKILL)

    async def kill_at_once(self, *workers: str) -> None:
        """Before the head can do anything about the first of them, all have ended."""
        send(self.rig.head.pid, signal.SIGSTOP)
        for worker in workers:
            self.kill(worker)
        await until(lambda: all(gone(self.pids[worker]) for worker in workers), "a worker lives")
        send(self.rig.head.pid, signal.SIGCONT)

    def freeze(self, worker: str) -> None:
        """Stop it with its agent, which would tell of it: so it is only slow, until its lease is over."""
        for pid in (self.agent_of[worker], self.pids[worker]):
            send(pid, signal.SIGSTOP)

    def thaw(self, worker: str) -> None:
        """They go on."""
        for pid in (self.pids[worker], self.agent_of[worker]):
            send(pid, signal.SIGCONT)

    async def wakes_to_end(self, worker: str) -> None:
        """Its stopped process goes on after others took its place, and ends by itself."""
        self.signal(worker, signal.SIGCONT)
        await until(lambda: gone(self.pids[worker]), "the zombie lives")

    def plan(self, action: str, worker: str, place: int | str) -> Path:
        """Have this worker do that at a place (see the training), as in its first body of a step."""
        gate = self.gates / f"{action}-{place}-{worker}"
        gate.touch()
        return gate

    def hold(self, worker: str, place: int | str) -> Path:
        """Have this worker wait there, or at a part of the state (`give-late`); `unlink` lets it go on."""
        return self.plan("hold", worker, place)

    async def held(self, worker: str, place: int | str) -> None:
        await until((self.gates / f"held-{place}-{worker}").exists, f"{worker} did not come to {place}")

    def hurry(self) -> None:
        """Steps as fast as they can be from now on."""
        (self.gates / "hurry").touch()

    # -- what is seen of it -----------------------------------------------------------------------------------------

    async def view(self) -> RunView:
        snapshot = msgspec.convert(await self.rig.call("status", run=self.id), Snapshot)
        view = snapshot.runs[0]
        for member in view.members:
            if member.pids:
                self.pids[member.member] = member.pids[0]
                self.rig.workers.update(member.pids)
        return view

    async def until(self, condition: Callable[[RunView], bool], why: str, within_s: float = WAIT_S) -> RunView:
        """The first view of which `condition` holds."""
        deadline = time.monotonic() + within_s
        while not condition(view := await self.view()):
            if time.monotonic() > deadline or view.status.ended:
                raise AssertionError(f"{why}: {self._story(view)}")
            await asyncio.sleep(LOOK_S)
        return view

    async def becomes(self, members: list[str], *, within_s: float = WAIT_S) -> RunView:
        """Wait until these train and no change is under way.

        Those that were there the last time come first, in this rank order; newcomers follow as they were ready.
        """
        stay = [worker for worker in members if worker in self.known]

        def there(view: RunView) -> bool:
            now = ranked(view)
            same = sorted(now) == sorted(members) and now[: len(stay)] == stay
            settled = same and view.change is None and view.status is RunStatus.TRAINING
            return settled and self.pids.keys() >= set(members)

        view = await self.until(there, f"the members are not {members}", within_s)
        self.known = ranked(view)
        return view

    async def reaches(self, step: int) -> RunView:
        return await self.until(lambda view: view.step >= step, f"step {step} is not reached")

    async def goes_on(self, steps: int = 3) -> RunView:
        """Wait until so many further steps are finished."""
        return await self.reaches((await self.view()).step + steps)

    def saved(self) -> set[int]:
        """Steps of the complete checkpoints on disk."""
        return {int(path.name.rpartition("-s")[2]) for path in complete_checkpoints(self.folder / "checkpoints")}

    async def saves(self) -> None:
        """Wait until a further checkpoint is complete."""
        before = self.saved()
        await until(lambda: self.saved() - before, "no checkpoint is written")

    async def told(
        self, kind: str, holds: Callable[[list[EventRecord]], bool] = bool, within_s: float = WAIT_S
    ) -> list[EventRecord]:
        """Events of that kind, as soon as `holds` is true of them."""
        deadline = time.monotonic() + within_s
        while not holds(found := await self.events(kind)):
            assert time.monotonic() < deadline, f"{found}: {self._story(await self.view())}"
            await asyncio.sleep(LOOK_S)
        return found

    def times(self) -> list[float]:
        """When each step was finished (seconds), as the members have noted it, whoever finished it."""
        times = self.gates / "times"
        return sorted(map(float, times.read_text().split())) if times.exists() else []

    def steps_seen(self) -> int:
        """Finished steps, without asking the head."""
        return len(self.times())

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[int]:
        """Inside, all members are held in one step; gives the number of the next one, for which gates can be laid."""
        number = next(self._pauses)
        pause = self.gates / f"pause-{number}"
        pause.touch()

        def steps() -> list[int]:
            return [int(note.name.rpartition("-")[2]) for note in self.gates.glob(f"paused-{number}-*")]

        # Who waits in its first body of a step holds all others up: none of them can begin the next one.
        await until(steps, "no member comes to a step")
        yield max(steps()) + 1
        pause.unlink()

    def longest_gap(self) -> float:
        """The longest time between two steps (seconds)."""
        return max(after - before for before, after in itertools.pairwise(self.times()))

    async def events(self, kind: str | None = None) -> list[EventRecord]:
        """What was written down, with all that views have shown by now."""
        await self.rig.call("prune", dry_run=True)  # it has a turn of its own, behind the one that a view is ahead of
        found = msgspec.convert(await self.rig.call("events", run=self.id, since=0, limit=10_000), list[EventRecord])
        return [event for event in found if kind in (None, event.kind)]

    async def roster(self) -> Roster:
        """What the store knows of its membership, read behind the head's back."""
        store = await Store.open(self.rig.paths.redis_socket)
        try:
            found = await store.load(f"run/{self.id}/")
        finally:
            await store.close()
        return Roster.load(self.id, {key.split("/", 2)[2]: value for key, (_, value) in found.items()})

    def log(self, worker: str) -> str:
        return (self.folder / "logs" / f"{worker}.log").read_text()

    def _story(self, view: RunView) -> str:
        logs = {log.name: log.read_text()[-300:] for log in (self.folder / "logs").glob("*.log")}
        agents = self.rig.folder / "agents.log"
        head = self.rig.head.log.read_text()[-1500:]
        return f"{view}\nlogs: {logs}\nagents: {agents.read_text()[-800:] if agents.exists() else ''}\nhead: {head}"

    async def ends(self, within_s: float = WAIT_S) -> RunReport:
        """Let it train to its end, as a history in which nothing is wrong; its report."""
        self.hurry()
        view = await self._ended(within_s)
        wrong = check_history(await self.events())
        assert not wrong, f"{wrong}: {self._story(view)}"
        return await self.report()

    async def judged(
        self, *options: object, losses: int = 0, backs: int = 0, unheard: bool = False, within_s: float = WAIT_S
    ) -> RunReport:
        """Likewise, and compare it with the same training left undisturbed; `options` of that, if they are others."""
        assert self.rig.undisturbed is not None
        report = await self.ends(within_s)
        judge(report, await self.rig.undisturbed(*(options or self.options)), losses, backs, unheard=unheard)
        return report

    async def fails(self) -> RunReport:
        """Wait until it has failed, and not ended otherwise; its report."""
        view = await self._ended(WAIT_S)
        assert view.status is RunStatus.FAILED, self._story(view)
        return await self.report()

    async def _ended(self, within_s: float) -> RunView:
        deadline = time.monotonic() + within_s
        while not (view := await self.view()).status.ended:
            assert time.monotonic() < deadline, f"it does not end: {self._story(view)}"
            await asyncio.sleep(LOOK_S)
        return view

    async def report(self) -> RunReport:
        return msgspec.convert(await self.rig.call("report", run=self.id), RunReport)


MakeRig = Callable[..., Rig]
Undisturbed = Callable[..., Awaitable[RunReport]]


def ranked(view: RunView) -> list[str]:
    """The members in rank order."""
    members = [m for m in view.members if m.rank is not None and m.phase is not MemberPhase.GONE]
    return [m.member for m in sorted(members, key=lambda m: m.rank or 0)]


def member(view: RunView, name: str) -> MemberView | None:
    return next((m for m in view.members if m.member == name), None)


def phase(view: RunView, name: str) -> MemberPhase | None:
    found = member(view, name)
    return None if found is None else found.phase


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


async def stop(pid: int, seconds: float) -> None:
    """Have that process stand still for so long."""
    send(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        send(pid, signal.SIGCONT)


def judge(report: RunReport, undisturbed: RunReport, losses: int = 0, backs: int = 0, *, unheard: bool = False) -> None:
    """What holds for every history: the same result, each sample once, at most one step lost for a loss.

    Args:
        report: of the history.
        undisturbed: of the same training, left alone.
        losses: members that were lost at least; one that is lost soon after another has no generation of its own.
        backs: times that it may have gone on from a checkpoint of an earlier step, and left a step undone for it.
        unheard: the head was away, and does not know what it was told meanwhile of how a change went.

    Raises:
        AssertionError: it does not.
    """
    assert report.status is RunStatus.FINISHED, report.message
    assert not report.message, report.message
    assert report.steps == undisturbed.steps
    assert (report.samples.lost, report.samples.duplicated) == (0, 0)
    assert report.samples.consumed == undisturbed.samples.consumed
    assert report.final_digest == undisturbed.final_digest
    assert report.final_loss == undisturbed.final_loss
    numbers = [generation.generation for generation in report.generations]
    assert numbers == sorted(set(numbers)), "numbers of generations are not strictly increasing"
    firsts = [generation.first_step for generation in report.generations]
    known = [first for first in firsts if first is not None or not unheard]
    assert sum((after or 0) < (before or 0) for before, after in itertools.pairwise(known)) <= backs, firsts
    assert firsts[0] == 0
    ejects = sum(generation.kind == "eject" for generation in report.generations)
    assert report.steps_discarded <= max(ejects, losses) + backs
    for before, after in itertools.pairwise(report.generations):
        if after.kind == "absorb" and after.first_step and set(before.members) & set(after.members):
            assert after.bytes_behind or unheard, (
                f"generation {after.generation}: nothing came while the others computed"
            )
