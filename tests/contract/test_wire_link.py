"""A link finds its head again and says hello first, whatever happened."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import builders
from fallow.core.membership.messages import VERSION, Report
from fallow.core.protocol import AgentLeft, AgentRefused, Beat, BeatReply, Ended, Hello, ToAgent
from fallow.files import private_dir, read_struct, write_private, write_struct
from fallow.model import AllocationKind, Exit, FallowError, HeadFile, KeyFile
from fallow.wire import codec
from fallow.wire import link as link_module
from fallow.wire.address import host_of, local_address_towards, own_address, resolve
from fallow.wire.keys import KeyPair, new_keypair
from fallow.wire.link import Link
from fallow.wire.router import Router
from waiting import until

DEADLINE_S = 60.0
HEAD, PEER = new_keypair(), new_keypair()
UNCLAIMED = range(32100, 32200)
"Between those of testbeds and those that the kernel gives out: nobody takes one of them while no head listens."


def hello(number: int = 0) -> Hello:
    return Hello(host="n", token="t", version="0", job_id="1", boot=number, slots=1, entry="127.0.0.1:1")


def beat(step: int) -> Beat:
    return Beat(report=Report(node=1, boot=1, seq=step, term=1, edition=1, step=step))


class Setup:
    """One router at a time, one link, and what the link heard."""

    def __init__(self, folder: Path) -> None:
        self.head_file = folder / "head.json"
        self.allowed = {PEER.public}
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.connections = 0
        self.router: Router | None = None

    async def head(self, keys: KeyPair = HEAD, port: int | None = None, ports: range | None = None) -> Router:
        self.router = Router(keys.public, keys.secret, lambda key: key in self.allowed)
        endpoint = await self.router.start("127.0.0.1", port, ports)
        write_struct(self.head_file, builders.head_file(endpoint=endpoint, public_key=keys.public))
        return self.router

    def link(self, hear: Callable[[ToAgent], None] | None = None) -> Link:
        keys = KeyFile(
            run="r", token="t", kind=AllocationKind.BASE, public_key=PEER.public, secret_key=PEER.secret,
            head_file=str(self.head_file),
        )  # fmt: skip
        self.made = Link(read_struct(self.head_file, HeadFile), keys, hear or self.heard.put_nowait, self._connected)
        return self.made

    def _connected(self) -> None:
        self.connections += 1
        self.made.send(hello(self.connections))

    async def next(self) -> Any:
        assert self.router is not None
        async with asyncio.timeout(DEADLINE_S):
            return (await self.router.recv())[1]

    async def back(self) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await self.heard.get()


@pytest.fixture
async def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    monkeypatch.setattr(link_module, "SILENCE_S", 0.3)
    made = Setup(private_dir(tmp_path / "s"))
    yield made
    if hasattr(made, "made"):
        await made.made.close(0.0)
    if made.router is not None:
        await made.router.close()


@pytest.mark.parametrize(("has_moved", "has_new_key"), [(False, False), (True, True), (False, True)])
async def test_the_head_is_found_again(setup: Setup, has_moved: bool, has_new_key: bool) -> None:
    router = await setup.head()
    link = setup.link()
    link.start()
    assert await setup.next() == hello(1)
    port = port_of(router)
    await router.close()
    router = await setup.head(new_keypair() if has_new_key else HEAD, None if has_moved else port)
    fields = msgspec.json.decode(setup.head_file.read_bytes())
    write_private(setup.head_file, msgspec.json.encode(fields | {"colour": "a newer Fallow's"}))
    assert (await setup.next()).boot >= 2
    assert link.head.endpoint == router.endpoint


def port_of(router: Router) -> int:
    return int(router.endpoint.rsplit(":", 1)[1])


async def test_a_file_system_that_never_answers_keeps_no_link_from_its_head(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def read(path: Path, kind: type) -> None:
        asked.set()
        answered.wait()
        raise FileNotFoundError

    monkeypatch.setattr(link_module, "read_struct", read)
    router = await setup.head(ports=UNCLAIMED)
    setup.link().start()
    assert await setup.next() == hello(1)
    await router.close()
    await asyncio.to_thread(asked.wait, DEADLINE_S)
    await setup.head(port=port_of(router), ports=UNCLAIMED)
    assert await setup.next() == hello(2)
    answered.set()


async def test_a_link_that_cannot_read_dials_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await setup.head()
    link = setup.link()
    link.start()
    peer, _ = await router.recv()
    monkeypatch.setattr(link_module, "guarded", lambda *_: 1 // 0)
    assert router.send(peer, BeatReply(term=1))
    await until(lambda: not link.connected)
    monkeypatch.undo()
    assert await setup.next() == hello(2)


async def test_the_hello_is_first_on_each_connection_and_what_is_said_without_one_is_dropped(setup: Setup) -> None:
    """Whoever was cut off for an hour does not tell each minute of it: an agent says again how things stand."""
    router = await setup.head(ports=UNCLAIMED)
    link = setup.link()
    for number in (1, 2, 3):
        link.send(beat(0))
        if number == 1:
            link.start()
        else:
            router = await setup.head(port=port_of(router), ports=UNCLAIMED)
        assert await setup.next() == hello(number)
        link.send(beat(number))
        assert await setup.next() == beat(number)
        await router.close()
        await until(lambda: not link.connected)


async def test_a_head_of_another_version_counts_as_silent_but_its_refusal_is_heard(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes is heard in order."""
    router = await setup.head()
    link = setup.link()
    link.start()
    peer, _ = await router.recv()
    for term in range(50):
        assert router.send(peer, BeatReply(term=term))
    assert [await setup.back() for _ in range(50)] == [BeatReply(term=term) for term in range(50)]
    before = link.last_heard
    monkeypatch.setattr(codec, "VERSION", VERSION + 1)
    assert router.send(peer, BeatReply(term=2))
    refused = AgentRefused(code=Exit.CONFIG, message="no")
    assert router.send(peer, refused)
    assert await setup.back() == refused
    monkeypatch.undo()
    assert router.send(peer, BeatReply(term=3))
    assert await setup.back() == BeatReply(term=3)
    assert link.last_heard > before


def test_addresses() -> None:
    assert local_address_towards("127.0.0.1") == "127.0.0.1"
    assert resolve("127.0.0.1") == "127.0.0.1"
    assert own_address() != "127.0.0.1"
    assert host_of("tcp://127.0.0.1:5") == "127.0.0.1"
    assert host_of("tcp://[::1]:5") == "::1"
    for bad in ("ipc:///x", "tcp://x", "tcp://:5", "x"):
        with pytest.raises(FallowError, match="endpoint"):
            host_of(bad)
    with pytest.raises(FallowError, match="does not resolve"):
        resolve("no-such-host.invalid")


async def test_close_flushes_and_gives_up_in_time(setup: Setup) -> None:
    router = await setup.head()
    link = setup.link()
    link.start()
    assert await setup.next() == hello(1)
    said = [*(Ended(node=node, boot=1, code=0) for node in range(100)), AgentLeft(code=0)]
    for message in said:
        link.send(message)
    await link.close(DEADLINE_S)
    assert [await setup.next() for _ in said] == said
    link.send(beat(1))
    await link.close(0.0)  # a second time does nothing
    link = setup.link()
    await router.close()
    link.start()
    async with asyncio.timeout(DEADLINE_S):
        await link.close(0.2)


async def test_the_head_is_found_again_by_a_key_that_it_accepts_later(setup: Setup) -> None:
    setup.allowed.clear()
    router = await setup.head()
    link = setup.link()
    link.start()
    await until(lambda: router.refusals["unknown key"] >= 2)
    setup.allowed.add(PEER.public)
    assert await setup.next() == hello(1)
    endpoint = link.head.endpoint
    for content in (b"", b"{}", b"\xff" * 100):  # a damaged file is ignored
        write_private(setup.head_file, content)
        link.send(beat(1))
        assert await setup.next() == beat(1)
    assert link.head.endpoint == endpoint


async def test_faults_of_the_owner_do_not_end_the_link(setup: Setup) -> None:
    router = await setup.head()
    heard: list[ToAgent] = []

    def hear(message: ToAgent) -> None:
        heard.append(message)
        raise ValueError("from on_message")

    link = setup.link(hear)
    link.start()
    assert await setup.next() == hello(1)
    (peer,) = router.connected
    for term in (1, 2):
        router.send(peer, BeatReply(term=term))
    await until(lambda: heard == [BeatReply(term=1), BeatReply(term=2)])
    link.send(beat(2))
    assert await setup.next() == beat(2)
