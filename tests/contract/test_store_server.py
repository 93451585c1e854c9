"""The private server: closed to others, never two on one file, gone with its head."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from fallow.files import Paths, private_dir
from fallow.model import Exit, FallowError
from fallow.store import server as server_module
from fallow.store.client import Store, Write
from fallow.store.server import RedisServer, find_server
from store_servers import PROGRAMS

DEADLINE_S = 60.0


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "state", tmp_path / "run").create()


@pytest.fixture(params=PROGRAMS, ids=lambda program: Path(program).name)
async def server(request: pytest.FixtureRequest, paths: Paths) -> AsyncIterator[RedisServer]:
    made = RedisServer(paths, request.param)
    yield made
    await made.stop()


def pid_of(server: RedisServer) -> int:
    return int(server.pid_file.read_text())


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def until_gone(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        await asyncio.sleep(0.01)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_is_private(server: RedisServer, paths: Paths) -> None:
    await server.start()
    assert server.alive
    process = psutil.Process(pid_of(server))
    assert not process.net_connections("inet"), "no network"
    assert mode(paths.redis_socket) == 0o700
    for path in paths.redis_dir.rglob("*"):
        assert mode(path) & 0o077 == 0, path
    assert server.config_file.name in " ".join(process.cmdline()) or str(paths.redis_socket) in " ".join(
        process.cmdline()
    )


async def test_stop_and_start_keeps_everything(server: RedisServer) -> None:
    await server.start()
    store = await Store.open(server.socket)
    term = await store.begin_term(0)
    await store.save([Write("a", 0, b"1")], [])
    pid = pid_of(server)
    await server.start()
    assert pid_of(server) == pid, "it runs"
    await server.stop()
    assert gone(pid)
    assert not server.alive
    await server.start()
    assert await store.load("") == {"a": (1, b"1")}
    assert await store.begin_term(0) == term + 1
    await store.close()


@pytest.mark.parametrize("state", ["running", "stopped"])
async def test_server_of_an_earlier_head_is_ended_first(
    server: RedisServer, paths: Paths, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STOP_S", 0.5)
    await server.start()
    old = pid_of(server)
    store = await Store.open(server.socket)
    await store.begin_term(7)
    await store.close()
    if state == "stopped":
        os.kill(old, signal.SIGSTOP)
    second = RedisServer(paths, server.program)
    await second.start()
    assert gone(old)
    assert pid_of(second) != old
    store = await Store.open(second.socket)
    assert await store.begin_term(0) == 9
    await store.close()
    await second.stop()


async def test_ends_with_its_head(server: RedisServer, paths: Paths) -> None:
    code = (
        "import asyncio, sys, pathlib\n"
        "from fallow.files import Paths\nfrom fallow.store.server import RedisServer\n"
        "async def main():\n"
        "    await RedisServer(Paths(*map(pathlib.Path, sys.argv[1:3])), sys.argv[3]).start()\n"
        "    print('up', flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    head = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, str(paths.state), str(paths.runtime), server.program), stdout=subprocess.PIPE
    )
    assert head.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        assert await head.stdout.readline() == b"up\n"
    pid = pid_of(server)
    head.kill()
    await head.wait()
    await until_gone(pid)


async def test_damaged_file_is_a_clear_error(server: RedisServer, paths: Paths) -> None:
    await server.start()
    store = await Store.open(server.socket)
    await store.begin_term(0)
    await store.save([Write("a", 0, b"x" * 5000)], [])
    await store.close()
    await server.stop()
    (log,) = paths.redis_dir.rglob("*.incr.aof")
    data = bytearray(log.read_bytes())
    data[10:60] = b"#" * 50
    log.write_bytes(data)
    with pytest.raises(FallowError, match=r"ended at start .*redis\.log") as caught:
        await server.start()
    assert caught.value.code is Exit.UNAVAILABLE
    assert not server.alive


async def test_program_that_is_no_server(paths: Paths) -> None:
    server = RedisServer(paths, shutil.which("false"))
    with pytest.raises(FallowError, match="ended at start"):
        await server.start()


def test_find_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert os.access(find_server(), os.X_OK)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server().endswith("valkey-server")
    monkeypatch.setattr(server_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FallowError, match="redis-server: not on PATH") as caught:
        find_server()
    assert caught.value.code is Exit.UNAVAILABLE


async def test_awkward_folder_names(tmp_path: Path) -> None:
    folder = private_dir(tmp_path / 'with space "and" \\ é')
    server = RedisServer(Paths(folder / "s", tmp_path / "r").create())
    await server.start()
    await server.stop()


async def test_nonsense_and_somebody_elses_pid_in_the_pid_file_are_left_alone(server: RedisServer) -> None:
    private_dir(server.pid_file.parent)
    other = await asyncio.create_subprocess_exec("sleep", "1000")
    for content in ("", "x", "-1", "0", "1", "99999999999999999999", f"{other.pid}\n"):
        server.pid_file.write_text(content)
        await server.start()
        assert server.alive, content
        await server.stop()
    assert not gone(other.pid)
    other.kill()
    await other.wait()
