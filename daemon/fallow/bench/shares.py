"""What is a slow member worth? One of the members takes three times as long per shard as the others.

Compared is the sum of the members' speeds, each measured by itself: a world of one usual member and a world of the slow
one, with the same model and the same number of shards. A shard's time is mostly a sleep, so that the members do not
take each other's processors away.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from fallow.bench import rows, session, steplog
from fallow.bench.rows import Peer, Progress, Row, Settings

PARAMS = 20_000
SHARDS_PER_MEMBER = 5
SHARD_S = 0.1
FACTOR = 3
SETTLED = 16
"""First step that counts: by then everybody has been measured and the shards are divided."""

STEPS = 60
ALONE = 6


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """One row per world of two or more, with a model too small to make members of one machine wait for processors."""
    for members in settings.members:
        if members > 1:
            progress(f"shares: {members} members, one of them {FACTOR} times slower")
            yield measure(members, PARAMS, settings.n or STEPS)


def measure(members: int, params: int, steps: int) -> Row:
    """One run with all members, one with a usual member alone, one with the slow one alone."""
    shards = SHARDS_PER_MEMBER * members
    rates = throughput(members, params, shards, SETTLED + steps, SETTLED, "n1")
    usual = rows.ours(throughput(1, params, shards, ALONE, 1, "none")).p50
    slow = rows.ours(throughput(1, params, shards, ALONE, 1, "n0")).p50
    total = (members - 1) * usual + slow
    ours = rows.ours(rates)
    even = members * slow / total
    return Row(
        name="one slow member",
        members=members,
        params=params,
        unit="shards/s",
        ours=ours,
        peer=Peer(name="sum of the speeds", p50=total),
        ratio=ours.p50 / total,
        note=(
            f"{shards} shards; alone: {usual:.2f} and {slow:.2f} shards/s; "
            f"even shares would reach {even:.2f} of the sum at most"
        ),
    )


def throughput(members: int, params: int, shards: int, steps: int, first: int, slow: str) -> list[float]:
    """Shards per second in each step from `first` on."""
    options = ["--shard-s", str(SHARD_S), "--slow", slow, "--slow-factor", str(FACTOR)]
    _, finished = session.train_noting(params, steps, members, most=shards, options=options)
    times = [one.at for one in steplog.progress(finished) if one.step >= first - 1]
    return [shards / (later - earlier) for earlier, later in pairwise(times)]
