"""Messages to bytes and back: one MessagePack struct per frame, strict and bounded."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

MAX_MESSAGE = 1024 * 1024
"Bytes in one message. Enforced by ZeroMQ on the way in and here on the way out."


class BadMessage(ValueError):
    """Bytes that are no message of the expected kind."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Bytes of one message. Raises `BadMessage` when it is too large for any peer to take it."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        raise BadMessage(f"{type(message).__name__} is {len(data)} bytes; the limit is {MAX_MESSAGE}")
    return data


class Decoder(Generic[T]):
    """Decodes messages of one union type; unknown tags, unknown fields and wrong types are refused."""

    def __init__(self, kind: Any) -> None:
        # `Any`: a union is no `type[T]` to a type checker.
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes | memoryview) -> T:
        """The message in `data`, or `BadMessage`."""
        if len(data) > MAX_MESSAGE:
            raise BadMessage(f"{len(data)} bytes; the limit is {MAX_MESSAGE}")
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
            raise BadMessage(str(error)[:200]) from error
