"""Holes in hand-made snapshots with known answers, and the report of the demo."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import asdict
from rich.console import Console

import views
from fallow.demo.holes import FREE, HoleWatch, waits_s
from fallow.demo.report import DemoReport, SlurmFacts, to_table
from fallow.demo.stage import members_of, owners_of
from fallow.model import AllocationKind, DelayReport, NodeOwner, NodeView

OWNERS = {
    ".": NodeOwner.IDLE,
    "p": NodeOwner.PLANNED,
    "#": NodeOwner.OURS,
    "M": NodeOwner.OURS,  # and a member
    "x": NodeOwner.OTHERS,
    "!": NodeOwner.DOWN,
}


def watched(*looks: tuple[float, str]) -> HoleWatch:
    """A watch after snapshots, each given as its time and a letter for each of the nodes n0, n1 ..."""
    watch = HoleWatch()
    for at, letters in looks:
        owners = {f"n{number}": OWNERS[letter] for number, letter in enumerate(letters)}
        watch.look(at, owners, [f"n{number}" for number, letter in enumerate(letters) if letter == "M"])
    return watch


def test_a_hole_is_from_one_job_of_others_to_the_next_whatever_we_did_meanwhile() -> None:
    watch = watched((0, "x"), (2, "."), (4, "p"), (6, "#"), (10, "M"), (20, "M"), (22, "."), (24, "x"))
    (hole,) = watch.holes
    assert (hole.begin, hole.end, hole.left_by_others) == (1.0, 23.0, True)
    assert (hole.allocated_at, hole.member_at, hole.trained_s) == (5.0, 8.0, 13.0)
    assert (waits_s(watch.holes), watch.start_up_s) == ([7.0], 3.0)
    assert (watch.idle_node_s(), watch.harvested_node_s()) == (22.0, 13.0)


def test_a_node_that_was_down_was_left_by_nobody_and_a_first_look_neither() -> None:
    watch = watched((0, "."), (2, "x"), (4, "!"), (6, "."), (8, "!"))
    assert [(hole.begin, hole.end, hole.left_by_others) for hole in watch.holes] == [(0, 1, False), (5, 7, False)]


@given(st.lists(st.tuples(st.floats(0.1, 50.0), st.sampled_from(sorted(OWNERS))), min_size=2, max_size=30))
def test_holes_are_apart_and_no_more_is_trained_than_there_is(steps: list[tuple[float, str]]) -> None:
    at, looks = 0.0, []
    for gap, letter in steps:
        at += gap
        looks.append((at, letter))
    watch = watched(*looks)
    for hole in watch.holes:
        assert 0 <= hole.trained_s <= hole.length_s + 1e-6
        assert hole.member_at is None or hole.begin <= hole.member_at <= hole.end
    for before, after in pairwise(watch.holes):
        assert before.end < after.begin
    free = [OWNERS[letter] in FREE for _, letter in looks]
    expected = sum(
        (later[0] - earlier[0]) * (a + b) / 2
        for (earlier, later), (a, b) in zip(pairwise(looks), pairwise(free), strict=True)
    )
    assert watch.idle_node_s() == pytest.approx(expected)


# -- owners of nodes, and the report -----------------------------------------------------------------------------------


def test_nodes_of_the_base_allocation_are_not_idle_without_us() -> None:
    owners = {"n1": NodeOwner.OURS, "n2": NodeOwner.OURS, "n3": NodeOwner.IDLE, "n4": NodeOwner.OTHERS}
    run = views.run(
        members=[views.member("n1"), views.member("n2", rank=None)],
        allocations=[views.allocation("n1"), views.allocation("n2", kind=AllocationKind.HARVEST)],
    )
    nodes = [NodeView(node=node, partitions=["p"], state="IDLE", owner=owner) for node, owner in owners.items()]
    assert owners_of(views.snapshot(run, nodes=nodes), run) == owners | {"n1": NodeOwner.OTHERS}
    assert members_of(run) == {"n1"}, "n2 starts up"


def report(lost_samples: int = 0) -> DemoReport:
    return DemoReport(
        **asdict(views.report(samples=views.samples(lost_samples))),
        slurm=SlurmFacts(version="25.11", nodes=8),
        static_digest="cd",
        static_loss=0.5,
        hole_to_step_s=views.NONE,
        idle_node_s=200.0,
        harvested_node_s=150.0,
        others_delayed=DelayReport(),
        slurmctld_rpcs_per_min=180.0,
        released_late=0,
        seconds=60.0,
    )


def test_the_report_is_one_flat_object_and_says_what_fell_short() -> None:
    flat = to_builtins(report())
    assert {"steps", "samples", "final_digest", "slurm", "static_digest", "hole_to_step_s", "others_delayed"} <= set(
        flat
    )
    assert report().sound
    assert not report(lost_samples=1).sound
    console = Console(width=200)
    with console.capture() as output:
        console.print(to_table(report(lost_samples=1)))
    assert "150 of 200 node-seconds (75%)" in output.get()
    assert "fell short: 1 samples lost, 0 repeated" in output.get()
    assert "the membership never changed" in output.get()
