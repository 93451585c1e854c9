"""Which samples a step uses, and who computes them: pure arithmetic.

An epoch is a list of sample numbers in an order that depends on (seed, epoch) only. Step s of it takes the next
`global_batch` of them, cut into shards of `batch_size`. The membership decides only who computes which shard.

Members compute shards in proportion to measured speed. All members must cut a step alike, so a division is a function
of values that all of them hold: the paces that the control exchange of a finished step told, or the first exchange of a
generation. A pace is seconds per shard.
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
"""Part of the step's time that a new division must save: paces that waver by 1.5 % cannot make it flap."""

EVERY = 8
"""Steps between two divisions: a pace is a median over a few steps, and must have seen the division before."""


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
    """One step, as it is divided into shards."""

    sizes: tuple[int, ...]
    "samples of each shard"
    crcs: tuple[int, ...]
    "of each shard, see `shard_crc`"
    last: bool
    "it is the last step of its epoch"

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
    """Refuse a step that is not a whole number of shards.

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
    """One body: compute `shard`; `counts` is False for a member that only takes part (a copy, weight 0)."""

    shard: int
    counts: bool


def duties(shares: Sequence[int], rank: int) -> list[Duty]:
    """Shards of a step that `rank` computes, in order: a contiguous block, at least one body.

    Args:
        shares: shards of each member, by rank; the first member has one or more. A member with none computes a copy
            that counts nothing, so that every member takes part in the reduction.
        rank: whose duties.
    """
    if not 0 <= rank < len(shares) or shares[0] < 1:
        raise ValueError(f"duties of rank {rank} in a step divided {list(shares)}")
    if not shares[rank]:
        return [Duty(rank % sum(shares), False)]
    first = sum(shares[:rank])
    return [Duty(shard, True) for shard in range(first, first + shares[rank])]


def divide(shards: int, paces: Sequence[float]) -> list[int]:
    """Shards of each member, by rank, so that the slowest is done soonest: min max nᵢ·paceᵢ with nᵢ ≥ 1.

    One after the other, each shard goes to the member that would be done with it first (the lower rank of equals),
    which is optimal. Where there are fewer shards than members, the first ranks have one each and the others none.

    Args:
        shards: in the step, at least 1.
        paces: seconds per shard by rank; 0 (not measured yet) counts as the median of those known.
    """
    size = len(paces)
    if shards < size:
        return [1] * shards + [0] * (size - shards)
    known = filled(paces)
    shares = [1] * size
    queue = [(2 * pace, rank) for rank, pace in enumerate(known)]
    heapq.heapify(queue)
    for _ in range(shards - size):
        _, rank = queue[0]
        shares[rank] += 1
        heapq.heapreplace(queue, ((shares[rank] + 1) * known[rank], rank))
    return shares


def filled(paces: Sequence[float]) -> list[float]:
    """Paces without gaps: the median of the known ones, or 1, for the unknown."""
    known = [pace for pace in paces if pace > 0]
    if len(known) == len(paces):
        return known
    usual = statistics.median(known) if known else 1.0
    return [pace if pace > 0 else usual for pace in paces]


def step_time(shares: Sequence[int], paces: Sequence[float]) -> float:
    """Seconds until the slowest member is done."""
    return max(share * pace for share, pace in zip(shares, paces, strict=True))


class Division(NamedTuple):
    """The division in force: the paces it was made from, so that steps of any number of shards can be cut by it.

    A generation begins with `Division(paces that its members bring along)`. No member's past plays a part in that: a
    newcomer has none, and after a kill survivors may differ by one step.
    """

    paces: tuple[float, ...]
    "by rank; 0: not measured"
    since: int | None = None
    "first step of it; None: from the generation's start"

    def shares(self, shards: int) -> list[int]:
        """Shards of each member, by rank, in a step of so many."""
        return list(_divided(shards, self.paces))

    def revised(self, shards: int, paces: Sequence[float], step: int) -> "Division":
        """The division from `step` on: another one if the last change is `EVERY` steps ago and it saves `GAIN`.

        Args:
            shards: in a full step.
            paces: newest seconds per shard, by rank; 0: not measured.
            step: the next step.
        """
        if self.since is not None and step - self.since < EVERY:
            return self
        return Division(tuple(paces), step) if self._worse(shards, paces) else self

    def _worse(self, shards: int, paces: Sequence[float]) -> bool:
        known = filled(paces)
        enough = (1 - GAIN) * step_time(self.shares(shards), known)
        if shards / sum(1 / pace for pace in known) >= enough:
            return False  # not even shards that can be cut would do; asked after every step, so it saves some time
        return step_time(divide(shards, known), known) < enough


@functools.lru_cache(maxsize=64)
def _divided(shards: int, paces: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(divide(shards, paces))


def mix(*parts: int | str) -> int:
    """A 63-bit seed from the parts: the same everywhere and for ever, unlike Python's `hash`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def shard_crc(epoch: int, step: int, shard: int, indices: bytes | memoryview) -> int:
    """CRC-32 of one shard's identity and content; sums of these are what members compare in every step.

    Args:
        epoch: of the data.
        step: in the epoch.
        shard: in the step.
        indices: its sample numbers as 64-bit integers; of a stream, whose samples have none, what is known of the step.
    """
    return zlib.crc32(indices, zlib.crc32(b"%d %d %d" % (epoch, step, shard)))
