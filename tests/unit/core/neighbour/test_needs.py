"""What is given up for others."""

import pytest
from msgspec.structs import replace

from builders import NOW, allocation, node, partition, runs, site, waits
from fallow.core.holes import Part
from fallow.core.holes import waits as is_waiting
from fallow.core.neighbour.needs import ExternalDemand, assess
from fallow.core.neighbour.waiting import LOOKED_AT, site_rules
from fallow.core.submission.sbatch import harvest_options
from fallow.core.tokens import new_token
from fallow.model import AllocationKind, JobInfo, ReservationInfo, RunSpec
from neighbours import FOUR, PENDING, RELEASING, THREE, TIERS, cluster, given_back, held, standing


def test_the_newest_go_and_idle_nodes_count() -> None:
    found = standing(FOUR, [waits("1", 3)], THREE)
    assert given_back(found) == ["n3", "n2"]
    assert found.give_backs[0].reason == "job 1 of alice waits for a node"
    assert found.kept_nodes == {"p": {"n2", "n3", "n4"}}
    assert found.delayed_jobs == {"1": {"ours-n2", "ours-n3"}}
    # A number that Slurm does not tell is one: all of ours were given back, beside the idle node.
    assert given_back(standing(FOUR, [waits("1", 0)], THREE)) == []


def test_a_node_that_is_being_left_counts_and_delays_all_the_same() -> None:
    ours = [held("n1", 300), held("n2", 200), held("n3", 100, RELEASING)]
    found = standing(FOUR, [waits("1", 2)], ours)
    assert [(wish.token, wish.urgent) for wish in found.give_backs] == [("ours-n3", True)], "it has to hurry now"
    assert found.delayed_jobs == {"1": {"ours-n3"}}
    # Its head has forgotten it, but Slurm shows it still.
    state = cluster(FOUR, [waits("1", 2)], ours)
    assert assess(state, ours[:2], former=["ours-n3"]).delayed_jobs == {"1": {"ours-n3"}}


@pytest.mark.parametrize(
    "job",
    [
        waits("1", 5),
        waits("1", 2, reason="QOSMaxJobsPerUserLimit"),
        waits("1", 2, reason="Dependency"),
        waits("1", 2, reason="JobHeldUser", priority=0),
        waits("1", 2, eligible_at=NOW + 60),
        waits("1", 2, partition="other"),
        waits("1", 2, cpus_per_node=5),
        waits("1", 2, memory_mb_per_node=4001),
        waits("1", 2, gpus_per_node=1),
        waits("1", 2, constraint="a100"),
        waits("1", 2, required_nodes=["n9"]),
        waits("1", 2, excluded_nodes=["n2", "n3", "n4"]),
        waits("1", 2, time_limit_s=7201.0),
        waits("1", 2, reservation="exam"),
        waits("1", 2, array_job_id="1", array_tasks="4-9%1"),
    ],
    ids=lambda job: f"{job.num_nodes} {job.reason} {job.constraint}",
)
def test_what_could_not_start_without_us_either_changes_nothing(job: JobInfo) -> None:
    partitions = [partition("p", ["n1", "n2", "n3", "n4"], max_time_s=7200.0)]
    element = runs("5", ["n9"], array_job_id="1")
    found = standing(FOUR, [job, element], THREE, partitions=partitions)
    assert found in (ExternalDemand(), ExternalDemand(contested_partitions=frozenset({job.partition})))


@pytest.mark.parametrize("plugin", [None, "", "project x"])
@pytest.mark.parametrize("hurried", [False, True])
def test_nobody_gives_a_node_back_for_what_another_head_asks_for_idle_nodes(hurried: bool, plugin: str | None) -> None:
    """Args: plugin: what the site's job_submit plugin writes in place of comments; None: it leaves them alone."""
    token = new_token("r-1", AllocationKind.HARVEST, 3, "0a1b2c", normal_priority=hurried)
    options = harvest_options(
        RunSpec(run="r", name="r", min_nodes=1, max_nodes=2), token, "p", 5, "o", 1, has_normal_priority=hurried
    )
    if (comment := plugin) is None:
        comment = next(word.partition("=")[2] for word in options if word.startswith("--comment="))
    request = waits("1", name=token, comment=comment, priority=5)
    ours = [*THREE[:2], held("n9", state=PENDING)]
    nodes = [*FOUR[:2], node("n4")]
    found = standing(nodes, [request, runs("91", [], name="ours-n9", state="PENDING", priority=5)], ours)
    if hurried:
        # A job of normal priority, like anybody's.
        assert (found.contested_partitions, found.competing_requests) == ({"p"}, {"ours-n9"})
        assert is_waiting(request)
    else:
        assert found == ExternalDemand()
        assert not is_waiting(request)
    full = standing(FOUR[:2], [request], THREE[:2])
    assert given_back(full) == (["n2"] if hurried else [])
    # Words alone, in a job of somebody's own, do not make it one.
    own = waits("1", name="train", comment=f"{token} harvest")
    assert given_back(standing(FOUR[:2], [own], THREE[:2])) == ["n2"]
    # What it has goes back to others with ours, and a job of normal priority stays.
    theirs = runs("7", ["n1"], name=token, comment=comment)
    found = given_back(standing(FOUR[:2], [waits("1", 2), theirs], THREE[1:2]))
    assert found == ([] if hurried else ["n2"])


def test_nodes_of_several_heads_are_given_back_together_and_each_gives_its_own_first() -> None:
    token = "fallow-s-1-h3-0a1b2c"
    nodes = [node(f"n{i}", "ALLOCATED") for i in range(1, 6)]
    theirs = runs("7", ["n3"], name=token, comment=f"{token} harvest")
    known = [runs("8", ["n4"]), runs("9", ["n5"]), theirs]
    ours = [held("n1", 300), held("n2", 200)]
    assert given_back(standing(nodes, [waits("1", 1), *known], ours)) == ["n2"], "its head may be no more"
    joint = standing(nodes, [waits("1", 3), *known], ours)
    assert given_back(joint) == ["n2", "n1"]
    assert (joint.kept_nodes, joint.delayed_jobs) == ({"p": {"n1", "n2", "n3"}}, {"1": {"ours-n1", "ours-n2"}})
    # Once that head has left, nothing of ours goes to its node, nor is it asked for.
    assert standing(nodes, [waits("1", 1), *known], [held("n9", state=PENDING)]).competing_requests == {"ours-n9"}
    for job in (waits("1", 4), waits("1", 3, required_nodes=["n4"])):
        assert given_back(standing(nodes, [job, *known], ours)) == [], "others' own jobs stay"
    # A job of normal priority stays, too, whoever asked for it.
    normal = new_token("s-1", AllocationKind.HARVEST, 3, "0a1b2c", normal_priority=True)
    hurried = runs("7", ["n3"], name=normal, comment=normal)
    assert given_back(standing(nodes, [waits("1", 3), *known[:2], hurried], ours)) == []
    # What is being left is as good as free.
    left = replace(theirs, state="COMPLETING", end_at=NOW - 1.0)
    assert given_back(standing(nodes, [waits("1", 1), *known[:2], left], ours)) == []
    # Where Slurm preempts, it takes from all heads.
    low = [partition("p", [n.node for n in nodes], preempt_mode="CANCEL")]
    assert given_back(standing(nodes, [waits("1", 3), *known], ours, partitions=low)) == []


HIGHER = "Nodes required for job are DOWN, DRAINED{} or reserved for jobs in higher priority partitions"


@pytest.mark.parametrize(
    ("reason", "seen"),
    [
        (HIGHER.format(""), True),
        (HIGHER.format(", REBOOTING"), True),
        (f"({HIGHER.format('').replace(' ', '_')})", True),
        ("ReqNodeNotAvail, May be reserved for other job", True),
        ("ReqNodeNotAvail, UnavailableNodes:n[7-8]", True),
        ("ReqNodeNotAvail", True),
        ("ReqNodeNotAvail, Reserved for maintenance", False),
        ("Reservation", False),
        ("PartitionNodeLimit", False),
    ],
)
def test_a_job_below_one_that_waits_in_a_higher_partition_waits_for_nodes_too(reason: str, seen: bool) -> None:
    """What the lower one shows while the higher one waits. Tried on 22.05: once ours had left, backfill started it."""
    partitions = [TIERS[0], replace(TIERS[1], preempt_mode="OFF")]
    nodes = [*FOUR[:3], node("n4", "ALLOCATED")]
    jobs = [runs("5", ["n4"], end_at=NOW + 900.0), waits("1", 4, partition="normal", start_at=NOW + 900.0)]
    low = waits("2", reason=reason, time_limit_s=600.0)
    assert given_back(standing(nodes, [*jobs, low], THREE, partitions=partitions)) == (["n3"] if seen else [])
    assert is_waiting(low) == seen
    far = waits("2", reason=reason, required_nodes=["n9"])
    assert given_back(standing(nodes, [*jobs, far], THREE, partitions=partitions)) == [], "not for nodes of ours"


def test_of_two_partitions_a_job_takes_the_one_that_costs_us_least() -> None:
    partitions = [partition("q", ["n1"]), partition("p", ["n4"])]
    found = standing(FOUR, [waits("1", partition="q,p")], [held("n1", partition="q")], partitions=partitions)
    assert (given_back(found), found.kept_nodes) == ([], {"p": {"n4"}})


def test_a_node_of_ours_counts_before_a_poll_shows_its_job_but_not_once_it_is_down() -> None:
    for state, names in (("ALLOCATED", ["n1"]), ("DOWN", [])):
        assert given_back(assess(cluster([node("n1", state)], [waits("1")]), [held("n1")])) == names


def test_what_slurm_has_planned_is_not_run_into() -> None:
    """Four nodes for the first job when the one that runs has ended; nothing longer fits in before it."""
    nodes = [*FOUR[:3], node("n4", "ALLOCATED", cpus_used=4)]
    running = runs("5", ["n4"], end_at=NOW + 300)
    first = waits("1", 4, priority=9, start_at=NOW + 300, planned_nodes=["n1", "n2", "n3", "n4"])
    long, short = waits("2", priority=5, time_limit_s=301.0), waits("2", priority=5, time_limit_s=300.0)
    assert given_back(standing(nodes, [running, first, long], THREE)) == []
    assert given_back(standing(nodes, [running, first, short], THREE)) == ["n3"]
    unplanned = waits("1", 4, priority=9)
    assert given_back(standing(nodes, [running, unplanned, long], THREE)) == ["n3"], "when in doubt, they come first"


def test_requests_of_ours_that_stand_in_the_way_are_named() -> None:
    request = held("h9", 0, PENDING)
    nodes = [node("n1"), node("n2")]
    assert standing(nodes, [waits("1", 2)], [request]).competing_requests == {"ours-h9"}
    assert standing(nodes, [waits("1", 3)], [request]).competing_requests == frozenset()
    nodes.append(node("n3", "ALLOCATED"))
    for name, competes in (("n3", False), ("n1", True)):
        one = held("h9", 0, PENDING, part=Part(name, 1, "", 1, 0))
        assert bool(standing(nodes, [waits("1", 2)], [one]).competing_requests) == competes


def test_jobs_of_ours_with_normal_priority_that_wait_are_others_to_what_was_picked_up_idle() -> None:
    """A user's second run starves behind the harvest of the first one otherwise, where nothing preempts."""
    base = allocation("ours-base", PENDING, kind=AllocationKind.BASE, run="second", partition="")
    job = waits("1", 2, name="train.sh", comment="its ours-base", user="me")
    for base.run in ("second", "r"):
        found = standing(FOUR, [job], [*THREE, base])
        assert (given_back(found), found.kept_nodes) == (["n3"], {"p": {"n3", "n4"}}), "what it needs and no more"
    base.asked_at = NOW - 1
    assert standing(FOUR, [job], [*THREE, base]) == ExternalDemand(), "it is being cancelled"


def test_a_hurried_job_takes_no_node_of_its_own_run() -> None:
    hurried = held("fast", 0, PENDING, has_normal_priority=True)
    job = waits("1", name=hurried.token, user="me")
    assert given_back(standing(FOUR[:3], [job], [*THREE, hurried])) == [], "the run would have no more than before"
    hurried.run = "other"
    assert given_back(standing(FOUR[:3], [job], [*THREE, hurried])) == ["n3"]


def test_all_of_ours_leave_a_shared_node() -> None:
    ours = [held("n1", 300), held("n1", 200)]
    ours[1].token = "ours-too"
    state = cluster([node("n1", "ALLOCATED", cpus_used=4)], [waits("1")], ours)
    assert [wish.token for wish in assess(state, ours).give_backs] == ["ours-too", "ours-n1"]


@pytest.mark.parametrize("everywhere", [False, True])
def test_thousands_that_wait_in_another_partition_hide_nobody(everywhere: bool) -> None:
    """The 3,001st of all is the first that waits for nodes of ours, also where some partition has all nodes."""
    nodes = [node("n1", "ALLOCATED"), node("n2", "ALLOCATED"), node("n3", "ALLOCATED"), node("n4", "ALLOCATED")]
    crowd = [waits(str(i), partition="cpu", reason="Priority", priority=9000 - i) for i in range(3000)]
    alice = waits("4000", partition="cpu,gpu", priority=4000)
    ours = [held("n3", 200, partition="gpu"), held("n4", 100, partition="gpu")]
    theirs = [runs("5000", ["n1", "n2"], partition="cpu")]
    partitions = [partition("cpu", ["n1", "n2"]), partition("gpu", ["n3", "n4"])]
    partitions += [partition("all", ["n1", "n2", "n3", "n4"])] if everywhere else []
    found = standing(nodes, [*crowd, alice, *theirs], ours, partitions=partitions)
    assert given_back(found) == ["n4"]
    assert found.contested_partitions == {"cpu", "gpu"}


def test_of_one_partition_the_first_are_looked_at_and_as_many_as_the_site_looks_at() -> None:
    nodes = [node("n1", "ALLOCATED"), node("n2", "ALLOCATED")]
    wide = [waits(str(i), 3, reason="Priority", priority=9000 - i) for i in range(LOOKED_AT)]
    state = cluster(nodes, [*wide, waits("4000", priority=4000)], [held("n1")])
    assert given_back(assess(state, [held("n1")])) == []
    for said, found in ("bf_interval=1,bf_max_job_test=20", []), ("x,bf_max_job_test=2000", ["n1"]):
        assert given_back(assess(state, [held("n1")], site=site_rules(site(scheduler_parameters=said)))) == found


@pytest.mark.parametrize(
    ("reason", "where", "found"),
    [
        ("PartitionTimeLimit", "p,short", ["n1"]),
        ("PartitionTimeLimit", "short", []),
        ("Insufficient_resources_in_topology_unit", "p", ["n1"]),
    ],
)
def test_a_job_that_one_of_its_partitions_refuses_waits_in_others(reason: str, where: str, found: list[str]) -> None:
    """Slurm shows the reason of the last partition that has one; 26.05 has further words for Resources."""
    both = [partition("p", ["n1"]), partition("short", ["n1"], max_time_s=3600.0)]
    job = waits("1", partition=where, reason=reason, time_limit_s=7200.0)
    assert given_back(standing([node("n1", "ALLOCATED")], [job], [held("n1")], partitions=both)) == found


@pytest.mark.parametrize(
    ("flags", "begins_in_s", "found"),
    [([], -60, []), (["FLEX"], 60, ["n1"]), (["ANY_NODES"], -60, ["n1"]), (["ANY_NODES"], 60, [])],
)
def test_a_reservation_that_binds_to_no_nodes(flags: list[str], begins_in_s: int, found: list[str]) -> None:
    start = NOW + begins_in_s
    own = ReservationInfo(reservation="r", nodes=["n9"], start_at=start, end_at=start + 7200, flags=flags)
    job = waits("1", reservation="r", time_limit_s=600.0)
    assert given_back(standing([node("n1", "ALLOCATED")], [job], [held("n1")], reservations=[own])) == found


@pytest.mark.parametrize(("ours_at", "found"), [(NOW - 200, {"ours-x"}), (NOW - 10, set())])
def test_of_equal_priorities_the_older_job_comes_first(ours_at: float, found: set[str]) -> None:
    job = waits("1", 2, priority=1, submit_at=NOW - 100)
    mine = waits("2", priority=1, submit_at=ours_at, name="ours-x")
    state = cluster([node("n1")], [job, mine])
    assert assess(state, [held("x", state=PENDING)]).competing_requests == found
