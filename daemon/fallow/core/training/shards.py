"""Which samples a step uses, and which member computes them. Pure arithmetic.

An epoch is a list of sample numbers whose order depends on (seed, epoch) only. Step s takes the next `global_batch`
samples, cut into shards of `batch_size`. The membership only decides who computes which shard.

Members compute shards in proportion to measured speed. All members must divide a step alike, so a division is a
function of values that all of them hold: the paces from the control exchange of a finished step, or from the first
exchange of a generation. A pace is seconds per shard.
"""

import functools
import hashlib
import heapq
import statistics
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from fallow.model import Exit, FallowError

GAIN = 0.06
"""Part of the step time that a new division must save. Paces that vary by 1.5 % then cause no change."""

EVERY = 8
"""Minimum steps between two divisions. A pace is a median over a few steps, all under the current division."""


class Layout(NamedTuple):
    """The fixed cut of an epoch.

    `length` samples in the epoch, `batch_size` samples in a full shard, `global_batch` samples in a full step.
    """

    length: int
    batch_size: int
    global_batch: int
    drop_last: bool

    @property
    def shards(self) -> int:
        """Shards in a full step."""
        return self.global_batch // self.batch_size

    @property
    def steps(self) -> int:
        """Optimizer steps in one epoch."""
        if self.drop_last:
            return self.length // self.global_batch
        return -(-self.length // self.global_batch)

    def samples_in(self, step: int) -> int:
        """Samples in step `step` of the epoch."""
        return min(self.global_batch, self.length - step * self.global_batch)

    def shards_in(self, step: int) -> int:
        """Shards in step `step` of the epoch; fewer than `shards` only in a last, partial step."""
        return -(-self.samples_in(step) // self.batch_size)

    def bounds(self, step: int, shard: int) -> tuple[int, int]:
        """First and one-past-last position, in the epoch's order, of one shard."""
        first = step * self.global_batch + shard * self.batch_size
        return first, min(first + self.batch_size, (step + 1) * self.global_batch, self.length)


class Cut(NamedTuple):
    """One step, cut into shards."""

    sizes: tuple[int, ...]
    "samples of each shard"
    crcs: tuple[int, ...]
    "`shard_crc` of each shard"
    last: bool
    "True for the last step of its epoch"

    @property
    def samples(self) -> int:
        """Samples in the step."""
        return sum(self.sizes)


def make_layout(length: int, batch_size: int, global_batch: int, drop_last: bool) -> Layout:
    """Check the numbers and return the cut of an epoch.

    Raises:
        FallowError: the global batch is not a multiple of the batch size, or no step fits.
    """
    check_batch(batch_size, global_batch)
    if length < 1:
        raise FallowError("the DataLoader has no samples: check the dataset and the sampler", Exit.DATA)
    if drop_last and length < global_batch:
        raise FallowError(
            f"drop_last=True and the epoch's {length} samples are fewer than the global batch of {global_batch}: "
            "no step would be left; lower global_batch (or max nodes), or set drop_last=False",
            Exit.DATA,
        )
    return Layout(length, batch_size, global_batch, drop_last)


def check_batch(batch_size: int, global_batch: int) -> None:
    """Check that a step is a whole number of shards.

    Raises:
        FallowError: the global batch is not a multiple of the batch size.
    """
    if batch_size < 1 or global_batch < batch_size or global_batch % batch_size:
        raise FallowError(
            f"global_batch={global_batch} is not a multiple of the DataLoader's batch_size={batch_size}; "
            "one batch of the loader is one shard: choose a multiple",
            Exit.DATA,
        )


class Duty(NamedTuple):
    """Compute `shard`. `counts` is False for a copy with weight 0, from a member that has no shard of its own."""

    shard: int
    counts: bool


def duties(shares: Sequence[int], rank: int) -> list[Duty]:
    """Shards of a step that `rank` computes, in order: a contiguous block of at least one.

    Args:
        shares: shards of each member, by rank; the first member has at least one. A member without shards computes a
            copy
            that does not count, so that every member takes part in the reduction.
        rank: of the member.
    """
    if not 0 <= rank < len(shares) or shares[0] < 1:
        raise ValueError(f"duties of rank {rank} in a step divided {list(shares)}")
    if not shares[rank]:
        return [Duty(rank % sum(shares), False)]
    first = sum(shares[:rank])
    return [Duty(shard, True) for shard in range(first, first + shares[rank])]


def divide(shards: int, paces: Sequence[float]) -> list[int]:
    """Shards of each member, by rank, so that the slowest member finishes first: min max nᵢ·paceᵢ with nᵢ ≥ 1.

    Each shard goes to the member that would finish it first (the lower rank of equals), which is optimal. With fewer
    shards than members, the first ranks have one each and the others none.

    Args:
        shards: in the step, at least 1.
        paces: seconds per shard by rank; 0 (not measured) counts as the median of the measured paces.
    """
    size = len(paces)
    if shards < size:
        return [1] * shards + [0] * (size - shards)
    filled_paces = fill_unmeasured(paces)
    shares = [1] * size
    queue = [(2 * pace, rank) for rank, pace in enumerate(filled_paces)]
    heapq.heapify(queue)
    for _ in range(shards - size):
        _, rank = queue[0]
        shares[rank] += 1
        heapq.heapreplace(queue, ((shares[rank] + 1) * filled_paces[rank], rank))
    return shares


def fill_unmeasured(paces: Sequence[float]) -> list[float]:
    """Replace each unmeasured pace (0) by the median of the measured ones, or by 1 if none is measured."""
    measured = [pace for pace in paces if pace > 0]
    if len(measured) == len(paces):
        return measured
    median_pace = statistics.median(measured) if measured else 1.0
    return [pace if pace > 0 else median_pace for pace in paces]


def step_time(shares: Sequence[int], paces: Sequence[float]) -> float:
    """Seconds until the slowest member has finished."""
    return max(share * pace for share, pace in zip(shares, paces, strict=True))


class Division(NamedTuple):
    """The current division, stored as paces so that it applies to steps of any number of shards.

    A generation begins with `Division(paces that its members bring along)`. No member's earlier division counts: a
    newcomer has none, and after a kill survivors may differ by one step.
    """

    paces: tuple[float, ...]
    "by rank; 0: not measured"
    since: int | None = None
    "first step of this division; None: it holds since the generation's start"

    def shares(self, shards: int) -> list[int]:
        """Shards of each member, by rank, in a step of `shards`."""
        return list(_divide_cached(shards, self.paces))

    def revised(self, shards: int, paces: Sequence[float], step: int) -> "Division":
        """The division from `step` on. It changes only if the last change is `EVERY` steps ago and it saves `GAIN`.

        Args:
            shards: in a full step.
            paces: newest seconds per shard, by rank; 0: not measured.
            step: the next step.
        """
        if self.since is not None and step - self.since < EVERY:
            return self
        return Division(tuple(paces), step) if self._is_worse(shards, paces) else self

    def _is_worse(self, shards: int, paces: Sequence[float]) -> bool:
        filled_paces = fill_unmeasured(paces)
        good_step_s = (1 - GAIN) * step_time(self.shares(shards), filled_paces)
        if shards / sum(1 / pace for pace in filled_paces) >= good_step_s:
            return False  # a cheap bound, since this runs after every step: not even divisible shards would save enough
        return step_time(divide(shards, filled_paces), filled_paces) < good_step_s


@functools.lru_cache(maxsize=64)
def _divide_cached(shards: int, paces: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(divide(shards, paces))


def mix(*parts: int | str) -> int:
    """A 63-bit seed from the parts. It is the same everywhere and for ever, unlike Python's `hash`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def shard_crc(epoch: int, step: int, shard: int, indices: bytes | memoryview) -> int:
    """CRC-32 of one shard's identity and content. In every step members compare sums of these.

    Args:
        epoch: of the data.
        step: in the epoch.
        shard: in the step.
        indices: its sample numbers as 64-bit integers. A stream's samples have no numbers: what is known of the step.
    """
    return zlib.crc32(indices, zlib.crc32(b"%d %d %d" % (epoch, step, shard)))
