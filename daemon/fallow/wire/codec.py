"""Messages to bytes and back, the one way for all of them: between head and agents, and between agents and workers.

A message is the MessagePack of (version, message). Large ones are compressed: what all nodes are told names all nodes,
which are much alike, and each copy is encrypted by itself. The frame (version, message), its compression and the
messages that are read behind every version (`Hello`, `Refused`) stay as they are in all versions to come.
"""

import zlib
from typing import Any, Generic, TypeVar

import msgspec

from fallow.core.membership.messages import READABLE, VERSION, Unreadable, Wire

T = TypeVar("T")

MAX_MESSAGE = 1024 * 1024
"Bytes of one message as it travels. Enforced by ZeroMQ on the way in, and here on the way out."

MAX_EXPANDED = 8 * MAX_MESSAGE
"Bytes of one message before it is compressed."

LARGE = 8 * 1024
"Bytes from which on a message is compressed."

_COMPRESSED = b"\xc1"
"What a compressed one begins with: in MessagePack this byte is never used."

_DAMAGES = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)

_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])


def encode(message: Wire) -> bytes:
    """Bytes of one message.

    Raises:
        Unreadable: it is too large for any peer to take it, or one of its texts is not Unicode.
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
        kind: the union. (`Any`: to a type checker it is no `type[T]`.)
        always: one of its messages that is read behind every version; None: none is.
    """

    def __init__(self, kind: Any, always: type[Wire] | None = None) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._always: msgspec.msgpack.Decoder[Any] | None = None if always is None else msgspec.msgpack.Decoder(always)

    def decode(self, data: bytes | memoryview) -> T:
        """The message in `data`.

        Raises:
            Unreadable: it is damaged, too large or of another version, or a field is missing or wrong.
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
