"""Rate limits for requests to slurmctld, for every client.

Queries and submissions have a token bucket each. The rate falls if slurmctld is slow, or limits our rate (`rl_enable`:
Slurm's commands then wait and retry by themselves, until they give up). The configuration is cached.
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
"""Seconds for which a configuration with a missing part is cached."""

STEP_S = 1.0
"""After a step of our clock by so many seconds, the configuration is asked for again: it carries slurmctld's clock."""

BURST_S = 20.0
"""A bucket holds the tokens of so many seconds."""

BUSY = 0.25
"""Maximum part of the time that our queries may keep slurmctld busy."""

STRAINED_S = 300.0
"""Seconds for which the rate is halved after slurmctld has reported too many requests."""

TEST_COST = 5.0
"""Number of queries that a will-run request counts as: it takes slurmctld's locks for writing."""

OWNER_COST = 5.0
"""Number of requests of `SlurmClient.owner`, with three levels of accounts."""


class Bucket:
    """A token bucket: tokens arrive at a rate, up to a maximum.

    Args:
        per_min: tokens per minute.
        clock: returns seconds.
    """

    def __init__(self, per_min: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_min / 60.0
        self._size = max(1.0, self._rate * BURST_S)
        self._clock = clock
        self._tokens, self._at = self._size, clock()
        self._strained_until = float("-inf")

    def take(self, cost: float = 1.0) -> float:
        """Take tokens, also future ones. Returns the seconds to wait before using them."""
        now = self._clock()
        rate = self._rate / 2 if now < self._strained_until else self._rate
        self._tokens = min(self._size, self._tokens + (now - self._at) * rate)
        self._at = now
        self._tokens -= cost
        return max(0.0, -self._tokens / rate)

    def spend(self, cost: float) -> None:
        """Take available tokens for a request that cannot wait. The request after it waits for its own tokens only."""
        self.take(0.0)
        self._tokens = min(self._tokens, max(0.0, self._tokens - cost))

    def strain(self) -> None:
        """Drop all tokens and halve the rate for a while: slurmctld has reported too many requests."""
        self._tokens = min(self._tokens, 0.0)
        self._strained_until = self._clock() + STRAINED_S


class PacedClient:
    """A `SlurmClient` that calls another one at the rate that slurmctld can serve."""

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
        """What answers, and why."""
        return self._slurm.backend

    @property
    def least_interval_s(self) -> float:
        """Minimum seconds between the beginnings of two polls: a slow slurmctld is asked less often."""
        return median(self._took) / BUSY if self._took else 0.0

    async def config(self) -> ClusterConfig:
        now, wall = self._clock(), self._wall()
        if self._config is not None:
            at, wall_at, config = self._config
            keep_s = UNKNOWN_S if config.qos_unknown else CONFIG_S
            if now - at < keep_s and abs((wall - wall_at) - (now - at)) < STEP_S:
                return config
        await self._wait(self._queries)
        # The times from before the question: a clock step during the call shows at the next call.
        config = await self._watch(self._slurm.config())
        self._config = now, wall, config
        return config

    async def poll(self) -> ClusterState:
        await self._wait(self._queries, self._slurm.poll_requests)
        began = self._clock()
        state = await self._watch(self._slurm.poll())
        # A failed poll is not counted: its time says nothing about the load of a slurmctld that answers again.
        self._took.append(max(0.0, self._clock() - began - self._slurm.start_s))
        return state

    async def may_submit(self) -> None:
        """Wait for the turn of the next `submit`, which itself does not wait: the caller then chooses a job."""
        await self._wait(self._submits)

    async def submit(self, request: JobRequest) -> str:
        return await self._watch(self._slurm.submit(request))

    async def cancel(self, job_ids: Sequence[str]) -> None:
        # Never delayed: somebody may be waiting for the node. The next queries wait instead.
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
