"""Buffers: after each round of a step all members hold those of shard 0.

Most models have none that change, or only such as a mask. So they are broadcast where the same round of the last step
changed them, and in a generation's first; else the control exchange tells whether shard 0's member has changed one, and
only then they follow. What a script writes to them between two exchanges is found by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fallow.worker.handover.state import as_bytes
from fallow.worker.transport.group import Group


class SharedBuffers:
    """One per run.

    Args:
        live: gives the modules' buffers.
        unread: gives the ids of those that no backward looks at.
    """

    def __init__(self, live: Callable[[], Sequence[torch.Tensor]], unread: Callable[[], set[int]]) -> None:
        self._live = live
        self._unread = unread
        self._agreed: list[torch.Tensor] = []
        "copies of what all members had after the last round; empty: there was none in this generation"
        self._kept: list[list[torch.Tensor]] = []
        "copies of shard 0's, by number of the backward that had just returned, if other shards came after it"
        self._quiet: set[tuple[int, int]] = set()
        "(phase, round) in which nothing had changed the last time: they do not go with its control exchange"
        self._key = (0, 0)
        "the one at work"
        self._flat: torch.Tensor | None = None
        self._alone = False
        "nobody else has any"
        self.changed = False
        "this member has shard 0, which changed one in this round"

    def attach(self) -> None:
        """Another generation begins."""
        self._agreed = []
        self._quiet.clear()

    def begin_step(self) -> None:
        """A step begins, or a phase of it."""
        self._kept = []

    def keep(self, copies: list[torch.Tensor]) -> None:
        """These are shard 0's behind its next backward, or of all of its body if that made none."""
        self._kept.append(copies)

    @property
    def kept(self) -> bool:
        """Shard 0's are known, and this member has come to others."""
        return bool(self._kept)

    def launch(self, group: Group, phase: int, number: int) -> None:
        """Just before the control exchange of a round, which has that number in its phase; sets `changed`."""
        # Rank 0 always has shard 0.
        self._key, self._flat, self.changed = (phase, number), None, False
        mine = self._mine()
        self._alone = not mine or (group.size == 1 and not self._kept)
        if self._alone:
            return
        self.changed = group.rank == 0 and bool(self._agreed) and not all(map(_same, mine, self._agreed))
        if self._key not in self._quiet:
            self._flat = _gather(mine)
            group.broadcast(self._flat, 0)

    def settle(self, group: Group, *, changed: bool) -> None:
        """The control exchange is complete.

        Args:
            group: the same as in `launch`.
            changed: whether that of shard 0's member said so.

        Raises:
            Interrupted: the group broke.
        """
        if self._alone:
            return
        if changed and self._flat is None:
            self._flat = _gather(self._mine())
            group.broadcast(self._flat, 0)
            group.wait()
        live = self._live()
        if self._flat is not None:
            self._agreed = _parts(self._flat, live)
        if group.rank or self._kept:
            self._take(live, came=self._flat is not None)
        self._flat = None
        (self._quiet.discard if changed else self._quiet.add)(self._key)

    def _mine(self) -> Sequence[torch.Tensor]:
        """Of shard 0, as far as this member knows, behind the backward at work."""
        return self._kept[min(self._key[1], len(self._kept) - 1)] if self._kept else self._live()

    def _take(self, live: Sequence[torch.Tensor], *, came: bool) -> None:
        """So that a graph that was made before stays good for another backward: what is equal is left alone.

        Torch refuses a backward that needs one that is not, since the graph was made with another value.
        """
        unread = self._unread()
        for target, value in zip(live, self._agreed, strict=True):
            free = id(target) in unread
            if (free and came) or not _same(value, target):
                with torch.no_grad():
                    # `data` leaves no trace for autograd.
                    (target.data if free else target).copy_(value)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, on whatever device; both of one shape and type."""
    return torch.equal(_words(one), _words(other.to(one.device)))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, large ones where possible: torch compares them several times as fast as bytes."""
    raw = as_bytes(tensor.detach().contiguous())
    return raw.view(torch.int64) if raw.numel() % 8 == 0 and raw.storage_offset() % 8 == 0 else raw


def _gather(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    # Bytes, because a copy is exact for every dtype.
    return torch.cat([as_bytes(tensor.detach().to("cpu").contiguous()) for tensor in tensors])


def _parts(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of `_gather`."""
    found, at = [], 0
    for tensor in like:
        part = flat[at : at + tensor.numel() * tensor.element_size()]
        aligned = part if at % tensor.element_size() == 0 else part.clone()
        found.append(aligned.view(tensor.dtype).view(tensor.shape))
        at += part.numel()
    return found
