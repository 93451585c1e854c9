"""Gradients of a step: local accumulation over shards, one reduction in the member's last body. No DDP.

Each parameter has a place in a flat bucket. A hook adds weight x gradient there and takes the gradient away, so a void
body leaves None behind. In the final body buckets are reduced in a fixed order, each as soon as it is full, so that the
network works while backward goes on; then a small float64 vector, the control exchange, closes the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from fallow.model import Exit, FallowError
from fallow.worker.group import Group, Interrupted

_FIRST_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20
"""Sizes as in DDP: a small first bucket starts the network early in backward."""

_HEAD = 9
"""Entries of the control vector before the per-parameter flags; see `Control`."""


class Control(NamedTuple):
    """Sums over the members; the order is that of the vector."""

    contributors: float
    switch: float
    checkpoint: float
    step: float
    round: float
    loss: float
    loss_weight: float
    samples: float
    crc: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every member knows about a step beforehand."""

    step: int
    "global, 0-based"
    samples: int
    crc: int
    "sum of the CRCs of all its shards"


@dataclass(slots=True)
class _Bucket:
    flat: torch.Tensor
    members: list[int]
    waiting: int = 0
    launched: bool = False


class Reducer:
    """Accumulates and reduces the gradients of all prepared modules.

    Args:
        named: parameters that require gradients, in model order; the layout is fixed from here on.
        buffers: the modules' buffers; after each round all members hold shard 0's.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], buffers: Sequence[torch.Tensor]) -> None:
        self._names = [name for name, _ in named]
        self._params = [parameter for _, parameter in named]
        self._buffers = list(buffers)
        self._place = _layout(self._params)
        self._buckets: list[_Bucket] = []
        self._views: dict[int, torch.Tensor] = {}
        self._group = Group(0, 0, 1, None)
        self._plan = StepPlan(0, 0, 0)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._params)
        ]
        self._live = False
        self._final = False
        self._weight = 0.0
        self._touched = [False] * len(self._params)
        self._fired = [False] * len(self._params)
        self._carried: dict[int, torch.Tensor] = {}
        self._kept_buffers: list[torch.Tensor] | None = None
        self._next = 0
        self.rounds = 0
        "finished reductions in this step"
        self.control: Control | None = None
        "sums of the step's rounds so far (loss, flags) or of the last one (the others)"
        self.used = False
        "some member had a gradient in this step"
        self.interrupted = False
        self.loss = 0.0
        self.loss_weight = 0.0
        self.samples = 0
        self.crc = 0
        self.flags: Callable[[], tuple[bool, bool]] = lambda: (False, False)
        "asked when the control vector leaves: (switch is committed, a checkpoint is wanted)"
        self.before_control: Callable[[], None] = lambda: None
        "called once per step, just before this member's contribution can be complete on others"

    # ----------------------------------------------------------------------------------------- steps and bodies

    def attach(self, group: Group) -> None:
        """Reduce over another generation's group from now on."""
        if self._group.broken is not None:
            self._forget_buckets()  # a late peer may still write into them
        self._group = group

    def begin_step(self, plan: StepPlan) -> None:
        """Start a step; contributions of an interrupted one are dropped."""
        self._plan = plan
        self._touched = [False] * len(self._params)
        self._carried = {}
        self._kept_buffers = None
        self.rounds = 0
        self.control = None
        self.used = False
        self.interrupted = False
        self.loss = self.loss_weight = 0.0
        self.samples = self.crc = 0

    def begin_body(self, weight: float, *, final: bool, live: bool) -> None:
        """Start a body.

        Args:
            weight: the shard's part of the step's samples (0 for a copy that counts nothing).
            final: the member's last body of the step: a backward in it reduces.
            live: False in a rehearsal: gradients are dropped.
        """
        self._weight = weight
        self._final = final
        self._live = live

    def keep_buffers(self) -> None:
        """Remember the buffers as they are now: shard 0's, which all members will get."""
        self._kept_buffers = [buffer.detach().clone() for buffer in self._buffers]

    def add_loss(self, value: float) -> None:
        """Count the loss of one backward in the current body (mean over the shard)."""
        self.loss += value * self._weight
        self.loss_weight = min(1.0, self.loss_weight + self._weight)

    def before_backward(self) -> None:
        """Put gradients aside that are there already: of the round before, or left by the user on purpose."""
        self._ensure_buckets()
        for index, parameter in enumerate(self._params):
            if parameter.grad is not None:
                if self._live:
                    carried = self._carried.get(index)
                    grad = parameter.grad.detach()
                    self._carried[index] = grad.clone() if carried is None else carried + grad
                parameter.grad = None
        if self._final and self.rounds:
            self._touched = [False] * len(self._params)
        self._fired = [False] * len(self._params)
        for bucket in self._buckets:
            bucket.waiting = len(bucket.members)
            bucket.launched = False
        self._next = 0

    def after_backward(self) -> None:
        """The end of an outermost backward: in the final body the round is completed here."""
        if self._final and self._live:
            self.finish_round()

    def finish_round(self) -> None:
        """Reduce what is left, exchange control, give out gradients. After an interrupt gradients are None."""
        try:
            if not self.interrupted:
                sums = self._exchange()
                self._give_out(sums)
                return
        except Interrupted:
            self.interrupted = True
        for parameter in self._params:
            parameter.grad = None
        self._forget_buckets()

    # ---------------------------------------------------------------------------------------------- reduction

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            grad = parameter.grad
            if grad is None:
                return
            parameter.grad = None
            if not self._live or self.interrupted:
                return
            if grad.layout != torch.strided:
                raise FallowError(
                    f"{self._names[index]} has a sparse gradient, which Fallow does not reduce; "
                    "build the layer with sparse=False",
                    Exit.DATA,
                )
            number, _, _ = self._place[index]
            bucket = self._buckets[number]
            if bucket.launched:
                raise FallowError(
                    f"{self._names[index]} received a gradient twice in one backward; "
                    "call torch.utils.checkpoint with use_reentrant=False",
                    Exit.DATA,
                )
            view = self._views[index]
            if self._touched[index]:
                view.add_(grad.detach(), alpha=self._weight)
            else:
                torch.mul(grad.detach(), self._weight, out=view)
                self._touched[index] = True
            if self._final and not self._fired[index]:
                self._fired[index] = True
                bucket.waiting -= 1
                self._launch_ready()

        return hook

    def _launch_ready(self, *, all_of_them: bool = False) -> None:
        try:
            while self._next < len(self._buckets):
                bucket = self._buckets[self._next]
                if bucket.waiting and not all_of_them:
                    return
                for index in bucket.members:
                    if not self._touched[index]:
                        self._views[index].zero_()
                if self._next == 0 and self.rounds == 0:
                    self.before_control()
                self._group.all_reduce(bucket.flat)
                bucket.launched = True
                self._next += 1
        except Interrupted:
            self.interrupted = True

    def _exchange(self) -> list[float]:
        if not self._buckets and self.rounds == 0:
            self.before_control()
        self._launch_ready(all_of_them=True)
        if self.interrupted:
            raise Interrupted("the group broke in this step")
        buffers = self._launch_buffers()
        switch, checkpoint = self.flags()
        first = self.rounds == 0
        head = Control(
            contributors=1.0,
            switch=float(switch),
            checkpoint=float(checkpoint),
            step=float(self._plan.step),
            round=float(self.rounds),
            loss=self.loss,
            loss_weight=self.loss_weight,
            samples=float(self.samples) if first else 0.0,
            crc=float(self.crc) if first else 0.0,
        )
        vector = torch.tensor([*head, *self._touched], dtype=torch.float64)
        self._group.all_reduce(vector)
        self._group.wait()
        if buffers is not None:
            _scatter_bytes(buffers, self._buffers)
        return list(vector.tolist())

    def _launch_buffers(self) -> torch.Tensor | None:
        # Rank 0 always has shard 0. Bytes, because a copy is exact for every dtype.
        if not self._buffers:
            return None
        if self._group.size == 1 and self._kept_buffers is None:
            return None
        flat = _gather_bytes(self._kept_buffers or self._buffers)
        self._group.broadcast(flat, 0)
        return flat

    def _give_out(self, sums: list[float]) -> None:
        control = Control(*sums[:_HEAD])
        self._check(control)
        before = self.control
        if before is not None:
            control = control._replace(
                switch=max(control.switch, before.switch),
                checkpoint=max(control.checkpoint, before.checkpoint),
                loss=control.loss + before.loss,
            )
        self.control = control
        self.rounds += 1
        self.loss = self.loss_weight = 0.0
        with torch.no_grad():
            for index, parameter in enumerate(self._params):
                if sums[_HEAD + index] > 0:
                    self.used = True
                    parameter.grad = self._views[index]
                    if index in self._carried:
                        parameter.grad.add_(self._carried[index])
                else:
                    parameter.grad = self._carried.get(index)
        self._carried = {}

    def _check(self, got: Control) -> None:
        size, plan = self._group.size, self._plan
        first = self.rounds == 0
        wanted = {
            "members": (got.contributors, size),
            "step": (got.step, size * plan.step),
            "backward of the step": (got.round, size * self.rounds),
            "samples": (got.samples, plan.samples if first else 0),
            "checksum of the samples": (got.crc, plan.crc if first else 0),
        }
        for what, (seen, planned) in wanted.items():
            if seen != planned:
                raise FallowError(
                    f"step {plan.step}: the members' sum of {what} is {seen:.0f}, the plan says {planned}: they did "
                    "not do the same work; every member's final body must make the same number of backward calls, "
                    "and the dataset must be the same on every node",
                )

    # ------------------------------------------------------------------------------------------------- memory

    def _ensure_buckets(self) -> None:
        if self._buckets or not self._params:
            return
        for number in range(1 + max(number for number, _, _ in self._place)):
            members = [index for index, place in enumerate(self._place) if place[0] == number]
            numel = sum(self._place[index][2] for index in members)
            first = self._params[members[0]]
            flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
            self._buckets.append(_Bucket(flat, members))
            for index in members:
                _, offset, count = self._place[index]
                self._views[index] = flat[offset : offset + count].view(self._params[index].shape)

    def _forget_buckets(self) -> None:
        self._buckets = []
        self._views = {}
        self._touched = [False] * len(self._params)


def _layout(params: Sequence[nn.Parameter]) -> list[tuple[int, int, int]]:
    """Per parameter: bucket number, offset and length in elements. Buckets hold one dtype, last parameters first."""
    place: dict[int, tuple[int, int, int]] = {}
    open_bucket: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}
    count = 0
    for index in reversed(range(len(params))):
        parameter = params[index]
        key = (parameter.dtype, parameter.device)
        number, used = open_bucket.get(key, (-1, 0))
        cap = _FIRST_BYTES if number == 0 else _BUCKET_BYTES
        if number < 0 or used * parameter.element_size() >= cap:
            number, used = count, 0
            count += 1
        place[index] = (number, used, parameter.numel())
        open_bucket[key] = (number, used + parameter.numel())
    return [place[index] for index in range(len(params))]


def _gather_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8) for t in tensors])


def _scatter_bytes(flat: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    at = 0
    with torch.no_grad():
        for target in targets:
            size = target.numel() * target.element_size()
            target.copy_(flat[at : at + size].clone().view(target.dtype).reshape(target.shape))
            at += size
