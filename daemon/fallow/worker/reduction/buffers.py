"""Buffers of the modules in a step: every shard starts from the step's own, and shard 0's are kept.

All copies stay on the buffers' device, and the host waits for none. Buffers are compared there, because native
BatchNorm and scripts that write to `.data` move no version counter. Buffers that nobody changed for a while do not
travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import torch

from fallow.worker.reduction.expectations import Unused
from fallow.worker.reduction.step_sums import bitmap, flags
from fallow.worker.transport.device import to_device, to_host
from fallow.worker.transport.group import Group

_ALIGN = 16
_PHASE = ""


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
        """By buffer, the number of 8-byte words up to its end, on the device."""
        return to_device(torch.tensor([end // 8 for end in self._ends], device="cpu"), self.bytes.device)


class StepBuffers:
    """Made once per run.

    Args:
        live: gives the modules' buffers, always as many, of the same shapes and types.
    """

    def __init__(self, live: Callable[[], Sequence[torch.Tensor]]) -> None:
        # One that covers the same memory several times, as an expanded one does, cannot be written to.
        written = [not _overlaps(tensor) for tensor in live()]
        self._all, self._written = live, written
        self._count = sum(written)
        self._unused = Unused([False] * self._count)
        self._before: _Room | None = None
        "the step's own"
        self._kept: _Room | None = None
        "shard 0's"
        self._has_kept = False
        self._arriving: list[tuple[list[int], _Room]] = []
        "numbers of buffers on their way, and where they arrive"
        self._changed: torch.Tensor | None = None
        "by buffer, on the host: words that shard 0 changed, up to its end"

    def _live(self) -> list[torch.Tensor]:
        return [tensor for tensor, written in zip(self._all(), self._written, strict=True) if written]

    def begin(self) -> None:
        """Remember the step's own buffers."""
        if not self._count:
            return
        live = self._live()
        if self._before is None:
            self._before = _Room(live)
        self._has_kept, self._changed, self._arriving = False, None, []
        with torch.no_grad():
            torch._foreach_copy_(self._before.views, live)

    def restore(self) -> None:
        """Put the step's own buffers back: before another shard, or before the step is done again."""
        if self._before is not None:
            with torch.no_grad():
                torch._foreach_copy_(self._live(), self._before.views)

    def keep(self) -> None:
        """Shard 0's body is over, on this member: its buffers are the step's result."""
        if not self._count:
            return
        assert self._before is not None
        if self._kept is None:
            self._kept = _Room(self._live())
        self._has_kept = True
        with torch.no_grad():
            torch._foreach_copy_(self._kept.views, self._live())
            unlike = self._kept.bytes.view(torch.int64) != self._before.bytes.view(torch.int64)
            # The sum before the first word is 0, and a buffer's last word stands in front of the place where it ends.
            counts = torch.nn.functional.pad(unlike.cumsum(0, dtype=torch.int32), (1, 0))
            self._changed = to_host(counts[self._kept.last_words])

    def share(self, group: Group, root: int) -> None:
        """Launch that all get those of shard 0 that change now and then.

        Args:
            group: the members.
            root: the rank that has kept shard 0's.
        """
        travels = [not unused for unused in self._unused.items(_PHASE)]
        self._launch(group, root, [number for number, one in enumerate(travels) if one])

    def changed(self) -> bytes:
        """Bitmap of the buffers that shard 0 changed, once the group is certain; empty where shard 0 is not."""
        if self._changed is None:
            return b""
        counts = [0, *self._changed.tolist()]
        return bitmap(count > before for before, count in pairwise(counts))

    def missing(self, changed: bytes) -> list[int]:
        """Numbers of the buffers that were changed and did not travel."""
        unused = self._unused.items(_PHASE)
        return [number for number, one in enumerate(flags(changed, self._count)) if one and unused[number]]

    def share_missing(self, group: Group, root: int, changed: bytes) -> None:
        """Launch that all get these, too."""
        self._launch(group, root, self.missing(changed))

    def settle(self) -> None:
        """All members have shard 0's: they become the modules' own."""
        if self._before is None:
            return
        live, wanted = self._live(), list(self._before.views)
        with torch.no_grad():
            if self._has_kept:
                assert self._kept is not None
                wanted = self._kept.views
            else:
                for numbers, room in self._arriving:
                    for number, view in zip(numbers, room.views, strict=True):
                        wanted[number] = view
            torch._foreach_copy_(live, wanted)
        self._arriving = []

    def renew(self) -> None:
        """The group was abandoned: a late peer may still write into what was to arrive."""
        self._kept, self._arriving = None, []

    def count(self, changed: bytes) -> None:
        """The sum counts: learn from what all members say which buffers change."""
        if self._count:
            self._unused.count(_PHASE, flags(changed, self._count))

    def export(self) -> dict[str, list[int]]:
        """Return what a newcomer needs, as plain values."""
        return self._unused.export()

    def load(self, exported: dict[str, list[int]]) -> None:
        """Take over what was exported."""
        self._unused.load(exported)

    def _launch(self, group: Group, root: int, numbers: list[int]) -> None:
        if group.size == 1 or not numbers:
            return
        live = self._live()
        if self._kept is None:
            self._kept = _Room(live)
        room = self._kept
        if len(numbers) < self._count:
            room = _Room([live[number] for number in numbers])
            if group.rank == root:
                torch._foreach_copy_(room.views, [self._kept.views[number] for number in numbers])
        group.copy(room.bytes, root)
        self._arriving.append((numbers, room))


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and side > 1 for stride, side in zip(tensor.stride(), tensor.shape, strict=True))
