"""Recorded clusters: readers of the formats that are known, and one door to all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fallow.model import Exit, FallowError
from fallow.sim.traces import helios, philly, sacct, swf
from fallow.sim.traces import outages as outages_of
from fallow.sim.traces.problems import MOST_EXAMPLES, lines
from fallow.sim.traces.recorded import RecordedJobs, Window
from fallow.sim.traces.sites import Profile, from_folder
from fallow.sim.traces.summit import SummitHoles
from fallow.sim.traces.walltimes import MEDIAN_FACTOR
from fallow.sim.types import Holes, Scheduler, Trace
from fallow.text import clean
from fallow.traces import trace_path

SUMMIT_DAYS = 2.0
"""What is drawn of Summit unless it is said."""


def open_trace(
    name: str | Path,
    *,
    site_folder: Path | None = None,
    outages: Sequence[Path] = (),
    seed: int = 0,
    begin_day: float = 0.0,
    days: float | None = None,
    profile: Profile = "preempt",
    scheduler: Scheduler | None = None,
    replay: bool | None = None,
    names: bool = False,
    walltime_factor: float = MEDIAN_FACTOR,
) -> Trace | Holes:
    """A trace by name (earth, earth-holes, philly, summit) or file.

    Args:
        name: the format of a file is found by its first line.
        site_folder: outputs of `scontrol` (`sites.SITE_FILES`), for the jobs of sacct.
        outages: outputs of `sacctmgr` (`outages.EVENTS`, `outages.RESERVATIONS`), for those jobs, too.
        seed: of walltimes and holes that are drawn.
        begin_day: days that are left out at the beginning.
        days: what is played; None: all of it, or `SUMMIT_DAYS`.
        profile: whether Slurm takes our nodes for others, at a site that is made up.
        scheduler: of such a site.
        replay: jobs are submitted when they started, so that the load is as recorded. None: as is best for the format.
        names: keep names of users and accounts.
        walltime_factor: what the median user asks for, divided by what is needed, where limits are drawn.

    Raises:
        FallowError: no such file, no such format, or nothing in it can be used.
    """
    path = trace_path(name)
    scheduler = scheduler or Scheduler()
    first = _first_line(path)

    def window(replay_usually: bool) -> Window:
        return Window(
            seed=seed,
            begin_day=begin_day,
            days=days,
            replay=replay_usually if replay is None else replay,
            factor=walltime_factor,
        )

    words = first.replace("|", ",").split(",")
    if "JobID" in words and "|" in first:
        site = None if site_folder is None else from_folder(site_folder)
        trace = sacct.read(path, window(False), profile, scheduler, site, names)
        for each in outages:
            _close(trace, each)
        return trace
    if site_folder is not None:
        raise FallowError(f"{path}: --site goes with the output of sacct only", Exit.USAGE)
    if outages:
        raise FallowError(f"{path}: --outages goes with the output of sacct only", Exit.USAGE)
    if first.startswith(";") or len(first.split()) == swf.FIELDS:
        return swf.read(path, window(False), profile, scheduler)
    if "job_id" in words and "queue" in words:
        return helios.read_jobs(path, window(True), profile, scheduler)
    if "running_gpus_ge8" in words:
        return helios.read_counts(path, window(True), profile, scheduler)
    if "active_nodes" in words:
        return philly.read_counts(path, window(True), profile, scheduler)
    if "percentile" in words:
        chosen = SUMMIT_DAYS if days is None else days
        return SummitHoles(path, seed, begin_day=begin_day, days=chosen, profile=profile, scheduler=scheduler)
    if not first:
        raise FallowError(f"{path}: it is empty", Exit.DATA)
    if first.count("|") == len(sacct.FIELDS) - 1:
        raise FallowError(f"{path}: the line with the names of the columns is missing (--noheader?)", Exit.DATA)
    raise FallowError(
        f"{path}: not the format of any trace that is known: sacct (`fallow simulate --help` shows the command), "
        f"the Standard Workload Format, or one of contrib/traces; its first line is {clean(first, 60)!r}",
        Exit.DATA,
    )


def _close(trace: RecordedJobs, path: Path) -> None:
    """Have nodes down, drained or maintained as a file says."""
    site, problems = trace.site, trace.problems
    nodes = {node.node for node in site.nodes}
    found, told = outages_of.read(path, nodes, site.scheduler.slurmd_timeout_s)
    trace.site = msgspec.structs.replace(
        site, outages=(*site.outages, *found.events), reservations=(*site.reservations, *found.maintenance)
    )
    trace.problems = msgspec.structs.replace(
        problems,
        bad={**problems.bad, **{f"{path.name}: {reason}": number for reason, number in told.bad.items()}},
        examples=[*problems.examples, *(f"{path.name}: {each}" for each in told.examples)][:MOST_EXAMPLES],
        assumed=[*problems.assumed, *told.assumed],
    )


def _first_line(path: Path) -> str:
    """Of the first lines the first that says something."""
    return next((line for _, line in itertools.islice(lines(path), 100) if line.strip()), "")
