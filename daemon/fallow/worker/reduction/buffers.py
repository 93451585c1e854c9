"""Buffers of the modules in a step: every shard starts from the step's own, and shard 0's are kept.

All copies stay on the buffers' device, and the host waits for none. Buffers are compared there, because native
BatchNorm and scripts that write to `.data` move no version counter. Buffers that nobody changed for a while do not
travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from fallow.worker.reduction.step_sums import PATIENCE, count_unused
from fallow.worker.transport.device import to_device, to_host
from fallow.worker.transport.group import Group

_ALIGN = 16


class _Room:
    """Memory for copies of all buffers, in one block of bytes."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self._ends: list[int] = []
        at = 0
        for tensor in like:
            at += -(-tensor.nbytes // _ALIGN) * _ALIGN
            self._ends.append(at)
        self.bytes = torch.zeros(at, dtype=torch.uint8, device=like[0].device)
        self.views = [
            self.bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip([0, *self._ends], like, strict=False)
        ]

    @cached_property
    def last_words(self) -> torch.Tensor:
        """0, and by buffer the number of 8-byte words up to its end, on the device."""
        return to_device(torch.tensor([0, *(end // 8 for end in self._ends)], device="cpu"), self.bytes.device)


class StepBuffers:
    """Made once per run. `live` gives the modules' buffers, always as many, of the same shapes and types."""

    def __init__(self, live: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._all_live = live
        # One that covers the same memory several times, as an expanded one does, cannot be written to.
        self._writable = [not _overlaps(tensor) for tensor in live()]
        self._unchanged_sums = [0] * sum(self._writable)
        "by buffer, sums in a row in which shard 0 did not change it"
        self._step_room: _Room | None = None
        "the step's own"
        self._shard_0_room: _Room | None = None
        "shard 0's"
        self._arrivals: list[tuple[Sequence[int], _Room]] = []
        "numbers of buffers on their way, and where they arrive"
        self._changed_words: torch.Tensor | None = None
        "on the host: 0, and by buffer the words that shard 0 changed, up to its end; None: another member has shard 0"

    def _live(self) -> list[torch.Tensor]:
        return [tensor for tensor, writable in zip(self._all_live(), self._writable, strict=True) if writable]

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the step's own buffers."""
        if not self._unchanged_sums:
            return
        live = self._live()
        self._step_room = self._step_room or _Room(live)
        self._changed_words, self._arrivals = None, []
        torch._foreach_copy_(self._step_room.views, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the step's own buffers back: before another shard, or before the step is done again."""
        if self._step_room is not None:
            torch._foreach_copy_(self._live(), self._step_room.views)

    @torch.no_grad()
    def keep(self) -> None:
        """Shard 0's body is over, on this member: its buffers are the step's result."""
        if self._step_room is None:
            return
        self._shard_0_room = self._shard_0_room or _Room(self._live())
        torch._foreach_copy_(self._shard_0_room.views, self._live())
        unlike = self._shard_0_room.bytes.view(torch.int64) != self._step_room.bytes.view(torch.int64)
        # The sum before the first word is 0, and a buffer's last word stands in front of the place where it ends.
        counts = torch.zeros(len(unlike) + 1, dtype=torch.int32, device=unlike.device)
        torch.cumsum(unlike, 0, out=counts[1:])
        self._changed_words = to_host(counts[self._shard_0_room.last_words])

    def share(self, group: Group, root: int, numbers: Sequence[int] | None = None) -> None:
        """Launch that all members get shard 0's, which `root` has kept. `numbers`: default all that change at times."""
        if numbers is None:
            numbers = [number for number, sums in enumerate(self._unchanged_sums) if sums < PATIENCE]
        if group.size == 1 or not numbers:
            return
        live = self._live()
        room = self._shard_0_room = self._shard_0_room or _Room(live)
        if len(numbers) < len(live):
            room = _Room([live[number] for number in numbers])
            if group.rank == root:
                torch._foreach_copy_(room.views, [self._shard_0_room.views[number] for number in numbers])
        group.copy(room.bytes, root)
        self._arrivals.append((numbers, room))

    def changed(self) -> list[int]:
        """Numbers of the buffers that shard 0 changed, after `Group.wait_and_verify`; none where shard 0 is not."""
        return [] if self._changed_words is None else self._changed_words.diff().nonzero().flatten().tolist()

    def missing(self, changed: Sequence[int]) -> list[int]:
        """Numbers of the buffers that were changed and did not travel."""
        return [number for number in changed if self._unchanged_sums[number] >= PATIENCE]

    @torch.no_grad()
    def settle(self) -> None:
        """All members have shard 0's: they become the modules' own."""
        if self._step_room is None:
            return
        wanted = list(self._step_room.views)
        if self._changed_words is not None:
            assert self._shard_0_room is not None
            wanted = self._shard_0_room.views
        for numbers, room in self._arrivals if self._changed_words is None else ():
            for number, view in zip(numbers, room.views, strict=True):
                wanted[number] = view
        torch._foreach_copy_(self._live(), wanted)
        self._arrivals = []

    def renew(self) -> None:
        """The group was abandoned: a late peer may still write into what was to arrive."""
        self._shard_0_room, self._arrivals = None, []

    def count(self, changed: Sequence[int]) -> None:
        """The sum counts: learn from what all members say which buffers change."""
        self._unchanged_sums = count_unused(self._unchanged_sums, changed)

    def export(self) -> dict[str, list[int]]:
        """Return what a newcomer needs, as plain values."""
        return {"": self._unchanged_sums}

    def load(self, exported: dict[str, list[int]]) -> None:
        """Take over what was exported."""
        self._unchanged_sums = exported.get("", [0] * len(self._unchanged_sums))


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and side > 1 for stride, side in zip(tensor.stride(), tensor.shape, strict=True))
