"""What the demo reads from the head's snapshots, and how it tells what came of it."""

from __future__ import annotations

from msgspec import to_builtins
from msgspec.structs import asdict
from rich.console import Console

import views
from fallow.demo.report import DemoReport, SlurmFacts, to_table
from fallow.demo.stage import members_of, owners_of
from fallow.model import AllocationKind, DelayReport, NodeOwner, NodeView


def test_nodes_of_the_base_allocation_are_not_idle_without_us() -> None:
    owners = {"n1": NodeOwner.OURS, "n2": NodeOwner.OURS, "n3": NodeOwner.IDLE, "n4": NodeOwner.OTHERS}
    run = views.run(
        members=[views.member("n1"), views.member("n2", rank=None)],
        allocations=[views.allocation("n1"), views.allocation("n2", kind=AllocationKind.HARVEST)],
    )
    nodes = [NodeView(node=node, partitions=["p"], state="IDLE", owner=owner) for node, owner in owners.items()]
    assert owners_of(views.snapshot(run, nodes=nodes), run) == owners | {"n1": NodeOwner.OTHERS}
    assert members_of(run) == {"n1"}, "the other one starts up"


def report(lost: int = 0) -> DemoReport:
    return DemoReport(
        **asdict(views.report(samples=views.samples(lost))),
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
    assert not report(lost=1).sound
    console = Console(width=200)
    with console.capture() as shown:
        console.print(to_table(report(lost=1)))
    assert "150 of 200 node-seconds (75%)" in shown.get()
    assert "fell short: 1 samples lost, 0 repeated" in shown.get()
    assert "the membership never changed" in shown.get()
