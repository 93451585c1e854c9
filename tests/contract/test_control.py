"""Both ends of the control socket, over a real one."""

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import builders
import views
from fallow.control import client as client_module
from fallow.control import server as server_module
from fallow.control.client import ControlClient, call
from fallow.control.protocol import MAX_REQUEST, NewRun
from fallow.control.server import ControlServer
from fallow.files import write_struct
from fallow.model import EventRecord, Exit, FallowError, Snapshot

SNAPSHOT = views.snapshot()


class Head:
    """A handler that answers a few methods in a few ways."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.events: list[list[EventRecord] | FallowError] = []
        "what it answers when it is asked for them, in turn"
        self.statuses: list[Snapshot] = []
        "likewise; the usual one when there are none"
        self.late_s = 0.0
        "with its events"

    async def handle(self, method: str, params: dict[str, Any]) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(await self._answer(method, params)))

    async def _answer(self, method: str, params: dict[str, Any]) -> Any:
        self.asked.append((method, params))
        match method:
            case "status":
                return self.statuses.pop(0) if self.statuses else SNAPSHOT
            case "create_run":
                return NewRun(run="r", token="t", folder="/f", key_file="/k")
            case "grow":
                raise FallowError("run r: it is over", Exit.USAGE)
            case "drain":
                await asyncio.sleep(60)
            case "report" | "prune" | "pause":
                await asyncio.sleep(0.2)
            case "usage":
                return "x" * 5_000_000
            case "events":
                await asyncio.sleep(self.late_s)
                answer = self.events.pop(0)
                if isinstance(answer, FallowError):
                    raise answer
                return [event for event in answer if event.seq > params["since"]]
        return None


def head_file(folder: Path, **changes: Any) -> Path:
    ours = {"host": socket.gethostname(), "pid": os.getpid(), "control": str(folder / "control.sock")}
    write_struct(folder / "head.json", builders.head_file(**{**ours, **changes}))
    return folder / "head.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Path, Head]]:
    head = Head()
    server = ControlServer(folder / "control.sock", head.handle)
    await server.start()
    try:
        yield head_file(folder), head
    finally:
        await server.close()


async def raw(folder: Path, *lines: bytes) -> list[dict[str, Any]]:
    """Answers to lines that no client of ours would send."""
    reader, writer = await asyncio.open_unix_connection(str(folder / "control.sock"), limit=1 << 26)
    answers = []
    async with asyncio.timeout(120):
        for line in lines:
            writer.write(line)
            if answer := await reader.readline():
                answers.append(json.loads(answer))
    writer.close()
    return answers


async def test_only_we_can_reach_the_socket(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with serving(folder) as (path, head), await ControlClient.connect(path):
        assert stat.S_IMODE((folder / "control.sock").stat().st_mode) & 0o077 == 0
        monkeypatch.setattr("fallow.control.client.peer_uid", lambda sock: os.getuid() + 1)
        with pytest.raises(FallowError, match="another user"):
            await ControlClient.connect(path)
        monkeypatch.setattr(server_module, "peer_uid", lambda sock: os.getuid() + 1)
        monkeypatch.setattr("fallow.control.client.peer_uid", lambda sock: os.getuid())
        async with await ControlClient.connect(path) as other:
            with pytest.raises(FallowError, match="went away"):
                await other.call("status")
        assert not head.asked
    assert not (folder / "control.sock").exists()
    open_folder = tmp_path_factory.mktemp("open")
    os.chmod(open_folder, 0o755)
    with pytest.raises(FallowError) as caught:
        await ControlServer(open_folder / "control.sock", Head().handle).start()
    assert caught.value.code is Exit.NOPERM


async def test_the_socket_of_an_earlier_head_is_replaced_and_its_end_is_not_the_end_of_ours(folder: Path) -> None:
    former = ControlServer(folder / "control.sock", Head().handle)
    await former.start()
    async with serving(folder) as (path, head):
        await former.close()
        async with await ControlClient.connect(path) as client:
            assert await client.call("cancel") is None
        assert head.asked
    assert not (folder / "control.sock").exists()


async def test_what_is_no_socket_is_not_replaced(folder: Path) -> None:
    (folder / "control.sock").write_text("precious")
    with pytest.raises(FallowError, match=r"control.sock .*remove it") as caught:
        await ControlServer(folder / "control.sock", Head().handle).start()
    assert caught.value.code is Exit.CANTCREAT
    assert (folder / "control.sock").read_text() == "precious"


NONSENSE = (
    b"\n", b"null\n", b"{}\n", b"[[[[\n", b'{"method": 1}\n', b'{"method": "status", "params": []}\n',
    b'{"method": "status", "extra": 1}\n', b"GET / HTTP/1.1\r\n", b"\xff\xfe\x00\n", b"[" * 100_000 + b"\n", b"1e999\n",
    b'{"method": "status", "params": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}\n",
    b'{"method":"status","params":{"run":"\\ud800"}}\n', b'{"method":"status","params":{"run":NaN}}\n',
    b'{"method":"grow","params":{"run":"x","by":1e999}}\n',
)  # fmt: skip


async def test_nonsense_is_answered_and_the_server_lives(folder: Path) -> None:
    async with serving(folder):
        for line in NONSENSE:
            first, second = await raw(folder, line, b'{"method": "cancel"}\n')
            assert first["error"]["code"] == Exit.DATA, line[:60]
            assert second == {"result": None}


async def test_a_line_without_end_is_cut_off(folder: Path) -> None:
    async with serving(folder) as (path, _):
        (answer,) = await raw(folder, b"x" * (MAX_REQUEST + 100_000))
        assert answer["error"]["code"] == Exit.DATA
        async with await ControlClient.connect(path) as client:
            with pytest.raises(FallowError, match="bytes long"):
                await client.call("create_run", spec={"script": "x" * MAX_REQUEST})


GONE = 2**22 + 1
"No process has that number."


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (None, "no head is running for .*; start one with: fallow daemon"),
        ({"pid": GONE}, rf"pid {GONE} on .* is gone; start one"),
        ({}, r"does not answer on .*control.sock"),
        ({"host": "login7", "pid": 5}, r"runs on login7 \(pid 5\), this is .*ssh login7"),
    ],
    ids=["none", "gone", "mute", "elsewhere"],
)
def test_who_cannot_be_asked_from_here_is_told(folder: Path, head: dict[str, Any] | None, words: str) -> None:
    path = folder / "head.json" if head is None else head_file(folder, **head)
    with pytest.raises(FallowError, match=words) as caught:
        call(path, "status")
    assert caught.value.code is Exit.UNAVAILABLE


async def test_answers_and_errors_of_the_head_reach_who_asked_and_the_connection_goes_on(folder: Path) -> None:
    async with serving(folder) as (path, head), await ControlClient.connect(path) as client:
        assert (await client.call("create_run", NewRun, spec={})).token == "t"
        with pytest.raises(FallowError, match="run r: it is over") as caught:
            await client.call("grow", run="r")
        assert caught.value.code is Exit.USAGE
        assert await client.call("status", Snapshot, run="r") == SNAPSHOT
        assert await client.call("cancel") is None
        told = [("create_run", {"spec": {}}), *((name, {"run": "r"}) for name in ("grow", "status"))]
        assert head.asked == [*told, ("cancel", {})]
        with pytest.raises(FallowError, match=r"drain within 0.1 s") as caught:
            await client.call("drain", timeout_s=0.1)
        assert caught.value.code is Exit.TEMPFAIL
        with pytest.raises(FallowError, match="went away"):  # its next answer may be the late one
            await client.call("status")


async def test_who_asks_for_a_count_of_samples_waits_longer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "TIMEOUT_S", 0.1)
    async with serving(folder) as (path, _), await ControlClient.connect(path) as client:
        for method in ("report", "prune"):
            assert await client.call(method) is None
        with pytest.raises(FallowError, match=r"pause within 0.1 s"):
            await client.call("pause")


async def test_who_watches_is_told_each_event_once_and_goes_on_while_the_store_is_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "WATCH_S", 0.0)
    events = [EventRecord(seq=seq, at=0.0, run=None, kind="poll", text="x") for seq in range(1, 7)]
    two, away, five, six = (views.snapshot(last_event=last) for last in (2, 4, 5, 6))
    away = views.changed(away, head=views.head(store_problem="no answer"))
    async with serving(folder) as (path, head), await ControlClient.connect(path) as client:
        head.statuses = [two, two, five, away, five, five, six]
        head.events = [events[:3], FallowError("store: away", Exit.UNAVAILABLE), events[:5], events]
        items = client.watch()
        seen = [await anext(items) for _ in range(13)]
    assert seen == [two, *events[:2], two, five, away, five, *events[2:5], five, six, events[5]]
    with pytest.raises(FallowError, match="went away"):
        await anext(items)


async def test_who_watches_gives_up_a_head_that_answers_too_late(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "WATCH_S", 0.0)
    async with serving(folder) as (path, head), await ControlClient.connect(path) as client:
        head.late_s, head.events = 0.5, [[]]
        call = client.call

        async def impatient(method: str, *asked: Any, **more: Any) -> Any:
            return await call(method, *asked, timeout_s=0.1 if method == "events" else 60.0, **more)

        monkeypatch.setattr(client, "call", impatient)
        items = client.watch()
        assert await anext(items) == SNAPSHOT
        with pytest.raises(FallowError) as caught:
            await anext(items)
        assert caught.value.code is Exit.TEMPFAIL


async def test_who_does_not_read_its_answers_is_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SLOW_S", 0.2)
    async with serving(folder):
        _, writer = await asyncio.open_unix_connection(str(folder / "control.sock"), limit=100)
        writer.write(b'{"method": "usage"}\n')

        async def ask_on() -> None:
            while True:
                writer.write(b"\n")
                await writer.drain()
                await asyncio.sleep(0.02)

        async with asyncio.timeout(120):
            with pytest.raises(ConnectionError):
                await ask_on()
        writer.close()
