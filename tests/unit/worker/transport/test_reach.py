"""Who reaches whom, over real sockets and a store in memory."""

import base64
import errno
import hashlib
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore

from fallow.worker.handover import supply
from fallow.worker.handover.supply import Outline
from fallow.worker.handover.transfer import FRESH, HOLDS, TORN
from fallow.worker.loop import exchange, meeting
from fallow.worker.loop.exchange import Call, Kind, Opening, Outcome, Part
from fallow.worker.loop.place import Position
from fallow.worker.prepared.state import TensorSpec
from fallow.worker.reduction.buckets import Sums
from fallow.worker.transport import stream
from fallow.worker.transport.stream import Card, Streams

FORMS = {1: "77d232c60999d52a"}
"""Version -> sum of the form of what members exchange."""


def meet(store: HashStore, ranks: list[int], size: int, timeout_s: float) -> dict[int, dict[int, str]]:
    """Let these members meet on a thread each; however late a thread is, the others know that its member has come."""
    members = [Streams(1, rank, size, "127.0.0.1") for rank in ranks]
    for rank, streams in zip(ranks, members, strict=True):
        publish(store, rank, streams.card)
    with ThreadPoolExecutor(len(ranks)) as pool:
        endpoints = list(pool.map(lambda streams: streams.meet(store, timeout_s), members))
    for streams in members:
        streams.close()
    return dict(zip(ranks, endpoints, strict=True))


def publish(store: HashStore, rank: int, card: Card) -> None:
    store.set(f"card/{rank}", msgspec.json.encode(card).decode())


def card_of(listener: socket.socket) -> Card:
    return Card("127.0.0.1", listener.getsockname()[1], bytes(16), stream.VERSION)


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """A listener whose process is stopped: the kernel takes connections, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.parametrize("size", [2, 5])
def test_all_reach_each_other_at_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "EXCHANGE_S", 120.0)
    began = time.monotonic()
    assert meet(HashStore(), list(range(size)), size, 240.0) == {rank: {} for rank in range(size)}
    assert time.monotonic() - began < 120, "nobody waited for a deadline"


def test_who_has_no_file_descriptor_left_for_a_moment_is_reached_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failed = socket.socket.accept, set[int]()

    def fails_once(listener: socket.socket) -> tuple[socket.socket, object]:
        if listener.fileno() not in failed:
            failed.add(listener.fileno())
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails_once)
    assert meet(HashStore(), [0, 1], 2, 240.0) == {0: {}, 1: {}}


def test_one_that_does_not_answer_is_named_by_all(mute: socket.socket) -> None:
    """With the address and port that were tried."""
    store, card = HashStore(), card_of(mute)
    publish(store, 0, card)
    unreachable = {0: card.endpoint}
    # The two have `EXCHANGE_S` to reach each other.
    assert meet(store, [1, 2], 3, 60.0) == {1: unreachable, 2: unreachable}


def test_one_that_exchanges_data_in_another_version_is_named_at_once(
    mute: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is sent to it, nor is it waited for. The others reach each other. Its card is written out here, since
    cards of all versions have this form; a later one may have more in it.
    """
    monkeypatch.setattr(stream, "EXCHANGE_S", 120.0)
    store, began = HashStore(), time.monotonic()
    card = msgspec.structs.replace(card_of(mute), version=stream.VERSION + 1)
    token = base64.b64encode(card.token).decode()
    text = f'{{"address":"127.0.0.1","port":{card.port},"token":"{token}","version":{card.version},"more":[]}}'
    store.set("card/0", text)
    for unreachable in meet(store, [1, 2], 3, 240.0).values():
        assert list(unreachable) == [0]
        assert unreachable[0].startswith(card.endpoint)
        assert f"versions {stream.VERSION} and {card.version} of" in unreachable[0]
        assert "one version of Fallow on all nodes" in unreachable[0]
    assert time.monotonic() - began < 120
    mute.setblocking(False)
    with pytest.raises(BlockingIOError):
        mute.accept()


def form() -> str:
    """What members exchange, as far as types, layouts and numbers with a meaning tell it.

    Names count though most fields travel by their place: two fields of one type that change places are another form.
    """
    structs = (Part, Outcome, Sums, Outline, TensorSpec, Position)
    fields = [[(field.encode_name, str(field.type)) for field in msgspec.structs.fields(kind)] for kind in structs]
    by_place = [kind.__struct_config__.array_like for kind in structs]
    tuples = [list(kind.__annotations__.items()) for kind in (Opening, Call)]
    frames = [frame.format for frame in (stream._HELLO, exchange._FORM, meeting._ANSWER, supply.ASK, supply.HEAD)]
    numbers = {kind.name: kind.value for kind in Kind}, (FRESH, HOLDS, TORN), supply.PARTS, supply.RECEIPT
    text = re.sub(r"<class '([^']*)'>", r"\1", repr([fields, by_place, tuples, frames, numbers]))
    return re.sub(r"fallow\.[\w.]*\.", "", text)  # its module may be another one


def test_what_members_exchange_has_the_form_of_its_version() -> None:
    """For another form: raise `stream.VERSION`, and write the form's sum here.

    The version stays where a field has only another name and travels by its place: write the sum anew.
    """
    assert hashlib.sha256(form().encode()).hexdigest()[:16] == FORMS[stream.VERSION], form()


def test_whoever_does_not_know_the_token_is_nobody(mute: socket.socket) -> None:
    """The one who should call has come, and is silent."""
    store, streams = HashStore(), Streams(1, 0, 2, "127.0.0.1")
    publish(store, 1, card_of(mute))
    with socket.create_connection((streams.card.address, streams.card.port), timeout=60) as stranger:
        stranger.sendall(stream._HELLO.pack(stream._HELLO.size, b"x" * 16, 1))
        stranger.shutdown(socket.SHUT_WR)
        assert streams.meet(store, 0.5) == {1: streams.card.endpoint}
    streams.close()
