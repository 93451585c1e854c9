"""Dial an endpoint and see how the handshake ends. Proves at start that strangers are refused."""

from __future__ import annotations

import time
from enum import StrEnum

import zmq
from zmq.utils.monitor import recv_monitor_message

_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class Outcome(StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "no answer"
    "neither in time; proves nothing"


def probe(endpoint: str, server_key: str, public: str, secret: str, timeout_s: float) -> Outcome:
    """How a handshake with these keys ends; empty keys dial without encryption. Blocks, at most `timeout_s`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        if server_key:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode("ascii"))
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public.encode("ascii"))
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode("ascii"))
        monitor = socket.get_monitor_socket(_REFUSALS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(endpoint)
        return _watch(monitor, time.monotonic() + timeout_s)
    finally:
        # Closes the monitor as well; `context.term` alone would wait for it.
        context.destroy(linger=0)


def _watch(monitor: zmq.Socket[bytes], deadline: float) -> Outcome:
    left = deadline - time.monotonic()
    if left <= 0 or not monitor.poll(int(left * 1000) + 1):
        return Outcome.UNKNOWN
    event = recv_monitor_message(monitor)["event"]
    return Outcome.ACCEPTED if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else Outcome.REFUSED
