"""The model that benchmarks train: the example `gpt_stdlib` with a chosen number of parameters and AdamW.

On the CPU a sample has 16 bytes, so that a step is short and membership changes dominate. In benchmarks of membership
changes on a device, weights are bfloat16 and AdamW works in float32 (`MixedAdamW`).
"""

import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim.adamw import adamw
from torch.utils.data import Dataset

from fallow.core.membership.names import member_name, member_number
from fallow.files import shipped
from fallow.model import Exit, FallowError

sys.path.append(str(shipped("examples")))
_EXAMPLE: Any = importlib.import_module("gpt_stdlib")
LAYERS = 6
CONTEXT = {"cuda": 256}
"""Kind of device -> bytes of a sample; 16 on other devices."""

HOST = torch.device("cpu")
_RATE, _BETAS, _EPS, _DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01


def make(params: int, device: torch.device = HOST, *, mixed: bool = False) -> nn.Module:
    """A model of about `params` parameters, with equal weights in every process. `mixed`: in bfloat16."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA
    width = min(range(16, 4096, 16), key=lambda width: abs(LAYERS * 12 * width**2 + 512 * width - params))
    model: nn.Module = _EXAMPLE.GPT(LAYERS, width, CONTEXT.get(device.type, 16), dropout=0.0)
    return model.to(device, torch.bfloat16 if mixed else torch.float32)


def text(device: torch.device = HOST) -> Dataset[tuple[torch.Tensor, torch.Tensor]]:
    """Samples for the model: bytes, and the bytes that follow each of them."""
    data: Dataset[tuple[torch.Tensor, torch.Tensor]] = _EXAMPLE.Text(CONTEXT.get(device.type, 16))
    return data


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of one batch. The batch may be on the host."""
    weight = next(model.parameters())
    tokens, targets = (part.to(weight.device, non_blocking=True) for part in (tokens, targets))
    # Norms and the loss of bfloat16 weights are in float32.
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=weight.dtype == torch.bfloat16):
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW. torch's default, a loop over tensors, takes six times as long on a CPU."""
    if next(model.parameters()).dtype == torch.bfloat16:
        return MixedAdamW(model.parameters())
    return torch.optim.AdamW(model.parameters(), _RATE, _BETAS, _EPS, _DECAY, fused=True)


class MixedAdamW(torch.optim.Optimizer):
    """AdamW for bfloat16 weights, with a copy of each weight and both moments in float32: 12 bytes a parameter.

    It updates one parameter after the other, so that only one gradient is in memory as float32.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        options: dict[str, Any] = {"amsgrad": False, "maximize": False, "fused": True, "eps": _EPS}
        options |= {"lr": _RATE, "beta1": _BETAS[0], "beta2": _BETAS[1], "weight_decay": _DECAY}
        for weight in (weight for group in self.param_groups for weight in group["params"] if weight.grad is not None):
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros((), device=weight.device)
                state["weight"] = weight.float()
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(state["weight"]) for _ in range(2))
            lists = [[state["weight"]], [weight.grad.float()], [state["exp_avg"]], [state["exp_avg_sq"]], []]
            adamw(*lists, [state["step"]], **options)  # type: ignore[call-arg, arg-type]
            weight.copy_(state["weight"])


def check_device(name: str) -> None:
    """Check that this machine has a kind of device.

    Raises:
        FallowError: torch finds no such device.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != name:
        advice = f"only {accelerator.type}" if accelerator else "no GPU. Check nvidia-smi and torch.version.cuda."
        raise FallowError(f"--device {name}: torch {torch.__version__} finds {advice}", Exit.UNAVAILABLE)


def are_shared(name: str, workers: int) -> bool:
    """True if there are more workers than devices of kind `name`."""
    return name != "cpu" and workers > torch.accelerator.device_count()


def take_device(name: str, workers: int) -> torch.device:
    """Choose the device of this process. Call before any other use of torch.

    If workers share devices, gradients are summed on the host, because NCCL refuses two ranks on one GPU.

    Args:
        name: torch's name of the kind of device.
        workers: number of workers of the run from its start to its end.
    """
    if name == "cpu":
        return HOST
    if are_shared(name, workers):
        dist.Backend.default_device_backend_map.pop(name, None)
    number = (member_number(os.environ.get("FALLOW_WORKER", member_name(1))) - 1) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(number)
    return torch.device(name, number)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work, for a measurement of time."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def sums_on(name: str, workers: int) -> str:
    """How gradients are summed on a device, for the note of a row; empty on the CPU."""
    if name == "cpu":
        return ""
    shared = f"{workers} workers share {torch.accelerator.device_count()} {name}: sums go through the host; "
    return shared if are_shared(name, workers) else f"each worker has a {name}: sums on the device; "
