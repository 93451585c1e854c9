"""State as bytes, without pickle: a tree of plain values as MessagePack, tensors beside it.

What a `state_dict` may hold: None, bool, int, float, str, bytes, list, tuple, set, dict (any encodable key),
OrderedDict, Counter, defaultdict of a basic type, io.BytesIO, numpy scalars and arrays, torch tensors, dtypes. Anything
else is refused by name: reading a state never runs code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import mmap
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from fallow.model import Exit, FallowError

_FACTORIES: dict[str, type] = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str}
_ALIGN = 64
"""Tensors begin at multiples of this in a stream, so that they can be used in place."""

_HUGE = 1 << 21
"""Blocks from this size on ask the kernel for huge pages."""

_BLOCK = 4096

_MIXED_CPU, _MIXED_DEVICE = 1 << 17, 1 << 24
"""Words that `fingerprint` mixes at a time."""

_SMALL = range(-(2**63), 2**64)


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Shape and dtype of one tensor in the stream (dtype as in `torch.float32`, without `torch.`)."""

    dtype: str
    shape: list[int]

    @property
    def nbytes(self) -> int:
        """Length in the stream, in bytes."""
        count = 1
        for side in self.shape:
            count *= side
        return count * dtype_named(self.dtype).itemsize


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """A whole state: `tree` (MessagePack, tensors as numbers) and the tensors' specs in order."""

    tree: bytes
    tensors: list[TensorSpec]


def dtype_named(name: str) -> torch.dtype:
    """`"float32"` -> `torch.float32`. Raises FallowError for a name that torch does not know."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FallowError(f"state names the dtype {name!r}, which this torch does not have", Exit.DATA)
    return dtype


def encode(value: Any, where: str) -> tuple[Encoded, list[torch.Tensor]]:
    """Take a tree apart.

    Args:
        value: nested plain values and tensors.
        where: name of the object, for errors.

    Returns:
        The structure, and the tensors it refers to (contiguous, on the CPU, detached; they share memory with the
        originals where those already are).

    Raises:
        FallowError: a value of another type; the text names the object and the type.
    """
    tensors: list[torch.Tensor] = []
    tree = _pack(value, where, tensors)
    specs = [TensorSpec(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
    return Encoded(tree=msgspec.msgpack.encode(tree), tensors=specs), tensors


def decode(encoded: Encoded, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `encode`."""
    try:
        return _unpack(msgspec.msgpack.decode(encoded.tree), tensors)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise FallowError(f"a received or stored state cannot be read: {error}", Exit.DATA) from None


def _pack(value: Any, where: str, tensors: list[torch.Tensor]) -> list[Any]:
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return ["v", value]
    if kind is int:
        return ["v", value] if value in _SMALL else ["big", str(value)]
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().to("cpu").contiguous())
        return ["t", len(tensors) - 1, isinstance(value, torch.nn.Parameter)]
    if kind in (list, tuple, set):
        return [kind.__name__, [_pack(item, where, tensors) for item in value]]
    if kind in (dict, OrderedDict, Counter, defaultdict):
        items = [[_pack(k, where, tensors), _pack(v, f"{where}.{k}", tensors)] for k, v in value.items()]
        if kind is not defaultdict:
            return [kind.__name__, items]
        factory = "" if value.default_factory is None else value.default_factory.__name__
        if factory and _FACTORIES.get(factory) is not value.default_factory:
            raise _refused(where, f"defaultdict of {factory}")
        return ["defaultdict", items, factory]
    if kind is io.BytesIO:
        return ["bytesio", value.getvalue()]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        scalar = isinstance(value, np.generic)
        return ["np", array.dtype.str, list(array.shape), array.tobytes(), scalar]
    raise _refused(where, f"{kind.__module__}.{kind.__qualname__}")


def _refused(where: str, what: str) -> FallowError:
    return FallowError(
        f"{where}: its state holds a {what}, which cannot be handed to another member; "
        "return plain values, arrays and tensors from state_dict() and get_extra_state()",
        Exit.DATA,
    )


def _unpack(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    tag = tree[0]
    if tag == "v":
        return tree[1]
    if tag == "big":
        return int(tree[1])
    if tag == "t":
        tensor = tensors[tree[1]]
        return torch.nn.Parameter(tensor) if tree[2] else tensor
    if tag in ("list", "tuple", "set"):
        return {"list": list, "tuple": tuple, "set": set}[tag](_unpack(item, tensors) for item in tree[1])
    if tag in ("dict", "OrderedDict", "Counter", "defaultdict"):
        items = [(_unpack(key, tensors), _unpack(value, tensors)) for key, value in tree[1]]
        if tag == "defaultdict":
            return defaultdict(_FACTORIES[tree[2]] if tree[2] else None, items)
        return {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[tag](dict(items))
    if tag == "bytesio":
        return io.BytesIO(tree[1])
    if tag == "dtype":
        return dtype_named(tree[1])
    if tag == "np":
        array = np.frombuffer(tree[3], dtype=np.dtype(tree[1])).reshape(tree[2]).copy()
        return array[()] if tree[4] else array
    raise ValueError(f"unknown tag {tag!r}")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def padded(size: int) -> int:
    """`size` rounded up to a multiple of 64, where the next tensor may begin."""
    return size + -size % _ALIGN


def room(specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """New tensors of the given specs in one block of memory."""
    size = sum(padded(spec.nbytes) for spec in specs)
    if size < _HUGE:
        return unflatten(torch.empty(size, dtype=torch.uint8), specs)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)  # the first touch of small pages costs more than the copy
    return unflatten(torch.frombuffer(block, dtype=torch.uint8), specs)


def unflatten(flat: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Tensors of the given specs as views of a whole stream."""
    tensors: list[torch.Tensor] = []
    at = 0
    for spec in specs:
        data = flat[at : at + spec.nbytes]
        tensors.append(data.view(dtype_named(spec.dtype)).reshape(spec.shape))
        at += padded(spec.nbytes)
    return tensors


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """A 62-bit hash over tensors' bits: one pass at the speed of memory, on the tensors' own device.

    Each 64-bit word of a large tensor is multiplied by an odd number that belongs to the word's place in its row of
    4 KiB, and its upper half is folded into its lower half. The sums over rows are hashed in order. So a changed bit
    changes the hash, and neither exchanged words nor changes of opposite sign cancel. Not secure against an adversary.
    """
    total = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        raw = as_bytes(tensor.detach().contiguous())
        if raw.storage_offset() % 8:
            raw = raw.clone()  # the hash must not depend on where in memory a tensor begins
        even = raw.numel() // _BLOCK * _BLOCK
        if even:
            total.update(as_bytes(_row_sums(raw[:even].view(torch.int64)).to("cpu")).numpy().data)
        total.update(as_bytes(raw[even:].to("cpu").contiguous()).numpy().data)
        total.update(raw.numel().to_bytes(8, "little"))
    return int.from_bytes(total.digest(), "little") >> 2


def _row_sums(words: torch.Tensor) -> torch.Tensor:
    """For each row of `_BLOCK` bytes the sum of its mixed words. Chunks of 1 MiB stay in the processor's cache."""
    chunk = min(words.numel(), _MIXED_CPU if words.device.type == "cpu" else _MIXED_DEVICE)
    row = _BLOCK // 8
    factors = _factors().to(words.device).repeat(chunk // row)
    mixed, folded = torch.empty_like(factors), torch.empty_like(factors)
    sums = []
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk]
        size = part.numel()
        torch.mul(part, factors[:size], out=mixed[:size])
        torch.bitwise_right_shift(mixed[:size], 32, out=folded[:size])
        folded[:size].bitwise_xor_(mixed[:size])
        sums.append(folded[:size].view(-1, row).sum(1))
    return torch.cat(sums)


@functools.cache
def _factors() -> torch.Tensor:
    """One odd number for each word of a row, the same in every process."""
    seed = hashlib.shake_128(b"fallow fingerprint").digest(_BLOCK)
    return torch.frombuffer(bytearray(seed), dtype=torch.int64) | 1


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree themselves, in the order in which `encode` numbers them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(key)
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)


def plain_name(name: str) -> str:
    """A tensor's name as it is without `torch.compile`, which gives a wrapped module's tensors a longer one."""
    return name.replace("_orig_mod.", "")


def digest(states: Sequence[dict[str, Any]]) -> str:
    """SHA-256 over models' state: names sorted (see `plain_name`); name, dtype, shape and raw bytes of each tensor,
    name and encoding of extra state.

    Args:
        states: one `state_dict()` per model; names carry the model's number where there are several.
    """
    named = {
        plain_name(f"{number}.{name}" if len(states) > 1 else name): value
        for number, state in enumerate(states)
        for name, value in state.items()
    }
    total = hashlib.sha256()
    for name in sorted(named):
        if not isinstance(named[name], torch.Tensor):  # extra state
            encoded, parts = encode(named[name], name)
            total.update(f"{name} {len(encoded.tree)}\n".encode() + encoded.tree)
            total.update(bytes.fromhex(digest([{str(number): part for number, part in enumerate(parts)}])))
            continue
        tensor = named[name].detach().to("cpu").contiguous()
        total.update(f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode())
        total.update(as_bytes(tensor).numpy().data)
    return total.hexdigest()
