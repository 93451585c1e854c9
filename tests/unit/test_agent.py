"""The agent against a scripted head: real ZeroMQ, real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from fallow.files import Paths, read_struct, write_struct
from fallow.model import (
    HIDDEN,
    PROTOCOL,
    SHOWN,
    AgentBeat,
    AgentBeatAck,
    AgentEnd,
    AgentHello,
    AgentLeft,
    AgentPlan,
    AllocationKind,
    Exit,
    ExitNoted,
    HeadFile,
    KeyAccepted,
    KeyFile,
    Notice,
    Refused,
    ShowOutput,
    StopWorker,
    WorkerExit,
    WorkerKey,
)
from fallow.wire.keys import new_keypair
from fallow.wire.router import Router, agent_of, key_of

DEADLINE_S = 20.0
M = TypeVar("M")


class Head:
    """Just enough of a head: one allocation, answers written by the test."""

    def __init__(self, tmp_path: Path) -> None:
        self.paths = Paths(tmp_path / "state", tmp_path / "run").create()
        self.run = self.paths.run("r1").create()
        self.keys, self.agent_keys = new_keypair(), new_keypair()
        self.key_file = self.run.key("t1")
        self.peer = ""
        self.heard: list[Any] = []
        self.worker_keys: dict[str, str] = {}
        self.port: int | None = None
        self.agent: asyncio.subprocess.Process | None = None

    async def start(self, term: int = 1) -> None:
        self.router = Router(self.keys.public, self.keys.secret, lambda key: key == self.agent_keys.public)
        endpoint = await self.router.start("127.0.0.1", self.port)
        self.port = int(endpoint.rsplit(":", 1)[1])
        write_struct(
            self.paths.head_file,
            HeadFile(
                protocol=PROTOCOL, version="0", host="h", pid=1, term=term, endpoint=endpoint,
                public_key=self.keys.public, control="", started_at=0.0,
            ),
        )  # fmt: skip

    def leave_keys(self, workers_per_node: int | None = None) -> None:
        keys = KeyFile(
            run="r1", token="t1", kind=AllocationKind.BASE, public_key=self.agent_keys.public,
            secret_key=self.agent_keys.secret, head_file=str(self.paths.head_file), workers_per_node=workers_per_node,
        )  # fmt: skip
        write_struct(self.key_file, keys)

    async def launch(self, code: str, *options: str, **environ: str) -> asyncio.subprocess.Process:
        if not self.key_file.exists():
            self.leave_keys()
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "CUDA", "FALLOW"))}
        self.agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fallow.agent", "--key-file", str(self.key_file), *options),
            *("--", sys.executable, "-u", "-c", code),
            env={**clean, "SLURMD_NODENAME": "node1", "SLURM_JOB_ID": "42", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return self.agent

    async def hear(self, kind: type[M], where: Callable[[M], bool] = lambda _: True) -> M:
        """The next such message; others are remembered. Beats are acknowledged."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self.peer, message = await self.router.recv()
                self.heard.append(message)
                if isinstance(message, AgentBeat):
                    self.router.send(self.peer, AgentBeatAck(term=1))
                if isinstance(message, kind) and where(message):
                    return message

    def send(self, message: Any) -> None:
        assert self.router.send(self.peer, message)

    def plan(self, *workers: str, beat_s: float = 0.1) -> None:
        self.send(AgentPlan(term=1, run="r1", workers=list(workers), folder=str(self.run.root), beat_s=beat_s))

    async def begin(self, *workers: str, beat_s: float = 0.1) -> AgentHello:
        hello = await self.hear(AgentHello)
        self.plan(*workers, beat_s=beat_s)
        for worker in workers:
            key = await self.hear(WorkerKey, lambda m, worker=worker: m.worker == worker)
            self.worker_keys[worker] = key.public_key
            self.send(KeyAccepted(worker=worker))
        return hello

    @property
    def pid(self) -> int:
        assert self.agent is not None
        return self.agent.pid

    async def ended(self) -> tuple[int, str, str]:
        assert self.agent is not None
        async with asyncio.timeout(DEADLINE_S):
            out, err = await self.agent.communicate()
        assert self.agent.returncode is not None
        return self.agent.returncode, out.decode(), err.decode()


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[Head]:
    made = Head(tmp_path)
    await made.start()
    yield made
    await made.router.close()
    if made.agent is not None and made.agent.returncode is None:
        made.agent.kill()
        await made.agent.wait()


async def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "condition did not come true"
        await asyncio.sleep(0.01)
    return found


# It dies with its agent, whatever a test does to that.
WAIT = "import ctypes, signal; ctypes.CDLL(None).prctl(1, 9); print('up'); signal.pause()"


async def test_hello_key_start_exit_end(head: Head) -> None:
    await head.launch("print('hello'); import sys; sys.stderr.write('\\x1b]52;c;eA==\\x07bad\\nworse'); sys.exit(3)")
    hello = await head.begin("w0")
    assert (hello.agent, hello.node, hello.job_id, hello.slots, hello.running) == ("node1", "node1", "42", 1, [])
    assert key_of(head.peer) == head.agent_keys.public
    assert agent_of(head.peer) == "node1"
    gone = await head.hear(WorkerExit)
    assert (gone.worker, gone.code, gone.signal, gone.tail) == ("w0", 3, None, "\\x1b]52;c;eA==\\x07bad\nworse")
    again = await head.hear(WorkerExit)
    assert again == gone, "repeated until it is noted"
    head.send(ExitNoted(worker="w0"))
    head.send(AgentEnd(term=1, code=93, reason="test"))
    assert (await head.hear(AgentLeft)).code == 93
    code, out, _ = await head.ended()
    assert code == 93
    assert out == "", "not shown, not copied"
    log = head.run.log("w0")
    assert log.read_bytes().startswith(b"hello\n")
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


async def test_a_head_that_is_not_reached_is_named_in_the_jobs_output(head: Head) -> None:
    """With the address and port that were tried, while the agent goes on trying."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        told = msgspec.structs.replace(read_struct(head.paths.head_file, HeadFile), endpoint=silent)
        write_struct(head.paths.head_file, told)
        agent = await head.launch("print('x')")
        assert agent.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            line = (await agent.stderr.readline()).decode()
        assert line.startswith(f"fallow agent: no connection from node1 (127.0.0.1) to the head at {silent} for ")
        assert "[head] address" in line
        assert agent.returncode is None
        agent.kill()
        await agent.wait()


async def test_signal_is_reported_fast(head: Head) -> None:
    await head.launch("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    await head.begin("w0")
    gone = await head.hear(WorkerExit)
    assert (gone.code, gone.signal) == (None, signal.SIGKILL)


async def test_command_that_cannot_start(head: Head) -> None:
    head.leave_keys()
    head.agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fallow.agent", "--key-file", str(head.key_file), "--", "/no/such/train.py"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    await head.begin("w0")
    gone = await head.hear(WorkerExit)
    assert gone.code == 127
    assert "/no/such/train.py: cannot be started (No such file or directory)" in gone.tail
    assert "for a Python script: python /no/such/train.py" in gone.tail


async def test_worker_gets_its_place(head: Head) -> None:
    code = (
        "import os, msgspec; from fallow.model import WorkerSecret\n"
        "s = msgspec.msgpack.decode(open(int(os.environ['FALLOW_CHANNEL_FD']), 'rb').read(), type=WorkerSecret)\n"
        "e = os.environ\n"
        "print(e['FALLOW_WORKER'], e['FALLOW_RUN'], e['LOCAL_RANK'], e['CUDA_VISIBLE_DEVICES'], s.address,"
        " s.public_key, s.head_file, os.getsid(0) == os.getpid(), os.readlink('/proc/self/fd/0'), flush=True)\n"
    )
    await head.launch(code, CUDA_VISIBLE_DEVICES="GPU-a,GPU-b")
    hello = await head.begin("w0", "w1")
    assert hello.slots == 2
    for worker in ("w0", "w1"):
        await head.hear(WorkerExit, lambda m, worker=worker: m.worker == worker and m.code == 0)
    for worker, device in (("w0", "GPU-a"), ("w1", "GPU-b")):
        words = head.run.log(worker).read_text().split()
        assert words == [
            *(worker, "r1", "0", device, "127.0.0.1", head.worker_keys[worker]),
            *(str(head.paths.head_file), "True", "/dev/null"),
        ]
    assert head.worker_keys["w0"] != head.worker_keys["w1"]


async def test_output_is_shown_on_demand(head: Head) -> None:
    code = (
        "import os, sys, signal\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('shown'), sys.stderr.write('loud\\n'), sys.exit(0)))\n"
        "print('before')\nwhile True: signal.pause()\n"
    )
    await head.launch(code)
    await head.begin("w0")
    await until(lambda: head.run.log("w0").exists() and b"before\n" in head.run.log("w0").read_bytes())
    head.send(ShowOutput(term=1, worker="w0"))
    head.send(ShowOutput(term=1, worker="w0"))
    await head.hear(AgentBeat)
    await head.hear(AgentBeat)
    os.kill(child_of(head.pid), signal.SIGUSR1)
    await head.hear(WorkerExit)
    head.send(AgentEnd(term=1, code=0, reason="test"))
    code_, out, err = await head.ended()
    assert (code_, out, err) == (0, "shown\n", "loud\n")


async def test_what_a_worker_says_of_its_own_output_counts_for_more(head: Head) -> None:
    """Neither a line too many nor one too few where it becomes the main member, or is it no more."""
    code = (
        "import os\n"
        f"shown, hidden = {SHOWN!r}, {HIDDEN!r}\n"
        "print('before the loop', flush=True)\n"
        "os.write(1, b'start' + hidden[:5])\nos.write(1, hidden[5:] + b'of others' + shown)\n"
        "print('of all')\nos.write(2, b'loud' + hidden + b'quiet')\n"
        "os.write(1, hidden)\nprint('of others')\n"
    )
    await head.launch(code)
    await head.hear(AgentHello)
    head.plan("w0")
    head.send(ShowOutput(term=1, worker="w0"))
    await head.hear(WorkerKey)
    head.send(KeyAccepted(worker="w0"))
    await head.hear(WorkerExit)
    log = head.run.log("w0").read_bytes()
    head.send(AgentEnd(term=1, code=0, reason="test"))
    code_, out, err = await head.ended()
    assert (code_, out, err) == (0, "before the loop\nstart\nof all\n", "loud\n")
    assert b"fallow output" not in log
    assert b"of othersof all\n" in log


async def test_relay_shows_everything(head: Head) -> None:
    await head.launch("print('seen')", "--relay")
    await head.begin("w0")
    await head.hear(WorkerExit)
    head.send(AgentEnd(term=1, code=0, reason="test"))
    assert (await head.ended())[1] == "seen\n"


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


async def test_sigterm_is_a_notice_and_workers_go_on(head: Head) -> None:
    agent = await head.launch(WAIT)
    await head.begin("w0")
    await until(lambda: head.run.log("w0").exists() and head.run.log("w0").read_bytes())
    agent.send_signal(signal.SIGTERM)
    for _ in range(2):
        assert (await head.hear(Notice)).signal == signal.SIGTERM
    assert (await head.hear(AgentBeat)).alive == ["w0"]


async def test_agent_end_kills_what_does_not_leave(head: Head) -> None:
    code = "import signal, subprocess; p = subprocess.Popen(['sleep', '1000']); print(p.pid)\n" + WAIT
    await head.launch(code)
    await head.begin("w0")
    await until(lambda: head.run.log("w0").exists() and b"up" in head.run.log("w0").read_bytes())
    grandchild = int(head.run.log("w0").read_text().split()[0])
    worker = child_of(head.pid)
    head.send(AgentEnd(term=1, code=75, reason="test", kill_after_s=0.2))
    gone = await head.hear(WorkerExit)
    assert gone.signal == signal.SIGKILL
    head.send(ExitNoted(worker="w0"))
    assert (await head.ended())[0] == 75
    await until(lambda: not os.path.exists(f"/proc/{worker}") and not os.path.exists(f"/proc/{grandchild}"))


async def test_stop_worker_kills_a_stopped_process(head: Head) -> None:
    await head.launch(WAIT)
    await head.begin("w0")
    await until(lambda: head.run.log("w0").exists() and head.run.log("w0").read_bytes())
    os.kill(child_of(head.pid), signal.SIGSTOP)
    head.send(StopWorker(term=1, worker="w0", reason="test"))
    assert (await head.hear(WorkerExit)).signal == signal.SIGKILL


async def test_a_process_that_is_stopped_is_told_at_once(head: Head) -> None:
    await head.launch(WAIT)
    await head.begin("w0", beat_s=10 * DEADLINE_S)
    await until(lambda: head.run.log("w0").exists() and head.run.log("w0").read_bytes())
    worker = child_of(head.pid)
    os.kill(worker, signal.SIGSTOP)
    await head.hear(AgentBeat, lambda beat: beat.stopped == ["w0"])
    os.kill(worker, signal.SIGCONT)
    await head.hear(AgentBeat, lambda beat: beat.stopped == [])


async def test_hello_again_after_the_head_came_back_elsewhere(head: Head) -> None:
    await head.launch(WAIT)
    await head.begin("w0")
    await head.hear(AgentBeat, lambda m: m.alive == ["w0"])
    await head.router.close()
    head.port, head.keys = None, new_keypair()
    await head.start(term=2)
    hello = await head.hear(AgentHello)
    assert hello.running == ["w0"]
    head.plan("w0")
    heard = len(head.heard)
    await head.hear(AgentBeat)
    await head.hear(AgentBeat)
    assert not [m for m in head.heard[heard:] if isinstance(m, WorkerKey | WorkerExit)], "not started twice"


async def test_refused_ends_the_agent_and_its_workers(head: Head) -> None:
    await head.launch(WAIT)
    await head.begin("w0")
    await head.hear(AgentBeat, lambda m: m.alive == ["w0"])
    worker = child_of(head.pid)
    head.send(Refused(code=93, message="not \x1b[31mwanted"))
    code, _, err = await head.ended()
    assert (code, err) == (93, "fallow agent: not \\x1b[31mwanted\n")
    await until(lambda: not os.path.exists(f"/proc/{worker}"))


async def test_s5_older_term_is_ignored(head: Head) -> None:
    await head.launch(WAIT)
    await head.begin("w0")
    head.send(ShowOutput(term=5, worker=None))
    head.send(StopWorker(term=4, worker="w0", reason="an old head"))
    await head.hear(AgentBeat)
    assert (await head.hear(AgentBeat)).alive == ["w0"]


async def test_silent_head_and_nothing_to_do(head: Head) -> None:
    await head.launch(WAIT, "--patience", "0.5")
    await head.hear(AgentHello)
    await head.router.close()
    code, _, err = await head.ended()
    assert code == Exit.TEMPFAIL
    assert "silent" in err
    await head.start()


async def test_agent_ends_with_its_parent(head: Head, tmp_path: Path) -> None:
    head.leave_keys()
    command = [sys.executable, "-m", "fallow.agent", "--key-file", str(head.key_file), "--"]
    command += [sys.executable, "-u", "-c", WAIT]
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"import subprocess, sys; sys.exit(subprocess.call({command!r}))"
    )
    hello = await head.begin("w0")
    await head.hear(AgentBeat, lambda m: m.alive == ["w0"])
    worker = child_of(hello.pid)
    parent.kill()
    await parent.wait()
    await until(lambda: gone(hello.pid) and gone(worker))


def gone(pid: int) -> bool:
    """Ended; a zombie that nobody waits for counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_h11_missing_key_file(tmp_path: Path) -> None:
    from fallow.agent.start import read_key_file
    from fallow.model import FallowError

    with pytest.raises(FallowError, match="still missing") as caught:
        read_key_file(tmp_path / "none.json", within_s=0.0)
    assert caught.value.code is Exit.NOINPUT


async def test_no_secret_in_argv_or_environment(head: Head) -> None:
    await head.launch(WAIT)
    await head.begin("w0")
    await head.hear(AgentBeat, lambda m: m.alive == ["w0"])
    for pid in (head.pid, child_of(head.pid)):
        shown = proc(pid, "cmdline") + proc(pid, "environ")
        for key in (*head.keys, *head.agent_keys, *head.worker_keys.values()):
            assert key.encode() not in shown
    assert b"key-file" in proc(head.pid, "cmdline"), "not vacuous"
