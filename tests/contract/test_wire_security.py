"""The head's port: strangers are refused, whatever they send, and change nothing."""

import asyncio
import os
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.membership.messages import VERSION, Checkpoint, Contract, Gathered, Report, Unreadable
from fallow.core.protocol import AgentLeft, AgentRefused, Beat, BeatReply, Ended, FromAgent, Hello, Progress, ToAgent
from fallow.model import Exit, FallowError
from fallow.wire import router as router_module
from fallow.wire.codec import MAX_EXPANDED, MAX_MESSAGE, Decoder, encode
from fallow.wire.keys import Authenticator, KeyPair, Outcome, new_keypair, probe
from fallow.wire.router import MAX_AGENTS_PER_KEY, Router, RouterDown, agent_of, key_of

DEADLINE_S = 60.0
Dial = Callable[..., "Peer"]
HEAD, KNOWN, OTHER = new_keypair(), new_keypair(), new_keypair()


@pytest.fixture
def allowed() -> set[str]:
    return {KNOWN.public, OTHER.public}


@pytest.fixture
async def router(allowed: set[str]) -> AsyncIterator[Router]:
    made = Router(HEAD.public, HEAD.secret, allowed.__contains__)
    await made.start("127.0.0.1", None)
    yield made
    await made.close()


@pytest.fixture
def dial(router: Router) -> Iterator[Dial]:
    peers: list[Peer] = []

    def make(keys: KeyPair, identity: bytes = b"") -> Peer:
        peers.append(Peer(router.endpoint, keys, identity))
        return peers[-1]

    yield make
    for peer in peers:
        peer.context.destroy(linger=0)


class Peer:
    """A client made by hand, so that it can do what `Link` never would."""

    def __init__(self, endpoint: str, keys: KeyPair, identity: bytes = b"") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, HEAD.public.encode())
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    async def received(self) -> bytes:
        return await asyncio.to_thread(self._receive)

    def _receive(self) -> bytes:
        assert self.socket.poll(int(DEADLINE_S * 1000)), "nothing came"
        return self.socket.recv()


def beat(step: int = 0) -> Beat:
    return Beat(report=Report(node=1, boot=1, seq=1, term=1, edition=1, step=step))


def hello(host: str = "h1") -> Hello:
    return Hello(host=host, token="t", version="0.0", job_id="1", boot=1, slots=1, entry="127.0.0.1:1")


def named(keys: KeyPair, host: str = "h1") -> str:
    return f"{keys.public} {host}"


async def next_from(router: Router) -> tuple[str, FromAgent]:
    async with asyncio.timeout(DEADLINE_S):
        return await router.recv()


async def introduce(router: Router, peer: Peer, keys: KeyPair = KNOWN, host: str = "h1") -> None:
    """Have a peer say hello; it is the next that is heard."""
    peer.send(encode(hello(host)))
    assert await next_from(router) == (named(keys, host), hello(host))


async def outcome(
    router: Router, keys: KeyPair | None, server: str = HEAD.public, within_s: float = DEADLINE_S
) -> Outcome:
    public, secret = keys or ("", "")
    return await asyncio.to_thread(probe, router.endpoint, server if keys else "", public, secret, within_s)


async def test_who_has_a_known_key_and_the_heads_own_gets_in_and_nobody_else(router: Router, dial: Dial) -> None:
    assert await outcome(router, KNOWN) is Outcome.ACCEPTED
    assert await outcome(router, new_keypair()) is Outcome.REFUSED
    assert router.refusals["unknown key"] >= 1
    assert await outcome(router, None) is Outcome.REFUSED
    assert await outcome(router, KNOWN, new_keypair().public, 0.5) is not Outcome.ACCEPTED
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.PLAIN_USERNAME, b"x")
    client.setsockopt(zmq.PLAIN_PASSWORD, b"y")
    client.connect(router.endpoint)
    client.send(encode(hello("stranger")))
    await introduce(router, dial(KNOWN))
    context.destroy(linger=0)


@pytest.mark.parametrize("is_supervised", [True, False])
async def test_everybody_is_refused_without_the_authenticator(router: Router, is_supervised: bool) -> None:
    """Even if our supervision failed: with the enforced domain libzmq itself accepts nobody any more."""
    assert router._zap is not None
    if not is_supervised:
        router._zap.task.remove_done_callback(router._zap_ended)
    router._zap.close()
    await asyncio.gather(router._zap.task, return_exceptions=True)
    for keys in (KNOWN, new_keypair(), None):
        assert await outcome(router, keys, within_s=0.5) is not Outcome.ACCEPTED
    if is_supervised:
        with pytest.raises(RouterDown, match="authenticator") as caught:
            await next_from(router)
        assert caught.value.code is Exit.SOFTWARE
        with pytest.raises(RouterDown):
            router.send(named(KNOWN), BeatReply(term=1))
        with pytest.raises(RouterDown):
            await router.receive(1)


@pytest.mark.parametrize(("everybody", "found"), [(True, "an unknown key: accepted"), (False, "a known key: refused")])
async def test_a_head_does_not_listen_where_all_are_let_in_or_refused(
    everybody: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Authenticator):
        def __init__(self, context: Any, allowed: Any, refused: Any) -> None:
            super().__init__(context, lambda key: everybody, refused)

    monkeypatch.setattr(router_module, "Authenticator", Broken)
    with pytest.raises(FallowError, match=f"authentication does not hold .*{found}"):
        await Router(HEAD.public, HEAD.secret, lambda key: False).start("127.0.0.1", None)


async def test_a_head_does_not_listen_with_an_old_libzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 4))
    with pytest.raises(FallowError, match=r"older than 4\.3\.5"):
        await Router(HEAD.public, HEAD.secret, lambda key: False).start("127.0.0.1", None)


async def test_revoked_key_is_not_heard(router: Router, dial: Dial, allowed: set[str]) -> None:
    bad, good = dial(KNOWN), dial(OTHER)
    await introduce(router, bad)
    await introduce(router, good, OTHER)
    allowed.discard(KNOWN.public)
    bad.send(encode(beat()))
    # The refusal is counted before anything else is delivered, or with the next message.
    async with asyncio.timeout(DEADLINE_S):
        while not router.refusals["revoked key"]:
            good.send(encode(beat()))
            assert (await router.recv())[0] == named(OTHER)


async def test_n4_peer_cannot_speak_as_another(router: Router, dial: Dial) -> None:
    first = dial(KNOWN, identity=b"me")
    await introduce(router, first)
    dial(OTHER, identity=b"me").send(encode(hello()))
    dial(OTHER).send(encode(hello("h2")))
    peer, _ = await next_from(router)
    assert key_of(peer) == OTHER.public, "whatever it says, it is its key"
    first.send(encode(beat()))
    while (heard := await next_from(router))[0] != named(KNOWN):
        assert key_of(heard[0]) == OTHER.public
    assert router.send(named(KNOWN), BeatReply(term=1))
    assert await first.received() == encode(BeatReply(term=1)), "its route was not stolen"
    first.context.destroy(linger=0)
    async with asyncio.timeout(DEADLINE_S):
        while not router.refusals["no hello yet"]:
            # While the router still knows the other connection, this one is not let in.
            dial(OTHER, identity=b"me").send(encode(beat()))
            await asyncio.sleep(0.05)
            assert KNOWN.public not in {key_of(peer) for peer, _ in await router.receive(10)}, "nor its name"


async def test_agents_of_one_allocation_have_their_own_routes(router: Router, dial: Dial) -> None:
    """And one that dials anew has its name there, and no longer on the old connection."""
    peers = {host: dial(KNOWN) for host in ("h1", "h2")}
    for host, peer in peers.items():
        await introduce(router, peer, host=host)
    assert (key_of(named(KNOWN)), agent_of(named(KNOWN))) == (KNOWN.public, "h1")
    for number, (host, peer) in enumerate(peers.items()):
        peer.send(encode(beat(number)))
        assert await next_from(router) == (named(KNOWN, host), beat(number))
        assert router.send(named(KNOWN, host), BeatReply(term=number))
        assert await peer.received() == encode(BeatReply(term=number))
    new = dial(KNOWN)
    await introduce(router, new)
    peers["h1"].send(encode(beat(1)))
    await counted(router, "no hello yet", 1)
    assert router.send(named(KNOWN), BeatReply(term=3))
    assert await new.received() == encode(BeatReply(term=3))
    assert router.connected == {named(KNOWN, host) for host in peers}
    router.drop(KNOWN.public)
    assert router.connected == set()
    assert not router.send(named(KNOWN), BeatReply(term=1))


async def counted(router: Router, reason: str, times: int) -> None:
    """Wait until so much was refused for a reason, and nothing was heard."""
    async with asyncio.timeout(DEADLINE_S):
        while router.refusals[reason] < times:
            assert await router.receive(10) == []
            await asyncio.sleep(0)


async def test_who_has_not_said_hello_on_its_connection_is_not_heard(router: Router, dial: Dial) -> None:
    """Not even with the name of another agent of its allocation in the message."""
    known, silent = dial(KNOWN), dial(KNOWN)
    await introduce(router, known)
    for message in (beat(), Ended(node=1, boot=1, code=0), AgentLeft(code=0)):
        silent.send(encode(message))
    await counted(router, "no hello yet", 3)
    await introduce(router, silent, host="h2")
    silent.send(encode(beat(7)))
    assert await next_from(router) == (named(KNOWN, "h2"), beat(7))


async def test_all_that_lies_there_is_taken_at_once(router: Router, dial: Dial) -> None:
    peer = dial(KNOWN)
    peer.send(encode(hello()))
    for step in range(100):
        peer.send(encode(beat(step)))
        peer.send(b"garbage")
    assert (await next_from(router))[1] == hello()
    found: list[FromAgent] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < 100:
            few = [message for _, message in await router.receive(30)]
            assert len(few) <= 30
            found += few
            await asyncio.sleep(0)
    assert found == [beat(step) for step in range(100)]
    assert await router.receive(30) == []
    peer.send(encode(beat(100)))
    assert await next_from(router) == (named(KNOWN), beat(100)), "who looks leaves nothing unnoticed"


async def test_one_key_has_so_many_agents_at_most(router: Router, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_AGENTS_PER_KEY >= 8192
    monkeypatch.setattr(router_module, "MAX_AGENTS_PER_KEY", 2)
    peers = {host: dial(KNOWN) for host in ("h1", "h2")}
    for host, peer in peers.items():
        await introduce(router, peer, host=host)
    dial(KNOWN).send(encode(hello("h3")))
    await counted(router, "too many agents", 1)
    await introduce(router, dial(OTHER), OTHER, "h3")
    await introduce(router, peers["h1"])


async def test_what_all_nodes_are_told_is_encrypted_before_more_of_it_is_sent(router: Router, dial: Dial) -> None:
    """Else the head's memory grows by the size of the message for each of its agents. One too large harms nothing."""
    peers = {host: dial(KNOWN) for host in ("h1", "h2", "h3")}
    for host, peer in peers.items():
        await introduce(router, peer, host=host)
    large = Gathered(generation=1, key="k", parts=(os.urandom(1 << 18),))
    assert not router.send(named(KNOWN), Gathered(generation=1, key="k", parts=large.parts * 8))
    for host in peers:
        assert router.send(named(KNOWN, host), large)
        async with asyncio.timeout(DEADLINE_S):
            await router.wait_until_encrypted()
    for peer in peers.values():
        assert await peer.received() == encode(large)


GARBAGE = [
    [b""], [b"\xc1"], [b"\x80"], [b"\x92\x01\x80"],
    [b"\x92\x01\x81\xa4type\xa5hello"], [b"\x92\x01\x81\xa4type\xa6refuse"],
    [b"GET / HTTP/1.1\r\n\r\n"], [b"\xdd\xff\xff\xff\xff"], [b"\x91" * 100_000], [b"\x92\x01" + b"\x91" * 100_000],
    [b"\xa5\xff\xfe\xfd\xfc\xfb"], [b"a", b"b"], [b"", b"", b""],
    [encode(beat()), b"more"], [encode(beat()) + b"\0"], [encode(beat())[:-1]],
    [encode(hello()).replace(b"token", b"to\xffen")],
    [encode(hello()).replace(b"\xa2h1", b"\xa2\xff1")], [encode(hello()).replace(b"boot\x01", b"boot\xff")],
]  # fmt: skip


async def test_garbage_changes_nothing(router: Router, dial: Dial) -> None:
    peer = dial(KNOWN)
    names = ["", "x" * 300, "a\nb", "\x1b[31m", "\x9b31m", "a b", "../x"]
    for name in names:
        peer.send(encode(hello(name)))
    await introduce(router, peer)
    assert router.refusals["bad host name"] + router.refusals["not a message"] == len(names)
    for frames in GARBAGE:
        peer.send(*frames)
    peer.send(encode(beat(9)))
    assert await next_from(router) == (named(KNOWN), beat(9))
    assert sum(router.refusals.values()) == len(names) + len(GARBAGE)
    assert router.connected == {named(KNOWN)}


async def test_a_peer_whose_first_message_is_not_understood_is_told(router: Router, dial: Dial) -> None:
    """It would send its hello for ever; a later message that is not understood is dropped."""
    peer, of_another_version = dial(KNOWN), dial(OTHER)
    peer.send(encode(hello()).replace(b"slots\x01", b"slots\xff"))
    await introduce(router, peer)
    peer.send(b"garbage")
    peer.send(encode(beat(1)))
    assert (await next_from(router))[1] == beat(1)
    newer = msgspec.structs.replace(hello("h7"), version="9.9.9")
    of_another_version.send(msgspec.msgpack.encode((VERSION + 1, newer)))
    await counted(router, "not a message", 3)
    for told, words in (
        (peer, ("$.slots",)),
        (of_another_version, ("h7", "9.9.9", f"version {VERSION + 1}", "Update the older side")),
    ):
        refusal = Decoder[ToAgent](ToAgent, always=AgentRefused).decode(await told.received())
        assert isinstance(refusal, AgentRefused)
        assert refusal.code == Exit.CONFIG
        for word in words:
            assert word in refusal.message
    assert router.connected == {named(KNOWN)}
    assert not await asyncio.to_thread(peer.socket.poll, 200)


async def test_foreign_protocols_and_messages_that_are_too_large_end_only_their_connection(
    router: Router, dial: Dial
) -> None:
    host, port = router.endpoint.removeprefix("tcp://").split(":")
    for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\x02\x00", b"\xff" * 4096, b""):
        with socket.create_connection((host, int(port)), DEADLINE_S) as stranger:
            stranger.sendall(data)
            await introduce(router, dial(KNOWN))
    dial(KNOWN).send(b"x" * (MAX_MESSAGE + 1))
    await introduce(router, dial(OTHER), OTHER)


async def test_listens_on_one_address_only(router: Router) -> None:
    port = int(router.endpoint.rsplit(":", 1)[1])
    listening = [c.laddr for c in psutil.Process(os.getpid()).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
    assert not [address for address in listening if address.ip in ("0.0.0.0", "::")]
    for address in ("0.0.0.0", "::", "*", "", "localhost", "224.0.0.1", "127.0.0.1:1", "tcp://x"):
        with pytest.raises(FallowError) as caught:
            await Router(HEAD.public, HEAD.secret, lambda key: True).start(address, None)
        assert caught.value.code is Exit.CONFIG
    second = Router(HEAD.public, HEAD.secret, lambda key: False)
    assert await second.start("127.0.0.1", port) != router.endpoint, "a port that is taken becomes a free one"
    await second.close()


async def test_ipv6() -> None:
    router = Router(HEAD.public, HEAD.secret, lambda key: key == KNOWN.public)
    try:
        endpoint = await router.start("::1", None)
    except FallowError:
        pytest.skip("no IPv6 here")
    assert endpoint.startswith("tcp://[::1]:")
    await router.close()


# -- the decoder --------------------------------------------------------------------------------------------

DECODER: Decoder[FromAgent] = Decoder(FromAgent)
SAMPLES = [
    encode(message)
    for message in (
        hello(),
        beat(5),
        Beat(progress=Progress(loss=0.5, scalars={"lr": 0.1}, pids=(1, 2))),
        Ended(node=1, boot=1, code=None, signal=9, tail="x" * 50),
        Beat(report=msgspec.structs.replace(beat().report, saved=Checkpoint(path="/c", generation=1, step=2))),
    )
]


@settings(max_examples=1000)
@given(st.data())
def test_decoder_survives_any_bytes_and_damaged_messages(data: st.DataObject) -> None:
    noise = data.draw(st.binary(max_size=300))
    decode(noise)
    decode(b"\x92\x01" + noise)
    message = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    decode(bytes(message))


def decode(data: bytes) -> None:
    try:
        message = DECODER.decode(data)
    except Unreadable:
        return
    again = DECODER.decode(encode(message))
    assert again == message or message != message, "what is accepted is a message"


def test_large_messages_are_compressed_and_bounded() -> None:
    """A few bytes must not become many, nor anything hide behind a message."""
    layout = tuple(f"model.{number}.weight float32[64,3]" for number in range(1000))
    contract = Contract(signature="s", shards=1, global_batch=1, layout=layout)
    message = Beat(report=msgspec.structs.replace(beat().report, ready=contract))
    data = encode(message)
    assert DECODER.decode(data) == DECODER.decode(memoryview(data)) == message
    assert len(data) < len(msgspec.msgpack.encode(message)) / 4
    bomb = zlib.compress(bytes(1 << 24), 9)
    for damaged in (data[:-1], data + b"x", data[:40] + bytes([data[40] ^ 1]) + data[41:], b"\xc1", b"\xc1" + bomb):
        with pytest.raises(Unreadable):
            DECODER.decode(damaged)


@pytest.mark.parametrize(("noise", "limit"), [(True, MAX_MESSAGE), (False, MAX_EXPANDED)], ids=["sent", "expanded"])
def test_size_limits(noise: bool, limit: int) -> None:
    """What just fits is read by the other side, and one that does not is not even sent."""
    decoder = Decoder[ToAgent](ToAgent)

    def gathered(size: int) -> Gathered:
        part = (lambda n: os.urandom(n)) if noise else bytes
        sizes = [min(1 << 18, size - begin) for begin in range(0, size, 1 << 18)]
        return Gathered(generation=1, key="k", parts=tuple(map(part, sizes)))

    fits = gathered(limit - 1000)
    assert decoder.decode(encode(fits)) == fits
    with pytest.raises(Unreadable, match="limit"):
        encode(gathered(limit + 1))
    with pytest.raises(Unreadable, match="limit"):
        decoder.decode(bytes(MAX_MESSAGE + 1))
