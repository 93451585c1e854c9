"""Keeps what we ask of slurmctld within bounds, whichever client asks it.

Queries and submissions have a token bucket each. A slurmctld that is slow, or that limits our rate (`rl_enable`:
Slurm's commands then wait and try again by themselves, until they give up), is asked less. The configuration is kept.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import TypeVar

from fallow.model import ClusterConfig, ClusterState, FallowError, JobRequest, OwnerView
from fallow.slurm.client import SlurmClient

T = TypeVar("T")

CONFIG_S = 3600.0
UNKNOWN_S = 60.0
"""The configuration is asked for again so soon where a part of it did not come."""

STEP_S = 1.0
"""When our clock has moved so far by itself, the configuration is asked for again: with it comes slurmctld's clock."""

BURST_S = 20.0
"""A bucket holds as much as it gets in this time."""

BUSY = 0.25
"""slurmctld may be busy with our queries for at most this part of the time."""

STRAINED_S = 300.0
"""For so long only half as much is asked after slurmctld has said that it was too much."""

TEST_COST = 5.0
"""A will-run request takes slurmctld's locks for writing; it counts as so many queries."""

OWNER_COST = 5.0
"""Requests of `SlurmClient.owner`, with three levels of accounts."""


class Bucket:
    """Tokens that come at a rate and are kept up to a number.

    Args:
        per_min: tokens in a minute.
        clock: seconds.
    """

    def __init__(self, per_min: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_min / 60.0
        self._size = max(1.0, self._rate * BURST_S)
        self._clock = clock
        self._tokens, self._at = self._size, clock()
        self._strained_until = float("-inf")

    def take(self, cost: float = 1.0) -> float:
        """Take tokens, those that are still to come too; returns the seconds to wait before using them."""
        now = self._clock()
        rate = self._rate / 2 if now < self._strained_until else self._rate
        self._tokens = min(self._size, self._tokens + (now - self._at) * rate)
        self._at = now
        self._tokens -= cost
        return max(0.0, -self._tokens / rate)

    def spend(self, cost: float) -> None:
        """Take tokens for what cannot wait, as far as there are any: nothing after it waits for longer than for one."""
        self.take(0.0)
        self._tokens = min(self._tokens, max(0.0, self._tokens - cost))

    def strain(self) -> None:
        """It was too much: nothing is left, and for some time less comes."""
        self._tokens = min(self._tokens, 0.0)
        self._strained_until = self._clock() + STRAINED_S


class PacedClient:
    """What a `SlurmClient` does, at the pace that slurmctld can take."""

    def __init__(
        self,
        slurm: SlurmClient,
        *,
        queries_per_min: float,
        submits_per_min: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._slurm = slurm
        self._clock, self._sleep = clock, sleep
        self._queries = Bucket(queries_per_min, clock)
        self._submits = Bucket(submits_per_min, clock)
        self._took: deque[float] = deque(maxlen=5)
        self._wall = wall
        self._config: tuple[float, float, ClusterConfig] | None = None
        "(our clock, wall clock, answer)"

    @property
    def backend(self) -> str:
        """Who answers."""
        return self._slurm.backend

    @property
    def least_interval_s(self) -> float:
        """Polls should not begin sooner than this after each other: a slow slurmctld is asked less often."""
        return median(self._took) / BUSY if self._took else 0.0

    async def config(self) -> ClusterConfig:
        now, wall = self._clock(), self._wall()
        if self._config is not None:
            at, wall_at, known = self._config
            keep_s = UNKNOWN_S if known.qos_unknown else CONFIG_S
            if now - at < keep_s and abs((wall - wall_at) - (now - at)) < STEP_S:
                return known
        await self._wait(self._queries)
        # The times from before the question: a step in between shows at the next one.
        found = await self._watch(self._slurm.config())
        self._config = now, wall, found
        return found

    async def poll(self) -> ClusterState:
        await self._wait(self._queries, self._slurm.poll_requests)
        began = self._clock()
        found = await self._watch(self._slurm.poll())
        # How long no answer took says nothing about slurmctld's load once it is back.
        self._took.append(max(0.0, self._clock() - began - self._slurm.start_s))
        return found

    async def may_submit(self) -> None:
        """Wait for the turn of the next `submit`, which does not wait itself: what to submit is chosen then."""
        await self._wait(self._submits)

    async def submit(self, request: JobRequest) -> str:
        return await self._watch(self._slurm.submit(request))

    async def cancel(self, job_ids: Sequence[str]) -> None:
        # Never held up: somebody may be waiting for the node. But what asks next is.
        self._queries.spend(len(job_ids))
        await self._watch(self._slurm.cancel(job_ids))

    async def test_only(self, request: JobRequest) -> str:
        await self._wait(self._queries, TEST_COST)
        return await self._watch(self._slurm.test_only(request))

    async def owner(self) -> OwnerView:
        await self._wait(self._queries, OWNER_COST)
        return await self._watch(self._slurm.owner())

    async def _wait(self, bucket: Bucket, cost: float = 1.0) -> None:
        if (wait_s := bucket.take(cost)) > 0:
            await self._sleep(wait_s)

    async def _watch(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except FallowError as error:
            if "rate limit" in error.message.lower():
                self._queries.strain()
                self._submits.strain()
            raise
