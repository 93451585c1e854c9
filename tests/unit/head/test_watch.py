"""What the head remembers of others from poll to poll: nodes that stay free for jobs which Slurm does not start."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import NOW, cluster, node, runs, waits
from builders import site as config
from fallow.config import Config, Harvest
from fallow.core.neighbour.waiting import LOOKS_AGAIN_S
from fallow.core.neighbour.watch import CYCLES, PASS_OVER_FACTOR
from fallow.core.tokens import new_token
from fallow.files import Paths
from fallow.head.loop.turn import Turn
from fallow.head.slurm.neighbours import Neighbours
from fallow.head.state.registry import Registry
from fallow.model import AllocationKind, ClusterConfig, JobInfo

POLL_S = 30.0
TRIED_S = CYCLES * LOOKS_AGAIN_S


class Site:
    """Nodes of one partition that are idle but for the running jobs, poll by poll."""

    def __init__(self, nodes: int, config: ClusterConfig | None = None) -> None:
        self.at, self.config = NOW - POLL_S, config
        self.nodes = [f"n{i}" for i in range(nodes)]
        wanted = Config(harvest=Harvest(allow_without_preemption=True))
        self.watch, self.book = Neighbours(wanted), Registry(Paths(Path(), Path()), wanted)

    def poll(self, jobs: Sequence[JobInfo], after_s: float = POLL_S) -> set[str]:
        """Take in a poll; return the nodes that are kept free."""
        self.at += after_s
        busy = {node for job in jobs if job.state == "RUNNING" for node in job.nodes}
        shown = cluster([node(n, "ALLOCATED" if n in busy else "IDLE") for n in self.nodes], jobs, at=self.at)
        needs = self.watch.polled(Turn(self.book, self.at, self.at), shown, self.config)
        return set(needs.kept_nodes.get("p", ())) - busy

    def until(self, jobs: Sequence[JobInfo], seconds: float) -> set[str]:
        """Poll until so many seconds have passed; return what is kept free in the end."""
        kept: set[str] = set()
        end = self.at + seconds
        while self.at < end:
            kept = self.poll(jobs)
        return kept


LICENSED = [waits(str(i)) for i in range(5)]
"""Jobs that ask for something that squeue does not show and that Slurm cannot give."""


def test_nodes_are_kept_for_a_job_until_slurm_has_looked_and_then_not_for_a_while() -> None:
    site = Site(6)
    assert site.poll(LICENSED) == {"n0", "n1", "n2", "n3", "n4"}
    assert len(site.until(LICENSED, TRIED_S)) == 5
    assert site.poll(LICENSED) == set()
    assert site.poll([*LICENSED, waits("9")]) == {"n0"}, "another job counts all the same"
    assert site.until(LICENSED, PASS_OVER_FACTOR * TRIED_S - 3 * POLL_S) == set()
    assert len(site.until(LICENSED, 2 * POLL_S)) == 5, "whatever kept them from starting may be over"


@pytest.mark.parametrize(
    ("interval_s", "parameters", "cycle_s"),
    [
        (30.0, "bf_interval=30,bf_max_time=600", 630.0),
        (120.0, "bf_interval=120", 240.0),
        (30.0, "bf_continue", 60.0),
        (5.0, "bf_interval=5,bf_max_time=10", LOOKS_AGAIN_S),
    ],
)
def test_slurm_is_given_as_long_as_a_cycle_of_its_backfill_may_last(
    interval_s: float, parameters: str, cycle_s: float
) -> None:
    site = Site(1, config(backfill_interval_s=interval_s, scheduler_parameters=parameters))
    site.poll([waits("1")])
    assert site.until([waits("1")], CYCLES * cycle_s) == {"n0"}
    assert site.until([waits("1")], 2 * POLL_S) == set()


def test_a_job_array_whose_elements_start_is_not_passed_over() -> None:
    """Each node goes to an element within a minute, and another one is free then."""
    site, array = Site(8), waits("1", array_job_id="1", array_tasks="1-99%1")
    for number in range(40):
        free = f"n{number // 2 % 8}"
        others = [runs(f"5{n}", [n]) for n in site.nodes if n != free]
        assert site.poll([array, *others]) == {free}


def test_while_slurm_is_away_it_passes_nothing_over() -> None:
    site = Site(6)
    site.poll(LICENSED)
    assert site.poll(LICENSED, 3600.0)
    assert site.until(LICENSED, TRIED_S - LOOKS_AGAIN_S - POLL_S)
    assert site.until(LICENSED, 2 * POLL_S) == set()


def test_what_a_head_that_is_no_more_holds_keeps_nothing_back_for_long() -> None:
    """Its jobs go on until their time is over; a job that needs their nodes, too, cannot start before."""
    site, token = Site(2), new_token("s-1", AllocationKind.HARVEST, 7, "0a1b2c")
    jobs = [waits("1", 2), runs("7", ["n1"], name=token, user="carol")]
    assert site.poll(jobs) == {"n0"}, "a head that lives gives its node back any moment now"
    assert site.until(jobs, TRIED_S + POLL_S) == set()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=1, max_size=5))
def test_no_node_lies_idle_without_end_and_none_is_taken_at_once(nodes: int, sizes: list[int]) -> None:
    site = Site(nodes)
    jobs = [waits(str(i), size) for i, size in enumerate(sizes)]
    first = site.poll(jobs)
    while site.at < NOW + TRIED_S:
        assert site.poll(jobs) == first
    assert site.until(jobs, (len(sizes) + 1) * (TRIED_S + POLL_S)) == set()
