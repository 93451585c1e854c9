"""What is given up for others in any small cluster, against a search through everything."""

from collections.abc import Sequence
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from builders import node, partition, runs, waits
from fallow.core.allocations import Allocation
from fallow.core.kinds import alternatives
from fallow.core.neighbour.needs import assess
from fallow.model import AllocationState, ClusterState, JobInfo
from neighbours import RELEASING, cluster, given_back, held


@st.composite
def small_clusters(draw: st.DrawFn, jobs: int) -> tuple[ClusterState, list[Allocation]]:
    """Idle nodes, others' nodes, and ours, held or left; and jobs that share nodes or do not."""
    kinds = draw(st.lists(st.sampled_from(("idle", "others", "held", "leaving")), min_size=1, max_size=5))
    nodes, ours, busy = [], [], []
    for i, kind in enumerate(kinds):
        name, features = f"n{i}", draw(st.sampled_from([[], ["a"], ["b"], ["a", "b"]]))
        nodes.append(node(name, "IDLE" if kind == "idle" else "ALLOCATED", features=features, cpus_used=4))
        if kind == "others":
            busy.append(runs(f"5{i}", [name]))
        elif kind != "idle":
            state = AllocationState.RUNNING if kind == "held" else RELEASING
            ours.append(held(name, float(i), state))
    names = [n.node for n in nodes]
    waiting = [
        waits(
            str(i),
            draw(st.integers(1, 3)),
            priority=100 - i,
            partition=draw(st.sampled_from(["p", "q"])),
            constraint=draw(st.sampled_from(["", "a", "b", "a&b", "a|b"])),
            excluded_nodes=draw(st.lists(st.sampled_from(names), max_size=1)),
            exclusive=draw(st.booleans()),
            cpus_per_node=draw(st.integers(1, 4)),
        )
        for i in range(draw(st.integers(1, jobs)))
    ]
    part = draw(st.lists(st.sampled_from(names), unique=True))
    partitions = [partition("p", names), partition("q", part)]
    return cluster(nodes, [*waiting, *busy], ours, partitions=partitions), ours


def usable(state: ClusterState, job: JobInfo) -> set[str]:
    """Nodes that the job may use, whoever has them."""
    partition = next(set(p.nodes) for p in state.partitions if p.partition == job.partition)
    suits = alternatives(job.constraint)[0]
    return {n.node for n in state.nodes if n.node in partition - {*job.excluded_nodes} and suits(frozenset(n.features))}


def fit_at_once(state: ClusterState, jobs: Sequence[JobInfo], free: frozenset[str]) -> bool:
    """Is there any way to run all these jobs on the free nodes? By trying all."""

    def go(index: int, left: dict[str, int]) -> bool:
        if index == len(jobs):
            return True
        job = jobs[index]
        need = 4 if job.exclusive else job.cpus_per_node
        good = [name for name in sorted(free & usable(state, job)) if left[name] >= need]
        ways = combinations(good, job.num_nodes)
        return any(go(index + 1, left | {name: left[name] - need for name in some}) for some in ways)

    return go(0, {n.node: 4 for n in state.nodes})


def free_and_ours(state: ClusterState, ours: list[Allocation]) -> tuple[frozenset[str], list[str]]:
    """Nodes that need nothing of us, and those that we hold, the newest first."""
    left = {n for a in ours if a.state is RELEASING for n in a.nodes}
    newest = sorted((a for a in ours if a.state is AllocationState.RUNNING), key=lambda a: -(a.start_at or 0.0))
    return frozenset({n.node for n in state.nodes if n.state == "IDLE"} | left), [a.nodes[0] for a in newest]


def best(state: ClusterState, job: JobInfo, free: frozenset[str], newest: list[str]) -> list[str] | None:
    """The fewest of ours with which the job fits, the newest of those sets; None: not with all of ours."""
    ways = (list(some) for count in range(len(newest) + 1) for some in combinations(newest, count))
    return next((some for some in ways if fit_at_once(state, [job], free.union(some))), None)


@settings(max_examples=150, deadline=None)
@given(small_clusters(jobs=1))
def test_the_first_job_gets_as_few_and_as_new_nodes_as_can_be(case: tuple[ClusterState, list[Allocation]]) -> None:
    state, ours = case
    free, newest = free_and_ours(state, ours)
    (job,) = (job for job in state.jobs if job.state == "PENDING")
    found = assess(state, ours)
    assert [name for name in given_back(found) if name in newest] == (best(state, job, free, newest) or [])
    assert bool(found.kept_nodes) == (best(state, job, free, newest) is not None)


@settings(max_examples=150, deadline=None)
@given(small_clusters(jobs=4))
def test_what_is_given_back_starts_jobs_on_nodes_that_they_may_use(case: tuple[ClusterState, list[Allocation]]) -> None:
    state, ours = case
    free, newest = free_and_ours(state, ours)
    found = assess(state, ours)
    given = given_back(found)
    jobs = {job.job_id: job for job in state.jobs if job.state == "PENDING"}
    for job_id, tokens in found.delayed_jobs.items():
        assert {token.removeprefix("ours-") for token in tokens} <= usable(state, jobs[job_id])
    for waiting, nodes in found.offers:
        assert nodes <= usable(state, waiting.jobs[0]) & free
    started = [
        job for job in jobs.values() if job.job_id in {*found.delayed_jobs, *(w.job_id for w, _ in found.offers)}
    ]
    assert fit_at_once(state, started, free.union(given)), "all of them at once"
    needed = frozenset[str]().union(*found.delayed_jobs.values())
    assert {f"ours-{name}" for name in given} == needed, "and for nobody else"
    first = next(iter(jobs.values()))
    assert (first in started) == (best(state, first, free, newest) is not None)


@settings(max_examples=100, deadline=None)
@given(small_clusters(jobs=4))
def test_what_does_not_fit_as_a_whole_leaves_no_trace(case: tuple[ClusterState, list[Allocation]]) -> None:
    state, ours = case
    wide = [waits("90", 9, priority=999), waits("91", het_job_id="91", priority=999), waits("92", 9, het_job_id="91")]
    more = replace(state, jobs=[*wide, *state.jobs])
    found, before = assess(more, ours), assess(state, ours)
    assert replace(found, contested_partitions=before.contested_partitions) == before


@settings(max_examples=100, deadline=None)
@given(small_clusters(jobs=4))
def test_nothing_is_given_back_that_slurm_takes(case: tuple[ClusterState, list[Allocation]]) -> None:
    state, ours = case
    above = [replace(p, priority_tier=9) for p in state.partitions]
    low = partition("low", [n.node for n in state.nodes], preempt_mode="CANCEL")
    ours = [replace(a, partition="low") for a in ours]
    found = assess(replace(state, partitions=[*above, low]), ours)
    others = assess(state, ours)
    assert found.give_backs == () and not found.kept_nodes.get("low")
    assert (found.delayed_jobs, found.offers) == (others.delayed_jobs, others.offers), "it takes as long all the same"
