"""The training that benchmarks run: a GPT of about so many parameters on made-up text, with AdamW.

On the processor context and batch are small, so that a step is short beside the state: what is measured is elasticity,
and on a machine with few cores anything else would only make all figures wait. On CUDA the context is longer and
multiplications may use TF32, so that the GPU has something to do. Where the membership changes on a device, weights are
bfloat16 and AdamW works in float32 (`MixedAdamW`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw
from torch.utils.data import Dataset

VOCABULARY = 256
CONTEXT = 16
CONTEXT_CUDA = 256
LAYERS = 6
_SAMPLES = 1 << 20
HOST = torch.device("cpu")
_RATE, _BETAS, _EPS, _DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01


class GPT(nn.Module):
    """Six pre-norm blocks; `width` a multiple of 16.

    Args:
        width: of the residual stream.
        dropout: as usual; 0 by default.
        context: tokens of a sample.
    """

    def __init__(self, width: int, dropout: float = 0.0, context: int = CONTEXT) -> None:
        super().__init__()
        self.context = context
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout, "gelu", batch_first=True, norm_first=True, bias=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64[batch, context] -> logits float[batch, context, VOCABULARY]."""
        x = self.token(tokens) + self.place.weight
        logits: torch.Tensor = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return logits


def parameters(width: int) -> int:
    """Number of parameters of `GPT(width)`."""
    block = 12 * width * width + 13 * width
    return LAYERS * block + 2 * width + 2 * VOCABULARY * width + VOCABULARY + CONTEXT * width


def width_for(wanted: float) -> int:
    """Width (a multiple of 16) whose number of parameters comes nearest."""
    return min(range(16, 4096, 16), key=lambda width: abs(parameters(width) - wanted))


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a periodic text, with the next byte as target; a pure function of the index."""

    def __init__(self, context: int = CONTEXT, samples: int = _SAMPLES) -> None:
        self._context, self._samples = context, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = (torch.arange(self._context + 1) * (1 + index % 7) + index) % VOCABULARY
        return window[:-1], window[1:]


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of one batch, which may still be on the host."""
    weight = next(model.parameters())
    tokens, targets = (part.to(weight.device, non_blocking=True) for part in (tokens, targets))
    # Norms and the loss of bfloat16 weights are in float32.
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=weight.dtype == torch.bfloat16):
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW in one pass over the memory; the loop over tensors, its default, takes six times as long on a CPU."""
    return torch.optim.AdamW(model.parameters(), _RATE, _BETAS, _EPS, _DECAY, fused=True)


class MixedAdamW(torch.optim.Optimizer):
    """AdamW for bfloat16 weights, with a copy of each weight and both moments in float32: 12 bytes a parameter.

    One parameter after the other, so that no more than one gradient is in memory as float32.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for weight in (weight for group in self.param_groups for weight in group["params"] if weight.grad is not None):
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros((), device=weight.device)
                state["weight"] = weight.float()
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(state["weight"]) for _ in range(2))
            adamw(
                [state["weight"]],
                [weight.grad.float()],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [state["step"]],
                fused=True,
                amsgrad=False,
                beta1=_BETAS[0],
                beta2=_BETAS[1],
                lr=_RATE,
                weight_decay=_DECAY,
                eps=_EPS,
                maximize=False,
            )
            weight.copy_(state["weight"])


def dtype_for(device: torch.device) -> torch.dtype:
    """Of the weights where the membership changes: float32 on the processor, bfloat16 on a device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def make(
    params: int, device: torch.device = HOST, dtype: torch.dtype = torch.float32
) -> tuple[GPT, torch.optim.Optimizer]:
    """Model and optimizer of about `params` parameters, the same in every process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    context = CONTEXT
    if device.type == "cuda":
        context = CONTEXT_CUDA
        torch.set_float32_matmul_precision("high")  # TF32
    model = GPT(width_for(params), context=context).to(device, dtype)
    return model, optimizer(model) if dtype == torch.float32 else MixedAdamW(model.parameters())
