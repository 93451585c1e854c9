"""Workers that are started and watched, without a head."""

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from threading import Thread

import msgspec
import pytest

import builders
from agent_head import DEADLINE_S, PUPPET, WAIT
from fallow.agent import crew as crew_module
from fallow.agent.crew import Crew
from fallow.agent.launch import Launch
from fallow.agent.merge import merge_report
from fallow.agent.process import inherit_orphans
from fallow.core.checks.devices import Devices
from fallow.core.membership.messages import End, Fault, Gather, Order, Report
from fallow.core.protocol import BeatReply, Ended
from fallow.files import RunPaths
from fallow.model import STACK_SIGNAL
from waiting import gone, until

Start = Callable[..., Crew]
FINISHED = "Finish(generation=1, steps=1, digest='d')"
FINISH = f"say(finish={FINISHED});"


class Rig:
    """A crew whose agent does nothing but look after it."""

    def __init__(self, folder: Path, code: str, slots: int, program: str = sys.executable, told: str = "") -> None:
        self.paths = RunPaths(folder / "run").create()
        self.changes, self.gathers, self.has_ended = 0, list[Gather](), False
        self.at_change: Callable[[], object] = lambda: None
        launch = Launch(
            run="r1", command=[program, "-u", "-c", code], environ=os.environ, host="h", job_id="1", slots=slots,
            devices=Devices({}, amd=False), address="127.0.0.1", entry="127.0.0.1",
        )  # fmt: skip
        self.crew = Crew(
            3,
            builders.setup(self.paths.root),
            launch,
            BeatReply(term=1, step=7),
            Order(node=3, term=1, edition=1, noted=told) if told else None,
            on_change=self._change,
            on_gather=self.gathers.append,
            on_end=self._note_end,
        )
        self.editions = 1

    def _change(self) -> None:
        self.changes += 1
        self.at_change()

    def _note_end(self) -> None:
        assert not self.has_ended, "told once"
        self.has_ended = True

    def order(self, code: str = "", end: End | None = None) -> None:
        self.editions += 1
        self.crew.obey(Order(node=3, term=1, edition=self.editions, noted=code, end=end))

    async def works(self, slot: int, step: int = 9) -> None:
        """Wait until that worker has said so."""
        self.order(f"say(step={step})")
        await self.until(lambda: self.crew.facts()[slot].status.step == step)

    def pids(self) -> list[int]:
        return [facts.pid for facts in self.crew.facts()]

    async def ended(self) -> Ended:
        await self.until(lambda: self.has_ended)
        return self.crew.ended(self.report())

    def report(self) -> Report:
        return merge_report(self.crew.facts(), node=3, boot=1, seq=1, highest=0)

    async def until(self, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            self.crew.look()
            return condition()

        await until(look)


@contextlib.asynccontextmanager
async def working(
    folder: Path, code: str = PUPPET, slots: int = 2, program: str = sys.executable
) -> AsyncIterator[Rig]:
    rig = Rig(folder, code, slots, program)
    await rig.until(lambda: len(rig.pids()) == slots and all(rig.pids()))
    yield rig
    rig.crew.kill()
    await rig.until(lambda: not rig.crew.is_alive)


async def test_workers_that_start_are_told_the_newest_of_all(tmp_path: Path) -> None:
    rig = Rig(tmp_path, PUPPET, slots=2, told=f"print('step', news.step, flush=True); {FINISH} sys.exit(0)")
    await rig.ended()
    assert [rig.paths.log(name).read_text() for name in ("n2.0", "n2.1")] == ["step 7\n", "step 7\n"]


async def test_a_node_that_can_open_no_more_files_for_one_of_its_workers_keeps_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def children() -> set[int]:
        return set(map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()))

    before, started, make = children(), set[int](), socket.socketpair

    def make_one() -> tuple[socket.socket, socket.socket]:
        started.update(children() - before)
        if started:
            raise OSError(errno.EMFILE, "Too many open files")
        return make()

    monkeypatch.setattr(socket, "socketpair", make_one)
    with pytest.raises(OSError, match="Too many"):
        Rig(tmp_path, WAIT, slots=2)
    await until(lambda: started and all(map(gone, started)))


async def test_a_sibling_that_has_finished_is_killed_in_time_and_one_that_still_works_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "EXIT_S", 0.0)
    async with working(tmp_path) as rig:
        rig.order(f"if slot == 1: {FINISH} sys.exit(0)")
        await rig.until(lambda: rig.pids()[1] == 0)
        await rig.works(0)  # the main worker evaluates
        rig.order(FINISH)
        ended = await rig.ended()
        assert (ended.code, ended.signal, ended.is_ordered) == (0, None, False), "the one that ended first"


@pytest.mark.parametrize(("how", "code", "found"), [("passed_boundary=2", 0, 0), ("finish=FINISHED", 5, 5)])
async def test_one_that_has_left_or_finished_leaves_time_to_its_sibling_whose_failure_counts_for_more(
    tmp_path: Path, how: str, code: int, found: int
) -> None:
    async with working(tmp_path) as rig:
        first, second = rig.pids()
        say = f"say({how.replace('FINISHED', FINISHED)})"
        rig.order(f"if slot == 0: {say}; sys.exit(0)")
        await rig.until(lambda: gone(first))
        await rig.works(1)
        assert not gone(second)
        rig.order(f"{say}; sys.exit({code})")
        ended = await rig.ended()
        assert (ended.code, ended.slot, ended.is_ordered) == (found, int(code > 0), False)


@pytest.mark.parametrize(
    ("program", "shown", "advice"), [("caf\udce9", "caf\\xe9", ""), ("/t.py", "/t.py", "python /t.py")]
)
async def test_a_program_that_cannot_be_started_is_named_whatever_its_name(
    tmp_path: Path, program: str, shown: str, advice: str
) -> None:
    ended = await Rig(tmp_path, "", slots=2, program=program).ended()
    assert ended.code == 127
    assert ended.tail.startswith(f"{shown}: cannot be started (No such file or directory)")
    assert ended.tail.endswith(advice)


async def test_a_worker_whose_output_nobody_can_read_is_one_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Thread.start

    def refuse(thread: Thread) -> None:
        if thread.name == "output-n2.1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Thread, "start", refuse)
    rig = Rig(tmp_path, WAIT, slots=2)
    ended = await rig.ended()
    assert (ended.code, ended.signal) == (127, None)
    assert ended.tail == "worker n2.1 cannot be started: can't start new thread"
    assert not any(rig.pids())


def wrapper_in(folder: Path) -> str:
    """A shell script that starts Python without `exec`."""
    wrapper = folder / "wrapper.sh"
    wrapper.write_text(f'#!/bin/sh\nsetsid {sys.executable} "$@"\nexit $?\n')
    wrapper.chmod(0o700)
    return str(wrapper)


@pytest.fixture
def inherits() -> Iterator[None]:
    """This process is the parent of its orphans, as an agent is."""
    inherit_orphans()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


@pytest.mark.usefixtures("inherits")
@pytest.mark.parametrize(
    ("last_words", "code", "number"),
    [
        ("say(passed_boundary=2); sys.exit(0)", 0, None),
        (f"{FINISH} sys.exit(3)", 3, None),
        (f"{FINISH} os.kill(os.getpid(), signal.SIGSEGV)", None, signal.SIGSEGV),
        ("", None, signal.SIGKILL),
    ],
)
async def test_the_end_of_a_worker_counts_not_that_of_the_shell_before_it_which_dies_of_slurms_sigterm(
    tmp_path: Path, last_words: str, code: int | None, number: int | None
) -> None:
    async with working(tmp_path, slots=1, program=wrapper_in(tmp_path)) as rig:
        (shell,) = rig.pids()
        rig.order("ctypes.CDLL(None).prctl(1, 0); signal.signal(signal.SIGTERM, lambda *_: None)")
        rig.order("say(step=os.getpid())")
        await rig.until(lambda: rig.crew.facts()[0].status.step > 0)
        worker = rig.crew.facts()[0].status.step
        assert rig.pids() == [worker] != [shell]
        os.kill(shell, signal.SIGTERM)
        os.kill(worker, signal.SIGTERM)
        await rig.until(lambda: gone(shell))
        await rig.works(0)
        if last_words:
            rig.order(last_words)
        else:
            rig.crew.kill()
        ended = await rig.ended()
        assert (ended.code, ended.signal) == (code, number)
        assert gone(worker)


@pytest.mark.parametrize(
    ("program", "last_words", "code", "number"),
    [
        ("wrapper.sh", "os.kill(os.getpid(), signal.SIGKILL)", None, signal.SIGKILL),
        ("wrapper.sh", "sys.exit(65)", 65, None),
        ("wrapper.sh", "sys.exit(150)", 150, None),
        (sys.executable, "sys.exit(137)", 137, None),
    ],
)
async def test_a_shell_tells_of_a_signal_by_its_exit_code(
    tmp_path: Path, program: str, last_words: str, code: int | None, number: int | None
) -> None:
    """To the head a script that the kernel has killed is a fault of the node, not of the script."""
    wrapper_in(tmp_path)
    async with working(tmp_path, slots=1, program=str(tmp_path / program)) as rig:
        await rig.works(0, step=1)
        rig.order(last_words)
        ended = await rig.ended()
        assert (ended.code, ended.signal) == (code, number)


@pytest.mark.parametrize("program", ["wrapper.sh", sys.executable])
async def test_an_exit_code_of_one_that_never_spoke_is_its_own(tmp_path: Path, program: str) -> None:
    """A wrapper that ends early with 143 fails on every node alike: Slurm has not taken this one."""
    wrapper_in(tmp_path)
    ended = await Rig(tmp_path, "import sys; sys.exit(143)", slots=1, program=str(tmp_path / program)).ended()
    assert (ended.code, ended.signal) == (143, None)


async def test_a_child_of_the_script_that_speaks_is_not_taken_for_the_worker(tmp_path: Path) -> None:
    async with working(tmp_path, slots=1) as rig:
        worker = rig.pids()
        await rig.works(0, step=1)
        rig.order("os.fork() or say(step=9); signal.pause()")
        await rig.until(lambda: rig.crew.facts()[0].status.step == 9)
        assert rig.pids() == worker


async def test_an_order_to_end_is_enforced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "KILL_AFTER_S", 0.2)
    async with working(tmp_path, WAIT) as rig:
        rig.order(end=End(code=75, reason="test"))
        ended = await rig.ended()
        assert (ended.code, ended.signal, ended.is_ordered) == (None, 9, True)


async def test_a_worker_that_hangs_writes_its_stack_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import faulthandler, signal\n"
        f"def hang():\n    faulthandler.register({STACK_SIGNAL}); print('up')\n    while True: signal.pause()\nhang()"
    )

    async def told_to_end(folder: Path, is_awaited: bool) -> Ended:
        async with working(folder, code, slots=1) as rig:
            log = rig.paths.log("n2")
            await rig.until(lambda: log.exists() and "up" in log.read_text())
            rig.order(end=End(code=75, reason="test", kill=True, stack=True))
            if is_awaited:
                await rig.until(lambda: "in hang" in log.read_text())
                assert not rig.has_ended
                rig.order(end=End(code=75, reason="test", kill=True))
            return await rig.ended()

    monkeypatch.setattr(crew_module, "STACK_S", 2 * DEADLINE_S)
    ended = await told_to_end(tmp_path / "1", is_awaited=True)
    assert ended.signal == signal.SIGKILL and "in hang" in ended.tail
    monkeypatch.setattr(crew_module, "STACK_S", 0.1)
    assert (await told_to_end(tmp_path / "2", is_awaited=False)).signal == signal.SIGKILL


async def test_a_crash_takes_the_sibling_along_and_is_no_ordered_end_though_an_order_follows(tmp_path: Path) -> None:
    async with working(tmp_path) as rig:
        _, second = rig.pids()
        fault = Fault(code=65, message="no", signature="ValueError at x.py:1")
        words = f"say(fault=Fault(**{msgspec.to_builtins(fault)!r})); sys.stderr.write('out of memory')"
        rig.order(f"if slot == 0: {words}; os.kill(os.getpid(), signal.SIGSEGV)")
        await rig.until(lambda: rig.pids()[0] == 0)
        rig.order(end=End(code=75, reason="test", kill=True))
        ended = await rig.ended()
        assert (ended.signal, ended.is_ordered, ended.tail) == (11, False, "out of memory")
        assert ended.report is not None and ended.report.fault == fault
        assert gone(second)


@pytest.mark.parametrize("slot", [0, 1])
async def test_the_worker_that_ends_first_tells_the_reason_and_not_what_its_end_does_to_the_other(
    slot: int, tmp_path: Path
) -> None:
    fault, words = "fault=Fault(code=1, message='connection reset by peer')", "os.kill(os.getpid(), signal.SIGKILL)"
    async with working(tmp_path) as rig:
        await rig.works(1 - slot)
        other = rig.pids()[1 - slot]
        rig.order(f"if slot == {slot}: {words}")
        # The other one hears of it before the agent does.
        os.waitid(os.P_PID, rig.pids()[slot], os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        rig.order(f"if slot != {slot}: say({fault})")
        await until(lambda: rig.crew.facts()[1 - slot].fault_s and rig.crew.facts()[slot].cut_off_s)
        assert rig.report().fault is None
        ended = await rig.ended()
        assert (ended.code, ended.signal) == (None, signal.SIGKILL)
        assert ended.report is not None and ended.report.fault is None
        assert gone(other)


async def test_a_fault_that_waits_for_what_the_other_worker_does_is_told_soon(tmp_path: Path) -> None:
    faults: list[Fault | None] = []
    async with working(tmp_path) as rig:
        await rig.works(1)
        rig.at_change = lambda: faults.append(rig.report().fault)
        rig.order("if slot == 0: say(fault=Fault(code=3, message='no'))")
        await until(lambda: faults[-1:] == [Fault(code=3, message="no")])


@pytest.mark.parametrize("slot", [0, 1])
async def test_the_fault_of_a_worker_remains_when_the_other_is_killed_because_of_it(slot: int, tmp_path: Path) -> None:
    async with working(tmp_path) as rig:
        rig.order(f"if slot == {slot}: say(fault=Fault(code=3, message='no')); sys.exit(3)")
        ended = await rig.ended()
        assert ended.code == 3
        assert ended.report is not None and ended.report.fault == Fault(code=3, message="no")


async def test_what_a_worker_said_before_its_end_is_heard_before_it_is_judged(tmp_path: Path) -> None:
    async with working(tmp_path) as rig:
        first, second = rig.pids()
        rig.order(f"if slot == 0: {FINISH} sys.exit(0)")
        # Nothing is read meanwhile.
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        rig.crew.look()
        assert rig.crew.facts()[0].status.finish is not None
        await rig.works(1)
        assert not gone(second)


async def test_a_worker_that_cannot_be_understood_is_killed(tmp_path: Path) -> None:
    code = "import os, signal\nos.write(int(os.environ['FALLOW_CHANNEL_FD']), b'\\0\\0\\0\\2\\x92\\1')\n" + WAIT
    ended = await Rig(tmp_path, code, slots=2).ended()
    assert ended.signal == 9
    assert ended.tail.startswith("worker n2.")
    assert "cannot be read" in ended.tail


async def test_output_that_nobody_takes_holds_up_neither_siblings_nor_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the first worker is a pipe that nobody reads: it takes no more, and its end does not show."""
    monkeypatch.setattr(crew_module, "TAIL_S", 0.1)
    paths = RunPaths(tmp_path / "run").create()
    os.mkfifo(paths.log("n2.0"))
    async with working(tmp_path) as rig:
        rig.order("print('output', flush=True); say(step=9)")
        await rig.until((log := paths.log("n2.1")).exists)
        await rig.until(lambda: "output" in log.read_text())
        await rig.until(lambda: rig.crew.facts()[0].status.step == 9)
        rig.order("sys.exit(4)")
        assert (await rig.ended()).code == 4
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.to_thread(paths.log("n2.0").read_text) == "output\n"
