"""A list of tensors cut into equal pieces, and one piece on its way from one member to another.

Both ends cut the same list of sizes, so a piece needs no description. It travels in chunks, each with a sum behind it.
Bytes on the host are sent from live memory and received into it. Bytes on a device pass two pinned buffers: one is
filled while the other is sent, or received while the other is emptied. The thread that sends or receives is on a side
stream of its own (see `device.beside`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from fallow.model import Exit, FallowError
from fallow.worker.prepared.checksum import checksum
from fallow.worker.prepared.state import device_of
from fallow.worker.transport import device
from fallow.worker.transport.stream import receive_into, send_all

CHUNK = 1 << 20
"""Bytes under one sum: small enough to be in the cache still when they are summed."""

_BUFFERS = 128
"""Tensors in one chunk at most; the kernel takes 1024 buffers in one call."""

_WORDS = 8
"""Pieces begin at multiples of so many 8-byte words."""

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def send_piece(line: socket.socket, memory: Sequence[torch.Tensor], number: int, pieces: int) -> None:
    """Send piece `number` of `pieces` equal ones.

    Args:
        line: to the receiver.
        memory: flat uint8 tensors, on the host or a device.
        number: of the piece, from 0.
        pieces: how many there are.

    Raises:
        OSError: the line broke.
    """
    for chunk in _on_host(cut(memory, number, pieces), device_of(memory)):
        send_all(line, [*(part.data for part in chunk), memoryview(checksum(*chunk).to_bytes(8, "little"))])


def _on_host(chunks: Iterator[list[torch.Tensor]], where: torch.device) -> Iterator[list[Bytes]]:
    """The chunks' bytes on the host, each until the next one is asked for."""
    if not device.asynchronous(where):
        yield from ([part.numpy() for part in chunk] for chunk in chunks)
        return
    buffers = _pinned()
    ahead: tuple[list[Bytes], torch.Event | None] | None = None
    try:
        for number, chunk in enumerate(chunks):
            views = _views(buffers[number % 2], chunk)
            for view, part in zip(views, chunk, strict=True):
                view.copy_(part, non_blocking=True)
            ready, ahead = ahead, ([view.numpy() for view in views], device.event(where))
            if ready is not None:
                device.wait(ready[1])
                yield ready[0]
        if ahead is not None:
            device.wait(ahead[1])
            yield ahead[0]
    finally:
        device.wait(device.event(where))  # nothing writes to the buffers any more


def receive_piece(
    line: socket.socket, memory: Sequence[torch.Tensor], number: int, pieces: int, moved: Callable[[], None]
) -> int:
    """The other end of `send_piece`; returns the piece's bytes, and calls `moved` whenever something has come.

    Raises:
        OSError: the line broke.
        FallowError: what arrived is not what was sent. All of it was read, so the line can be used on.
    """
    where = device_of(memory)
    buffers = _pinned() if device.asynchronous(where) else []
    emptied: list[torch.Event | None] = [None, None]
    total, damaged = 0, False
    try:
        for n, chunk in enumerate(cut(memory, number, pieces)):
            device.wait(emptied[n % 2])
            views = _views(buffers[n % 2], chunk) if buffers else chunk
            places = [view.numpy() for view in views]
            total += sum(place.size for place in places)
            expected = bytearray(8)
            receive_into(line, [*(place.data for place in places), memoryview(expected)], moved)
            damaged = damaged or int.from_bytes(expected, "little") != checksum(*places)
            if buffers:
                for view, part in zip(views, chunk, strict=True):
                    part.copy_(view, non_blocking=True)
                emptied[n % 2] = device.event(where)
    finally:
        device.wait(device.event(where))
    if damaged:
        raise FallowError("state arrived damaged from another member; check this node's network", Exit.TEMPFAIL)
    return total


def _pinned() -> list[torch.Tensor]:
    return list(torch.empty(2, CHUNK, dtype=torch.uint8, device="cpu", pin_memory=True))


def _views(buffer: torch.Tensor, chunk: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    sizes = [part.numel() for part in chunk]
    return buffer[: sum(sizes)].split_with_sizes(sizes)


def cut(memory: Sequence[torch.Tensor], number: int, pieces: int) -> Iterator[list[torch.Tensor]]:
    """The chunks, at most `CHUNK` bytes each, of one of several pieces of about the same length."""
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
