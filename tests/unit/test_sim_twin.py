"""Which jobs of others we held up, by comparison with the same cluster without us."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.model import PartitionInfo
from fallow.sim.twin import PERCENTILES, Holdings, Spans, apart, held_up
from fallow.sim.types import Ended, JobPart, SimJob, SimNode, Site, Started

SITE = Site(
    name="toy",
    nodes=(SimNode(node="n0", partitions=("a", "s")), SimNode(node="n1", partitions=("b", "s"))),
    partitions=tuple(PartitionInfo(partition=name, nodes=["n0", "n1"]) for name in "abs"),
)


def job(number: int, submit_at: float, partition: str = "a") -> SimJob:
    parts = (JobPart(partition=partition, nodes=1),)
    return SimJob(job_id=str(number), user="u", submit_at=submit_at, runs_s=60.0, limit_s=60.0, parts=parts)


def spans(*held: tuple[str, float, float], until: float = 1000.0) -> dict[str, Spans]:
    """Args: held: node, begin and end of ours; an end of infinity: it goes on."""
    holdings = Holdings(SITE)
    for number, (node, begin, end) in enumerate(held):
        holdings.happened(Started(at=begin, job_id=f"o{number}", nodes=(node,), end_at=inf))
        if end < inf:
            holdings.happened(Ended(at=end, job_id=f"o{number}", state="COMPLETED"))
    holdings.happened(Ended(at=500.0, job_id="never began", state="CANCELLED"))
    return holdings.spans(until)


def test_holdings_are_joined_and_kept_by_partition() -> None:
    found = spans(("n0", 0.0, 50.0), ("n0", 40.0, 60.0), ("n1", 70.0, 80.0), ("n0", 90.0, inf))
    assert list(found) == ["a", "b", "s"]
    assert (found["a"].begins, found["a"].ends) == ([0.0, 90.0], [60.0, 1000.0])
    assert (found["b"].begins, found["b"].ends) == ([70.0], [80.0])
    assert (found["s"].begins, found["s"].ends) == ([0.0, 70.0, 90.0], [60.0, 80.0, 1000.0])


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20))), st.integers(0, 60), st.integers(0, 20)
)  # fmt: skip
def test_spans_meet_what_any_of_their_parts_meets(parts: list[tuple[int, int]], begin: int, length: int) -> None:
    pairs = [(float(at), float(at + lasts)) for at, lasts in parts]
    found = Spans.of(pairs)
    assert all(end < after for end, after in zip(found.ends, found.begins[1:], strict=False))
    met = any(one <= begin + length and two >= begin for one, two in pairs)
    assert found.meets(begin, begin + length) == met


def test_later_beside_a_node_of_ours_is_our_doing() -> None:
    jobs = [job(1, 100.0), job(2, 100.0, "b"), job(3, 100.0), job(4, 100.0)]
    twin = {"1": (100.0, 160.0), "2": (100.0, 160.0), "3": (200.0, 260.0), "4": (100.0, 160.0)}
    ran = {"1": (104.0, 164.0), "2": (104.0, 164.0), "3": (150.0, 210.0), "4": (100.0, 160.0)}
    found = held_up(jobs, ran, twin, spans(("n0", 0.0, 103.0)), 1000.0, 30.0)
    assert found.waited == {"1": pytest.approx(4.0)}
    assert found.moved == 1, "one came 50 s earlier; one waited without us, but not for long"
    assert found.compared == 4
    assert found.queued_s == (0.0, 4.0, 4.0, 50.0)
    assert found.queued_without_s == (0.0, 0.0, 0.0, 100.0)


def test_a_job_that_we_still_hold_up_counts_until_now() -> None:
    jobs = [job(1, 100.0), job(2, 100.0), job(3, 300.0)]
    twin = {"1": (100.0, 160.0), "2": (250.0, 310.0), "3": (300.0, 360.0)}
    found = held_up(jobs, {}, twin, spans(("n0", 0.0, inf), until=200.0), 200.0, 30.0)
    assert found.waited == {"1": 100.0}
    assert (found.moved, found.compared) == (0, 1), "the second waits in both, the third is not there yet"


def test_distributions_are_kept_in_few_steps() -> None:
    jobs = [job(number, float(number)) for number in range(1000)]
    ran = {each.job_id: (each.submit_at + float(each.job_id), inf) for each in jobs}
    found = held_up(jobs, ran, ran, {}, 1e6, 30.0)
    assert len(found.queued_s) == PERCENTILES + 1
    assert (found.queued_s[0], found.queued_s[-1]) == (0.0, 999.0)
    assert found.queued_s == found.queued_without_s


def test_it_says_how_far_it_is_from_the_real_slurm() -> None:
    jobs = [msgspec.structs.replace(job(number, 0.0), start_at=100.0) for number in range(100)]
    twin = {str(number): (100.0 + number, inf) for number in range(99)}
    assert apart(jobs, twin).endswith("starts jobs +49 s from when they really started (p5 +4 s, p95 +94 s)")
    assert apart([job(1, 0.0)], twin) == ""
