"""Busy shares of this process's connections, of real sockets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from fallow.worker.transport import link_load
from fallow.worker.transport.link_load import LinkLoad

PEER = "127.0.0.1"


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """To a peer on this host that reads nothing."""
    monkeypatch.setattr(link_load, "WINDOW_S", 0.2)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((PEER, 0)))
        calling = stack.enter_context(socket.create_connection(listener.getsockname()))
        stack.enter_context(listener.accept()[0])
        calling.setblocking(False)
        yield calling


def measured(load: LinkLoad, addresses: set[str]) -> dict[str, float]:
    """The first window's shares."""
    deadline = time.monotonic() + 120
    while not load.measure(addresses) and time.monotonic() < deadline:
        time.sleep(0.01)
    return load.busy_shares


def test_a_link_on_which_nothing_is_sent_is_idle(connection: socket.socket) -> None:
    assert measured(LinkLoad(), {PEER}) == {PEER: 0.0}


def test_a_peer_that_does_not_read_has_no_busy_link(connection: socket.socket) -> None:
    """It computes: its link is not the reason that bytes wait."""
    with suppress(BlockingIOError):
        while True:
            connection.send(bytes(1 << 20))
    assert measured(LinkLoad(), {PEER})[PEER] < 0.5


def test_connections_to_others_do_not_count(connection: socket.socket) -> None:
    load = LinkLoad()
    load.measure({"10.0.0.9"})
    time.sleep(0.25)
    assert load.measure({"10.0.0.9"}) == {}


def test_every_descriptor_stays_open_and_none_is_added(connection: socket.socket) -> None:
    before = os.listdir("/proc/self/fd")
    measured(LinkLoad(), {PEER})
    assert os.listdir("/proc/self/fd") == before
