"""Starts agents, their workers and heads as forks of one process that has imported all: 30 ms instead of 2 s each.

Everything but the `exec` is as usual: one agent process per node, one worker process per agent with its secret in an
inherited pipe, its own session and its agent as parent. The fork is sound because the parent is bare: it has one thread
(checked before each fork), has computed nothing, drawn no random number and opened no socket but the one to the tests.
An agent has threads, so it cannot fork workers itself. It comes with `eggs`, children from before its first thread,
that wait for what `exec` would have given them: argv, environment, standard streams and the pipe.

The requests are JSON objects over the sequenced-packet socket whose descriptor is the first argument. All have `argv`,
`environ` and the paths `out` and `error`, some the path of a network `namespace`. They are answered with `{"pid": N}`.
One with `eggs` (a number) starts an agent, one with `head` a head, one with `script` and `folder` is `python ARGV`, and
one with `folder` alone `fallow ARGV` (see `local_nest`). `{}` is answered with `{"ended": {PID: STATUS}}`: the wait
statuses of all processes that were started here and have ended so far. When the socket closes, all end.
"""

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed
import torch.utils.data

import fallow.agent.process
import fallow.head.main
import fallow.worker.api.run
from fallow.agent.__main__ import main as agent_main
from fallow.worker.api.lazy_imports import defer_compiler_import

sys.path.append(str(Path(__file__).parents[1]))
import network

LONGEST = 1 << 20
_PR_SET_PDEATHSIG = 1


def threads() -> int:
    """Threads of this process, as the kernel counts them."""
    return len(os.listdir("/proc/self/task"))


class Nursery:
    """The parent of all agents."""

    def __init__(self, tests: socket.socket) -> None:
        self._tests = tests
        self._alive: set[int] = set()
        self._heads: set[int] = set()
        "they end their stores"
        self._ended: dict[int, int] = {}

    def serve(self) -> None:
        """Until the tests close their end."""
        while data := self._tests.recv(LONGEST):
            request = json.loads(data)
            self._reap()
            answer = {"pid": self._start(request)} if request else {"ended": self._ended}
            self._tests.send(json.dumps(answer).encode())
        for pid in self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if pid in self._heads else signal.SIGKILL)

    def _reap(self) -> None:
        for pid in list(self._alive):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._alive.discard(pid)
                self._ended[pid] = status

    def _start(self, request: dict[str, Any]) -> int:
        assert threads() == 1, "the nursery has threads: their locks would be copied in whatever state they are"
        pid = os.fork()
        if pid == 0:
            self._tests.close()
            if request.get("namespace"):
                network.enter(request["namespace"])
            if "eggs" in request:
                be_an_agent(request)
            if "script" in request:
                be_a_script(request)
            if "head" in request:
                be_a_head(request["environ"], streams_of(request))
            importlib.import_module("local_nest").be_local(request)
        self._alive.add(pid)
        if "head" in request:
            self._heads.add(pid)
        return pid


def be_an_agent(request: dict[str, Any]) -> NoReturn:
    """What `python -m fallow.agent ARGV` would be, with workers that hatch."""
    os.setsid()
    become(request["argv"], request["environ"], streams_of(request))
    run_agent(request["argv"], request["eggs"])


def be_a_head(environ: dict[str, str], streams: tuple[int, int, int]) -> NoReturn:
    """What `python -m fallow.head` would be: it ends with who started it, in order."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    become(["fallow.head"], environ, streams)
    end(exit_code_of(lambda: runpy.run_module("fallow.head", run_name="__main__")))


def be_a_script(request: dict[str, Any]) -> NoReturn:
    """What `python ARGV` would be."""
    os.chdir(request["folder"])
    become(request["argv"], request["environ"], streams_of(request))
    run_script()


def streams_of(request: dict[str, Any]) -> tuple[int, int, int]:
    """No input, and the files that the request names for the output."""
    out, error = (os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for name in ("out", "error"))
    return os.open(os.devnull, os.O_RDONLY), out, error


def run_agent(argv: list[str], eggs: int) -> NoReturn:
    """An agent, with so many workers that hatch, to its end."""
    nest = [lay(be_a_worker) for _ in range(eggs)]

    def start(command: Sequence[str], **options: Any) -> Any:
        if not nest or command[0] != sys.executable or not command[1].endswith(".py"):
            return subprocess.Popen(command, **options)
        return Hatched(*nest.pop(0), command, **options)

    fallow.agent.process.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]
    end(agent_main(argv))


def lay(hatch: Callable[[socket.socket], NoReturn]) -> tuple[int, socket.socket]:
    """Fork an egg, which calls `hatch`: its process id, and where it waits for its orders."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        hatch(its)
    its.close()
    return pid, ours


class Hatched:
    """The part of `subprocess.Popen` that an agent uses, for a worker that is there already."""

    def __init__(self, pid: int, orders: socket.socket, command: Sequence[str], **options: Any) -> None:
        self.pid = pid
        tell(orders, command[1:], options["env"], *options["pass_fds"], options["stdout"], options["stderr"])

    def wait(self) -> int:
        """Reap it: its exit code, or its signal as a negative number."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def tell(orders: socket.socket, argv: Sequence[str], environ: dict[str, str], *descriptors: int) -> None:
    """Have an egg hatch."""
    told = json.dumps({"argv": [*argv], "environ": {**environ}}).encode()
    with orders:
        orders.sendmsg([told], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])


def told_by(orders: socket.socket, count: int) -> tuple[dict[str, Any], list[int]]:
    """Wait for the orders and so many descriptors; ends this egg if none come."""
    try:
        data, descriptors, _, _ = socket.recv_fds(orders, LONGEST, count)
    except OSError:
        os._exit(0)
    if not data:
        os._exit(0)
    orders.close()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    return json.loads(data), descriptors


def be_a_worker(orders: socket.socket) -> NoReturn:
    """What `python ARGV` would be, as soon as the agent says so."""
    told, (channel, out, error) = told_by(orders, 3)
    os.setsid()
    os.set_inheritable(channel, True)
    null = os.open(os.devnull, os.O_RDONLY)
    become(told["argv"], {**told["environ"], "FALLOW_CHANNEL_FD": str(channel)}, (null, out, error))
    run_script()


def run_script() -> NoReturn:
    """The script that `sys.argv` names, to its end."""
    # Signals are at their defaults, as after an exec.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[0] = os.path.dirname(sys.argv[0])
    end(exit_code_of(lambda: runpy.run_path(sys.argv[0], run_name="__main__")))


def exit_code_of(work: Callable[[], object]) -> int:
    """Do it, and what the interpreter does behind it."""
    code = 0
    try:
        work()
    except SystemExit as exit:  # as the interpreter would see it
        code = 0 if exit.code is None else exit.code & 0xFF if isinstance(exit.code, int) else 1
        if isinstance(exit.code, str):
            sys.stderr.write(exit.code + "\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    return code


def become(argv: Sequence[str], environ: dict[str, str], streams: tuple[int, int, int]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = list(argv)
    for target, source in enumerate(streams):
        os.dup2(source, target)
    for source in set(streams):
        os.close(source)


def end(code: int) -> NoReturn:
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    torch.set_num_threads(1)
    defer_compiler_import()  # as `import fallow` does in a worker
    importlib.import_module("torch.distributed.checkpoint")  # the first save does so: once, not in every worker
    gc.freeze()  # a collection in a fork would copy all pages
    if os.getppid() == parent:
        sys.modules["nursery"] = sys.modules["__main__"]  # for `local_nest`
        Nursery(socket.socket(fileno=int(sys.argv[1]))).serve()
