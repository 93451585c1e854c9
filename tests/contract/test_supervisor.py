"""What systemd hears of a head: datagrams on a socket of its own (sd_notify(3)), which the test reads in its place."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fallow.head.loop.monitoring import Notifier
from head_in_process import serving

DEADLINE_S = 60.0

MANY = 10_000
"""More messages than a socket that nobody reads may hold (net.unix.max_dgram_qlen)."""


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(DEADLINE_S)
        yield receiver


def fields(message: bytes) -> dict[str, str]:
    return dict(line.split("=", 1) for line in message.decode().splitlines())


async def test_a_head_is_ready_then_alive_with_each_turn_and_says_that_it_stops(
    tmp_path: Path, systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
    systemd.setblocking(False)
    heard, has_run = list[dict[str, str]](), asyncio.Event()

    async def listen() -> None:
        while not heard or "STOPPING" not in heard[-1]:
            heard.append(fields(await asyncio.get_running_loop().sock_recv(systemd, 4096)))
            if heard[-1].get("STATUS") == "1 runs, 0 peers":
                has_run.set()

    listening = asyncio.create_task(listen())
    async with serving(tmp_path) as head:
        await head.create()
        await asyncio.wait_for(has_run.wait(), DEADLINE_S)
    await asyncio.wait_for(listening, DEADLINE_S)
    ready, *alive, stopping = heard
    assert ready == {"READY": "1", "STATUS": "term 1, 0 runs"}
    assert {one["WATCHDOG"] for one in alive} == {"1"}
    assert stopping == {"STOPPING": "1"}


def test_a_name_that_is_no_file_is_found_too() -> None:
    """As systemd's own was, once (`@` stands for the null byte that begins it)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("")  # the kernel chooses one
        receiver.settimeout(DEADLINE_S)
        name: bytes = receiver.getsockname()
        Notifier({"NOTIFY_SOCKET": f"@{name[1:].decode()}"}).alive("well")
        assert fields(receiver.recv(4096)) == {"WATCHDOG": "1", "STATUS": "well"}


def test_a_supervisor_that_reads_nothing_holds_no_turn_up(systemd: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": systemd.getsockname()})

    def feed() -> None:
        for _ in range(MANY):
            notifier.alive("well")

    feeding = threading.Thread(target=feed, daemon=True)
    feeding.start()
    feeding.join(DEADLINE_S)
    assert not feeding.is_alive()
    notifier.stopping()
    assert fields(systemd.recv(4096))["WATCHDOG"] == "1"


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/there/is/none"}])
def test_a_head_without_a_supervisor_serves_all_the_same(environ: dict[str, str]) -> None:
    notifier = Notifier(environ)
    notifier.ready("term 1")
    notifier.alive("well")
    notifier.stopping()
