"""What the demo reads from the head's snapshots, and how it tells what came of it."""

from __future__ import annotations

from rich.console import Console

from fallow.demo.report import DemoReport, SlurmFacts, to_json, to_table
from fallow.demo.stage import members_of, owners_of
from fallow.model import (
    AllocationKind,
    AllocationState,
    AllocationView,
    DelayReport,
    HeadView,
    MemberPhase,
    MemberView,
    NodeOwner,
    NodeView,
    PauseReport,
    Quantiles,
    RunReport,
    RunStatus,
    RunView,
    SampleReport,
    Snapshot,
)

NONE = Quantiles(p50=None, p95=None)


def member(node: str, kind: AllocationKind, rank: int | None) -> MemberView:
    phase = MemberPhase.STARTING if rank is None else MemberPhase.MEMBER
    return MemberView(
        member=node, node=node, token=node, allocation=kind, phase=phase, rank=rank, workers=1, step=0, ends_in_s=None,
        last_seen_s=0.0,
    )  # fmt: skip


def allocation(node: str, kind: AllocationKind) -> AllocationView:
    return AllocationView(
        token=node, kind=kind, state=AllocationState.RUNNING, job_id="1", partition="p", nodes=[node], ends_in_s=None
    )


def test_nodes_of_the_base_allocation_are_not_idle_without_us() -> None:
    owners = {"n1": NodeOwner.OURS, "n2": NodeOwner.OURS, "n3": NodeOwner.IDLE, "n4": NodeOwner.OTHERS}
    base, harvest = AllocationKind.BASE, AllocationKind.HARVEST
    run = RunView(
        run="r", name="r", status=RunStatus.TRAINING, min_nodes=1, max_nodes=8, limit=8, generation=1, step=1,
        total_steps=None, epoch=0, loss=None, samples_per_s=0.0, change=None,
        members=[member("n1", base, 0), member("n2", harvest, None)],
        allocations=[allocation("n1", base), allocation("n2", harvest)],
    )  # fmt: skip
    head = HeadView(
        version="1", host="h", pid=1, term=1, uptime_s=1.0, cluster=None, slurm_version=None, slurm_error=None,
        poll_age_s=None, poll_interval_s=2.0, polls=1, agents=2, workers=2,
    )  # fmt: skip
    nodes = [NodeView(node=node, partitions=["p"], state="IDLE", owner=owner) for node, owner in owners.items()]
    snapshot = Snapshot(at=1.0, head=head, nodes=nodes, runs=[run], last_event=0)
    assert owners_of(snapshot, run) == owners | {"n1": NodeOwner.OTHERS}
    assert members_of(run) == {"n1"}, "the other one starts up"


def report(lost: int = 0) -> DemoReport:
    run = RunReport(
        run="r", status=RunStatus.FINISHED, steps=10, samples=SampleReport(consumed=80, lost=lost, duplicated=0),
        final_digest="ab", final_loss=0.5, generations=[], pause_s=PauseReport(planned=NONE, unplanned=NONE),
        steps_discarded=0,
    )  # fmt: skip
    return DemoReport(
        run=run, slurm=SlurmFacts(version="25.11", nodes=8), static_digest="cd", static_loss=0.5, hole_to_step_s=NONE,
        idle_node_s=200.0, harvested_node_s=150.0, others_delayed=DelayReport(), slurmctld_rpcs_per_min=180.0,
        released_late=0, seconds=60.0,
    )  # fmt: skip


def test_the_report_is_one_flat_object_and_says_what_fell_short() -> None:
    flat = to_json(report())
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
