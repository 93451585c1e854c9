"""What others need of us: until when it stays the same, and what it does not depend on."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fallow.core.allocations import Allocation
from fallow.core.neighbour import lookout
from fallow.core.neighbour.lookout import Lookout, same_until
from fallow.core.neighbour.needs import assess
from fallow.core.neighbour.waiting import nodes_for
from fallow.core.neighbour.watch import Manners, Neighbourhood
from fallow.core.states import ON_NODES
from fallow.model import (
    AllocationKind,
    AllocationState,
    ClusterState,
    JobInfo,
    NodeInfo,
    PartitionInfo,
    ReservationInfo,
)

NOW, AGAIN_S = 1_000_000.0, 100.0
NODES = {"p": ["a1", "a2", "a3"], "q": ["b1", "b2"]}


def theirs(job_id: str, state: str, partition: str = "p", **more: object) -> JobInfo:
    return JobInfo(job_id=job_id, name="x", user="al", state=state, partition=partition, **more)  # type: ignore[arg-type]


def waits(job_id: str, partition: str = "p", **more: object) -> JobInfo:
    return theirs(job_id, "PENDING", partition, reason="Resources", exclusive=True, **more)


def cluster(*jobs: JobInfo, **more: object) -> ClusterState:
    busy = {name for job in jobs if job.state in ON_NODES for name in job.nodes}
    nodes = [
        NodeInfo(node=name, state="ALLOCATED" if name in busy else "IDLE", partitions=[partition, "low"], cpus=4)
        for partition, names in NODES.items()
        for name in names
    ]
    both = [PartitionInfo(partition=name, nodes=names, priority_tier=1) for name, names in NODES.items()]
    low = PartitionInfo(partition="low", nodes=[n.node for n in nodes], preempt_mode="REQUEUE")
    return ClusterState(at=NOW, nodes=nodes, jobs=list(jobs), partitions=[*both, low], **more)  # type: ignore[arg-type]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[ClusterState, list[Allocation]]:
    """Others and we on the nodes, and others who wait; times that matter are near."""
    times = st.integers(-12, 40).map(lambda n: NOW + 10.0 * n)
    jobs, mine = [], []
    for number, name in enumerate(n for names in NODES.values() for n in names):
        there = "p" if name in NODES["p"] else "q"
        match draw(st.sampled_from(["idle", "ours", "theirs", "ending"])):
            case "ours":
                partition = draw(st.sampled_from([there, "low"]))
                kind, running = AllocationKind.HARVEST, AllocationState.RUNNING
                token, nodes = f"fallow-r-h{number}", [name]
                mine.append(
                    Allocation(
                        token=token, run="r", kind=kind, public_key="", state=running, partition=partition, nodes=nodes
                    )
                )
                job = theirs(str(number), "RUNNING", partition, nodes=nodes, exclusive=True, end_at=draw(times))
                jobs.append(replace(job, name=token, preempt_at=draw(st.none() | times.filter(lambda at: at <= NOW))))
            case "idle":
                continue
            case what:
                state = "RUNNING" if what == "theirs" else "COMPLETING"
                end_at = draw(times if what == "theirs" else times.filter(lambda at: at <= NOW))
                jobs.append(theirs(str(number), state, there, nodes=[name], exclusive=True, end_at=end_at))
    for number in range(draw(st.integers(1, 3))):
        partition = draw(st.sampled_from("pq"))
        planned = draw(st.booleans())
        jobs.append(
            waits(
                str(100 + number),
                partition,
                num_nodes=draw(st.integers(1, 2)),
                time_limit_s=draw(st.sampled_from([60.0, 120.0, None])),
                start_at=draw(times) if planned else None,
                planned_nodes=NODES[partition][:2] if planned else [],
                eligible_at=draw(st.none() | times),
                priority=draw(st.integers(1, 3)),
            )
        )
    reserved = ReservationInfo(reservation="m", nodes=["a1"], start_at=draw(times), end_at=NOW + 300.0)
    return cluster(*jobs, reservations=[reserved] if draw(st.booleans()) else []), mine


@settings(max_examples=200, deadline=None)
@given(worlds(), st.floats(0.0, 1.0, exclude_max=True))
def test_what_others_need_stays_the_same_until_then(world: tuple[ClusterState, list[Allocation]], part: float) -> None:
    state, mine = world
    until = same_until(state, {a.token for a in mine}, AGAIN_S)
    later = replace(state, at=NOW + part * (min(until, NOW + 600.0) - NOW))
    if later.at < until:
        assert assess(later, mine, again_s=AGAIN_S) == assess(state, mine, again_s=AGAIN_S)


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_only_what_is_near_matters_to_who_waits(world: tuple[ClusterState, list[Allocation]]) -> None:
    state, mine = world
    there = nodes_for(state, [job for job in state.jobs if job.state == "PENDING"])
    ours = {a.token for a in mine}
    jobs = [job for job in state.jobs if job.name in ours or not job.nodes or not there.isdisjoint(job.nodes)]
    nodes = [node if node.node in there else replace(node, state="IDLE") for node in state.nodes]
    fewer = replace(state, jobs=jobs, nodes=nodes)
    assert assess(fewer, mine, again_s=AGAIN_S) == assess(state, mine, again_s=AGAIN_S)


@st.composite
def followed(draw: st.DrawFn, world: tuple[ClusterState, list[Allocation]]) -> tuple[ClusterState, list[Allocation]]:
    """A later poll of the same world, in which a few things may have changed."""
    state, mine = world
    jobs, mine = list(state.jobs), [replace(a) for a in mine]
    for number in draw(st.lists(st.integers(0, len(jobs) - 1), max_size=2, unique=True)):
        match draw(st.sampled_from(["gone", "ending", "priority", "users"])):
            case "gone":
                jobs[number] = replace(jobs[number], state="COMPLETED", nodes=[])
            case "ending" if jobs[number].nodes:
                jobs[number] = replace(jobs[number], state="COMPLETING", end_at=NOW)
            case "priority":
                jobs[number] = replace(jobs[number], priority=2)
            case _:
                jobs[number] = replace(jobs[number], user="bo")
    for allocation in mine:
        if draw(st.integers(0, 5)) == 0:
            allocation.state = draw(st.sampled_from([AllocationState.RELEASING, AllocationState.ENDED]))
    for number in range(draw(st.integers(0, 2))):
        token, partition = f"fallow-r-h9{number}", draw(st.sampled_from(["p", "q", "low"]))
        mine.append(
            Allocation(
                token=token,
                run="r",
                kind=AllocationKind.HARVEST,
                public_key="",
                state=AllocationState.PENDING,
                partition=partition,
            )
        )
        jobs.append(replace(waits(str(900 + number), partition, priority=draw(st.integers(0, 3))), name=token))
    flags = draw(st.sampled_from([[], [], ["DRAIN"]]))
    nodes = [replace(node, flags=flags) if node.node == "b1" else node for node in state.nodes]
    return replace(state, at=NOW + draw(st.integers(0, 60)), jobs=jobs, nodes=nodes), mine


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_kept_is_what_would_be_found(data: st.DataObject) -> None:
    world = data.draw(worlds())
    watching = Lookout()
    for state, mine in (world, world, *(data.draw(followed(world)) for _ in range(3))):
        assert watching.assess(state, mine, again_s=AGAIN_S) == assess(state, mine, again_s=AGAIN_S)


def test_what_happens_far_away_is_no_reason_to_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, needs = [], lookout.needs
    monkeypatch.setattr(lookout, "needs", lambda *given: looks.append(1) or needs(*given))
    watching, waiting = Lookout(), waits("2", end_at=None)
    near = [waiting, theirs("1", "RUNNING", nodes=["a1"], end_at=NOW + 50.0)]
    state = cluster(*near)
    first = watching.assess(state, [])
    assert first.wanted == {"p"}
    assert watching.assess(state, []) == first
    assert len(looks) == 2, "nobody has looked what is near, as the job might have been gone by now"
    far = replace(cluster(*near, theirs("3", "RUNNING", "q", nodes=["b1"])), at=NOW + 20.0)
    assert watching.assess(far, []) == first
    assert len(looks) == 2
    watching.assess(replace(far, at=NOW + 50.0), [])
    assert len(looks) == 3, "the job there must be over by then"
    watching.assess(cluster(waiting), [])
    assert len(looks) == 4, "it is over"


def test_it_may_change_when_something_is_over() -> None:
    def until(*jobs: JobInfo, **more: object) -> float:
        return same_until(cluster(*jobs, **more), {"fallow-r-h0"}, AGAIN_S) - NOW

    assert until() == until(theirs("1", "RUNNING", nodes=["a1"], end_at=NOW + 9.0)) == inf, "nobody waits"
    waiting = waits("2", time_limit_s=60.0)
    assert until(waiting) == inf
    assert until(replace(waiting, eligible_at=NOW + 20.0)) == 20.0
    assert until(replace(waiting, start_at=NOW + 70.0)) == 10.0, "one that starts then would run into it"
    assert until(waiting, theirs("1", "RUNNING", nodes=["a1"], end_at=NOW + 50.0)) == 50.0
    assert until(waiting, theirs("1", "RUNNING", nodes=["b1"], end_at=NOW + 50.0)) == inf, "far away"
    assert until(waiting, theirs("1", "COMPLETING", nodes=["a1"], end_at=NOW - 5.0)) == 10.0
    reserved = ReservationInfo(reservation="m", nodes=["a1"], start_at=NOW + 100.0, end_at=NOW + 900.0)
    assert until(waiting, reservations=[reserved]) == 40.0
    mine = replace(theirs("1", "RUNNING", nodes=["a1"], end_at=NOW + 50.0), name="fallow-r-h0")
    assert until(waiting, mine) == inf
    assert until(waiting, replace(mine, preempt_at=NOW - 60.0)) == 40.0


def test_nothing_is_said_of_the_time_while_polls_are_counted() -> None:
    neighbourhood = Neighbourhood(Manners())
    state = cluster(waits("2"))
    assert neighbourhood.stands_until(state, None, ()) == inf
    neighbourhood.look(state, None, [], [])
    assert neighbourhood.stands_until(state, None, ()) == NOW, "idle nodes are kept for a job, for so many polls"
