"""Cuts a list of tensors into equal pieces, and sends one piece from one member to another.

Both ends cut the same list of sizes, so a piece needs no description. A piece travels in chunks, each followed by a
checksum. Host tensors are sent from live memory and received into live memory. Device tensors pass a ring of two
pinned buffers: the thread fills one while it sends the other, or receives into one while the other is emptied. Each
thread works on its own side stream (see `device.side_stream`).
"""

import contextlib
import socket
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
import torch

from fallow.model import Exit, FallowError
from fallow.worker.prepared.checksum import checksum
from fallow.worker.prepared.state import allocate, as_bytes, device_of, spec_of
from fallow.worker.transport import device
from fallow.worker.transport.stream import receive_into, send_all

CHUNK = 1 << 20
"""Bytes per checksum: few enough to be still in the processor's cache when the checksum is computed."""

_BUFFERS = 128
"""Largest number of tensors in one chunk; the kernel accepts 1024 buffers per call."""

_WORDS = 8
"""Alignment of pieces, in 8-byte words."""


class Damaged(FallowError):
    """The received bytes do not match their checksum."""

    def __init__(self) -> None:
        super().__init__(
            "state arrived damaged from another member; check the memory and the network of both nodes", Exit.TEMPFAIL
        )


Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def to_host(memory: Sequence[torch.Tensor], number: int, pieces: int) -> Generator[list[Bytes]]:
    """Yield the bytes of a piece's chunks on the host. Each is valid until the next one is requested."""
    where, chunks = device_of(memory), cut(memory, number, pieces)
    if not device.asynchronous(where):
        yield from ([part.numpy() for part in chunk] for chunk in chunks)
        return
    pending: tuple[torch.Tensor, torch.Event | None] | None = None
    try:
        for buffer, chunk in _ring(chunks):
            for view, part in _views(buffer, chunk):
                view.copy_(part, non_blocking=True)
            ready, pending = pending, (buffer, device.event(where))
            if ready is not None:
                device.wait(ready[1])
                yield [ready[0].numpy()]
        if pending is not None:
            device.wait(pending[1])
            yield [pending[0].numpy()]
    finally:
        device.wait(device.event(where))  # until no copy writes to the buffers


def from_host(memory: Sequence[torch.Tensor], number: int, pieces: int) -> Generator[list[Bytes]]:
    """Yield host memory for the bytes of a piece's chunks. The bytes are copied when the next one is requested."""
    where, chunks = device_of(memory), cut(memory, number, pieces)
    if not device.asynchronous(where):
        yield from ([part.numpy() for part in chunk] for chunk in chunks)
        return
    emptied: list[torch.Event | None] = [None, None]
    try:
        for buffer, chunk in _ring(chunks):
            device.wait(emptied.pop(0))
            yield [buffer.numpy()]
            for view, part in _views(buffer, chunk):
                part.copy_(view, non_blocking=True)
            emptied.append(device.event(where))
    finally:
        device.wait(device.event(where))


def _ring(chunks: Iterator[list[torch.Tensor]]) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yield each chunk with one of two pinned buffers, cut to the chunk's length."""
    buffers = torch.empty(2, CHUNK, dtype=torch.uint8, device="cpu", pin_memory=True)
    for number, chunk in enumerate(chunks):
        yield buffers[number % 2][: sum(part.numel() for part in chunk)], chunk


def _views(buffer: torch.Tensor, chunk: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the chunk's parts with views of the buffer."""
    return zip(buffer.split_with_sizes([part.numel() for part in chunk]), chunk, strict=True)


def send_piece(connection: socket.socket, memory: Sequence[torch.Tensor], number: int, pieces: int) -> None:
    """Send piece `number` of `pieces` equal ones.

    Args:
        connection: to the receiver.
        memory: flat uint8 tensors, on the host or a device.
        number: 0-based number of the piece.
        pieces: number of pieces.

    Raises:
        OSError: the connection broke.
    """
    with contextlib.closing(to_host(memory, number, pieces)) as chunks:
        for chunk in chunks:
            send_all(connection, [*(part.data for part in chunk), memoryview(checksum(*chunk).to_bytes(8, "little"))])


def receive_piece(
    connection: socket.socket, memory: Sequence[torch.Tensor], number: int, pieces: int, moved: Callable[[], None]
) -> int:
    """The other end of `send_piece`; returns the piece's bytes, and calls `moved` whenever something has come.

    Raises:
        OSError: the connection broke.
        Damaged: what arrived is not what was sent.
    """
    total, damaged = 0, False
    with contextlib.closing(from_host(memory, number, pieces)) as chunks:
        for places in chunks:
            total += sum(place.size for place in places)
            expected = bytearray(8)
            receive_into(connection, [*(place.data for place in places), memoryview(expected)], moved)
            damaged = damaged or int.from_bytes(expected, "little") != checksum(*places)
    if damaged:
        raise Damaged
    return total


def cut(memory: Sequence[torch.Tensor], number: int, pieces: int) -> Iterator[list[torch.Tensor]]:
    """Yield the chunks of one of `pieces` nearly equal pieces. A chunk has at most `CHUNK` bytes."""
    step = 8 * _WORDS
    words = sum(-(-flat.numel() // step) for flat in memory)
    first, end = words * number // pieces * step, words * (number + 1) // pieces * step
    chunk: list[torch.Tensor] = []
    size = at = 0
    for flat in memory:
        low, high = max(first, at), min(end, at + flat.numel())
        while low < high:
            take = min(high - low, CHUNK - size)
            chunk.append(flat[low - at : low - at + take])
            size += take
            low += take
            if size == CHUNK or len(chunk) == _BUFFERS:
                yield chunk
                chunk, size = [], 0
        at += -(-flat.numel() // step) * step
    if chunk:
        yield chunk


def copies_through_ring(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy a device's tensors to one block of pageable host memory. Waits for the device."""
    copies = allocate([spec_of(tensor) for tensor in tensors])
    memory, targets = [as_bytes(tensor) for tensor in tensors], [as_bytes(copy) for copy in copies]
    with contextlib.closing(to_host(memory, 0, 1)) as chunks:
        for (buffer,), parts in zip(chunks, cut(targets, 0, 1), strict=True):
            for view, part in _views(torch.from_numpy(buffer), parts):
                part.copy_(view)
    return copies
