"""Fast checksums that compare the members' states and find damaged transfers. Not secure against an adversary."""

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash

from fallow.worker.prepared.state import as_bytes, host_copies
from fallow.worker.transport import device as devices

_ROW = 4096
_CHUNK = 1 << 22
"""64-bit words that a device mixes at a time."""


def checksum(*parts: Any) -> int:
    """Return 62 bits of a hash of the buffers' bytes, one buffer after the other (XXH3, https://xxhash.com)."""
    total = xxhash.xxh3_64()
    for part in parts:
        total.update(part)
    return total.intdigest() >> 2


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """Return 62 bits of a hash of the tensors' bytes and lengths, in order.

    Device tensors are hashed on their device, by `row_hashes` twice: only 40 KB of 10 GB come to the host.
    """
    lengths, on_host, hashes = [], [], []
    for tensor in tensors:
        flat = as_bytes(tensor.detach().contiguous())
        lengths.append(flat.numel())
        if devices.asynchronous(flat.device):
            hashes.append(row_hashes(flat))
        else:
            on_host.append(flat)
    copies, copied = host_copies([row_hashes(torch.cat(hashes))] if hashes else [])
    devices.wait(copied)
    return checksum(repr(lengths).encode(), *(one.numpy() for one in on_host + copies))


def row_hashes(flat: torch.Tensor) -> torch.Tensor:
    """Return a hash of each row of 4 KiB, computed on the tensor's device in one pass over its memory.

    A row's hash is the sum over its mixed 64-bit words. A word is multiplied by an odd factor that belongs to its place
    in the row, its upper half is folded into its lower half, and it is multiplied again. The second multiplication
    spreads a change of the highest bits. So a changed bit changes its row's hash, and neither exchanged words nor
    changes of opposite sign cancel. The bytes behind the last whole row are returned unhashed.

    Args:
        flat: uint8, 1-D.
    """
    even = flat.numel() // _ROW * _ROW
    if even and flat.storage_offset() % 8:
        flat = flat.clone()
    words, row = flat[:even].view(torch.int64), _ROW // 8
    factors = _factors(words.device).repeat(min(words.numel(), _CHUNK) // row)
    parts = []
    for part in torch.split(words, _CHUNK):
        by_place = factors[: part.numel()]
        product = part * by_place
        product ^= product >> 32
        product *= by_place
        parts.append(as_bytes(product.view(-1, row).sum(1)))
    return torch.cat([*parts, flat[even:]])


def majority_and_others(sums: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the indices of the most frequent checksum (of equally frequent ones the first), and all other indices."""
    ((usual, _),) = Counter(sums).most_common(1)
    return [n for n, one in enumerate(sums) if one == usual], [n for n, one in enumerate(sums) if one != usual]


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return one odd factor for each word of a row, the same factors in every process."""
    seed = hashlib.shake_128(b"fallow fingerprint").digest(_ROW)
    return devices.to_device(torch.frombuffer(bytearray(seed), dtype=torch.int64) | 1, device)
