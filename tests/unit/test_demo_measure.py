"""The demo's figures from hand-made observations with known answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fallow.core.quantile import quantile
from fallow.demo.measure import Sample, Waiting, others_delayed, sample_of
from fallow.model import ClusterState, JobInfo, NodeInfo


def sample(at: float, idle: str = "", ours: str = "", others: str = "", waiting: tuple[Waiting, ...] = ()) -> Sample:
    return Sample(at, frozenset(idle), frozenset(ours), frozenset("b"), frozenset(others), waiting)


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


def test_a_node_that_is_set_aside_is_idle_and_one_whose_job_is_not_shown_is_not_down() -> None:
    states = {
        "n1": ("IDLE", ["PLANNED"]),
        "n2": ("ALLOCATED", []),
        "n3": ("IDLE", ["COMPLETING"]),
        "n4": ("IDLE", ["DRAIN"]),
        "n5": ("DOWN", ["NOT_RESPONDING"]),
        "n6": ("IDLE", []),
    }
    nodes = [NodeInfo(node=name, state=state, flags=flags) for name, (state, flags) in states.items()]
    found = sample_of(ClusterState(at=1.0, nodes=nodes, jobs=[], partitions=[]), frozenset())
    assert (found.idle, found.planned, found.down) == ({"n1", "n6"}, {"n1"}, {"n4", "n5"})


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_one_of_the_values_and_enough_do_not_exceed_it(values: list[float], q: float) -> None:
    found = quantile(values, q)
    assert found in values
    assert sum(1 for value in values if value <= found) >= q * len(values)
    assert quantile([], q) is None
