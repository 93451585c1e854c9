"""Whether we may harvest at all, how long others waited for us, and how much slurmctld is asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.config import Config
from fallow.core.checks import site as checks
from fallow.core.checks.site import Level
from fallow.core.neighbour.delays import Delays
from fallow.core.neighbour.permission import MAX_NICE, Visibility, needed_nice, nice_for, refusals
from fallow.core.neighbour.watch import WATCHFUL_S
from fallow.model import ClusterConfig, ClusterState, DelayReport, FallowError, JobInfo, NodeInfo, PartitionInfo
from fallow.slurm import parse
from fallow.slurm.cli import CliClient
from fallow.slurm.client import SlurmUnavailable
from fallow.slurm.fake import FakeSlurm
from fallow.slurm.paced import BURST_S, CONFIG_S, STRAINED_S, UNKNOWN_S, Bucket, PacedClient
from fallow.slurm.pyslurm_client import PyslurmClient

NOW = 1_000_000.0
PLAIN = PartitionInfo(partition="plain", nodes=["n1", "n2"])
LOW = PartitionInfo(partition="low", nodes=["n1", "n2"], preempt_mode="CANCEL", priority_tier=0)


def site(**changes: object) -> ClusterConfig:
    return ClusterConfig(cluster="c", slurm_version="25.11.1", **changes)  # type: ignore[arg-type]


def cluster(
    jobs: list[JobInfo] | None = None, at: float = NOW, partitions: tuple[PartitionInfo, ...] = (PLAIN,)
) -> ClusterState:
    nodes = [NodeInfo(node="n1", state="ALLOCATED"), NodeInfo(node="n2", state="IDLE")]
    return ClusterState(at=at, nodes=nodes, jobs=jobs or [], partitions=list(partitions))


def job(job_id: str, state: str, **more: object) -> JobInfo:
    known = {"name": f"job{job_id}", "user": "alice", "partition": "plain", **more}
    return JobInfo(job_id=job_id, state=state, **known)  # type: ignore[arg-type]


def test_nice_against_the_weights_of_a_site() -> None:
    text = (
        "PriorityType            = priority/multifactor\nPriorityWeightAge       = 1000\n"
        "PriorityWeightQOS       = 100000\nPriorityWeightAssoc     = 0\n"
        "PriorityWeightTRES      = CPU=1000,GRES/gpu=3000\n"
    )
    config, _ = parse.config(text)
    assert config.priority_weights == {"Age": 1000, "QOS": 100000, "TRES CPU": 1000, "TRES GRES/gpu": 3000}
    assert (needed_nice(config), nice_for(config, 100_000), nice_for(config, 200_000)) == (105_001, 105_001, 200_000)
    assert nice_for(site(), 100_000) == 100_000
    assert parse.config("PriorityWeightTRES = (null)\n")[0].priority_weights == {}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("PriorityFlags = CALCULATE_RUNNING,NO_NORMAL_QOS", "leaves the factor of QOS without a bound"),
        ("PriorityFlags = NO_NORMAL_ALL", "leaves the factor of QOS, TRES without a bound"),
        ("PriorityFlags = NO_NORMAL_ASSOC", ""),  # its weight is 0
        ("PriorityFlags = CALCULATE_RUNNING,MAX_TRES\nPrioritySiteFactorPlugin = (null)", ""),
        ("PriorityFlags =\nPrioritySiteFactorPlugin = site_factor/none", ""),
        ("PrioritySiteFactorPlugin = site_factor/lottery", "site_factor/lottery adds to priorities"),
    ],
)
def test_weights_bound_priorities_only_where_factors_are_normalized(lines: str, words: str) -> None:
    config, _ = parse.config(
        "PriorityType = priority/multifactor\nPriorityWeightQOS = 1000\nPriorityWeightTRES = CPU=10\n" + lines + "\n"
    )
    assert needed_nice(config) == (None if words else 1011)
    assert nice_for(config, 100_000) == 100_000
    found = refusals(cluster(), config, unseen=False, allow_unseen=False, allow_unfair=False)
    assert (words in found.get("plain", "")) and bool(found) == bool(words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (site(), ""),
        (site(priority_type="priority/multifactor", priority_weights={"Age": 1000}), ""),
        (site(priority_type="priority/multifactor"), "the older job goes first"),
        (site(priority_type="priority/multifactor", priority_weights={"QOS": MAX_NICE}), "weights add up to"),
    ],
)
def test_where_no_nice_helps_nothing_is_harvested_unless_slurm_preempts(config: ClusterConfig, words: str) -> None:
    state = cluster(partitions=(PLAIN, msgspec.structs.replace(LOW, priority_tier=1)))
    found = refusals(state, config, unseen=False, allow_unseen=False, allow_unfair=False)
    assert set(found) == ({"plain"} if words else set())
    assert words in found.get("plain", "")
    assert not refusals(state, config, unseen=False, allow_unseen=False, allow_unfair=True)


def test_where_slurm_preempts_on_some_nodes_only_something_may_speak_against_the_others() -> None:
    mixed = msgspec.structs.replace(PLAIN, preempt_mode="CANCEL", unpreempted=frozenset(PLAIN.nodes[:1]))
    state = cluster(partitions=(mixed,))
    found = refusals(state, site(), unseen=True, allow_unseen=False, allow_unfair=False)
    assert found["plain"].startswith("on nodes where nobody preempts its jobs: others' jobs cannot be seen")
    assert not refusals(state, site(), unseen=False, allow_unseen=False, allow_unfair=False)
    (check,) = checks.partitions(state, ["plain"], True, found)
    assert "not on 1 of its" in check.found


def test_nice_does_not_help_against_partitions_of_a_lower_tier() -> None:
    found = refusals(cluster(partitions=(PLAIN, LOW)), site(), unseen=False, allow_unseen=False, allow_unfair=False)
    assert found == {"plain": "its requests would come before all jobs of low, whose priority tier is lower"}
    down = msgspec.structs.replace(LOW, up=False)
    assert not refusals(cluster(partitions=(PLAIN, down)), site(), unseen=False, allow_unseen=False, allow_unfair=False)


@pytest.mark.parametrize("preempt_mode", ["OFF", "REQUEUE"])
def test_one_node_is_not_asked_for_where_jobs_have_more(preempt_mode: str) -> None:
    """Slurm would refuse it every time."""
    pair = msgspec.structs.replace(PLAIN, min_nodes=2, preempt_mode=preempt_mode)
    found = refusals(cluster(partitions=(pair,)), site(), unseen=False, allow_unseen=True, allow_unfair=True)
    assert found == {"plain": "its jobs have 2 nodes at least, a request has one"}
    (check,) = checks.partitions(cluster(partitions=(pair,)), ["plain"], True, found)
    assert (check.level, check.found) == (Level.FAIL, found["plain"])
    (check,) = checks.partitions(cluster(partitions=(pair,)), [], True, found)
    assert check.level is Level.WARN, "there is no other"


def test_hidden_jobs_are_noticed_and_forbid_harvesting() -> None:
    secretive = site(private_data=["jobs"])
    assert Visibility().look(cluster(), secretive)
    found = refusals(cluster(), secretive, unseen=True, allow_unseen=False, allow_unfair=False)
    assert found == {"plain": "others' jobs cannot be seen, and nothing would take a node from us for them"}
    assert not refusals(cluster(), secretive, unseen=True, allow_unseen=True, allow_unfair=False)
    # Nobody says so, but n1 is in use by nobody, poll after poll.
    watching = Visibility()
    assert [watching.look(cluster(), site()) for _ in range(4)] == [False, False, True, True]
    seen = cluster([job("1", "RUNNING", nodes=["n1"])])
    assert not watching.look(seen, site())
    assert [watching.look(cluster(), site()) for _ in range(3)] == [False, False, True]


# ---------------------------------------------------------------------------------------------------------------
# Delays
# ---------------------------------------------------------------------------------------------------------------


def test_a_delay_lasts_until_our_node_is_free() -> None:
    delays = Delays()
    waiting = job("1", "PENDING", submit_at=NOW + 3)
    assert delays.note(cluster(), {}) == []
    assert delays.note(cluster([waiting], NOW + 5), {"1": frozenset(["a"])}) == []
    assert delays.report(NOW + 6) == DelayReport(jobs=1, p95_s=3.0, max_s=3.0)
    # Ours ended at 8, theirs started at 11 in Slurm's own good time.
    ours = job("7", "CANCELLED", name="a", end_at=NOW + 8)
    (over,) = delays.note(cluster([waiting, ours], NOW + 10), {})
    assert (over.job_id, over.user, over.waited_s) == ("1", "alice", 5.0)
    assert delays.note(cluster([job("1", "RUNNING", start_at=NOW + 11)], NOW + 15), {}) == []
    # Started within the second in which it came: Slurm's time is before it was seen waiting.
    soon = Delays(polled_at=NOW)
    soon.note(cluster([job("2", "PENDING", submit_at=NOW + 1)], NOW + 1.5), {"2": frozenset(["a"])})
    (over,) = soon.note(cluster([job("2", "RUNNING", start_at=NOW + 1)], NOW + 3), {})
    assert over.waited_s == 0.5
    # And once more: one job, one sum.
    delays.note(cluster([waiting], NOW + 20), {"1": frozenset(["b"])})
    assert delays.note(cluster([waiting], NOW + 25), {"1": frozenset(["b"])}) == []
    (over,) = delays.note(cluster([job("1", "RUNNING", start_at=NOW + 27)], NOW + 30), {})
    assert over.waited_s == 5.0 + 12.0, "from the poll before the one that showed it"
    assert delays.report(NOW + 99) == DelayReport(jobs=1, p95_s=17.0, max_s=17.0)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(delays), type=Delays)
    assert again.report(NOW + 99) == delays.report(NOW + 99)


@pytest.mark.parametrize("state", ["SUSPENDED", "CONFIGURING", "STOPPED", "REQUEUED"])
def test_a_job_of_ours_that_is_not_over_ends_no_delay(state: str) -> None:
    delays = Delays(polled_at=NOW)
    waiting = job("1", "PENDING", submit_at=NOW)
    delays.note(cluster([waiting], NOW + 5), {"1": frozenset(["a"])})
    ours = job("7", state, name="a", end_at=NOW + 6)
    (over,) = delays.note(cluster([waiting, ours], NOW + 10), {})
    assert over.waited_s == 10.0, "its end is none that has been"


@pytest.mark.parametrize("state", ["REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"])
def test_a_job_that_was_put_back_has_not_started(state: str) -> None:
    delays = Delays(polled_at=NOW)
    delays.note(cluster([job("1", "PENDING", submit_at=NOW)], NOW + 5), {"1": frozenset(["a"])})
    (over,) = delays.note(cluster([job("1", state, start_at=NOW + 1)], NOW + 10), {})
    assert over.waited_s == 10.0


def test_all_delays_count_and_the_longest_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fallow.core.neighbour.delays.KEPT", 100)
    delays, waits = Delays(), [100.0, 0.0, *(1.0 + number % 20 for number in range(299))]
    for number, wait in enumerate(waits):
        at, name = NOW + 1000.0 * number, str(number)
        delays.note(cluster([job(name, "PENDING", submit_at=at)], at), {name: frozenset(["a"])})
        delays.note(cluster([job(name, "RUNNING", start_at=at + wait)], at + 500.0), {})
    report = delays.report(at + 500.0)
    assert (report.jobs, report.max_s) == (300, 100.0)
    assert 19.0 <= report.p95_s <= 19.0 * 1.1
    assert len(delays.jobs) == 100
    # One that still waits is kept, however many came after it.
    for number in range(110):
        at += 1000.0
        delays.note(cluster(at=at), {"waits": frozenset(["b"]), f"x{number}": frozenset(["a"])})
        delays.note(cluster(at=at + 1.0), {"waits": frozenset(["b"])})
    assert delays.jobs["waits"].tokens == ["b"] and len(delays.jobs) == 100
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(delays), type=Delays)
    assert again.report(at) == delays.report(at)


@given(st.lists(st.dictionaries(st.sampled_from("123456"), st.sampled_from(["a", "b"])), max_size=20))
def test_which_jobs_wait_still_is_known_to_a_head_that_comes_back(polls: list[dict[str, str]]) -> None:
    delays, at = Delays(), NOW
    for waits in polls:
        at += 10.0
        delayed = {job_id: frozenset([token]) for job_id, token in waits.items()}
        shown = cluster([job(job_id, "PENDING", submit_at=NOW) for job_id in waits], at)
        back = msgspec.msgpack.decode(msgspec.msgpack.encode(delays), type=Delays)
        assert delays.note(shown, delayed) == back.note(shown, delayed)
        assert delays == back


@given(st.lists(st.tuples(st.floats(0.1, 60), st.booleans()), max_size=20))
def test_delays_are_never_longer_than_the_time_that_passed(polls: list[tuple[float, bool]]) -> None:
    delays, at = Delays(), NOW
    for step, late in polls:
        at += step
        delays.note(cluster([job("1", "PENDING", submit_at=NOW)], at), {"1": frozenset(["a"])} if late else {})
    report = delays.report(at)
    assert 0 <= report.max_s <= at - NOW + 1e-6
    assert report.jobs == any(late for _, late in polls[1:] if late) or report.jobs <= 1


# ---------------------------------------------------------------------------------------------------------------
# Pace
# ---------------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Time that passes only where somebody sleeps."""

    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def paced(clock: Clock, slurm: FakeSlurm | None = None) -> tuple[PacedClient, FakeSlurm]:
    inner = slurm or FakeSlurm(nodes=2)
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


async def test_polls_wait_for_their_turn_and_cancels_never_do() -> None:
    clock = Clock()
    client, slurm = paced(clock)
    for _ in range(25):
        await client.poll("fallow-")
    assert slurm.polls == 25
    assert sum(clock.slept) == pytest.approx(5.0)
    await client.cancel(["1"])
    assert sum(clock.slept) == pytest.approx(5.0)


async def test_what_is_really_sent_counts() -> None:
    clock = Clock()
    client, slurm = paced(clock)
    slurm.poll_requests = 6
    for _ in range(4):
        await client.poll("fallow-")
    assert sum(clock.slept) == pytest.approx(4 * 6 - BURST_S), "the first three and a bit are the burst"
    before = len(clock.slept)
    clock.now += 3600.0
    await client.owner()
    await client.cancel([str(number) for number in range(1000)])
    assert len(clock.slept) == before
    # However many were cancelled, the next poll waits for no more than itself.
    await client.poll("fallow-")
    assert clock.slept[before:] == [pytest.approx(6.0)]


def test_every_client_says_what_a_poll_sends() -> None:
    assert CliClient().poll_requests == PyslurmClient().poll_requests == 6
    assert Config().slurm.queries_per_min * WATCHFUL_S / 60 >= CliClient().poll_requests


async def test_the_configuration_is_asked_for_once_an_hour() -> None:
    clock = Clock()
    client, slurm = paced(clock)
    first = await client.config()
    slurm.unavailable = True
    assert await client.config() is first
    clock.now += CONFIG_S
    with pytest.raises(SlurmUnavailable):
        await client.config()


async def test_a_configuration_without_what_the_accounting_says_is_asked_for_again_soon() -> None:
    clock = Clock()

    class Away(FakeSlurm):
        away = True

        async def config(self) -> ClusterConfig:
            return msgspec.structs.replace(await super().config(), qos_unknown=self.away)

    slurm = Away(nodes=2)
    client, _ = paced(clock, slurm)
    assert (await client.config()).qos_unknown
    slurm.away = False
    assert (await client.config()).qos_unknown
    clock.now += UNKNOWN_S
    assert not (await client.config()).qos_unknown


async def test_a_slow_slurmctld_and_one_that_limits_our_rate_are_asked_less() -> None:
    clock = Clock()

    class Slow(FakeSlurm):
        async def poll(self, names_prefix: str) -> ClusterState:
            await clock.sleep(4.0)
            return await super().poll(names_prefix)

    client, slurm = paced(clock, Slow(nodes=1))
    assert client.least_interval_s == 0.0
    await client.poll("fallow-")
    assert client.least_interval_s == 16.0
    slurm.unavailable = True
    for _ in range(6):
        clock.now += 30.0
        with pytest.raises(SlurmUnavailable):
            await client.poll("fallow-")
    assert client.least_interval_s == 16.0, "an outage is no load"

    class Limiting(FakeSlurm):
        async def find(self, token: str) -> list[JobInfo]:
            raise SlurmUnavailable("squeue: Rate limit exceeded, please retry momentarily")

    clock = Clock()
    client, _ = paced(clock, Limiting(nodes=1))
    with pytest.raises(FallowError, match="Rate limit"):
        await client.find("fallow-x")
    await client.poll("fallow-")
    await client.poll("fallow-")
    assert clock.slept == [2.0, 2.0], "nothing saved up, and half the rate"
    clock.now += STRAINED_S
    await asyncio.gather(*(client.poll("fallow-") for _ in range(20)))
    assert len(clock.slept) == 2


def test_a_limited_rate_is_no_refusal() -> None:
    assert not parse.is_refusal(
        "sbatch: error: Batch job submission failed: Rate limit exceeded, please retry momentarily"
    )
