"""What the head shows and reports, with values that a test need not care about. Arguments replace them."""

from typing import Any, TypeVar

import msgspec

from fallow.model import (
    AllocationKind,
    AllocationState,
    AllocationView,
    HeadView,
    MemberPhase,
    MemberView,
    PauseReport,
    Quantiles,
    RunReport,
    RunStatus,
    RunView,
    SampleReport,
    Snapshot,
)

T = TypeVar("T", bound=msgspec.Struct)

NONE = Quantiles(p50=None, p95=None)


def changed(value: T, **changes: Any) -> T:
    return msgspec.structs.replace(value, **changes)


def report(**changes: Any) -> RunReport:
    """Of a run that has finished after 100 steps."""
    made = RunReport(
        run="r1",
        status=RunStatus.FINISHED,
        steps=100,
        samples=samples(),
        final_digest="ab" * 32,
        final_loss=0.125,
        generations=[],
        pause_s=PauseReport(planned=NONE, unplanned=NONE),
        steps_discarded=0,
    )
    return changed(made, **changes)


def samples(lost: int = 0) -> SampleReport:
    return SampleReport(consumed=6400, lost=lost, duplicated=0)


def head(**changes: Any) -> HeadView:
    made = HeadView(
        version="1",
        host="login1",
        pid=7,
        term=1,
        uptime_s=90_061,
        cluster="c",
        slurm_version="22.05.8",
        slurm_error=None,
        poll_age_s=3.0,
        poll_interval_s=30,
        polls=2,
        agents=1,
        workers=1,
    )
    return changed(made, **changes)


def member(node: str = "n1", **changes: Any) -> MemberView:
    made = MemberView(
        member="n3",
        node=node,
        token="r1.0",
        allocation=AllocationKind.BASE,
        phase=MemberPhase.MEMBER,
        rank=0,
        workers=4,
        step=5,
        ends_in_s=3661.0,
        last_seen_s=0.25,
    )
    return changed(made, **changes)


def allocation(node: str = "n1", **changes: Any) -> AllocationView:
    made = AllocationView(
        token="r1.0",
        kind=AllocationKind.BASE,
        state=AllocationState.RUNNING,
        job_id="77",
        partition="gpu",
        nodes=[node],
        ends_in_s=3661.0,
    )
    return changed(made, **changes)


def run(**changes: Any) -> RunView:
    """A run that trains on one node of at most 8."""
    made = RunView(
        run="r1",
        name="train",
        status=RunStatus.TRAINING,
        min_nodes=1,
        max_nodes=8,
        limit=8,
        generation=3,
        step=5,
        total_steps=100,
        epoch=0,
        loss=0.25,
        samples_per_s=1234.5,
        members=[member()],
        allocations=[allocation()],
        change=None,
    )
    return changed(made, **changes)


def snapshot(*runs: RunView, **changes: Any) -> Snapshot:
    return changed(Snapshot(at=0.0, head=head(), nodes=[], runs=list(runs), last_event=9), **changes)
