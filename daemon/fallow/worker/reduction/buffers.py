"""Buffers of the modules in a step: every shard starts from the step's own, and shard 0's are kept.

As under DDP, all buffers of the member that has shard 0 go to all members in each step, in one piece of memory. All
copies stay on the buffers' device, and the host waits for none.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from fallow.worker.transport.device import asynchronous
from fallow.worker.transport.group import Group

_ALIGN = 16
ROOT = 0
"""Rank of the member that has shard 0, in every division."""


class _BufferCopies:
    """Memory for copies of all buffers, in one block of bytes."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in like]
        *starts, size = accumulate(sizes, initial=0)
        device = next((tensor.device for tensor in like if asynchronous(tensor.device)), like[0].device)
        self.bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self.views = [
            self.bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, like, strict=True)
        ]


class StepBuffers:
    """Made once per run. `live` gives the modules' buffers, always as many, of the same shapes and types."""

    def __init__(self, live: Callable[[], list[torch.Tensor]]) -> None:
        self.live = live
        self._step_copies: _BufferCopies | None = None
        "buffers at the beginning of the step; None: there are no buffers, or no step has begun"
        self._shard_0_copies: _BufferCopies | None = None
        "buffers after shard 0, on all members after `share`"

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the step's own buffers."""
        live = self.live()
        if live:
            if self._step_copies is None:
                self._step_copies, self._shard_0_copies = _BufferCopies(live), _BufferCopies(live)
            _copy(self._step_copies.views, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the step's own buffers back: before another shard, or before the step is done again."""
        if self._step_copies is not None:
            _copy(self.live(), self._step_copies.views)

    @torch.no_grad()
    def keep(self) -> None:
        """Shard 0's body is over, on this member: its buffers are the step's result."""
        if self._shard_0_copies is not None:
            _copy(self._shard_0_copies.views, self.live())

    def share(self, group: Group) -> None:
        """Launch the broadcast of shard 0's buffers, which rank `ROOT` has kept."""
        if self._shard_0_copies is not None:
            group.copy(self._shard_0_copies.bytes, ROOT)

    @torch.no_grad()
    def settle(self) -> None:
        """Put shard 0's buffers into the modules. Call when all members have them."""
        if self._shard_0_copies is not None:
            _copy(self.live(), self._shard_0_copies.views)

    def renew(self) -> None:
        """Use new memory, because a late peer of the abandoned group may still write into the old one."""
        if self._shard_0_copies is not None:
            self._shard_0_copies = _BufferCopies(self.live())


def _copy(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """A call for each type: with several types in one call every tensor costs CUDA a kernel."""
    for dtype in {tensor.dtype for tensor in into}:
        numbers = [number for number, tensor in enumerate(into) if tensor.dtype == dtype]
        torch._foreach_copy_([into[number] for number in numbers], [source[number] for number in numbers])
