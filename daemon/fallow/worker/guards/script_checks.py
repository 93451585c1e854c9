"""Checks of what a script has prepared, and of what it does in front of, inside and behind inner loops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fallow.model import Exit, FallowError
from fallow.worker.prepared.objects import Prepared

_SUMS = "fallow.worker.reduction"

_CALLERS = 6
"""Frames from an optimizer's hook to `GradScaler.step`, at most: both wrap the step, and a scheduler does."""


def check_prepared(prepared: Prepared, known: Sequence[nn.Parameter] | None) -> list[nn.Parameter]:
    """Refuse prepared objects that do not fit together, or that have changed since the first call.

    Args:
        prepared: the run's objects.
        known: parameters of the prepared modules in the first call; None: this is it.

    Returns:
        The parameters now.

    Raises:
        FallowError: in words what to write instead.
    """
    now = [parameter for module in prepared.modules for parameter in module.parameters()]
    if known is not None and (len(now) != len(known) or any(a is not b for a, b in zip(now, known, strict=True))):
        raise FallowError(
            "the prepared modules have other parameters than in the first run.updates loop: build the whole model "
            "before run.prepare, members must agree on it",
            Exit.DATA,
        )
    inside = set(map(id, now))
    held = [p for optimizer in prepared.optimizers for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(parameter.requires_grad and id(parameter) not in inside for parameter in held)
    if strangers:
        raise FallowError(
            f"a prepared optimizer holds {strangers} parameters that belong to no prepared module, so their "
            "gradients would not be shared: run.prepare(model, optimizer, ...) with every module that is trained",
            Exit.DATA,
        )
    for number, optimizer in enumerate(prepared.optimizers):
        scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        if scheduled and not any(_drives(thing, optimizer) for thing in prepared.others):
            raise FallowError(
                f"a learning-rate scheduler is attached to optimizer {number} ({type(optimizer).__name__}) but was "
                "not prepared, so a member that joins would not have its state; write run.prepare(..., scheduler)",
                Exit.DATA,
            )
    hooks = [hook for p in now for hook in (p._post_accumulate_grad_hooks or {}).values()]
    if any(not str(getattr(hook, "__module__", "")).startswith(_SUMS) for hook in hooks):
        raise FallowError(
            "a prepared parameter has a hook of register_post_accumulate_grad_hook, which would see a part of the "
            "step's gradient: do that work behind the inner loop, or use parameter.register_hook, which sees one "
            "shard's gradient",
            Exit.DATA,
        )
    return now


def steps_seen(prepared: Prepared, may_step: Callable[[], None]) -> RemovableHandle:
    """Have each step of an optimizer looked at; `may_step` is asked before one that trains prepared modules.

    Raises:
        FallowError: (in the script's `step`) the optimizer holds prepared parameters and was not prepared itself, or
            a scaler that was not prepared makes the step.
    """

    def seen(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is known for known in prepared.optimizers):
            scaler = _calling_scaler()
            if scaler is not None and not any(scaler is known for thing in prepared.others for known in _parts(thing)):
                raise FallowError(
                    "a GradScaler steps a prepared optimizer and was not prepared itself, so a member that joins would "
                    "scale its loss by another factor; write run.prepare(model, optimizer, scaler, ...)",
                    Exit.DATA,
                )
            may_step()
            return
        ours = {id(parameter) for module in prepared.modules for parameter in module.parameters()}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise FallowError(
                f"{type(optimizer).__name__} trains a prepared module and was not prepared itself, so a member that "
                "joins would not have its state; write run.prepare(model, optimizer, ...)",
                Exit.DATA,
            )

    return register_optimizer_step_pre_hook(seen)


def _calling_scaler() -> torch.amp.GradScaler | None:
    """The scaler that makes the step at work."""
    frame = sys._getframe(1)
    for _ in range(_CALLERS):
        found = frame.f_locals.get("self")
        if isinstance(found, torch.amp.GradScaler):
            return found if found.is_enabled() else None
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _parts(thing: Any) -> list[Any]:
    """A prepared object, and what it has in its attributes."""
    inside = list(getattr(thing, "__dict__", {}).values())
    inside += [item for value in inside if isinstance(value, list | tuple) for item in value]
    return [thing, *inside]


def _drives(thing: Any, optimizer: torch.optim.Optimizer) -> bool:
    """True if a prepared object is a scheduler of the optimizer, or has one in an attribute."""
    return any(getattr(owner, "optimizer", None) is optimizer for owner in _parts(thing))
