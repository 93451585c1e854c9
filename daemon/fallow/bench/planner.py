"""How long is one plan? Curves of all runs, targets, requests, withdrawals and give-backs, over a made-up cluster.

A quarter of the nodes is idle, another quarter is ours, and others' jobs are planned on some of the idle ones. In one
of the rows nothing preempts and others' jobs wait, for more nodes than there are: what they need of us is worked out.
Processor time of this process, so that what else runs on the machine does not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec

from fallow.bench.rows import Progress, Row, Settings, ours
from fallow.core.allocations import Allocation
from fallow.core.gain import Curve, speeds
from fallow.core.planning.plan import Action, plan
from fallow.core.planning.share import Worth, values
from fallow.core.rules import Demand, HarvestRules
from fallow.model import AllocationKind, AllocationState, ClusterState, JobInfo, NodeInfo, PartitionInfo

SIZES = ((1_000, 20), (10_000, 200), (40_000, 800))
"""(nodes, runs)."""

BESIDE = (10_000, 200, 500)
"""(nodes, runs, jobs of others that wait)."""

TIMES = 5
PENDING = 100
"""Requests that may wait at once: far more than a site would like."""

AHEAD = 2
"""Requests that wait for nodes of others, as the head has them where nodes come one by one."""

PARTITIONS = 8
SHARED = 3
"""One in so many nodes is in two partitions."""

NOW = 1_000_000.0
SHARDS = (8, 64, 256, 1024)
WIDE = (1, 2, 1, 16, 1, 4, 64)


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """One row per size of the cluster."""
    for nodes, runs in SIZES:
        progress(f"planner: {nodes} nodes, {runs} runs")
        yield measure(nodes, runs, settings.n or TIMES)
    nodes, runs, waiting = BESIDE
    progress(f"planner: {nodes} nodes, {runs} runs, {waiting} jobs of others wait")
    yield measure(nodes, runs, settings.n or TIMES, waiting)


def measure(nodes: int, runs: int, times: int, waiting: int = 0) -> Row:
    """Plan the same situation several times, the fitting of the curves included."""
    cluster, demands, allocations, curves = situation(nodes, runs)
    if waiting:
        cluster = beside(cluster, waiting)
    rules = HarvestRules(max_pending=PENDING, allow_without_preemption=bool(waiting), ahead=AHEAD)
    took: list[float] = []
    wishes: Sequence[Action] = ()
    for _ in range(times):
        began = time.process_time()
        valued = [msgspec.structs.replace(demand, worth=worth(curves[demand.run])) for demand in demands]
        wishes = plan(cluster, valued, allocations, rules).actions
        took.append(time.process_time() - began)
    return Row(
        name="plan",
        members=None,
        params=None,
        unit="s",
        ours=ours(took),
        note=f"{nodes} nodes, {runs} runs, {len(allocations)} of the nodes ours"
        + (f", {waiting} jobs of others wait and nothing preempts" if waiting else "")
        + f": {len(wishes)} wishes",
    )


def worth(known: tuple[Curve, int, float]) -> Worth:
    curve, shards, weight = known
    return Worth(values(speeds(curve, shards, 4, 1000), shards // 4, weight), base=1)


def beside(cluster: ClusterState, waiting: int) -> ClusterState:
    """The same without preemption, and with jobs that wait for whole nodes, parts of nodes, and many nodes at once."""
    partitions = [msgspec.structs.replace(partition, preempt_mode="OFF") for partition in cluster.partitions]
    jobs = [
        _job(
            f"w{w}",
            f"p{w % PARTITIONS}",
            "PENDING",
            reason="Resources" if w < PARTITIONS else "Priority",
            num_nodes=WIDE[w // PARTITIONS % len(WIDE)],
            gpus_per_node=1 + w % 4,
            exclusive=w % 3 > 0,
            priority=2 * waiting - w,
            time_limit_s=600.0 * (1 + w % 12),
        )
        for w in range(waiting)
    ]
    return msgspec.structs.replace(cluster, partitions=partitions, jobs=[*cluster.jobs, *jobs])


def situation(
    nodes: int, runs: int
) -> tuple[ClusterState, list[Demand], list[Allocation], dict[str, tuple[Curve, int, float]]]:
    """A cluster of `PARTITIONS` partitions with nodes in common, runs that can use one to four, and what they hold."""
    infos, parts, jobs, allocations = [], [], [], []
    names = [[f"n{i}" for i in range(p, nodes, PARTITIONS)] for p in range(PARTITIONS)]
    shared = [members[::SHARED] for members in names]
    usable = {f"r{r}": [f"p{(r + k) % PARTITIONS}" for k in range(1 + r % 4)] for r in range(runs)}
    users = {f"p{p}": [run for run, may in usable.items() if f"p{p}" in may] for p in range(PARTITIONS)}
    for p, members in enumerate(names):
        there = [*members, *shared[p - 1]]
        parts.append(PartitionInfo(partition=f"p{p}", nodes=there, preempt_mode="REQUEUE", max_time_s=14400.0))
        for i, node in enumerate(members):
            of = [f"p{p}"] if i % SHARED else [f"p{p}", f"p{(p + 1) % PARTITIONS}"]
            infos.append(NodeInfo(node=node, state="IDLE" if i % 4 == 0 else "ALLOCATED", partitions=of, gpus=4))
            if i % 8 == 0:
                end = NOW + 600.0 * (1 + i % 20)
                jobs.append(_job(f"j{p}-{i}", f"p{p}", "PENDING", planned_nodes=[node], start_at=end))
            if i % 4 == 1 and users[f"p{p}"]:
                holder = users[f"p{p}"][i // 4 % len(users[f"p{p}"])]
                allocations.append(_held(f"t-{node}", holder, f"p{p}", node))
            elif i % 4 > 1:
                jobs.append(_job(f"j{p}-{i}", f"p{p}", "RUNNING", nodes=[node]))
    demands, curves = [], {}
    for r, (name, may) in enumerate(usable.items()):
        shards = SHARDS[r % len(SHARDS)]
        curve = Curve(shard_s=0.1 * (1 + r % 3))
        for size in (4, 8, 16, 32):
            if size <= shards:
                uneven = 1 + 0.02 * ((r * size) % 5)
                curve.observe(size, 0.1 * (1 + r % 3) * -(-shards // size) * uneven + 0.05, 120.0, NOW)
        demands.append(Demand(run=name, nodes=shards // 4, partitions=tuple(may)))
        curves[name] = curve, shards, 1.0 + r % 5
    return ClusterState(at=NOW, nodes=infos, jobs=jobs, partitions=parts), demands, allocations, curves


def _job(job_id: str, partition: str, state: str, **more: object) -> JobInfo:
    return JobInfo(job_id=job_id, name="theirs", user="alice", state=state, partition=partition, **more)  # type: ignore[arg-type]


def _held(token: str, run: str, partition: str, node: str) -> Allocation:
    return Allocation(
        token=token,
        run=run,
        kind=AllocationKind.HARVEST,
        public_key="k",
        state=AllocationState.RUNNING,
        job_id=token,
        partition=partition,
        nodes=[node],
        start_at=NOW - 900.0,
        end_at=NOW + 5400.0,
    )
