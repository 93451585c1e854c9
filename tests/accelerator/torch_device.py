"""What torch looks up in Python about a device: the module `torch.fake`, and autocast."""

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

_libraries: list[torch.library.Library] = []
"""Registered kernels go away with their library object."""

# The operators that matter of those that CUDA's autocast names.
_LOW_PRECISION = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention", "conv2d")
_FLOAT32 = (
    *("layer_norm", "cross_entropy_loss", "nll_loss", "mse_loss", "softmax.int", "log_softmax.int"),
    *("sum", "exp", "log", "pow.Tensor_Scalar"),
)


class Stream(torch.Stream):
    """`torch.Stream` on the device."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> "Stream":
        return super().__new__(cls, **known) if known else super().__new__(cls, device="fake:0", priority=priority)


class Event(torch.Event):
    """`torch.Event` on the device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        return super().__new__(cls, device="fake:0", enable_timing=enable_timing)


def register(ops: Any) -> None:
    """Name torch's PrivateUse1 `fake` and register `torch.fake`. The native library must be loaded."""
    torch.utils.rename_privateuse1_backend("fake")
    torch._register_device_module("fake", _module(ops))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _register_autocast()
    _register_convolution()


def _module(ops: Any) -> types.ModuleType:
    module: Any = types.ModuleType("torch.fake")
    module.Stream, module.Event = Stream, Event
    module.device = lambda index: contextlib.nullcontext()
    module.stream = module.StreamContext = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.is_available = module.is_initialized = lambda: True
    module._initialized = True  # else activation checkpointing leaves the device's random numbers as they are
    module._is_in_bad_fork = lambda: False
    module._lazy_init = module.empty_cache = lambda: None
    module.current_device = lambda: 0
    module.set_device = lambda index: None
    module.device_count = lambda: 1
    module.mem_get_info = lambda device=None: (1 << 40, 1 << 40)
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.default_stream = lambda device=None: Stream(stream_id=0, device_index=0, device_type=20)
    module.set_stream = torch.accelerator.set_stream
    # A seed has 64 bits; operators take signed integers.
    module.manual_seed = module.manual_seed_all = lambda seed: ops.seed((seed + (1 << 63)) % (1 << 64) - (1 << 63))
    module.get_rng_state = lambda device="fake": ops.get_rng_state()
    module.set_rng_state = lambda state, device="fake": ops.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def _register_autocast() -> None:
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in _LOW_PRECISION:
        aten.impl(name, _autocast_kernel(name, None), "AutocastPrivateUse1")
    for name in _FLOAT32:
        aten.impl(name, _autocast_kernel(name, torch.float32), "AutocastPrivateUse1")
    _libraries.extend((everything, aten))


def _autocast_kernel(name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        to = dtype or torch.get_autocast_dtype("fake")
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return operator(*(_cast(a, to) for a in args), **{k: _cast(v, to) for k, v in kwargs.items()})

    return kernel


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "fake":
        return value
    return value.to(dtype) if value.is_floating_point() and value.dtype != torch.float64 else value


def _register_convolution() -> None:
    """In two dimensions, without groups: the CPU has no kernels under the names that other devices are asked for."""
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("conv2d", _convolution, "AutogradPrivateUse1")
    _libraries.append(aten)


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> torch.Tensor:
    if groups != 1:
        raise NotImplementedError("the fake accelerator has no convolutions in groups")
    kernel = weight.shape[2:]
    out = weight.flatten(1) @ torch.ops.aten.im2col(x, kernel, dilation, padding, stride)
    if bias is not None:
        out = out + bias.view(-1, 1)
    sizes = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    shape = [(size + 2 * pad - spread * (width - 1) - 1) // step + 1 for size, width, step, pad, spread in sizes]
    return out.view(x.shape[0], weight.shape[0], *shape)
