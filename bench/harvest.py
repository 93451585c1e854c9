"""The same jobs of other users on two private Slurms side by side, with and without Fallow.

Both Slurms get the same jobs at the same times. The Slurm without Fallow runs a sleeping job in place of the base
allocation. All figures are from Slurm's jobs and nodes, polled each second; only the training nodes are from the head.
*Usable* holes (`fallow.demo.holes`) are longer than a start-up: no training can begin in a shorter hole.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.rows import Row, Settings, progress, summarize
from bench.session import command
from fallow.core.holes import is_idle
from fallow.demo.holes import HoleWatch, waits_s
from fallow.demo.stage import Stage, members_of, start_load
from fallow.model import ClusterState, DelayReport, Exit, FallowError, JobInfo, NodeOwner, Snapshot
from fallow.slurm.cli import CliClient
from fallow.testbed.cluster import Testbed

NODES, SHARDS, SHARD_S = 8, 32, 0.04
"""A step takes 1.3 s on one node and 0.16 s on eight: each node makes the training faster."""

LOOK_S = 1.0
PATIENCE_S = 300.0
"""Longest wait for the first step of the training."""

LOAD = {"utilisation": 0.6, "mean": 60.0}
"""Jobs of a minute. A start-up relative to these jobs is like 30 s relative to the holes of a large site."""

SCRIPT = """#!/bin/bash
#SBATCH --job-name=training --partition=normal --exclusive --time=1440
#FALLOW workers-per-node=1 min-minutes=1
export OMP_NUM_THREADS=1 PYTHONPATH={path}
fallow run -- {command}
"""


def run(settings: Settings) -> Iterator[Row]:
    """Rows for idle time, holes, and delays of other jobs. Takes `settings.seconds` and a minute; Ctrl-C ends it."""
    with tempfile.TemporaryDirectory(prefix="fallow-harvest-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        with (
            Testbed.up(folder / "with", nodes=NODES, profile=settings.profile) as bed,
            Testbed.up(folder / "without", nodes=NODES, profile=settings.profile) as other,
        ):
            yield from asyncio.run(measure(folder, bed, other, settings))


async def measure(folder: Path, bed: Testbed, other: Testbed, settings: Settings) -> list[Row]:
    """Run the training and the other jobs on both testbeds."""
    head_settings = {
        "FALLOW_SLURM__POLL_INTERVAL_S": "10",
        "FALLOW_HARVEST__ALLOW_WITHOUT_PREEMPTION": "true" if settings.profile == "plain" else "false",
        "FALLOW_HARVEST__MAX_PENDING": str(NODES),
        "FALLOW_HARVEST__MIN_MINUTES": "1",
    }
    stage = Stage(folder, bed, head_settings)
    control = await stage.head.start()
    argv = command(10_000, folder, steps=10**6, shards=SHARDS, shard_s=SHARD_S)
    base = await stage.submit(SCRIPT.format(path=os.environ["PYTHONPATH"], command=" ".join(argv)), NODES)
    sleeping = ["--job-name=training", "--exclusive", "--output=/dev/null", "--time=1440", "--wrap=exec sleep 86400"]
    await asyncio.to_thread(other.slurm, "sbatch", *sleeping)
    end = time.monotonic() + PATIENCE_S
    while not (training := (await control.call("status", Snapshot)).runs[0]).generation:
        if training.status.ended or time.monotonic() > end:
            raise FallowError(f"the run is {training.status} and never trained: {training.message}", Exit.SOFTWARE)
        await asyncio.sleep(LOOK_S)
    beds = {"with": bed, "without": other}
    loads = [start_load(each, folder / f"{name}.log", seed=0, seconds=8e4, **LOAD) for name, each in beds.items()]
    jobs: dict[str, dict[str, JobInfo]] = {name: {} for name in beds}
    watch, began = HoleWatch(), time.time()
    try:
        with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C: report the figures so far
            while time.time() - began < settings.seconds:
                await asyncio.sleep(LOOK_S)
                try:
                    looks = await asyncio.gather(*(CliClient(each.conf).poll() for each in beds.values()))
                    snapshot = await control.call("status", Snapshot)
                except FallowError as error:  # the next poll may succeed
                    progress(f"harvest: {error}")
                    continue
                for cluster, user_jobs in zip(looks, jobs.values(), strict=True):
                    user_jobs.update((job.name, job) for job in cluster.jobs if job.name.startswith("user-"))
                owners = owners_in(looks[0], base)
                watch.look(looks[0].at, owners, members_of(snapshot.runs[0]))
                progress(f"harvest: {time.time() - began:.0f} s, {len(watch.holes)} holes")
        delayed = (await control.call("status", Snapshot)).head.others_delayed
        return list(rows(watch, later_s(jobs["with"], jobs["without"], time.time()), delayed))
    finally:
        for load in loads:
            load.terminate()
            await asyncio.to_thread(load.wait)
        await control.aclose()
        await stage.head.stop()


def rows(watch: HoleWatch, later: list[float], delayed: DelayReport) -> Iterator[Row]:
    """The figures as rows. A figure without measurements has no row."""
    start_up_s = watch.start_up_s or 0.0
    idle_s, trained_s = watch.idle_node_s(start_up_s), watch.harvested_node_s(start_up_s)
    if idle_s:
        usable = f"{trained_s:.0f} of {idle_s:.0f} node-seconds in holes longer than a start-up ({start_up_s:.1f} s)"
        yield Row(name="idle time trained", unit="of it", ours=summarize([trained_s / idle_s]), note=usable)
    if waits := waits_s(hole for hole in watch.holes if hole.left_by_others):
        yield Row(name="hole to first step", ours=summarize(waits), note=f"{len(watch.holes)} holes")
    if later:
        most = f"at most {max(later):.0f} s later than without Fallow; the head counts {delayed.jobs} delayed, "
        most += f"p95 {delayed.p95_s:.1f} s, at most {delayed.max_s:.1f} s"
        yield Row(name="others' jobs later", ours=summarize(later), note=most)


def owners_in(cluster: ClusterState, base: str) -> dict[str, NodeOwner]:
    """The owner of each node according to Slurm. The base job counts as another user's: its nodes are not harvested.

    A busy node whose job is not in the poll is left out: `squeue` and `scontrol` run one after the other.
    """
    nodes_in_use = {
        node.node for node in cluster.nodes if {node.state, *node.flags} & {"ALLOCATED", "MIXED", "COMPLETING"}
    }
    unused = [node for node in cluster.nodes if node.node not in nodes_in_use]
    owners = {node.node: NodeOwner.IDLE if is_idle(node) else NodeOwner.DOWN for node in unused}
    active_jobs = [job for job in cluster.jobs if job.state in ("RUNNING", "COMPLETING", "CONFIGURING")]
    our_jobs = [job for job in active_jobs if job.name.startswith("fallow-") and job.job_id != base]
    owners |= {node: NodeOwner.OURS for job in our_jobs for node in job.nodes}
    return owners | {node: NodeOwner.OTHERS for job in active_jobs if job not in our_jobs for node in job.nodes}


def later_s(with_fallow: dict[str, JobInfo], without_fallow: dict[str, JobInfo], until: float) -> list[float]:
    """Seconds that each job waited longer with Fallow. The wait of a pending job ends at `until`."""

    def wait_s(job: JobInfo) -> float:
        # A job that was cancelled while pending has a start time in Slurm, but no nodes.
        start = job.start_at if job.nodes and job.start_at is not None else until
        return min(start, until) - (job.submit_at or until)

    started = [
        name
        for name in with_fallow.keys() & without_fallow.keys()
        if with_fallow[name].nodes or without_fallow[name].nodes
    ]
    return [wait_s(with_fallow[name]) - wait_s(without_fallow[name]) for name in started]
