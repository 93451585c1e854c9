"""How much slurmctld is asked."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import Clock
from fallow.model import ClusterState, FallowError, JobRequest
from fallow.slurm.client import SlurmUnavailable
from fallow.slurm.paced import BURST_S, CONFIG_S, STRAINED_S, Bucket, PacedClient
from scripted_slurm import ScriptedSlurm


def paced(clock: Clock, slurm: ScriptedSlurm | None = None) -> tuple[PacedClient, ScriptedSlurm]:
    inner = slurm or ScriptedSlurm(nodes=2)
    client = PacedClient(inner, queries_per_min=60, submits_per_min=30, clock=clock, sleep=clock.sleep)
    return client, inner


@given(st.floats(1, 600), st.lists(st.tuples(st.floats(0, 30), st.sampled_from([1.0, 5.0])), min_size=1, max_size=60))
def test_a_bucket_never_gives_more_than_its_rate_and_one_burst(
    per_min: float, calls: list[tuple[float, float]]
) -> None:
    clock = Clock()
    bucket = Bucket(per_min, clock)
    used: list[tuple[float, float]] = []
    for pause, cost in calls:
        clock.now += pause
        used.append((clock.now + bucket.take(cost), cost))
    burst = max(1.0, per_min / 60 * BURST_S)
    for first, (start, _) in enumerate(used):
        for last in range(first, len(used)):
            total = sum(cost for _, cost in used[first : last + 1])
            assert total <= burst + (used[last][0] - start) * per_min / 60 + used[first][1] + 1e-6


async def test_what_is_really_sent_counts() -> None:
    clock = Clock()
    client, slurm = paced(clock)
    slurm.poll_requests = 6
    for _ in range(4):
        await client.poll()
    assert sum(clock.slept) == pytest.approx(4 * 6 - BURST_S), "the first three and a bit are the burst"
    before = len(clock.slept)
    clock.now += 3600.0
    await client.owner()
    await client.cancel([str(number) for number in range(1000)])
    assert len(clock.slept) == before


async def test_the_configuration_is_asked_for_once_an_hour() -> None:
    clock = Clock()
    client, slurm = paced(clock)
    first = await client.config()
    slurm.unavailable = True
    assert await client.config() is first
    clock.now += CONFIG_S
    with pytest.raises(SlurmUnavailable):
        await client.config()


async def test_a_slow_slurmctld_is_asked_less() -> None:
    clock = Clock()

    class Slow(ScriptedSlurm):
        async def poll(self) -> ClusterState:
            await clock.sleep(4.0)
            return await super().poll()

    client, slurm = paced(clock, Slow(nodes=1))
    assert client.least_interval_s == 0.0
    await client.poll()
    assert client.least_interval_s == 16.0
    slurm.unavailable = True
    for _ in range(6):
        clock.now += 30.0
        with pytest.raises(SlurmUnavailable):
            await client.poll()
    assert client.least_interval_s == 16.0, "an outage is no load"


async def test_one_that_limits_our_rate_is_asked_half_as_often() -> None:
    class Limiting(ScriptedSlurm):
        async def test_only(self, request: JobRequest) -> str:
            raise SlurmUnavailable("squeue: Rate limit exceeded, please retry momentarily")

    clock = Clock()
    client, _ = paced(clock, Limiting(nodes=1))
    with pytest.raises(FallowError, match="Rate limit"):
        await client.test_only(JobRequest(token="fallow-x", options=[], script=""))
    await client.poll()
    await client.poll()
    assert clock.slept == [2.0, 2.0], "nothing saved up, and half the rate"
    clock.now += STRAINED_S
    await asyncio.gather(*(client.poll() for _ in range(20)))
    assert len(clock.slept) == 2
