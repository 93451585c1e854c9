"""Which jobs of others we held up, by comparison with the same cluster without us."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from fallow.model import PartitionInfo
from fallow.sim.twin import PERCENTILES, HeldUp, Holdings, Stay, apart, held_up
from fallow.sim.types import Ended, JobPart, Outage, SimJob, SimNode, Site, Started

SITE = Site(
    name="toy",
    nodes=(
        SimNode(node="n0", partitions=("a", "s"), gpus=8),
        SimNode(node="n1", partitions=("b", "s"), gpus=8),
        SimNode(node="n2", partitions=("b", "s"), gpus=8),
    ),
    partitions=(
        PartitionInfo(partition="a", nodes=["n0"]),
        PartitionInfo(partition="b", nodes=["n1", "n2"]),
        PartitionInfo(partition="s", nodes=["n0", "n1", "n2"]),
    ),
    outages=(Outage(node="n0", begin=900.0, end=950.0),),
)
N0, N1, N2 = 1, 2, 4


def job(number: int, submit_at: float, partition: str = "a", nodes: int = 1, gpus: int | None = None) -> SimJob:
    """Args: gpus: of a node that it shares; None: all of the node."""
    part = JobPart(partition=partition, nodes=nodes, gpus_per_node=gpus or 0, exclusive=gpus is None)
    return SimJob(job_id=str(number), user="u", submit_at=submit_at, runs_s=60.0, limit_s=60.0, parts=(part,))


def ours(*held: tuple[str, float, float], until: float = 1000.0) -> list[Stay]:
    """Args: held: node, begin and end of ours; an end of infinity: it goes on."""
    holdings = Holdings(SITE)
    for number, (node, begin, end) in enumerate(held):
        holdings.happened(Started(at=begin, job_id=f"o{number}", nodes=(node,), end_at=inf))
        if end < inf:
            holdings.happened(Ended(at=end, job_id=f"o{number}", state="COMPLETED"))
    holdings.happened(Ended(at=500.0, job_id="never began", state="CANCELLED"))
    return holdings.stays(until)


def compare(
    jobs: list[SimJob],
    ran: dict[str, tuple[float, float, int]],
    twin: dict[str, float],
    stays: list[Stay],
    until: float = 1000.0,
) -> HeldUp:
    """Args: ran: start, end and nodes; twin: start without us."""
    times = {name: (begin, end) for name, (begin, end, _) in ran.items()}
    nodes = {name: mask for name, (_, _, mask) in ran.items()}
    without = {name: (at, at + 60.0) for name, at in twin.items()}
    return held_up(SITE, jobs, times, nodes, without, stays, until, 30.0)


def test_holdings_are_kept_by_node() -> None:
    found = ours(("n0", 0.0, 50.0), ("n2", 40.0, 60.0), ("n1", 90.0, inf))
    assert found == [Stay(0.0, 50.0, N0), Stay(40.0, 60.0, N2), Stay(90.0, 1000.0, N1)]


def test_only_the_time_counts_in_which_a_node_was_still_ours() -> None:
    jobs = [job(1, 100.0), job(2, 300.0), job(3, 400.0)]
    twin = {"1": 100.0, "2": 300.0, "3": 500.0}
    ran = {"1": (104.0, 164.0, N0), "2": (300.0, 360.0, N0), "3": (450.0, 510.0, N0)}
    found = compare(jobs, ran, twin, ours(("n0", 0.0, 103.0), ("n0", 380.0, 445.0)))
    assert found.waited == {"1": pytest.approx(3.0)}, "the fourth second is Slurm's"
    assert (found.earlier, found.later, found.latest_s) == (1, 0, 0.0)
    assert found.compared == 3
    assert found.queued_s == (0.0, 4.0, 50.0)
    assert found.queued_without_s == (0.0, 0.0, 100.0)


def test_a_knock_on_is_told_apart() -> None:
    """The first waits for us, and so the second for the first; the node that is ours then is no good to it."""
    jobs = [job(1, 100.0, "b", 2), job(2, 150.0, "b", 2)]
    twin = {"1": 100.0, "2": 160.0}
    ran = {"1": (140.0, 200.0, N1 | N2), "2": (201.0, 261.0, N1 | N2)}
    found = compare(jobs, ran, twin, ours(("n1", 0.0, 139.0), ("n0", 0.0, inf)))
    assert found.waited == {"1": pytest.approx(39.0)}
    assert (found.earlier, found.later) == (0, 1) and found.latest_s == pytest.approx(41.0)


def test_a_job_that_lacks_more_than_our_nodes_does_not_wait_for_us() -> None:
    """It wants two nodes: one is ours, the other somebody else's until 150 s; then ours alone is missing, for 10 s."""
    jobs = [job(1, 50.0, "b"), job(2, 100.0, "b", 2)]
    twin = {"1": 50.0, "2": 100.0}
    ran = {"1": (50.0, 150.0, N1), "2": (160.5, 220.0, N1 | N2)}
    found = compare(jobs, ran, twin, ours(("n2", 0.0, 160.0)))
    assert found.waited == {"2": pytest.approx(10.0)}
    assert found.later == 1 and found.latest_s == pytest.approx(50.5)


def test_a_node_that_is_free_besides_ours_would_have_done() -> None:
    found = compare([job(1, 100.0, "b")], {"1": (150.0, 210.0, N1)}, {"1": 100.0}, ours(("n1", 0.0, 150.0)))
    assert found.waited == {} and found.later == 1


@pytest.mark.parametrize(("gpus", "waits"), [(4, True), (5, False), (None, False)])
def test_jobs_share_nodes_by_gpus(gpus: int | None, waits: bool) -> None:
    """Another has four of eight GPUs. (Ours are whole nodes, so none is there beside it but in this test.)"""
    jobs = [job(1, 50.0, gpus=4), job(2, 100.0, gpus=gpus)]
    ran = {"1": (50.0, 500.0, N0), "2": (120.0, 180.0, N0)}
    found = compare(jobs, ran, {"1": 50.0, "2": 100.0}, ours(("n0", 0.0, 120.0)))
    assert found.waited == ({"2": pytest.approx(20.0)} if waits else {})


def test_nodes_that_take_no_jobs_are_not_kept_by_us() -> None:
    found = compare([job(1, 880.0)], {"1": (980.0, 990.0, N0)}, {"1": 880.0}, ours(("n0", 0.0, 980.0)))
    assert found.waited == {"1": pytest.approx(50.0)}


def test_components_wait_for_all_of_their_nodes() -> None:
    parts = (JobPart(partition="a", nodes=1), JobPart(partition="b", nodes=2))
    het = SimJob(job_id="1", user="u", submit_at=100.0, runs_s=60.0, limit_s=60.0, parts=parts)
    ran = {"1": (140.0, 200.0, N0), "1+1": (140.0, 200.0, N1 | N2), "2": (50.0, 110.0, N1)}
    found = compare([job(2, 50.0, "b"), het], ran, {"1": 100.0, "1+1": 100.0, "2": 50.0}, ours(("n0", 0.0, 130.0)))
    assert found.waited == {"1": pytest.approx(20.0)}


def test_a_job_that_we_still_hold_up_counts_until_now() -> None:
    jobs = [job(1, 100.0), job(2, 100.0), job(3, 300.0)]
    found = compare(jobs, {}, {"1": 100.0, "2": 250.0, "3": 300.0}, ours(("n0", 0.0, inf), until=200.0), 200.0)
    assert found.waited == {"1": 100.0}
    assert (found.later, found.compared) == (0, 1), "the second waits in both, the third is not there yet"


def test_distributions_are_kept_in_few_steps() -> None:
    jobs = [job(number, float(number)) for number in range(1000)]
    ran = {each.job_id: (each.submit_at + float(each.job_id), inf) for each in jobs}
    found = held_up(SITE, jobs, ran, {}, ran, [], 1e6, 30.0)
    assert len(found.queued_s) == PERCENTILES + 1
    assert (found.queued_s[0], found.queued_s[-1]) == (0.0, 999.0)
    assert found.queued_s == found.queued_without_s


def test_it_says_how_far_it_is_from_the_real_slurm() -> None:
    jobs = [msgspec.structs.replace(job(number, 0.0), start_at=100.0) for number in range(100)]
    twin = {str(number): (100.0 + number, inf) for number in range(99)}
    assert apart(jobs, twin).endswith("starts jobs +49 s from when they really started (p5 +4 s, p95 +94 s)")
    assert apart([job(1, 0.0)], twin) == ""
