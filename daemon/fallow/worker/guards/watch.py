"""What a script must not do to prepared objects, and what members compare in each step."""

import sys
import zlib
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fallow.model import Exit, FallowError
from fallow.worker.prepared.objects import Prepared
from fallow.worker.prepared.state import as_bytes, device_of, named_parameters
from fallow.worker.transport.device import capturing, to_host

_its_version = attrgetter("_version")

_CANARY = 1024
"""Elements of one parameter that are compared between the members in each step."""

_PLAIN = (float, int, bool)
"""Types of options that are compared as they are; so are tuples of floats."""

_SCALER_STEP = torch.amp.GradScaler.step.__code__

_CALLERS = 6
"""Frames from an optimizer's hook to `GradScaler.step`, at most: both wrap the step, and a scheduler does."""


class Watch:
    """Looks at what a script does to the prepared objects. One per run."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._weights: list[nn.Parameter] = []
        self._known_parameters: list[nn.Parameter] | None = None
        "all parameters, since the first run.updates call"
        self._unsummed: dict[str, nn.Parameter] = {}
        "by name: parameters that were frozen when gradients were first summed; they have no place in the sums"
        self._group_sizes: list[int] = []

    def begin_call(self) -> None:
        """A run.updates call begins.

        Raises:
            FallowError: what was prepared does not fit together, or has changed since the first call; or hooks would be
                compiled.
        """
        if getattr(sys.modules.get("torch._dynamo.config"), "compiled_autograd", False):
            raise FallowError(
                "torch._dynamo.config.compiled_autograd is on: it compiles the backward, and in it the hooks that take "
                "the gradients, which torch cannot: leave it off; torch.compile(model) compiles the backward as well",
                Exit.DATA,
            )
        first = self._known_parameters is None
        self._check_prepared()
        self._prepared.modes.list_parts()
        self._weights = [parameter for _, parameter in self._prepared.parameters()]
        if first:
            summed = set(map(id, self._weights))
            self._unsummed = {name: p for name, p in named_parameters(self._prepared.modules) if id(p) not in summed}
            for scaler in (part for thing in self._prepared.stateful_objects for part in _parts(thing)):
                # One that has scaled nothing refuses to step, and `continue` may leave out all shards of a first step.
                if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() and self._weights:
                    scaler.scale(torch.zeros((), device=self._prepared.device))

    def begin_step(self) -> None:
        """An inner loop begins.

        Raises:
            FallowError: parameters are trained whose gradients are not summed.
        """
        sizes = [len(group["params"]) for group in self._prepared.groups()]
        if sizes != self._group_sizes:
            self._check_prepared()
            self._group_sizes = sizes
        thawed = [name for name, parameter in self._unsummed.items() if parameter.requires_grad]
        if thawed:
            raise FallowError(
                f"{thawed[0]} was frozen when the first run.updates loop began and has requires_grad=True now, so each "
                "member would train it by itself: call run.prepare while all that will ever train is trainable, and "
                "freeze it behind that",
                Exit.DATA,
            )

    def _check_prepared(self) -> None:
        """Refuse prepared objects that do not fit together, or that have changed since the first call."""
        now = [parameter for module in self._prepared.modules for parameter in module.parameters()]
        if self._known_parameters is not None and list(map(id, now)) != list(map(id, self._known_parameters)):
            raise FallowError(
                "the prepared modules have other parameters than in the first run.updates loop: build the whole model "
                "before run.prepare, members must agree on it",
                Exit.DATA,
            )
        inside = set(map(id, now))
        held = [parameter for group in self._prepared.groups() for parameter in group["params"]]
        strangers = sum(parameter.requires_grad and id(parameter) not in inside for parameter in held)
        if strangers:
            raise FallowError(
                f"a prepared optimizer holds {strangers} parameters that belong to no prepared module, so their "
                "gradients would not be shared: run.prepare(model, optimizer, ...) with every module that is trained, "
                "and a parameter outside of modules in nn.ParameterList([parameter])",
                Exit.DATA,
            )
        for number, optimizer in enumerate(self._prepared.optimizers):
            scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
            if scheduled and not any(_drives(thing, optimizer) for thing in self._prepared.stateful_objects):
                raise FallowError(
                    f"a learning-rate scheduler is attached to optimizer {number} ({type(optimizer).__name__}) but was "
                    "not prepared, so a member that joins would not have its state; write run.prepare(..., scheduler)",
                    Exit.DATA,
                )
        hooks = [hook for p in now for hook in (p._post_accumulate_grad_hooks or {}).values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("fallow.worker.reduction") for hook in hooks):
            raise FallowError(
                "a prepared parameter has a hook of register_post_accumulate_grad_hook, which would see a part of the "
                "step's gradient: do that work behind the inner loop, or use parameter.register_hook, which sees one "
                "shard's gradient",
                Exit.DATA,
            )
        self._known_parameters = now

    def steering(self) -> list[Any]:
        """What an inner loop must leave alone: the sum of the weights' version counters, and the rates."""
        return [sum(map(_its_version, self._weights)), *self.rates()]

    def start_weight_sample(self, step: int) -> torch.Tensor:
        """Copy a sample of one parameter, another one in each step, to the host: readable behind the step's wait."""
        if not self._weights:
            return torch.empty(0, device="cpu")
        return to_host(self._weights[step % len(self._weights)].detach().reshape(-1)[:_CANARY].contiguous())

    def weight_checksum(self, sample: torch.Tensor) -> int:
        """32 bits of a sample that has come to the host."""
        return zlib.crc32(as_bytes(sample).numpy().data)

    def agreement(self, steering: Sequence[Any]) -> int:
        """32 bits that are the same on all members, if what they did until now to the prepared objects was.

        Args:
            steering: as it is now.
        """
        return zlib.crc32(repr(self.settings(steering[1:])).encode())

    def settings(self, rates: Sequence[Any]) -> list[Any]:
        """What the script has set: rates, what is frozen, and what rests. Args: rates: as they are now."""
        numbers = [*rates, *self._prepared.modes.fingerprints()]
        if self._prepared.reproducible:
            # Unlike metrics show in the rate only when it is lowered next, and not where one member is left then.
            plateaus = [thing for thing in self._prepared.stateful_objects if isinstance(thing, ReduceLROnPlateau)]
            numbers += [float(value) for thing in plateaus for value in (thing.best, thing.num_bad_epochs)]
        return numbers

    def rates(self) -> list[Any]:
        """Sizes and plain options of all optimizers' groups. Each step asks several times, and groups may be many."""
        groups = self._prepared.groups()
        found: list[Any] = [len(group["params"]) for group in groups]
        for value in chain.from_iterable(group.values() for group in groups):
            kind = type(value)
            if kind in _PLAIN or (kind is tuple and all(type(part) is float for part in value)):
                found.append(value)
            elif kind is not list and value is not None and _is_number(value):
                found.append(value.item())
        return found


def watch_steps(prepared: Prepared, may_step: Callable[[Any], None], has_stepped: Callable[[Any], None]) -> None:
    """Have each step of an optimizer looked at; `may_step` is asked before one that trains prepared modules.

    Args:
        prepared: all that the script has prepared, so far and later.
        may_step: raises if it is no time for a step of the optimizer.
        has_stepped: told of the optimizer behind it.

    Raises:
        FallowError: (in the script's `step`) the optimizer holds prepared parameters and was not prepared itself, or
            a scaler that was not prepared makes the step, or the step is captured in a graph.
    """

    def check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is known for known in prepared.optimizers):
            scaler = _calling_scaler()
            if scaler is not None and not any(
                scaler is known for thing in prepared.stateful_objects for known in _parts(thing)
            ):
                raise FallowError(
                    "a GradScaler steps a prepared optimizer and was not prepared itself, so a member that joins would "
                    "scale its loss by another factor; write run.prepare(model, optimizer, scaler, ...)",
                    Exit.DATA,
                )
            if capturing(device_of(optimizer.param_groups[0]["params"][:1])):  # all parameters are on one device
                raise FallowError(
                    "an optimizer's step inside of torch.cuda.graph: a replay would read the gradients of this step, "
                    "where later ones need not be: write the step outside of the graph (fused=True makes it short)",
                    Exit.DATA,
                )
            may_step(optimizer)
            return
        ours = {id(parameter) for module in prepared.modules for parameter in module.parameters()}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise FallowError(
                f"{type(optimizer).__name__} trains a prepared module and was not prepared itself, so a member that "
                "joins would not have its state; write run.prepare(model, optimizer, ...)",
                Exit.DATA,
            )

    def end_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is known for known in prepared.optimizers):
            has_stepped(optimizer)

    register_optimizer_step_pre_hook(check_step)
    register_optimizer_step_post_hook(end_step)


def _calling_scaler() -> torch.amp.GradScaler | None:
    """The scaler that makes the step at work."""
    frame = sys._getframe(1)
    for _ in range(_CALLERS):
        if frame.f_code is _SCALER_STEP:  # what `f_locals` gives takes longer than the rest of the hook
            scaler: torch.amp.GradScaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
        frame = frame.f_back or frame
    return None


def _parts(thing: Any) -> list[Any]:
    """A prepared object, and what it has in its attributes."""
    inside = list(getattr(thing, "__dict__", {}).values())
    inside += [item for value in inside if isinstance(value, list | tuple) for item in value]
    return [thing, *inside]


def _drives(thing: Any, optimizer: torch.optim.Optimizer) -> bool:
    """True if a prepared object is a scheduler of the optimizer, or has one in an attribute."""
    return any(getattr(owner, "optimizer", None) is optimizer for owner in _parts(thing))


def _is_number(value: Any) -> bool:
    """A learning rate in a tensor, where it can be read without waiting for an accelerator."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu"
