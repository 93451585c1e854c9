"""Recorded clusters: readers of the formats that are known, and one door to all of them."""

import itertools
from pathlib import Path

from fallow.model import Exit, FallowError
from fallow.sim.traces import sacct, shipped, swf
from fallow.sim.traces.problems import lines
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sites import from_folder
from fallow.sim.types import Recording
from fallow.text import clean


def open_trace(name: str | Path, window: Window | None = None, site_folder: Path | None = None) -> Recording:
    """A trace by name (earth, philly, summit) or file.

    Args:
        name: the format of a file is found by its first line.
        window: what is played of it.
        site_folder: outputs of `scontrol` (`sites.SITE_FILES`), for the jobs of sacct.

    Raises:
        FallowError: no such file, no such format, or nothing in it can be used.
    """
    path, window = shipped.trace_path(name), window or Window()
    first = next((line for _, line in itertools.islice(lines(path), 100) if line.strip()), "")
    words = first.replace("|", ",").split(",")
    if "JobID" in words and "|" in first:
        return sacct.read(path, window, None if site_folder is None else from_folder(site_folder))
    if site_folder is not None:
        raise FallowError(f"{path}: --site goes with the output of sacct only", Exit.USAGE)
    if first.startswith(";") or len(first.split()) == swf.FIELDS:
        return swf.read(path, window)
    if "job_id" in words and "queue" in words:
        return shipped.read_helios(path, window)
    if "active_nodes" in words:
        return shipped.read_philly(path, window)
    if "begin_s" in words:
        return shipped.read_summit(path, window)
    if not first:
        raise FallowError(f"{path}: it is empty", Exit.DATA)
    if first.count("|") == len(sacct.FIELDS) - 1:
        raise FallowError(f"{path}: the line with the names of the columns is missing (--noheader?)", Exit.DATA)
    raise FallowError(
        f"{path}: not the format of any trace that is known: sacct (`fallow simulate --help` shows the command), "
        f"the Standard Workload Format, or one of contrib/traces; its first line is {clean(first, 60)!r}",
        Exit.DATA,
    )
