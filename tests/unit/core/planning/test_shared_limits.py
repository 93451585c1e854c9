"""Harvest jobs leave room under the limits of accounts and QOS to their owner and to the owner's group."""

from typing import Any

import pytest
from msgspec.structs import replace

from builders import NOW, allocation, gpu_node, job, partition, site
from builders import cluster as poll_of
from fallow.core.accounting.backoff import Asker
from fallow.core.allocations import Allocation
from fallow.core.kinds import Kind
from fallow.core.planning.knowledge import Experience
from fallow.core.planning.rules import Demand, HarvestRules, current_rules
from fallow.core.planning.shared_limits import (
    LimitVerdict,
    Reserve,
    cap_demands,
    fills,
    resolve_askers,
    waits_for_limit,
    yield_to_waiting,
)
from fallow.model import AllocationKind, AllocationState, ClusterState, JobInfo, LimitView, OwnerView, ShareView

ME = Asker("lab", "idle")
NAMES = [f"n{i}" for i in range(40)]
PARTITIONS = [partition("p", NAMES, preempt_mode="REQUEUE"), partition("normal", NAMES, priority_tier=10, qos="part")]


def token(number: int) -> str:
    return f"fallow-r-h{number}-{number:06x}"


def ours(number: int, state: str = "RUNNING", **more: Any) -> JobInfo:
    values = {"user": "ann", "account": "lab", "qos": "idle", "gpus_per_node": 1, "name": token(number)}
    values |= {"comment": f"{token(number)} harvest", "nodes": [f"n{number}"] if state != "PENDING" else []}
    return job(str(100 + number), state, **{**values, **more})


def held(number: int, state: AllocationState = AllocationState.RUNNING, **more: Any) -> Allocation:
    start_at = NOW - 1000.0 + number if state is AllocationState.RUNNING else None
    return allocation(token(number), state, start_at=start_at, **more)


def theirs(job_id: str, state: str = "RUNNING", **more: Any) -> JobInfo:
    return job(job_id, state, **{"user": "bob", "account": "lab", "qos": "normal", "partition": "normal", **more})


def waits(reason: str, job_id: str = "9", **more: Any) -> JobInfo:
    return theirs(job_id, "PENDING", reason=reason, **more)


def cluster(*jobs: JobInfo) -> ClusterState:
    return poll_of([gpu_node(name, "ALLOCATED") for name in NAMES], jobs, partitions=PARTITIONS)


@pytest.mark.parametrize(
    ("reasons", "shared"),
    [
        ("AssocGrpGRES AssocGrpNodeLimit AssocMaxJobsLimit QOSGrpCpuLimit", True),
        ("QOSMaxJobsPerUserLimit (QOSMaxGRESPerUser) MaxNodePerAccount", True),
        ("QOSMaxSubmitJobPerUserLimit AssocMaxSubmitJobLimit MaxJobsPerAccount", True),
        ("QOSMaxCpuPerJobLimit AssocMaxWallDurationPerJobLimit AssocGrpWallLimit", False),
        ("QOSMinGRES QOSNotAllowed InvalidAccount Resources Priority", False),
        ("QOSMaxCpuPerNode QOSMinCpuNotSatisfied PartitionTimeLimit", False),
    ],
)
def test_reasons_that_the_end_of_a_job_of_ours_can_ease(reasons: str, shared: bool) -> None:
    words = reasons.split()
    assert [waits_for_limit(waits(reason)) for reason in words] == [shared] * len(words)
    assert not waits_for_limit(waits(""))


@pytest.mark.parametrize(
    ("reason", "who", "shares"),
    [
        ("AssocGrpNodeLimit", {"user": "bob", "account": "lab"}, True),
        ("AssocGrpNodeLimit", {"user": "ann", "account": "other"}, True),
        ("AssocGrpNodeLimit", {"user": "bob", "account": "other"}, False),
        ("AssocMaxJobsLimit", {"user": "ann", "account": "lab"}, True),
        ("AssocMaxJobsLimit", {"user": "bob", "account": "lab"}, False),
        ("QOSMaxJobsPerUserLimit", {"user": "ann", "qos": "idle"}, True),
        ("QOSMaxJobsPerUserLimit", {"user": "ann", "qos": "normal"}, False),
        ("QOSMaxJobsPerUserLimit", {"user": "bob", "qos": "idle"}, False),
        ("MaxJobsPerAccount", {"user": "bob", "qos": "idle", "account": "lab"}, True),
        ("QOSGrpCpuLimit", {"user": "eve", "qos": "idle", "account": "other"}, True),
        ("QOSGrpCpuLimit", {"user": "eve", "qos": "normal", "account": "lab"}, False),
    ],
)
def test_whose_limit_our_jobs_fill(reason: str, who: dict[str, str], shares: bool) -> None:
    by_partition, job = {p.partition: p for p in PARTITIONS}, waits(reason, **who)
    assert fills(ours(1), job, by_partition) is shares
    # The QOS of a partition binds the jobs in it, too.
    per_user = waits("QOSMaxJobsPerUserLimit", user="ann")
    assert fills(ours(1, partition="normal"), per_user, by_partition) and not fills(ours(1), per_user, by_partition)


def test_who_waits_for_a_limit_of_the_group_gets_what_the_job_needs_of_us() -> None:
    job = waits("AssocGrpNodeLimit", num_nodes=2, gpus_per_node=1)
    found = yield_to_waiting(cluster(job, *map(ours, range(4))), [held(i) for i in range(4)], {"r": ME})
    assert [wish.token for wish in found.give_backs] == [token(3), token(2)], "the newest first"
    assert all(wish.urgent for wish in found.give_backs)
    assert found.give_backs[0].reason == "job 9 of bob waits for AssocGrpNodeLimit"
    (demand,) = cap_demands([Demand("r", 5)], [found])
    assert (demand.nodes, demand.can_renew) == (0, False)


def test_who_waits_for_licences_that_our_jobs_have_gets_as_many_as_it_needs() -> None:
    mine = [ours(i, licenses={"solver": 1}) for i in range(4)]
    for wanted, number in ({"solver": 1}, 1), ({"solver": 3}, 3), ({"solver": 2, "mesher": 9}, 2), ({"mesher": 1}, 0):
        job = waits("Licenses", user="eve", account="other", qos="urgent", num_nodes=4, licenses=wanted)
        found = yield_to_waiting(cluster(job, *mine), [held(i) for i in range(4)], {"r": ME})
        assert len(found.give_backs) == number
        assert cap_demands([Demand("r", 5)], [found])[0].nodes == (0 if number else 5)
    base = allocation("fallow-r-b0-000000", kind=AllocationKind.BASE)
    shown = theirs("7", name="train", comment=base.token, licenses={"solver": 1}, nodes=["n9"])
    found = yield_to_waiting(cluster(waits("Licenses", licenses={"solver": 2}), shown), [base], {"r": ME})
    assert (found.give_backs, found.max_more) == ((), {"r": 0}), "it keeps its own; no more are taken"


@pytest.mark.parametrize(
    ("wants", "number"),
    [
        ({"reason": "AssocGrpGRES", "gpus_per_node": 3}, 3),
        *(({"array_tasks": tasks}, n) for tasks, n in {"": 1, "7": 1, "0-2": 3, "0-2%2": 2, "0-99": 4}.items()),
        ({"array_job_id": "9", "array_tasks": "2-9%3"}, 1),  # two elements run, and its own limit is three
    ],
)
def test_as_much_is_given_back_as_the_job_or_elements_of_an_array_need(wants: dict[str, Any], number: int) -> None:
    job = waits(**{"reason": "AssocGrpNodeLimit", **wants})
    begun = [theirs(str(i), array_job_id="9", nodes=[f"n{i}"]) for i in (20, 21)]
    found = yield_to_waiting(cluster(job, *begun, *map(ours, range(4))), [held(i) for i in range(4)], {"r": ME})
    assert len(found.give_backs) == number


def test_what_is_on_its_way_out_or_has_just_left_is_not_given_back_twice() -> None:
    job = waits("AssocGrpNodeLimit")
    leaving = held(0, AllocationState.RELEASING, asked_at=NOW - 1.0)
    assert yield_to_waiting(cluster(job, ours(0), ours(1)), [leaving, held(1)], {"r": ME}).give_backs == ()
    gone = ours(0, "COMPLETED", end_at=NOW - 10.0)
    assert yield_to_waiting(cluster(job, gone, ours(1)), [held(1)], {"r": ME}).give_backs == ()
    long_gone = ours(0, "COMPLETED", end_at=NOW - 100.0)
    assert len(yield_to_waiting(cluster(job, long_gone, ours(1)), [held(1)], {"r": ME}).give_backs) == 1
    # Two jobs wait, and one node of ours is on its way, or has just been left.
    for first, mine in (ours(0), [leaving]), (gone, []):
        both = cluster(job, waits("AssocGrpNodeLimit", "10"), first, ours(1), ours(2))
        found = yield_to_waiting(both, [*mine, held(1), held(2)], {"r": ME})
        assert [wish.token for wish in found.give_backs] == [token(2)]


def test_requests_make_room_too_and_other_runs_are_left_alone() -> None:
    job = waits("QOSMaxSubmitJobPerUserLimit", user="ann", qos="idle")
    pending = held(1, AllocationState.PENDING)
    other = held(2, run="s")
    state = cluster(job, ours(1, "PENDING"), ours(2, qos="normal"))
    found = yield_to_waiting(state, [pending, other], {"r": ME, "s": Asker("lab", "normal")})
    assert found.withdrawals == {token(1): "job 9 of ann waits for QOSMaxSubmitJobPerUserLimit"}
    assert found.give_backs == () and set(found.max_more) == {"r"}


def test_a_run_whose_base_job_is_in_the_account_asks_for_nothing_while_somebody_waits() -> None:
    base = held(1, kind=AllocationKind.BASE)
    shown = ours(1, comment=token(1), name="train", partition="normal", qos="normal")
    state = cluster(waits("AssocGrpNodeLimit"), shown)
    assert yield_to_waiting(state, [base], {"r": Asker()}).max_more == {"r": 0}
    assert yield_to_waiting(state, [base], {"r": Asker("spare", "idle")}).max_more == {}, (
        "its harvest jobs are in another account"
    )
    assert resolve_askers(state, [base], {"r": Asker(), "s": Asker()}) == {"r": Asker("lab", "normal"), "s": Asker()}


def test_others_requests_for_idle_nodes_are_nobody_who_waits() -> None:
    request = waits("AssocGrpNodeLimit", name="fallow-x-h1-abcdef", comment="fallow-x-h1-abcdef harvest")
    assert yield_to_waiting(cluster(request, ours(1)), [held(1)], {"r": ME}) == LimitVerdict()
    assert (
        yield_to_waiting(cluster(ours(1, "PENDING", reason="AssocGrpNodeLimit")), [held(1)], {"r": ME})
        == LimitVerdict()
    )


@pytest.mark.parametrize(
    ("of", "name", "wants", "waits_in_vain"),
    [
        ("account lab", "GrpTRES node", {"num_nodes": 21}, True),
        ("account lab", "GrpTRES node", {"num_nodes": 20}, False),
        ("account lab", "GrpTRES cpu", {"num_nodes": 21}, False),  # the job waits for another limit
        ("QOS normal", "GrpTRES node", {"num_nodes": 21}, False),  # which may replace that of the account
        ("account other", "GrpTRES node", {"num_nodes": 21}, False),
        ("account lab", "GrpTRES gres/gpu", {"reason": "AssocGrpGRES", "gpus_per_node": 21}, True),
        # 20 CPUs on three nodes, which are shown as 7 on each.
        ("account lab", "GrpTRES cpu", {"reason": "AssocGrpCpuLimit", "num_nodes": 3, "cpus_per_node": 7}, False),
        ("account lab", "GrpTRES cpu", {"reason": "AssocGrpCpuLimit", "num_nodes": 3, "cpus_per_node": 8}, True),
        ("QOS normal", "MaxTRESPU cpu", {"reason": "QOSMaxCpuPerUserLimit", "cpus_per_node": 21}, False),  # of ann
    ],
)
def test_nothing_is_given_back_for_a_job_that_asks_for_more_than_all_of_a_limit(
    of: str, name: str, wants: dict[str, Any], waits_in_vain: bool
) -> None:
    """It waits for ever; all harvesting under the limit had stopped for as long."""
    job = waits(**{"reason": "AssocGrpNodeLimit", **wants})
    mine = ours(1, qos="normal", user="bob")
    found = yield_to_waiting(cluster(job, mine), [held(1)], {"r": ME}, told((of, name, 20.0, 1.0)))
    assert (found == LimitVerdict()) is waits_in_vain and bool(found.give_backs) is not waits_in_vain


# -- the reserve ----------------------------------------------------------------------------------------------------


def told(*limits: tuple[str, str, float, float]) -> OwnerView:
    shares = [ShareView(account="lab", partition="", shares=1.0, usage=0.0, factor=1.0)]
    views = [LimitView(of=of, name=name, limit=limit, used=used) for of, name, limit, used in limits]
    return OwnerView(user="ann", at=NOW, limits=views, shares=shares)


def room(
    owner: OwnerView | None,
    *jobs: JobInfo,
    allocations: tuple[Allocation, ...] = (),
    demands: tuple[Demand, ...] = (Demand("r", 100),),
    whole: bool = False,
) -> LimitVerdict:
    askers = {demand.run: ME for demand in demands}
    return Reserve().verdict(
        owner, cluster(*jobs), allocations, demands, askers, set(askers) if whole else set(), {"scavenge-qos"}
    )


@pytest.mark.parametrize(
    ("of", "name", "kind", "most"),
    [
        ("user ann in account lab", "MaxSubmitJobs", Kind(), 15),
        ("user ann in account lab", "MaxJobs", Kind(), 15),
        ("account lab", "GrpTRES gres/gpu", Kind(gpus=2), 7),
        ("account lab", "GrpTRES gres/gpu", Kind(), None),
        ("account lab", "GrpTRES cpu", Kind(cpus=4), 3),
        ("account physics", "GrpTRES node", Kind(), 15),
        ("QOS idle", "MaxTRESPU gres/gpu", Kind(gpus=1), 15),
        ("QOS scavenge-qos", "GrpJobs", Kind(), 15),
        ("QOS normal", "GrpJobs", Kind(), None),
        ("QOS idle", "MaxTRESPJ gres/gpu", Kind(gpus=1), None),
        ("account lab", "GrpTRESMins cpu", Kind(), None),
    ],
)
def test_a_quarter_of_each_limit_is_left(of: str, name: str, kind: Kind, most: int | None) -> None:
    found = room(told((of, name, 20.0, 0.0)), demands=(Demand("r", 100, kind=kind),))
    assert found.max_more.get("r") == most


def test_what_others_use_and_what_we_have_counts() -> None:
    owner = told(("account lab", "GrpTRES node", 20.0, 7.0))
    others = theirs("1", num_nodes=5)
    mine = [ours(1), ours(2)]
    allocations = (held(1), held(2), held(3, AllocationState.PENDING))
    assert room(owner, others, *mine, allocations=allocations).max_more == {"r": 20 - 5 - 5 - 3}
    # Slurm counts nodes of accounts below this one, which the jobs' accounts do not tell.
    hidden = told(("account lab", "GrpTRES node", 20.0, 12.0))
    assert room(hidden, others, *mine, allocations=allocations).max_more == {"r": 20 - 5 - 10 - 3}


def test_what_slurm_told_before_ours_went_is_not_taken_for_others() -> None:
    owner, reserve = told(("account lab", "GrpTRES node", 20.0, 8.0)), Reserve()
    demands, askers = (Demand("r", 100),), {"r": ME}
    many = [held(i) for i in range(8)]
    first = reserve.verdict(owner, cluster(*map(ours, range(8))), many, demands, askers, set(), set())
    assert first.max_more == {"r": 7}
    later = reserve.verdict(owner, cluster(ours(1)), many[1:2], demands, askers, set(), set())
    assert later.max_more == {"r": 14}


def test_a_submit_limit_counts_what_waits_and_each_element_of_an_array() -> None:
    owner = told(("user ann in account lab", "MaxSubmitJobs", 40.0, 0.0))
    array = theirs("1", "PENDING", user="ann", array_tasks="0-9%2")
    assert room(owner, array, waits("Priority", user="ann"), waits("Priority", "10")).max_more == {"r": 30 - 10 - 1}


def test_a_whole_node_counts_with_all_that_it_has() -> None:
    assert room(told(("account lab", "GrpTRES gres/gpu", 32.0, 0.0)), whole=True).max_more == {"r": 6}
    assert room(told(("account lab", "GrpTRES cpu", 640.0, 0.0)), whole=True).max_more == {"r": 7}


def test_runs_of_one_account_share_what_is_left() -> None:
    owner = told(("account lab", "GrpJobs", 20.0, 0.0))
    found = room(owner, demands=(Demand("r", 10), Demand("s", 10)))
    assert [demand.nodes for demand in cap_demands([Demand("r", 10), Demand("s", 10)], [found])] == [10, 5]


def test_what_reaches_into_the_reserve_is_given_back_requests_first_then_the_newest() -> None:
    owner = told(("account lab", "GrpJobs", 8.0, 0.0))
    allocations = (*(held(i) for i in range(6)), held(6, AllocationState.PENDING))
    found = room(owner, theirs("1"), theirs("2"), *map(ours, range(6)), allocations=allocations)
    # Six may be used, two of them are others', seven are ours.
    assert found.max_more == {"r": -3}
    assert [wish.token for wish in found.give_backs] == [token(5), token(4)]
    assert cap_demands([Demand("r", 5)], [found]) == [Demand("r", -3)]


@pytest.mark.parametrize(
    ("of", "used", "num_nodes", "kept"),
    [
        ("account division", 8.0, 6, 6),
        ("account division", 8.0, 1, 2),  # the reserve is enough
        ("account division", 11.0, 6, 2),  # others alone leave too little, so ours would go in vain
        ("account lab", 8.0, 6, 2),
    ],
)
def test_room_is_left_to_a_job_that_may_wait_for_a_limit_above_our_account(
    of: str, used: float, num_nodes: int, kept: int
) -> None:
    owner = told((of, "GrpTRES node", 8.0, used))
    mine, allocations = map(ours, range(8)), tuple(held(i) for i in range(8))
    others = used - 8.0
    found = room(owner, waits("AssocGrpNodeLimit", account="b", num_nodes=num_nodes), *mine, allocations=allocations)
    assert found.max_more == {"r": 8 - kept - others - 8}
    assert len(found.give_backs) == min(8, kept + others)


def test_a_node_that_is_asked_for_again_counts_once() -> None:
    owner = told(("account lab", "GrpJobs", 20.0, 0.0))
    successor = held(2, AllocationState.PENDING, replaces=token(1))
    found = room(owner, ours(1), ours(2, "PENDING"), allocations=(held(1), successor))
    assert found.max_more == {"r": 14} and found.may_renew


@pytest.mark.parametrize(
    ("known", "accounting", "max_pending", "most"),
    [(False, True, None, 8), (True, True, None, 1 << 30), (False, False, None, 1 << 30), (False, True, 50, 50)],
)
def test_few_requests_wait_where_the_limits_are_not_known(
    known: bool, accounting: bool, max_pending: int | None, most: int
) -> None:
    told = site(accounting=accounting), Experience(), NOW, 30.0
    found = current_rules(HarvestRules(), *told, max_pending=max_pending, limits_known=known)
    assert found.max_waiting >= most if most > 8 else found.max_waiting == most
    usual = current_rules(HarvestRules(), *told, max_pending=max_pending)
    assert replace(found, max_waiting=0) == replace(usual, max_waiting=0)
