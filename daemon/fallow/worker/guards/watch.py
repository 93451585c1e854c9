"""What members compare in each step, and what may not change inside an inner loop."""

from __future__ import annotations

import zlib
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fallow.model import Exit, FallowError
from fallow.worker.guards.script_checks import check_prepared
from fallow.worker.prepared.objects import Prepared
from fallow.worker.prepared.state import as_bytes, named_parameters
from fallow.worker.transport.device import to_host

_its_version = attrgetter("_version")

_CANARY = 1024
"""Elements of one parameter that are compared between the members in each step."""


class Watch:
    """Looks at what a script does to the prepared objects. One per run."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._weights: list[nn.Parameter] = []
        self._known: list[nn.Parameter] | None = None
        "all parameters, since the first run.updates call"
        self._unsummed: dict[str, nn.Parameter] = {}
        "by name: parameters that were frozen when gradients were first summed; they have no place in the sums"
        self._group_sizes: list[int] = []

    def begin_call(self) -> None:
        """A run.updates call begins.

        Raises:
            FallowError: what was prepared does not fit together, or has changed since the first call.
        """
        first = self._known is None
        self._known = check_prepared(self._prepared, self._known)
        self._weights = [parameter for _, parameter in self._prepared.parameters()]
        if first:
            summed = set(map(id, self._weights))
            self._unsummed = {name: p for name, p in named_parameters(self._prepared.modules) if id(p) not in summed}

    def begin_step(self) -> None:
        """An inner loop begins.

        Raises:
            FallowError: parameters are trained whose gradients are not summed.
        """
        sizes = [len(group["params"]) for optimizer in self._prepared.optimizers for group in optimizer.param_groups]
        if sizes != self._group_sizes:
            self._known = check_prepared(self._prepared, self._known)
            self._group_sizes = sizes
        thawed = [name for name, parameter in self._unsummed.items() if parameter.requires_grad]
        if thawed:
            raise FallowError(
                f"{thawed[0]} was frozen when the first run.updates loop began and has requires_grad=True now, so each "
                "member would train it by itself: call run.prepare while all that will ever train is trainable, and "
                "freeze it behind that",
                Exit.DATA,
            )

    def steering(self) -> tuple[int, int]:
        """What an inner loop must leave alone: versions of the weights, and the optimizers' rates."""
        return sum(map(_its_version, self._weights)), hash(self._rates())

    def start_piece(self, step: int) -> torch.Tensor:
        """A piece of one parameter, another one in each step, on its way to the host."""
        if not self._weights:
            return torch.empty(0, device="cpu")
        return to_host(self._weights[step % len(self._weights)].detach().reshape(-1)[:_CANARY].contiguous())

    def piece(self, piece: torch.Tensor) -> int:
        """Its checksum, once it is there; 32 bits."""
        return zlib.crc32(as_bytes(piece).numpy().data)

    def agreement(self) -> int:
        """32 bits that are the same on all members, if what they did until now to the prepared objects was."""
        numbers = [*self._rates(), *self._metrics(), self._prepared.modes.fingerprint()]
        return zlib.crc32(repr(numbers).encode())

    def _rates(self) -> tuple[Any, ...]:
        """Sizes and plain options of all optimizers' groups."""
        groups = [group for optimizer in self._prepared.optimizers for group in optimizer.param_groups]
        found: list[Any] = [len(group["params"]) for group in groups]
        for group in groups:
            found += [value for value in group.values() if _is_plain(value)]
            found += [value.item() for value in group.values() if _is_number(value)]
        return tuple(found)

    def _metrics(self) -> tuple[float, ...]:
        """Unlike ones show in the learning rate only when it is lowered next, and not where one member is left then."""
        if not self._prepared.reproducible:
            return ()
        plateaus = [thing for thing in self._prepared.others if isinstance(thing, ReduceLROnPlateau)]
        return tuple(float(value) for thing in plateaus for value in (thing.best, thing.num_bad_epochs))


def _is_number(value: Any) -> bool:
    """A learning rate in a tensor, where it can be read without waiting for an accelerator."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu"


def _is_plain(value: Any) -> bool:
    return type(value) in (float, int, bool) or (type(value) is tuple and all(type(part) is float for part in value))
