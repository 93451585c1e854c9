"""Recorded clusters: readers of the formats that are known, and one door to all of them."""

from __future__ import annotations

import itertools
from pathlib import Path

from fallow.model import Exit, FallowError
from fallow.sim.traces import helios, philly, sacct, summit, swf
from fallow.sim.traces.problems import lines
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sites import Profile, from_folder
from fallow.sim.types import Recording, Scheduler
from fallow.text import clean
from fallow.traces import trace_path


def open_trace(
    name: str | Path,
    *,
    site_folder: Path | None = None,
    seed: int = 0,
    begin_day: float = 0.0,
    days: float | None = None,
    profile: Profile = "preempt",
    scheduler: Scheduler | None = None,
) -> Recording:
    """A trace by name (earth, philly, summit) or file.

    Args:
        name: the format of a file is found by its first line.
        site_folder: outputs of `scontrol` (`sites.SITE_FILES`), for the jobs of sacct.
        seed: of walltimes that are drawn.
        begin_day: days that are left out at the beginning.
        days: what is played; None: all of it, or two days of `summit`.
        profile: whether Slurm takes our nodes for others, at a site that is made up.
        scheduler: of such a site.

    Raises:
        FallowError: no such file, no such format, or nothing in it can be used.
    """
    path = trace_path(name)
    scheduler = scheduler or Scheduler()
    window = Window(seed=seed, begin_day=begin_day, days=days)
    first = next((line for _, line in itertools.islice(lines(path), 100) if line.strip()), "")
    words = first.replace("|", ",").split(",")
    if "JobID" in words and "|" in first:
        site = None if site_folder is None else from_folder(site_folder)
        return sacct.read(path, window, profile, scheduler, site)
    if site_folder is not None:
        raise FallowError(f"{path}: --site goes with the output of sacct only", Exit.USAGE)
    if first.startswith(";") or len(first.split()) == swf.FIELDS:
        return swf.read(path, window, profile, scheduler)
    if "job_id" in words and "queue" in words:
        return helios.read(path, window, profile, scheduler)
    if "active_nodes" in words:
        return philly.read(path, window, profile, scheduler)
    if "begin_s" in words:
        return summit.read(path, window, profile, scheduler)
    if not first:
        raise FallowError(f"{path}: it is empty", Exit.DATA)
    if first.count("|") == len(sacct.FIELDS) - 1:
        raise FallowError(f"{path}: the line with the names of the columns is missing (--noheader?)", Exit.DATA)
    raise FallowError(
        f"{path}: not the format of any trace that is known: sacct (`fallow simulate --help` shows the command), "
        f"the Standard Workload Format, or one of contrib/traces; its first line is {clean(first, 60)!r}",
        Exit.DATA,
    )
