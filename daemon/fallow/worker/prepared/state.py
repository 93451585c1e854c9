"""State as bytes, without pickle: a tree of plain values as MessagePack, and a list of the tensors in it.

What a state may hold: None, bool, int, float, str, bytes, list, tuple, set, dict (any encodable key), OrderedDict,
Counter, defaultdict of a basic type, io.BytesIO, numpy scalars and arrays, torch tensors, dtypes. Anything else is
refused by name, so reading a state never runs code. `encode` is the only function that walks a state: the order of its
tensors is the order in which members send them, save them and put them back. A tensor that is found in several places
is one tensor in all of them again.
"""

import contextlib
import hashlib
import io
import mmap
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from fallow.model import Exit, FallowError
from fallow.worker.transport import device as devices
from fallow.worker.transport.device import HOST

_FACTORIES = {"": None, "int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str}
_ALIGN = 64
"""Tensors begin at multiples of this in a block, so that they can be used in place."""

_HUGE = 1 << 21
"""Blocks from this size on ask the kernel for huge pages."""

_SMALL = range(-(2**63), 2**64)

Path = list[str | int]
"""Place in a tree: str is a key, int a place in a list."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Shape and dtype of one tensor (dtype as in `torch.float32`, without `torch.`)."""

    dtype: str
    shape: list[int]
    order: list[int] = []
    "its dimensions as they lie in memory, outermost first; empty: row by row"
    on_device: bool = False
    "on the sender's accelerator"

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return prod(self.shape) * dtype_named(self.dtype).itemsize


@dataclass
class Encoded:
    """A state taken apart."""

    tree: bytes = b""
    "MessagePack, tensors as numbers"
    tensors: list[torch.Tensor] = field(default_factory=list)
    "live tensors, each once"
    paths: list[Path] = field(default_factory=list)
    "paths of the tensors"
    aliases: list[tuple[int, Path]] = field(default_factory=list)
    "further places of tensors, with the tensors' numbers"
    plain: list[tuple[Path, Any]] = field(default_factory=list)
    "the largest parts of the state in which there is no tensor"
    _numbers: dict[int, int] = field(default_factory=dict)
    "id of a tensor -> its number"

    def number(self, tensor: torch.Tensor, path: Path) -> int:
        """List a tensor, unless it is listed already, and return its number."""
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number < len(self.tensors):
            self.aliases.append((number, path))
        else:
            self.tensors.append(tensor)
            self.paths.append(path)
        return number

    @property
    def specs(self) -> list[TensorSpec]:
        """What the tensors look like."""
        return [spec_of(tensor) for tensor in self.tensors]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """What one tensor looks like."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype, list(tensor.shape), _order(tensor), devices.asynchronous(tensor.device))


def dtype_named(name: str) -> torch.dtype:
    """`"float32"` -> `torch.float32`. Raises FallowError for a name that torch does not know."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FallowError(f"state names the dtype {name!r}, which this torch does not have", Exit.DATA)
    return dtype


def encode(value: Any, where: str) -> Encoded:
    """Take a tree of plain values and tensors apart; nothing is copied.

    Args:
        value: the tree.
        where: name of the object, for errors.

    Raises:
        FallowError: a value of another type; the text names the object and the type.
    """
    encoded = Encoded()
    encoded.tree = msgspec.msgpack.encode(_pack(value, where, [], encoded))
    return encoded


def decode(tree: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `encode`; the tensors themselves become part of the result. Raises FallowError."""
    try:
        return _unpack(msgspec.msgpack.decode(tree), list(tensors))
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise FallowError(f"a received or stored state cannot be read: {error}", Exit.DATA) from None


def decode_onto(encoded: Encoded, live: Encoded, first: int = 0) -> Any:
    """Decode a tree with its tensors, from the `first` one on, on the devices of the live ones in their places."""
    places = {str(path): tensor.device for path, tensor in zip(live.paths, live.tensors, strict=True)}
    tensors = [
        tensor.to(places.get(str(path), tensor.device)) if number >= first else tensor
        for number, (path, tensor) in enumerate(zip(encoded.paths, encoded.tensors, strict=True))
    ]
    return decode(encoded.tree, tensors)


def _pack(value: Any, where: str, path: Path, into: Encoded) -> list[Any]:
    before, plain = (len(into.tensors), len(into.aliases)), len(into.plain)
    packed = _pack_kind(value, where, path, into)
    if (len(into.tensors), len(into.aliases)) == before:
        into.plain[plain:] = [(path, value)]  # instead of its own parts
    return packed


def _pack_kind(value: Any, where: str, path: Path, into: Encoded) -> list[Any]:
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return ["v", value]
    if kind is int:
        return ["v", value] if value in _SMALL else ["big", str(value)]
    if isinstance(value, torch.Tensor):
        is_parameter = isinstance(value, nn.Parameter)
        return ["t", into.number(value, path), int(is_parameter and 1 + value.requires_grad)]
    if kind in (list, tuple, set):
        items = [_pack(item, where, [*path, n], into) for n, item in enumerate(value)]
        # Text has another hash in each process, so that equal sets give their items in different orders.
        return [kind.__name__, sorted(items, key=msgspec.msgpack.encode) if kind is set else items]
    if kind in (dict, OrderedDict, Counter, defaultdict):
        items = [
            [_pack_key(key, where), _pack(item, f"{where}.{key}", [*path, str(key)], into)]
            for key, item in value.items()
        ]
        if kind is not defaultdict:
            return [kind.__name__, items]
        factory = getattr(value.default_factory, "__name__", "")
        if _FACTORIES.get(factory) is not value.default_factory:
            raise _unsupported(where, f"defaultdict of {factory}")
        return ["defaultdict", items, factory]
    if kind is io.BytesIO:
        return ["bytesio", value.getvalue()]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        return ["np", array.dtype.str, list(array.shape), array.tobytes(), isinstance(value, np.generic)]
    raise _unsupported(where, f"{kind.__module__}.{kind.__qualname__}")


def _pack_key(key: Any, where: str) -> list[Any]:
    encoded = Encoded()
    packed = _pack(key, where, [], encoded)
    if encoded.tensors:
        raise _unsupported(where, "tensor as a key")
    return packed


def _unsupported(where: str, what: str) -> FallowError:
    return FallowError(
        f"{where}: its state holds a {what}, which cannot be handed to another member; "
        "return plain values, arrays and tensors from state_dict() and get_extra_state()",
        Exit.DATA,
    )


def _unpack(tree: Any, tensors: list[torch.Tensor]) -> Any:
    tag = tree[0]
    if tag == "v":
        return tree[1]
    if tag == "big":
        return int(tree[1])
    if tag == "t":
        number, kind = tree[1:]
        if kind and not isinstance(tensors[number], nn.Parameter):
            tensors[number] = nn.Parameter(tensors[number], requires_grad=kind == 2)
        return tensors[number]
    if tag in ("list", "tuple", "set"):
        return {"list": list, "tuple": tuple, "set": set}[tag](_unpack(item, tensors) for item in tree[1])
    if tag in ("dict", "OrderedDict", "Counter", "defaultdict"):
        items = [(_unpack(key, tensors), _unpack(value, tensors)) for key, value in tree[1]]
        if tag == "defaultdict":
            return defaultdict(_FACTORIES[tree[2]], items)
        return {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[tag](dict(items))
    if tag == "bytesio":
        return io.BytesIO(tree[1])
    if tag == "dtype":
        return dtype_named(tree[1])
    if tag == "np":
        array = np.frombuffer(tree[3], dtype=np.dtype(tree[1])).reshape(tree[2]).copy()
        return array[()] if tree[4] else array
    raise ValueError(f"unknown tag {tag!r}")


def to_bytes(value: Any, where: str) -> bytes:
    """A small state as one string of bytes; waits for the device. Raises FallowError as `encode` does."""
    encoded = encode(value, where)
    copies, copied = host_copies(encoded.tensors)
    devices.wait(copied)
    parts = [(spec, as_bytes(copy).numpy().tobytes()) for spec, copy in zip(encoded.specs, copies, strict=True)]
    return msgspec.msgpack.encode((encoded.tree, parts))


def from_bytes(data: bytes, device: torch.device = HOST) -> Any:
    """The inverse of `to_bytes`; what was on a device is put on `device`.

    Raises:
        FallowError: `to_bytes` did not make these bytes.
    """
    try:
        tree, parts = msgspec.msgpack.decode(data, type=tuple[bytes, list[tuple[TensorSpec, bytes]]])
        tensors = allocate([spec for spec, _ in parts])
        for n, (spec, raw) in enumerate(parts):
            as_bytes(tensors[n]).numpy()[:] = np.frombuffer(raw, dtype=np.uint8)
            if spec.on_device:
                tensors[n] = devices.to_device(tensors[n], device)
    except (msgspec.DecodeError, RuntimeError, ValueError) as error:
        raise FallowError(f"a received or stored state cannot be read: {error}", Exit.DATA) from None
    return decode(tree, tensors)


# ---------------------------------------------------------------------------------------------------------- memory


def _order(tensor: torch.Tensor) -> list[int]:
    if tensor.is_contiguous():
        return []
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else []


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view of a tensor as it lies in memory; a copy, row by row, if there are gaps in it, or if torch has
    put off to conjugate or negate it."""
    order, values = _order(tensor), tensor.detach().resolve_conj().resolve_neg()
    lying = (values.permute(order) if order else values).contiguous()
    # A single element, as of `matrix[:1, 0]`, is contiguous whatever its stride is, and `view` wants a stride of 1.
    return lying.as_strided((lying.numel(),), (1,)).view(torch.uint8)


def allocate(specs: Sequence[TensorSpec], device: torch.device = HOST, *, pinned: bool = False) -> list[torch.Tensor]:
    """New tensors: those of the host in one block of memory, those with `on_device` on `device` each by itself."""
    is_away = [devices.asynchronous(device) and spec.on_device for spec in specs]
    sizes = [
        0 if in_device_memory else -(-spec.nbytes // _ALIGN) * _ALIGN
        for spec, in_device_memory in zip(specs, is_away, strict=True)
    ]
    parts = torch.split(_block(sum(sizes), pinned=pinned), sizes)
    tensors: list[torch.Tensor] = []
    for spec, in_device_memory, part in zip(specs, is_away, parts, strict=True):
        flat = torch.empty(spec.nbytes, dtype=torch.uint8, device=device) if in_device_memory else part[: spec.nbytes]
        order = spec.order or list(range(len(spec.shape)))
        lying = flat.view(dtype_named(spec.dtype)).reshape([spec.shape[side] for side in order])
        tensors.append(lying.permute([order.index(side) for side in range(len(order))]))
    return tensors


def reusable_tensors(live: Iterable[torch.Tensor], specs: Iterable[TensorSpec]) -> dict[int, torch.Tensor]:
    """By number, the live tensors that are as specified, so that their memory takes such a tensor's bytes."""
    pairs = enumerate(zip(live, specs, strict=False))
    alike = {n: tensor.detach() for n, (tensor, spec) in pairs if spec_of(tensor) == spec}
    return {n: tensor for n, tensor in alike.items() if as_bytes(tensor).data_ptr() == tensor.data_ptr()}


def _block(size: int, *, pinned: bool) -> torch.Tensor:
    if pinned or size < _HUGE:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)  # the first touch of small pages costs more than the copy
    return torch.frombuffer(block, dtype=torch.uint8)


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The accelerator on which some of them are, else the host."""
    return next((tensor.device for tensor in tensors if devices.asynchronous(tensor.device)), HOST)


def host_copies(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Event | None]:
    """Copies of the tensors' values now, in one block of host memory, and the event behind which they may be read."""
    device = device_of(tensors)
    copies = allocate([spec_of(tensor) for tensor in tensors], pinned=devices.asynchronous(device))
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach(), non_blocking=True)
    return copies, devices.event(device)


# ----------------------------------------------------------------------------------------------- names and digests


def plain_name(name: str) -> str:
    """A tensor's name as it is without `torch.compile`, which gives a wrapped module's tensors a longer one."""
    return name.replace("_orig_mod.", "")


def named_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The modules' parameters with their names; one that two modules share comes twice."""
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            yield plain_name(f"model.{number}.{name}"), parameter


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
            encoded = encode(named[name], name)
            total.update(f"{name} {len(encoded.tree)}\n".encode() + encoded.tree)
            parts = {str(number): part for number, part in enumerate(encoded.tensors)}
            total.update(bytes.fromhex(digest([parts])))
            continue
        tensor = named[name].detach().to("cpu").contiguous()
        total.update(f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode())
        total.update(as_bytes(tensor).numpy().data)
    return total.hexdigest()
