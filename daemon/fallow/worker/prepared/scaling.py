"""Which GradScaler belongs to which loss and to which optimizer: a script may have one for each loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fallow.model import Exit, FallowError


class _Scaled(NamedTuple):
    """What a scaler made of a loss."""

    outcome: weakref.ref[torch.Tensor]
    loss: torch.Tensor
    scaler: torch.amp.GradScaler


class Scaling:
    """Of one run. Learns from the calls that the script makes."""

    def __init__(self) -> None:
        self.scalers: list[torch.amp.GradScaler] = []
        "all that are prepared"
        self._scaled: list[_Scaled] = []
        "in the body at work, as long as no backward has begun on it"
        self._scaler_of: dict[int, torch.amp.GradScaler | None] = {}
        "by id of an optimizer: the scaler that steps it; None: it steps by itself"

    # ----------------------------------------------------------------------------------------------------- losses

    def begin_body(self) -> None:
        """What was scaled in the body before is no loss of this one."""
        self._scaled = []

    def noted(self, scaler: torch.amp.GradScaler) -> Callable[..., Any]:
        """A `scale` method for a scaler's class that remembers what it has scaled."""
        inner = scaler.scale

        def scale(_self: Any, outputs: Any) -> Any:
            several = isinstance(outputs, list | tuple)
            made = inner(outputs)
            for loss, scaled in zip(outputs, made, strict=True) if several else [(outputs, made)]:
                if isinstance(loss, torch.Tensor) and loss.numel() == 1 and scaled is not loss:
                    self._scaled.append(_Scaled(weakref.ref(scaled), loss.detach(), scaler))
            return made

        return scale

    def unscaled(self, root: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The value of the loss that a backward begins on, and by what it has yet to be divided.

        A sum of losses that several scalers have scaled counts as the sum of these losses.
        """
        own = next((one for one in self._scaled if one.outcome() is root), None)
        if own is not None:
            self._scaled.remove(own)
            return own.loss, 1.0
        scaled, self._scaled = self._scaled, []
        scalers = {id(one.scaler): one.scaler for one in scaled}
        if len(scalers) > 1:
            return torch.stack([one.loss.reshape(()) for one in scaled]).sum(), 1.0
        # It was scaled and then divided, say, or added to another one of the same scaler.
        return root.detach(), next((scaler.get_scale() for scaler in scalers.values()), 1.0)

    # ------------------------------------------------------------------------------------------------- optimizers

    def note_step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """The script steps an optimizer, through a scaler or by itself."""
        self._scaler_of[id(optimizer)] = scaler

    def step_all(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step all optimizers as the script does, in a body that the script has left before.

        Raises:
            FallowError: there are several scalers, and the script has not yet stepped an optimizer.
        """
        used: dict[int, torch.amp.GradScaler] = {}
        for optimizer in optimizers:
            scaler = self._scaler_of.get(id(optimizer), self.scalers[0] if len(self.scalers) == 1 else None)
            if len(self.scalers) > 1 and id(optimizer) not in self._scaler_of:
                raise FallowError(
                    f"the final body of the first step was left by `continue`, so which of {len(self.scalers)} "
                    f"GradScalers steps {type(optimizer).__name__} is not known: do not leave that body out",
                    Exit.DATA,
                )
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                used[id(scaler)] = scaler
            optimizer.zero_grad()
        for scaler in used.values():
            scaler.update()
