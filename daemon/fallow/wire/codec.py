"""Messages to bytes and back: one MessagePack struct per frame, strict and bounded.

Large ones are compressed: all members of a generation are told the names of all, which are much alike, and each copy is
encrypted by itself.
"""

from __future__ import annotations

import zlib
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

MAX_MESSAGE = 1024 * 1024
"Bytes in one message, before it is compressed. Enforced by ZeroMQ on the way in and here on the way out."

LARGE = 8 * 1024
"Bytes from which on a message is compressed."

_COMPRESSED = b"\xc1"
"What a compressed one begins with: in MessagePack this byte is never used."


class BadMessage(ValueError):
    """Bytes that are no message of the expected kind."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Bytes of one message. Raises `BadMessage` when it is too large for any peer to take it."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        raise BadMessage(f"{type(message).__name__} is {len(data)} bytes; the limit is {MAX_MESSAGE}")
    return data if len(data) < LARGE else _COMPRESSED + zlib.compress(data, 1)


class Decoder(Generic[T]):
    """Decodes messages of one union type; unknown tags, unknown fields and wrong types are refused."""

    def __init__(self, kind: Any) -> None:
        # `Any`: a union is no `type[T]` to a type checker.
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes | memoryview) -> T:
        """The message in `data`, or `BadMessage`."""
        if len(data) > MAX_MESSAGE:
            raise BadMessage(f"{len(data)} bytes; the limit is {MAX_MESSAGE}")
        if data[:1] == _COMPRESSED:
            data = _expanded(data[1:])
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
            raise BadMessage(str(error)[:200]) from error


def _expanded(data: bytes | memoryview) -> bytes:
    stream = zlib.decompressobj()
    try:
        expanded = stream.decompress(data, MAX_MESSAGE)
    except zlib.error as error:
        raise BadMessage(f"compressed, and damaged: {error}") from None
    if not stream.eof or stream.unused_data:
        raise BadMessage(f"compressed, and no message of at most {MAX_MESSAGE} bytes")
    return expanded
