"""The arithmetic signature: what makes two processes compute the same bits from the same numbers.

Gradients change with the number of threads and with the instruction set, so members of a reproducible run must agree on
everything listed here; a newcomer that differs is refused, with the first difference in words.
"""

import contextlib
import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from fallow.model import Exit, FallowError

_FLAGS = ("sse4", "avx", "fma", "f16c", "amx", "asimd", "sve", "bf16", "i8mm")
"""Beginnings of the names of processor flags that libraries choose their kernels by."""

_WORKSPACES = (":4096:8", ":16:8")
"""Settings of cuBLAS that make its sums repeatable."""


def enforce(devices: Iterable[torch.device]) -> None:
    """Choose deterministic kernels for the whole process, whose prepared modules are on these devices.

    Raises:
        FallowError: CUDA was started with settings under which its results are not repeatable.
    """
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(True)
    else:
        # The same, but for the compiler: that would be imported to be told, which takes longer than torch itself. It
        # reads this when it comes.
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
        torch.set_deterministic_debug_mode("error")
    # It would fill all new memory, at a cost, for the sake of programs that read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if all(device.type != "cuda" for device in devices):
        return
    torch.backends.cudnn.benchmark = False
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _WORKSPACES:
        raise FallowError(
            "reproducible=True on CUDA needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before torch uses the "
            "GPU: export it in the batch script, before the line that starts the training",
            Exit.CONFIG,
        )


def signature(devices: Iterable[torch.device]) -> list[str]:
    """One line per fact about a process whose prepared modules are on these devices, always in the same order.

    Each completes the sentence "it computes with ...".
    """
    kinds = sorted({device.type for device in devices}) or ["cpu"]
    lines = [
        f"{platform.machine()} processors of {_processor()[0]}",
        f"{torch.backends.cpu.get_cpu_capability()} kernels",
        f"the processor flags {' '.join(_processor()[1]) or '(unknown)'}",
        f"{torch.get_num_threads()} thread(s)",
        f"torch {torch.__version__}",
        f"modules on {', '.join(kinds)}",
        f"float32 matrix products of {torch.get_float32_matmul_precision()} precision",
        f"deterministic algorithms {'on' if torch.are_deterministic_algorithms_enabled() else 'off'}",
        f"oneDNN {'on' if torch.backends.mkldnn.enabled else 'off'}",
        f"denormal numbers {'kept' if torch.tensor([1e-40], device='cpu').mul(1).item() else 'flushed to 0'}",
        f"the default type {_short(torch.get_default_dtype())}",
        f"autocast in {_short(torch.get_autocast_dtype('cpu'))} on the CPU",
    ]
    lines += [line for kind in kinds if kind != "cpu" for line in _device(kind)]
    if "cuda" in kinds:
        lines += [
            f"CUDA {torch.version.cuda}",
            f"cuDNN {torch.backends.cudnn.version()}",  # type: ignore[no-untyped-call]
            f"TF32 {'on' if torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32 else 'off'}",
            f"CUBLAS_WORKSPACE_CONFIG={os.environ.get('CUBLAS_WORKSPACE_CONFIG', '')}",
        ]
    return [*lines, *(f"test sums on {kind} of digest {_sample(kind)}" for kind in kinds)]


def _device(kind: str) -> list[str]:
    properties: Any = getattr(torch.get_device_module(kind), "get_device_properties", lambda: None)()
    name, units = (getattr(properties, of, "(unknown)") for of in ("name", "multi_processor_count"))
    dtype = _short(torch.get_autocast_dtype(kind)) if torch.amp.is_autocast_available(kind) else "(none)"
    return [f"{kind} devices of type {name} with {units} multiprocessors", f"autocast in {dtype} on {kind}"]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _processor(source: Path = Path("/proc/cpuinfo")) -> tuple[str, list[str]]:
    """Vendor and the flags that matter, of this process's processor."""
    text = ""
    with contextlib.suppress(OSError):
        text = source.read_text()
    vendor = re.search(r"^(?:vendor_id|CPU implementer)\s*: (.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    chosen = [flag for flag in (flags[1] if flags else "").split() if flag.startswith(_FLAGS)]
    return vendor[1] if vendor else "(unknown)", sorted(chosen)


def _sample(kind: str) -> str:
    """Digest of a few small computations, forward and backward: the libraries' choices show here, whatever they are."""
    total = hashlib.sha256()
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast(kind, enabled=False):
        generator = torch.Generator(device="cpu").manual_seed(1)
        x = torch.randn(24, 3, 17, 13, generator=generator, dtype=torch.float32, device="cpu").to(kind)
        kernel = (
            torch.randn(8, 3, 3, 3, generator=generator, dtype=torch.float32, device="cpu").to(kind).requires_grad_()
        )
        weight = (
            torch.randn(1320, 257, generator=generator, dtype=torch.float32, device="cpu").to(kind).requires_grad_()
        )
        h = F.gelu(F.conv2d(x, kernel)).flatten(1)
        h = F.layer_norm(h @ weight, (257,))
        low = (h.bfloat16() @ weight.t().bfloat16()).float()
        loss = torch.logsumexp(low, 1).mean() + h.tanh().exp().sum() / 1000 + h.double().std(0).log().sum()
        torch.autograd.backward(loss)
        for tensor in (loss, kernel.grad, weight.grad):
            assert tensor is not None
            total.update(tensor.detach().double().cpu().numpy().tobytes())
    return total.hexdigest()[:12]
