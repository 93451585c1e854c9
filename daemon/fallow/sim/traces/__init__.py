"""Traces of clusters: a reader for each format, and `open_trace` for all of them."""

import itertools
from pathlib import Path

from fallow.model import Exit, FallowError
from fallow.sim.traces import sacct, shipped, swf
from fallow.sim.traces.problems import lines
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sites import site_from_folder
from fallow.sim.types import Recording
from fallow.text import clean


def open_trace(name: str | Path, window: Window | None = None, site_folder: Path | None = None) -> Recording:
    """Open a trace by name (earth, philly, summit) or path.

    Args:
        name: name or path; the first line of a file tells its format.
        window: the part of the trace to play.
        site_folder: folder with output of `scontrol` (`sites.SITE_FILES`), for a trace from sacct.

    Raises:
        FallowError: the file does not exist, has an unknown format, or has no usable line.
    """
    path, window = shipped.trace_path(name), window or Window()
    first = next((line for _, line in itertools.islice(lines(path), 100) if line.strip()), "")
    words = first.replace("|", ",").split(",")
    if "JobID" in words and "|" in first:
        return sacct.read(path, window, None if site_folder is None else site_from_folder(site_folder))
    if site_folder is not None:
        raise FallowError(f"{path}: --site needs the output of sacct as --trace", Exit.USAGE)
    if first.startswith(";") or len(first.split()) == swf.FIELDS:
        return swf.read(path, window)
    if "job_id" in words and "queue" in words:
        return shipped.read_helios(path, window)
    if "active_nodes" in words:
        return shipped.read_philly(path, window)
    if "begin_s" in words:
        return shipped.read_summit(path, window)
    if not first:
        raise FallowError(f"{path}: the file is empty", Exit.DATA)
    if first.count("|") == len(sacct.FIELDS) - 1:
        raise FallowError(f"{path}: the line with the column names is missing; run sacct without --noheader", Exit.DATA)
    raise FallowError(
        f"{path}: unknown format; the first line is {clean(first, 60)!r}. Known: sacct (`fallow simulate --help` "
        "shows the command), the Standard Workload Format, the files of contrib/traces",
        Exit.DATA,
    )
