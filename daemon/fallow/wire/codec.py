"""Encode and decode all messages: between head and agents, and between agents and workers.

The bytes of a message are the MessagePack of (version, message). Large messages are compressed: a message to all nodes
has similar entries for all nodes, and each copy is encrypted separately. The frame (version, message), its compression,
`Hello` and `AgentRefused` never change, so that peers of different versions can refuse each other with a reason.
"""

import zlib
from typing import Any, Generic, TypeVar

import msgspec

from fallow.core.membership.messages import READABLE, VERSION, Unreadable, Wire

T = TypeVar("T")

MAX_MESSAGE = 1024 * 1024
"Maximum size in bytes of a message on the wire. ZeroMQ enforces it for received messages, `encode` for sent ones."

MAX_EXPANDED = 8 * MAX_MESSAGE
"Maximum size in bytes of a message before compression."

LARGE = 8 * 1024
"Size in bytes from which a message is compressed."

_COMPRESSED = b"\xc1"
"First byte of a compressed message. MessagePack never uses this byte."

_DAMAGES = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)

_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])


def encode(message: Wire) -> bytes:
    """Encode one message.

    Raises:
        Unreadable: the message is too large for any peer, or one of its texts is not Unicode.
    """
    try:
        data = _encoder.encode((VERSION, message))
    except UnicodeEncodeError as error:
        raise Unreadable(f"{type(message).__name__} cannot be sent: {error}") from error
    if len(data) <= MAX_EXPANDED:
        travelling = data if len(data) < LARGE else _COMPRESSED + zlib.compress(data, 1)
        if len(travelling) <= MAX_MESSAGE:
            return travelling
    limits = f"the limit is {MAX_MESSAGE} bytes when compressed, and {MAX_EXPANDED} before"
    raise Unreadable(f"{type(message).__name__} of {len(data)} bytes cannot be sent: {limits}")


class Decoder(Generic[T]):
    """Reads messages of one union type. Unknown fields are ignored; unknown tags and wrong types are refused.

    Args:
        kind: the union. (Typed `Any` because a union is no `type[T]` to a type checker.)
        always: message class that is read from peers of every version; None: no class.
    """

    def __init__(self, kind: Any, always: type[Wire] | None = None) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._always: msgspec.msgpack.Decoder[Any] | None = None if always is None else msgspec.msgpack.Decoder(always)

    def decode(self, data: bytes | memoryview) -> T:
        """Decode the message in `data`.

        Raises:
            Unreadable: the message is damaged, too large or of another version, or a field is missing or wrong.
        """
        if len(data) > MAX_MESSAGE:
            raise Unreadable(f"message of {len(data)} bytes cannot be read: the limit is {MAX_MESSAGE}")
        if data[:1] == _COMPRESSED:
            data = _expand(data[1:])
        try:
            version, body = _frames.decode(data)
            if version in READABLE:
                return self._decoder.decode(body)
        except _DAMAGES as error:
            text = f"message of {len(data)} bytes cannot be read: {str(error)[:200]}. Update the older side"
            raise Unreadable(text) from error
        try:
            if self._always is not None:
                message: T = self._always.decode(body)
                return message
        except _DAMAGES:
            pass
        versions = ", ".join(map(str, sorted(READABLE)))
        text = f"message of version {version} cannot be read: this Fallow knows {versions}. Update the older side"
        raise Unreadable(text)


def _expand(data: bytes | memoryview) -> bytes:
    stream = zlib.decompressobj()
    try:
        expanded = stream.decompress(data, MAX_EXPANDED)
    except zlib.error as error:
        raise Unreadable(f"message cannot be read: it is compressed and damaged: {error}") from None
    if not stream.eof or stream.unused_data:
        raise Unreadable(f"message cannot be read: it is compressed, and no message of at most {MAX_EXPANDED} bytes")
    return expanded
