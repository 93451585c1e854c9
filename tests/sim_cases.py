"""Small clusters, jobs and runs for tests that play them on the simulated Slurm."""

from collections.abc import Iterable, Sequence
from typing import Any

from fallow.model import PartitionInfo, TraceRead
from fallow.sim.published import restart_costs
from fallow.sim.slurm import SlurmSim
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sites import synthetic_site
from fallow.sim.types import (
    Change,
    Costs,
    Plans,
    Profile,
    Recording,
    RunPlan,
    Scheduler,
    SimEvent,
    SimJob,
    SimNode,
    Site,
)

MIN = 60.0
MANY = 1_000_000.0
FREE = Costs(absorb=(0, 0), release=(0, 0), eject=(0, 0), start=(0, 0))
READ = TraceRead(name="made-up", jobs=0, bad_lines={}, examples=[], assumed=[])


# -- clusters -------------------------------------------------------------------------------------------------------


def site(
    nodes: int = 4, *, partitions: Sequence[PartitionInfo] = (), gpus: int = 8, preempt: bool = False, **more: Any
) -> Site:
    """Nodes n1, n2, ... in a partition p. Args: more: fields of the scheduler."""
    names = [f"n{i}" for i in range(1, nodes + 1)]
    partitions = tuple(partitions) or (PartitionInfo(partition="p", nodes=names),)
    return Site(
        name="made-up",
        nodes=tuple(SimNode(node=name, gpus=gpus, cpus=16) for name in names),
        partitions=partitions,
        scheduler=Scheduler(**{"batch_sched_delay_s": 0.0, "kill_wait_s": 5.0, **more}),
        preempt_type="preempt/partition_prio" if preempt else "",
    )


def tiers(nodes: int, grace_s: float = 10.0) -> list[PartitionInfo]:
    """A partition whose jobs give way to those of another on the same nodes, as in the testbed's profile `preempt`."""
    names = [f"n{i}" for i in range(1, nodes + 1)]
    usual: dict[str, Any] = {"nodes": names, "max_time_s": 86400.0, "preempt_mode": "REQUEUE"}
    return [
        PartitionInfo(partition="normal", default=True, priority_tier=10, **usual),
        PartitionInfo(partition="scavenge", grace_s=grace_s, **usual),
    ]


def job(
    job_id: str, at: float, nodes: int, limit_s: float, runs_s: float = MANY, partition: str = "p", **more: Any
) -> SimJob:
    gpus = more.pop("gpus", None)
    usual = {"user": "u", "gpus_per_node": gpus or 0, "exclusive": gpus is None}
    wants: dict[str, Any] = {"partition": partition, "nodes": nodes, "runs_s": runs_s, "limit_s": limit_s}
    return SimJob(job_id=job_id, submit_at=at, **wants, **{**usual, **more})


def submission(minutes: int = 60, token: str = "fallow-r-h1-x", **options: str) -> tuple[str, dict[str, str]]:
    """Arguments of `SlurmSim.submit`."""
    return token, {"partition": "p", "time": str(minutes), "nice": "100000", **options}


def starts(sim: SlurmSim, *jobs: str) -> list[float]:
    return [round(sim.run_times[name][0], 3) for name in jobs]


def events_of(kind: type[Any], events: Iterable[SimEvent]) -> list[Any]:
    return [each for each in events if isinstance(each, kind)]


# -- holes ----------------------------------------------------------------------------------------------------------


def holes(*changes: Change, nodes: int = 4, profile: Profile = "preempt", **more: Any) -> Recording:
    names = [f"n{number}" for number in range(nodes)]
    scheduler = Scheduler(**{"kill_wait_s": 5.0, **more})
    where = synthetic_site("holes", {"batch": names}, 4, Window(profile=profile, scheduler=scheduler))
    return Recording(site=where, begin=0.0, end=MANY, summary=READ, changes=changes)


Turns = list[tuple[int, int]]
"""(seconds since the one before, nodes that are idle from then on, as bits)."""


def changes_of(turns: Turns) -> list[Change]:
    at, before, changes = 0.0, 0, list[Change]()
    for seconds, mask in turns:
        at += seconds
        joined, claimed = (
            tuple(n for n in range(some.bit_length()) if some >> n & 1) for some in (mask & ~before, before & ~mask)
        )
        changes.append((at, joined, claimed))
        before = mask
    return changes


def hole_sim(source: Recording, plans: Plans = "hidden") -> SlurmSim:
    return SlurmSim(source.site, 0, source.begin, changes=source.changes, plans=plans)


# -- runs -----------------------------------------------------------------------------------------------------------


def runs_of(number: int, *speeds: float, **more: Any) -> list[RunPlan]:
    """Equal runs; `speeds`: on one node, two, ... up to their most."""
    rate = tuple(enumerate(speeds, 1))
    return [RunPlan(run=f"r{n}", min_nodes=1, max_nodes=len(speeds), rate=rate, **more) for n in range(number)]


def linear(number: int = 1, most: int = 8, **more: Any) -> list[RunPlan]:
    return runs_of(number, *(float(n) for n in range(1, most + 1)), **more)


def costing(up: float, down: float = 0.0, start: float = 0.0) -> Costs:
    return restart_costs(f"{up:g}-{down:g}", (start, start))
