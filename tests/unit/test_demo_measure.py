"""The demo's figures from hand-made observations with known answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fallow.core.quantile import quantile
from fallow.demo.measure import Sample, Waiting, harvested, hole_to_step, others_delayed, sample_of
from fallow.model import ChangeKind, ClusterState, GenerationReport, JobInfo, NodeInfo, Parts


def sample(at: float, idle: str = "", ours: str = "", others: str = "", waiting: tuple[Waiting, ...] = ()) -> Sample:
    return Sample(at, frozenset(idle), frozenset(ours), frozenset("b"), frozenset(others), waiting)


def generation(number: int, at: float, *members: str) -> GenerationReport:
    return GenerationReport(
        generation=number,
        kind=ChangeKind.ABSORB,
        members=list(members),
        first_step=0,
        pause_s=0.0,
        parts=Parts(),
        at=at,
    )


NODES = {"w0": "b", "w1": "x", "w2": "y"}


def test_a_job_is_delayed_by_us_only_while_our_nodes_would_complete_it() -> None:
    job = Waiting("7", 2, 0.0)
    samples = [
        sample(0, idle="x", ours="y", waiting=(job,)),  # ours is all it lacks
        sample(1, idle="x", ours="y", waiting=(job,)),
        sample(2, idle="xy", waiting=(job,)),  # Slurm's turn
        sample(3, others="xy"),
    ]
    delay = others_delayed(samples)
    assert (delay.jobs, delay.max_s) == (1, 2.0)
    hopeless = [sample(0, ours="y", waiting=(Waiting("8", 5, 0.0),)), sample(1, ours="y")]
    assert others_delayed(hopeless).jobs == 0


def test_nodes_go_to_waiting_jobs_in_their_order() -> None:
    first, second = Waiting("1", 1, 0.0), Waiting("2", 1, 1.0)
    delay = others_delayed([sample(0, idle="x", ours="y", waiting=(first, second)), sample(1)])
    assert (delay.jobs, delay.max_s) == (1, 1.0), "the idle node is the first one's, ours would be the second one's"


def test_idle_time_counts_as_used_only_while_the_node_is_a_members() -> None:
    samples = [sample(0, idle="xy"), sample(1, ours="x", idle="y"), sample(3, ours="xy"), sample(4, others="xy")]
    found = harvested(samples, [generation(1, 0.5, "w0"), generation(2, 2.5, "w0", "w1")], NODES, end_at=10.0)
    assert found.idle_node_s == 2 * 1 + 2 * 2 + 2 * 1
    assert found.harvested_node_s == 1.0, "x was a member's from the sample at 3 on, for one second"


def test_a_hole_lasts_from_somebody_elses_end_to_the_first_generation_with_its_node() -> None:
    samples = [
        sample(0, others="xy"),
        sample(5, idle="x", others="y"),
        sample(9, ours="x", others="y"),
        sample(12, ours="x", idle="y"),
        sample(20, ours="xy"),
    ]
    found = hole_to_step(
        samples,
        [generation(1, 1, "w0"), generation(2, 11.5, "w0", "w1"), generation(3, 19, "w0", "w1", "w2")],
        NODES,
        0.0,
    )
    assert (found.p50, found.max) == (6.5, 7.0)


def test_who_has_which_node_is_told_by_the_jobs() -> None:
    nodes = [NodeInfo(node=n, state="IDLE" if n == "n4" else "ALLOCATED") for n in ("n1", "n2", "n3", "n4")]
    jobs = [
        JobInfo(job_id="1", name="train", user="me", state="RUNNING", partition="p", nodes=["n1"]),
        JobInfo(job_id="2", name="fallow-r-h1", user="me", state="RUNNING", partition="p", nodes=["n2"]),
        JobInfo(job_id="3", name="theirs", user="alice", state="COMPLETING", partition="p", nodes=["n3"]),
        JobInfo(job_id="4", name="theirs", user="alice", state="PENDING", partition="p", reason="Resources"),
        JobInfo(job_id="5", name="theirs", user="alice", state="PENDING", partition="p", reason="QOSMaxJobs"),
    ]
    found = sample_of(ClusterState(at=1.0, nodes=nodes, jobs=jobs, partitions=[]), frozenset({"1"}))
    assert (found.base, found.ours, found.others, found.idle) == ({"n1"}, {"n2"}, {"n3"}, {"n4"})
    assert [w.job_id for w in found.waiting] == ["4"]


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_one_of_the_values_and_enough_do_not_exceed_it(values: list[float], q: float) -> None:
    found = quantile(values, q)
    assert found in values
    assert sum(1 for value in values if value <= found) >= q * len(values)
    assert quantile([], q) is None
