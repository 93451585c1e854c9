"""The agent of a node against a scripted head: real ZeroMQ, real processes."""

import asyncio
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from agent_head import DEADLINE_S, PUPPET, WAIT, Head
from fallow.core.membership.messages import End
from fallow.core.protocol import (
    Admitted,
    AgentLeft,
    AgentRefused,
    Beat,
    EndAgent,
    Ended,
    EndNoted,
    Hello,
    Introduce,
)
from fallow.files import read_struct, write_struct
from fallow.model import HIDE_MARK, SHOW_MARK, Exit, HeadFile
from fallow.wire.router import agent_of, key_of
from waiting import gone, until


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[Head]:
    made = Head(tmp_path)
    await made.start()
    yield made
    await made.close()


async def test_hello_start_end_and_the_agents_own_end(head: Head) -> None:
    words = "os.write(1, b'hello\\n'); sys.stderr.write('\\x1b]52;c;eA==\\x07bad\\nworse'); sys.exit(3)"
    await head.launch(f"import os, sys; {words}")
    hello = await head.begin()
    assert (hello.host, hello.token, hello.job_id, hello.boot, hello.slots) == ("node1", "t1", "42", 1, 1)
    assert (hello.entry, hello.node) == ("127.0.0.1", 0)
    assert (key_of(head.peer), agent_of(head.peer)) == (head.agent_keys.public, "node1")
    ended = await head.hear(Ended)
    assert (ended.node, ended.boot, ended.code, ended.signal, ended.is_ordered) == (1, 1, 3, None, False)
    assert ended.tail == "\\x1b]52;c;eA==\\x07bad\nworse"
    assert await head.hear(Ended) == ended, "repeated until it is noted"
    assert (await head.hear(Beat)).report is None, "none is there to report of"
    head.send(EndNoted(node=1, boot=1))
    head.send(EndAgent(term=1, code=93, reason="test"))
    assert (await head.hear(AgentLeft)).code == 93
    code, out, _ = await head.ended()
    assert code == 93
    assert out == "", "not shown, not copied"
    log = head.run.log("n0")
    assert b"hello\n" in log.read_bytes()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


async def test_hello_is_repeated_until_the_workers_are_admitted_and_none_runs_before(head: Head) -> None:
    await head.launch(WAIT)
    first = await head.hear(Hello)
    assert await head.hear(Hello) == first
    assert head.workers() == []
    head.send(Admitted(node=1, boot=1))
    assert await head.hear(Hello) == first, "without the setup no worker can be started"
    for _ in range(2):
        head.admit()
        await head.report(lambda report: (report.node, report.boot) == (1, 1), pids=1)
    assert len(head.workers()) == 1, "started only once"


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


async def test_a_worker_gets_its_place_its_start_and_no_secret(head: Head) -> None:
    code = PUPPET + (
        "    e = os.environ\n"
        "    print(e['FALLOW_WORKER'], e['FALLOW_RUN'], e['LOCAL_RANK'], e['CUDA_VISIBLE_DEVICES'],"
        " os.getsid(0) == os.getpid(), os.readlink('/proc/self/fd/0'), start.worker, start.node, slot, start.slots,"
        " start.address, start.setup.run, flush=True)\n"
    )
    await head.launch(code, CUDA_VISIBLE_DEVICES="GPU-a,GPU-b", FALLOW_WORKER="another's")
    hello = await head.begin(node=7)
    assert hello.slots == 2
    for slot, device in enumerate(("GPU-a", "GPU-b")):
        name = f"n6.{slot}"
        text = await head.printed(name, "\n")
        assert text.splitlines()[0].split() == [
            *(name, "r1", "0", device, "True", "/dev/null", name, "7", str(slot), "2", "127.0.0.1", "r1"),
        ]
    for pid in (head.pid, *head.workers()):
        shown = proc(pid, "cmdline") + proc(pid, "environ")
        for key in (*head.keys, *head.agent_keys):
            assert key.encode() not in shown
    assert b"key-file" in proc(head.pid, "cmdline"), "not vacuous"


def proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


async def test_output_of_the_main_nodes_first_worker_is_shown_as_long_as_it_does_not_say_itself(head: Head) -> None:
    await head.launch_two()
    # Whether what a worker writes is shown is decided when its agent reads it.
    await head.obeyed(head.order(noted="print('before', flush=True)"))
    await head.printed("n0.0", "before")
    words = "sys.stderr.write('loud\\n'); os.write(1, b'worker %d\\n' % slot)"
    await head.obeyed(head.order(is_main=True, noted=words))
    for text in ("loud\n", "worker 0\n"):
        await head.printed("n0.0", text)
    await head.obeyed(head.order(is_main=True, noted=f"if slot == 0: os.write(1, {HIDE_MARK!r} + b'hidden')"))
    await head.obeyed(head.order(noted=f"if slot == 0: os.write(1, {SHOW_MARK!r} + b'shown')"))
    assert await head.finish() == (0, "worker 0\nshown", "loud\n")
    assert b"hidden" in head.run.log("n0.0").read_bytes()
    assert b"worker 1" in head.run.log("n0.1").read_bytes()


async def test_sigterm_is_told_with_every_beat_and_workers_go_on(head: Head) -> None:
    agent = await head.launch(WAIT)
    await head.begin(beat_s=10 * DEADLINE_S)
    await head.report(lambda report: True, pids=1)
    agent.send_signal(signal.SIGTERM)
    await head.hear(Beat, lambda beat: beat.warned == signal.SIGTERM)  # at once
    head.admit(beat_s=0.1)
    agent.send_signal(signal.SIGUSR1)  # ends the long pause, too
    for _ in range(2):
        await head.hear(Beat, lambda beat: beat.warned == signal.SIGUSR1)
        assert len(await head.pids()) == 1


async def test_end_agent_kills_what_does_not_leave(head: Head) -> None:
    code = "import signal, subprocess; p = subprocess.Popen(['sleep', '1000']); print(p.pid)\n" + WAIT
    await head.launch(code)
    await head.begin()
    grandchild = int((await head.printed("n0", "up")).split()[0])
    (worker,) = head.workers()
    head.send(EndAgent(term=1, code=75, reason="test", kill_after_s=0.2))
    ended = await head.hear(Ended)
    assert (ended.signal, ended.is_ordered) == (signal.SIGKILL, True)
    head.send(EndNoted(node=1, boot=1))
    assert (await head.ended())[0] == 75
    await until(lambda: gone(worker) and gone(grandchild))


async def test_a_process_that_is_stopped_is_told_at_once_and_for_how_long(head: Head) -> None:
    await head.launch(WAIT)
    await head.begin(beat_s=10 * DEADLINE_S)
    await head.printed("n0", "up")
    (worker,) = head.workers()
    os.kill(worker, signal.SIGSTOP)
    first = await head.report(lambda report: report.stopped_s > 0)
    head.admit(beat_s=0.1)
    await head.report(lambda report: report.stopped_s > first.stopped_s + 0.5)
    os.kill(worker, signal.SIGCONT)
    await head.report(lambda report: report.stopped_s == 0)


async def test_for_how_long_a_worker_has_said_nothing_is_told_until_it_has_said_its_last_words(head: Head) -> None:
    await head.launch()
    await head.begin()
    await head.report(lambda report: report.mute_s > 0.3)
    ordered_at = time.monotonic()
    order = head.order()
    report = await head.obeyed(order)
    assert report.mute_s <= time.monotonic() - ordered_at, "it has spoken since"
    head.order(noted="channel.close(5.0); signal.pause()")
    await head.report(lambda report: report.mute_s == 0)


async def test_orphans_of_the_script_leave_no_zombies_behind(head: Head) -> None:
    await head.launch()
    await head.begin()
    await head.report(lambda _: True, pids=1)
    head.order(noted="os.fork() or os._exit(os.fork() or print(f'<{os.getpid()}>', flush=True) or 0)")
    orphan = (await head.printed("n0", ">")).partition(">")[0].partition("<")[2]
    await until(lambda: not Path("/proc", orphan).exists())


async def test_s5_a_head_of_an_older_term_is_ignored(head: Head) -> None:
    """Of one term the newest order counts."""
    await head.launch()
    await head.begin()
    head.term = 5
    newest = head.order(edition=3, noted="print(3, flush=True)")
    for stale in ({"edition": 2}, {"edition": 3}, {"node": 2, "edition": 4}, {"term": 4, "edition": 9}):
        head.order(noted="print('stale', flush=True)", **stale)
    await head.obeyed(newest)
    head.order(term=4, edition=9, end=End(code=0, reason="an old head", kill=True))
    head.send(EndAgent(term=4, code=0, reason="an old head", kill_after_s=0.0))
    head.term = 6
    await head.obeyed(head.order(edition=1, noted="print('term 6', flush=True)"))
    assert await head.printed("n0", "term 6\n") == "3\nterm 6\n"


async def test_a_refused_agent_ends(head: Head) -> None:
    await head.launch(WAIT)
    await head.hear(Hello)
    head.send(AgentRefused(code=93, message="not \x1b[31mwanted"))
    code, _, err = await head.ended()
    assert (code, err) == (93, "fallow agent: not \\x1b[31mwanted\n")


async def test_of_a_long_traceback_the_end_is_shown_and_why_the_agent_ends(head: Head) -> None:
    await head.launch(WAIT)
    await head.hear(Hello)
    reason = '  File "train.py", line 1, in forward\n' * 1000 + "ValueError: no \x1b[31mshape\nnode n1 failed"
    head.send(EndAgent(term=1, code=70, reason=reason))
    code, _, err = await head.ended()
    assert (code, err[-60:].partition("\n")[2]) == (70, "ValueError: no shape\nnode n1 failed\n")


async def test_an_agent_that_can_open_no_more_files_ends_and_says_so(head: Head) -> None:
    await head.launch(WAIT)
    await head.hear(Hello)
    resource.prlimit(head.pid, resource.RLIMIT_NOFILE, (3, 3))
    head.admit()
    code, _, err = await head.ended()
    assert (code, "cannot be started: [Errno 24]" in err, "Traceback" in err) == (Exit.OSERR, True, False)


async def test_silent_head_and_nothing_to_do(head: Head) -> None:
    await head.launch(WAIT, "--patience", "0.5")
    code, _, err = await head.ended()
    assert code == Exit.TEMPFAIL
    assert "silent" in err


async def test_agent_ends_with_its_parent(head: Head) -> None:
    head.leave_keys()
    command = [sys.executable, "-Pm", "fallow.agent", "--key-file", str(head.key_file), "--"]
    command += [sys.executable, "-u", "-c", WAIT]
    code = f"import subprocess, sys; p = subprocess.Popen({command!r}); print(p.pid, flush=True); sys.exit(p.wait())"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    agent = int(await parent.stdout.readline())
    await head.begin()
    (worker,) = await head.pids(lambda found: len(found) == 1)
    parent.kill()
    await parent.wait()
    await until(lambda: gone(agent) and gone(worker))


async def test_workers_that_no_record_knows_are_introduced_again_and_end_if_another_has_their_number(
    head: Head,
) -> None:
    await head.launch()
    await head.begin()
    await head.obeyed(head.order())
    head.send(Introduce(node=2))
    head.send(Introduce(node=1))
    hello = await head.hear(Hello)
    assert (hello.boot, hello.node) == (1, 1)
    head.admit()
    await head.obeyed(head.order())
    head.send(Introduce(node=1))
    await head.hear(Hello)
    head.admit(node=9)
    ended = await head.hear(Ended)
    assert (ended.node, ended.signal, ended.is_ordered) == (9, signal.SIGKILL, False)


async def test_slurm_takes_the_node_while_no_head_is_there(head: Head) -> None:
    """Its workers leave by themselves, in order."""
    code = "import signal, sys; signal.signal(15, lambda *_: (print('left', flush=True), sys.exit(0)))\n" + WAIT
    agent = await head.launch(code)
    await head.begin()
    await head.printed("n0", "up")
    await head.router.close()
    agent.send_signal(signal.SIGTERM)
    assert (await head.ended())[0] == Exit.NO_RESTART
    assert "left" in head.run.log("n0").read_text()
    await head.start()
