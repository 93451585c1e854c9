"""A cluster of which only the holes are known: starts, owners that come back, limits, and what a poll shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.allocations import Allocation
from fallow.core.holes import find_holes
from fallow.core.neighbour.needs import assess
from fallow.core.neighbour.preemption import as_for_us
from fallow.model import AllocationKind, AllocationState, JobInfo
from fallow.sim.pool import PoolSim
from fallow.sim.traces.sites import Profile, harvested, made_up
from fallow.sim.types import (
    Costs,
    Ended,
    Happening,
    Latency,
    Notice,
    Options,
    Plans,
    Pool,
    Problems,
    Scheduler,
    Site,
    Started,
    Waited,
    Wanted,
)
from fallow.slurm.client import SubmitRejected

Change = tuple[float, tuple[int, ...], tuple[int, ...]]
FREE = Costs(absorb=(0, 0), release=(0, 0), eject=(0, 0), start=(0, 0))
NEW, OLD = (25, 11), (22, 5)


@dataclass
class Listed:
    """Holes that a test says."""

    site: Site
    listed: Sequence[Change]
    begin: float = 0.0
    end: float = 100_000.0
    problems: Problems = field(default_factory=lambda: Problems(read=0, used=0, bad={}, examples=[], assumed=[]))

    def changes(self) -> Iterator[Change]:
        return iter(self.listed)


def pool(
    *changes: Change,
    latency: Latency = "slurm",
    plans: Plans = "hidden",
    profile: Profile = "preempt",
    nodes: int = 4,
    version: tuple[int, int] = NEW,
    kill_wait_s: float = 5.0,
) -> PoolSim:
    names = [f"n{number}" for number in range(nodes)]
    scheduler = Scheduler(version=version, kill_wait_s=kill_wait_s)
    site = made_up("site", {"batch": names}, gpus=4, profile=profile, scheduler=scheduler)
    return PoolSim(Listed(site, changes), Options(seed=0, latency=latency, plans=plans, poll_s=30.0, costs=FREE))


def ask(engine: PoolSim, minutes: int = 60, **more: object) -> str:
    partition = harvested(engine.site)[0]
    return engine.submit(Wanted(token="fallow-r-h1", partition=partition, minutes=minutes, **more))  # type: ignore[arg-type]


def until(engine: PoolSim, to: float) -> list[Happening]:
    """Everything up to `to`, without the counts of idle nodes."""
    found: list[Happening] = []
    while engine.next_at() <= to:
        found += engine.advance(engine.next_at())
    found += engine.advance(to)
    return [each for each in found if not isinstance(each, Pool)]


def job(engine: PoolSim, job_id: str) -> JobInfo:
    return next(info for info in engine.poll().jobs if info.job_id == job_id)


# -- without latency ----------------------------------------------------------------------------------------------


def test_without_latency_a_request_starts_at_once() -> None:
    engine = pool((0.0, (0, 1), ()), (100.0, (), (0, 1)), latency="none")
    assert engine.advance(0.0) == [Pool(at=0.0, idle=2)]
    job_id = ask(engine, 60)
    assert engine.next_at() == 0.0
    assert engine.advance(0.0) == [Started(at=0.0, job_id=job_id, nodes=("n0",), end_at=3600.0)]
    assert engine.idle_nodes() == 2
    assert engine.next_at() == 100.0


def test_an_owner_who_comes_back_gets_the_node_of_one_who_leaves_at_once_without_waiting() -> None:
    engine = pool((0.0, (0,), ()), (100.0, (), (0,)), (200.0, (0,), ()), latency="none")
    engine.advance(0.0)
    job_id = ask(engine)
    engine.advance(50.0)
    assert engine.advance(100.0) == [Pool(at=100.0, idle=0), Notice(at=100.0, job_id=job_id, kill_at=110.0)]
    engine.left(job_id)
    assert engine.advance(100.0) == [Ended(at=100.0, job_id=job_id, state="PREEMPTED")]
    assert until(engine, 300.0) == []


def test_who_does_not_leave_is_killed_after_the_grace_and_kill_wait() -> None:
    engine = pool((0.0, (0,), ()), (100.0, (), (0,)), latency="none")
    engine.advance(0.0)
    job_id = ask(engine)
    owner = Waited(at=115.0, job_id="", seconds=15.0)
    found = until(engine, 200.0)
    assert found[1:3] == [
        Notice(at=100.0, job_id=job_id, kill_at=110.0),
        Ended(at=115.0, job_id=job_id, state="PREEMPTED"),
    ]
    assert isinstance(found[3], Waited)
    assert (found[3].at, found[3].seconds) == (owner.at, owner.seconds)


def test_a_request_waits_for_the_next_hole() -> None:
    engine = pool((0.0, (0,), ()), (50.0, (2,), ()), latency="none")
    engine.advance(0.0)
    first, second = ask(engine), ask(engine)
    assert [each.job_id for each in until(engine, 10.0) if isinstance(each, Started)] == [first]
    assert job(engine, second).reason == "Priority"
    assert until(engine, 60.0) == [Started(at=50.0, job_id=second, nodes=("n2",), end_at=3650.0)]


# -- with Slurm's latency -----------------------------------------------------------------------------------------


def test_requests_start_in_backfill_cycles_only() -> None:
    engine = pool((0.0, (0, 1, 2), ()))
    engine.advance(0.0)
    ask(engine)
    (first,) = until(engine, 40.0)
    assert isinstance(first, Started)
    assert 0 < first.at <= 30.0
    # One that comes at the moment of a cycle is too late for it.
    engine.advance(first.at + 60.0)
    ask(engine)
    (second,) = until(engine, first.at + 100.0)
    assert isinstance(second, Started)
    assert second.at == pytest.approx(first.at + 90.0)


def test_grace_with_slurms_delays() -> None:
    """The owner comes at 100.0; a pass takes 0.2 s, the signal 0.17 s, the epilog 0.3 s, and the next pass 0.2 s."""
    engine = pool((0.0, (0,), ()), (100.0, (), (0,)))
    engine.advance(0.0)
    job_id = ask(engine)
    until(engine, 100.1)
    (notice,) = until(engine, 100.5)
    assert isinstance(notice, Notice)
    assert (notice.at, notice.kill_at) == (pytest.approx(100.37), pytest.approx(110.2))
    info = job(engine, job_id)
    assert (info.state, info.preempt_at, info.end_at) == ("RUNNING", pytest.approx(100.2), pytest.approx(110.2))
    engine.left(job_id)
    ended, waited = until(engine, 105.0)
    assert ended == Ended(at=100.5, job_id=job_id, state="PREEMPTED")
    assert isinstance(waited, Waited)
    assert waited.seconds == pytest.approx(1.0)


def test_grace_is_over_at_a_sweep_and_kill_wait_follows() -> None:
    engine = pool((0.0, (0,), ()), (100.0, (), (0,)))
    engine.advance(0.0)
    ask(engine)
    ended = next(each for each in until(engine, 200.0) if isinstance(each, Ended))
    assert 115.2 <= ended.at <= 145.2
    assert ended.state == "PREEMPTED"


def test_without_grace_the_signal_comes_at_once_and_the_end_with_kill_wait() -> None:
    engine = pool((0.0, (0,), ()), (100.0, (), (0,)), profile="nograce")
    engine.advance(0.0)
    job_id = ask(engine)
    _, notice, ended, waited = until(engine, 200.0)
    assert isinstance(notice, Notice)
    assert (notice.at, notice.kill_at) == (pytest.approx(100.48), pytest.approx(104.7))
    assert ended == Ended(at=notice.kill_at, job_id=job_id, state="PREEMPTED")
    assert isinstance(waited, Waited)
    assert waited.seconds == pytest.approx(5.2)


def test_on_a_plain_site_the_owner_waits_for_us() -> None:
    engine = pool((0.0, (0, 1), ()), (100.0, (), (0,)), profile="plain")
    engine.advance(0.0)
    job_id = ask(engine)
    assert len(until(engine, 150.0)) == 1
    (waiting,) = (info for info in engine.poll().jobs if info.state == "PENDING")
    assert (waiting.reason, waiting.required_nodes, waiting.partition) == ("Resources", ["n0"], "batch")
    engine.left(job_id)
    ended, waited = until(engine, 160.0)
    assert ended == Ended(at=150.0, job_id=job_id, state="COMPLETED")
    assert isinstance(waited, Waited)
    assert (waited.job_id, waited.seconds) == (waiting.job_id, pytest.approx(50.5))
    assert [info.state for info in engine.poll().jobs] == ["COMPLETED"]


def test_the_heads_own_rules_give_the_owner_his_node() -> None:
    engine = pool((0.0, (0, 1), ()), (100.0, (), (0,)), profile="plain")
    engine.advance(0.0)
    job_id = ask(engine)
    until(engine, 150.0)
    held = Allocation(token="fallow-r-h1", run="r", kind=AllocationKind.HARVEST, public_key="")
    held.state, held.job_id, held.nodes, held.partition = AllocationState.RUNNING, job_id, ["n0"], "batch"
    standing = assess(as_for_us(engine.poll(), engine.config(), None), [held])
    assert [(each.token, each.urgent) for each in standing.give_backs] == [("fallow-r-h1", True)]


def test_an_owner_whose_time_is_over_waits_no_longer() -> None:
    engine = pool((0.0, (0,), ()), (100.0, (), (0,)), (140.0, (0,), ()), profile="plain")
    engine.advance(0.0)
    ask(engine)
    _, waited = until(engine, 150.0)
    assert isinstance(waited, Waited)
    assert (waited.at, waited.seconds) == (140.0, 40.0)
    assert [info.state for info in engine.poll().jobs] == ["RUNNING"]


def test_a_limit_is_noticed_at_a_sweep() -> None:
    engine = pool((0.0, (0,), ()))
    engine.advance(0.0)
    job_id = ask(engine, 1)
    started, notice, ended = until(engine, 300.0)
    assert isinstance(started, Started)
    assert isinstance(notice, Notice)
    assert started.end_at == started.at + 60
    assert 0 <= notice.at - started.end_at < 30
    assert ended == Ended(at=notice.at + 5, job_id=job_id, state="TIMEOUT")


def test_cancel() -> None:
    engine = pool((0.0, (0,), ()))
    engine.advance(0.0)
    running, pending = ask(engine), ask(engine)
    until(engine, 100.0)
    engine.cancel(pending)
    engine.cancel(running)
    assert job(engine, running).state == "COMPLETING"
    ended, notice, killed = until(engine, 200.0)
    assert ended == Ended(at=100.0, job_id=pending, state="CANCELLED")
    assert isinstance(notice, Notice)
    assert (notice.at, notice.kill_at) == (pytest.approx(100.03), pytest.approx(105.03))
    assert killed == Ended(at=notice.kill_at, job_id=running, state="CANCELLED")
    engine.cancel(running)
    engine.left(running)
    assert until(engine, 300.0) == []


# -- known ends ---------------------------------------------------------------------------------------------------


def test_what_does_not_fit_its_hole_is_not_started() -> None:
    engine = pool((0.0, (0, 1), ()), (1000.0, (), (0,)), (5000.0, (), (1,)), latency="none", plans="known")
    engine.advance(0.0)
    assert ask(engine, 20)
    assert ask(engine, 20)
    assert [each.nodes for each in until(engine, 10.0) if isinstance(each, Started)] == [("n1",)]


def test_the_whole_time_is_granted_where_nobody_is_planned() -> None:
    engine = pool((0.0, (0,), ()), plans="known")
    engine.advance(0.0)
    ask(engine, 60)
    (started,) = until(engine, 40.0)
    assert isinstance(started, Started)
    assert started.end_at - started.at == 3600.0


def test_the_head_sees_the_ends_of_holes_and_waits_for_nobody() -> None:
    engine = pool((0.0, (0, 1), ()), (1000.0, (), (0,)), (2e6, (), (1,)), plans="known")
    engine.advance(0.0)
    cluster = as_for_us(engine.poll(), engine.config(), None)
    scavenge = [p for p in cluster.partitions if p.partition == "scavenge"]
    assert scavenge[0].preempts
    holes = find_holes(cluster, scavenge)
    assert [(hole.node, hole.length_s, hole.sure) for hole in holes] == [("n1", None, True), ("n0", 1000.0, True)]
    assert not assess(cluster, []).kept_nodes


# -- the rest -----------------------------------------------------------------------------------------------------


def test_a_poll_shows_nodes_and_remembers_jobs_for_a_while() -> None:
    engine = pool((0.0, (0, 1), ()))
    engine.advance(0.0)
    job_id = ask(engine)
    until(engine, 40.0)
    cluster = engine.poll()
    assert [node.state for node in cluster.nodes] == ["ALLOCATED", "IDLE", "ALLOCATED", "ALLOCATED"]
    assert cluster.nodes[1].idle_since == 0.0
    assert job(engine, job_id).nodes == ["n0"]
    again = engine.poll()
    assert again.nodes is cluster.nodes
    assert again.jobs is cluster.jobs
    engine.left(job_id)
    assert engine.poll().nodes[0].flags == ["COMPLETING"]
    until(engine, 41.0)
    assert engine.poll().nodes[0].state == "IDLE"
    engine.advance(339.0)
    assert job(engine, job_id).state == "COMPLETED"
    engine.advance(341.0)
    assert engine.poll().jobs == []


def test_refused_requests() -> None:
    engine = pool((0.0, (0,), ()))
    with pytest.raises(SubmitRejected, match="invalid partition specified: nowhere"):
        engine.submit(Wanted(token="t", partition="nowhere", minutes=1))
    with pytest.raises(SubmitRejected, match="configuration is not available"):
        engine.submit(Wanted(token="t", partition="scavenge", minutes=1, node="n9"))


def test_pinned_excluded_and_too_long_requests() -> None:
    engine = pool((0.0, (0, 1, 2), ()), latency="none")
    engine.advance(0.0)
    long = ask(engine, 24 * 60 + 1)
    ask(engine, node="n1")
    ask(engine, exclude=frozenset({"n0"}))
    assert [each.nodes for each in until(engine, 1.0) if isinstance(each, Started)] == [("n1",), ("n2",)]
    assert job(engine, long).reason == "PartitionTimeLimit"


@st.composite
def holes(draw: st.DrawFn) -> list[Change]:
    idle: set[int] = set()
    at, found = 0.0, []
    for _ in range(draw(st.integers(1, 25))):
        changed = draw(st.sets(st.integers(0, 5), min_size=1))
        found.append((at, tuple(sorted(changed - idle)), tuple(sorted(changed & idle))))
        idle ^= changed
        at += draw(st.sampled_from([0.5, 7.0, 60.0, 130.0, 1000.0]))
    return found


@settings(max_examples=60, deadline=None)
@given(
    listed=holes(),
    latency=st.sampled_from(["none", "slurm"]),
    plans=st.sampled_from(["hidden", "known"]),
    profile=st.sampled_from(["preempt", "nograce", "plain"]),
    actions=st.lists(st.sampled_from(["ask", "short", "leave", "cancel", "stay"]), min_size=1, max_size=12),
)
def test_nodes_are_used_once_and_every_job_ends_once(
    listed: list[Change], latency: Latency, plans: Plans, profile: Profile, actions: list[str]
) -> None:
    engine = pool(*listed, latency=latency, plans=plans, profile=profile, nodes=6)
    idle: set[int] = set()
    on: dict[str, int] = {}
    asked: list[str] = []
    over: list[str] = []
    places = {node.node: number for number, node in enumerate(engine.site.nodes)}
    waiting, turn, seen = list(listed), 0, -inf
    while (at := engine.next_at()) <= listed[-1][0] + 8000:
        assert at >= seen
        seen = at
        while waiting and waiting[0][0] <= at:
            _, joined, left = waiting.pop(0)
            idle = (idle - set(left)) | set(joined)
        for each in engine.advance(at):
            if isinstance(each, Started):
                node = places[each.nodes[0]]
                assert node in idle
                assert node not in on.values()
                on[each.job_id] = node
                # What Slurm has planned is kept free, except for what is enforced late.
                back = min((then for then, _, gone in waiting if node in gone), default=inf)
                assert plans == "hidden" or each.end_at <= back + 1e-6
            elif isinstance(each, Ended):
                on.pop(each.job_id, None)
                over.append(each.job_id)
            elif isinstance(each, Pool):
                assert each.idle == len(idle)
            elif isinstance(each, Waited):
                assert each.seconds > 0
                assert profile == "plain" or latency == "slurm" or each.seconds <= 15.0 + 1e-6
        assert engine.idle_nodes() == len(idle)
        shown = engine.poll()
        assert {n.node for n in shown.nodes if n.state == "IDLE"} == {
            name for name, number in places.items() if number in idle and number not in on.values()
        } - {n.node for n in shown.nodes if "COMPLETING" in n.flags}
        action, turn = actions[turn % len(actions)], turn + 1
        if action in ("ask", "short") and len(asked) < 60:
            asked.append(ask(engine, 60 if action == "ask" else 2))
        elif action == "leave" and on:
            engine.left(min(on, key=int))
        elif action == "cancel" and asked:
            engine.cancel(asked[turn % len(asked)])
    assert len(over) == len(set(over))
    running = {info.job_id for info in engine.poll().jobs if info.user == "me" and info.state in ("PENDING", "RUNNING")}
    assert set(asked) - set(over) >= running
