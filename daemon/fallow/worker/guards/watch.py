"""Checks of what a script does to prepared objects, and values that members compare in each step."""

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
from fallow.worker.prepared.state import device_of, named_parameters
from fallow.worker.transport.device import is_capturing, to_host

_version_of = attrgetter("_version")

_CANARY = 1024
"""Number of elements of one parameter that members compare in each step."""

_PLAIN = (float, int, bool)
"""Types of options that are compared directly, like tuples of floats."""

_SCALER_STEP = torch.amp.GradScaler.step.__code__

_CALLERS = 6
"""Largest number of frames between an optimizer's hook and `GradScaler.step`, with the wrapper of a scheduler."""


class Watch:
    """Checks the prepared objects of a run at each call and step."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._weights: list[nn.Parameter] = []
        self._known_parameters: list[nn.Parameter] | None = None
        "all parameters at the first run.updates call; None before it"
        self._unsummed: dict[str, nn.Parameter] = {}
        "name -> parameter that was frozen at the first run.updates call; its gradients are not summed"
        self._group_sizes: list[int] = []

    def begin_call(self) -> None:
        """Check the prepared objects at the beginning of a run.updates call.

        Raises:
            FallowError: prepared objects do not fit together or have changed since the first call, or hooks would be
                compiled.
        """
        if getattr(sys.modules.get("torch._dynamo.config"), "compiled_autograd", False):
            raise FallowError(
                "torch._dynamo.config.compiled_autograd is on. It compiles the backward with Fallow's gradient hooks, "
                "which torch cannot compile. Turn it off; torch.compile(model) compiles the backward as well",
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
                # A scaler that has scaled nothing refuses to step, and `continue` may skip all shards of a first step.
                if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() and self._weights:
                    scaler.scale(torch.zeros((), device=self._prepared.device))

    def begin_step(self) -> None:
        """Check the prepared objects at the beginning of an inner loop.

        Raises:
            FallowError: a parameter is trainable now, but its gradients are not summed.
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
        """Raise if prepared objects do not fit together or have changed since the first call."""
        parameters = [parameter for module in self._prepared.modules for parameter in module.parameters()]
        if self._known_parameters is not None and list(map(id, parameters)) != list(map(id, self._known_parameters)):
            raise FallowError(
                "the prepared modules have other parameters than in the first run.updates loop: build the whole model "
                "before run.prepare, members must agree on it",
                Exit.DATA,
            )
        module_ids = set(map(id, parameters))
        optimizer_parameters = [parameter for group in self._prepared.groups() for parameter in group["params"]]
        strangers = sum(
            parameter.requires_grad and id(parameter) not in module_ids for parameter in optimizer_parameters
        )
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
        hooks = [hook for p in parameters for hook in (p._post_accumulate_grad_hooks or {}).values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("fallow.worker.reduction") for hook in hooks):
            raise FallowError(
                "a prepared parameter has a hook of register_post_accumulate_grad_hook, which would see a part of the "
                "step's gradient: do that work behind the inner loop, or use parameter.register_hook, which sees one "
                "shard's gradient",
                Exit.DATA,
            )
        self._known_parameters = parameters

    def steering(self) -> list[Any]:
        """Return values that an inner loop must not change: the sum of the weights' version counters, and `rates`."""
        return [sum(map(_version_of, self._weights)), *self.rates()]

    def start_weight_sample(self, step: int) -> torch.Tensor:
        """Copy a sample of one parameter, chosen by the step, to the host. Readable after the step's wait."""
        if not self._weights:
            return torch.empty(0, device="cpu")
        flat = self._weights[step % len(self._weights)].detach().reshape(-1)[:_CANARY].contiguous()
        return to_host(flat.as_strided(flat.shape, (1,)))  # the stride of a single element may be any

    def weight_checksum(self, sample: torch.Tensor) -> int:
        """Return the CRC-32 of a sample that has arrived on the host."""
        return zlib.crc32(sample.view(torch.uint8).numpy().data)

    def agreement(self, steering: Sequence[Any]) -> int:
        """Return a CRC-32 of the settings. Members whose scripts act alike have equal values.

        Args:
            steering: current result of `steering`.
        """
        return zlib.crc32(repr(self.settings(steering[1:])).encode())

    def settings(self, rates: Sequence[Any]) -> list[Any]:
        """Return the script's settings: `rates`, what is frozen, and what rests."""
        numbers = [*rates, *self._prepared.modes.fingerprints()]
        if self._prepared.reproducible:
            # Differing metrics show in the rate only at its next reduction, and never if one member is left by then.
            plateaus = [thing for thing in self._prepared.stateful_objects if isinstance(thing, ReduceLROnPlateau)]
            numbers += [float(value) for thing in plateaus for value in (thing.best, thing.num_bad_epochs)]
        return numbers

    def rates(self) -> list[Any]:
        """Return sizes and plain options of all optimizers' groups. Called several times per step: keep it fast."""
        groups = self._prepared.groups()
        options: list[Any] = [len(group["params"]) for group in groups]
        for value in chain.from_iterable(group.values() for group in groups):
            kind = type(value)
            if kind in _PLAIN or (kind is tuple and all(type(part) is float for part in value)):
                options.append(value)
            elif kind is not list and value is not None and _is_number(value):
                options.append(value.item())
        return options


def watch_steps(prepared: Prepared, may_step: Callable[[Any], None], has_stepped: Callable[[Any], None]) -> None:
    """Register hooks that check each step of an optimizer.

    The script's `step` raises FallowError if the optimizer trains prepared parameters and was not prepared itself, if a
    scaler that was not prepared makes the step, or if the step is captured in a graph.

    Args:
        prepared: all objects that the script prepares, now and later.
        may_step: called before a step of a prepared optimizer; raises if the step is not allowed now.
        has_stepped: called after a step of a prepared optimizer.
    """

    def check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is candidate for candidate in prepared.optimizers):
            scaler = _calling_scaler()
            prepared_parts = (part for thing in prepared.stateful_objects for part in _parts(thing))
            if scaler is not None and not any(scaler is part for part in prepared_parts):
                raise FallowError(
                    "a GradScaler steps a prepared optimizer and was not prepared itself, so a member that joins would "
                    "scale its loss by another factor; write run.prepare(model, optimizer, scaler, ...)",
                    Exit.DATA,
                )
            if is_capturing(device_of(optimizer.param_groups[0]["params"][:1])):  # all parameters are on one device
                raise FallowError(
                    "an optimizer's step inside of torch.cuda.graph: a replay would read the gradients of this step, "
                    "where later ones need not be: write the step outside of the graph (fused=True makes it short)",
                    Exit.DATA,
                )
            may_step(optimizer)
            return
        prepared_ids = {id(parameter) for module in prepared.modules for parameter in module.parameters()}
        if any(id(parameter) in prepared_ids for group in optimizer.param_groups for parameter in group["params"]):
            raise FallowError(
                f"{type(optimizer).__name__} trains a prepared module and was not prepared itself, so a member that "
                "joins would not have its state; write run.prepare(model, optimizer, ...)",
                Exit.DATA,
            )

    def end_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is candidate for candidate in prepared.optimizers):
            has_stepped(optimizer)

    register_optimizer_step_pre_hook(check_step)
    register_optimizer_step_post_hook(end_step)


def _calling_scaler() -> torch.amp.GradScaler | None:
    """Return the enabled GradScaler whose `step` calls the current optimizer step, if any."""
    frame = sys._getframe(1)
    for _ in range(_CALLERS):
        if frame.f_code is _SCALER_STEP:  # checked first, since `f_locals` takes longer than the rest of the hook
            scaler: torch.amp.GradScaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
        frame = frame.f_back or frame
    return None


def _parts(thing: Any) -> list[Any]:
    """Return a prepared object and the values of its attributes."""
    attributes = list(getattr(thing, "__dict__", {}).values())
    attributes += [item for value in attributes if isinstance(value, list | tuple) for item in value]
    return [thing, *attributes]


def _drives(thing: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a prepared object is a scheduler of the optimizer, or has one in an attribute."""
    return any(getattr(owner, "optimizer", None) is optimizer for owner in _parts(thing))


def _is_number(value: Any) -> bool:
    """Return True for a one-element host tensor, such as a learning rate. Reading it waits for no device."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu"
