"""Buffers of the modules in a step: every shard starts from the step's own, and shard 0's are kept.

As under DDP, all buffers of the member that has shard 0 go to all members in each step, in one piece of memory. All
copies stay on the buffers' device, and the host waits for none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from fallow.worker.transport.group import Group

_ALIGN = 16
ROOT = 0
"""Rank of the member that has shard 0, in every division."""


class _Room:
    """Memory for copies of all buffers, in one block of bytes."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in like]
        *starts, size = accumulate(sizes, initial=0)
        self.bytes = torch.zeros(size, dtype=torch.uint8, device=like[0].device)
        self.views = [
            self.bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, like, strict=True)
        ]


class StepBuffers:
    """Made once per run. `live` gives the modules' buffers, always as many, of the same shapes and types."""

    def __init__(self, live: Callable[[], list[torch.Tensor]]) -> None:
        self._live = live
        self._step_room: _Room | None = None
        "the step's own; None: there are no buffers, or no step has begun"
        self._shard_0_room: _Room | None = None
        "shard 0's, on all members after `share`"

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the step's own buffers."""
        live = self._live()
        if live:
            self._step_room = self._step_room or _Room(live)
            torch._foreach_copy_(self._step_room.views, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the step's own buffers back: before another shard, or before the step is done again."""
        if self._step_room is not None:
            torch._foreach_copy_(self._live(), self._step_room.views)

    @torch.no_grad()
    def keep(self) -> None:
        """Shard 0's body is over, on this member: its buffers are the step's result."""
        if self._step_room is not None:
            torch._foreach_copy_(self._room().views, self._live())

    def share(self, group: Group) -> None:
        """Launch that all members get shard 0's, which rank `ROOT` has kept."""
        if self._step_room is not None:
            group.copy(self._room().bytes, ROOT)

    @torch.no_grad()
    def settle(self) -> None:
        """All members have shard 0's: they become the modules' own."""
        if self._step_room is not None:
            torch._foreach_copy_(self._live(), self._room().views)

    def renew(self) -> None:
        """The group was abandoned: a late peer may still write into what was to arrive."""
        self._shard_0_room = None

    def _room(self) -> _Room:
        self._shard_0_room = self._shard_0_room or _Room(self._live())
        return self._shard_0_room
