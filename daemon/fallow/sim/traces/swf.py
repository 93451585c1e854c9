"""The Standard Workload Format, version 2.2, of the Parallel Workloads Archive.

Each line has 18 numbers; -1 means unknown. Lines that begin with `;` are a header of `Key: value`. The format:
https://www.cs.huji.ac.il/labs/parallel/workload/swf.html
"""

import math
import re
from pathlib import Path

from fallow.sim.traces.problems import LAST_S, Tally, lines
from fallow.sim.traces.recorded import Window, recording
from fallow.sim.traces.sites import max_days, synthetic_site
from fallow.sim.types import Recording, SimJob

FIELDS = 18
_ID, _SUBMIT, _WAIT, _RUN, _PROCESSORS, _ASKED_PROCESSORS, _ASKED_S, _STATUS = 0, 1, 2, 3, 4, 7, 8, 10
_USER, _PARTITION = 11, 15
_PARTIAL = (2, 3, 4)
"""Status values of lines that are parts of a job; the job itself has its own line."""


def read(path: Path, window: Window) -> Recording:
    """Read the jobs of a log. A node has MaxProcs / MaxNodes processors; jobs that need fewer share nodes.

    Raises:
        FallowError: the file has another format.
    """
    tally = Tally(path, "the Standard Workload Format: 18 numbers in each line")
    header: dict[str, str] = {}
    partitions: dict[int, str] = {}
    rows: list[list[float]] = []
    for number, line in lines(path):
        if line.startswith(";"):
            key, _, value = line.lstrip("; \t").partition(":")
            header.setdefault(key.strip(), value.strip())
            if key.strip() == "Partition" and (match := re.match(r"\s*(\d+)\s+(\S+)", value)):
                partitions[int(match[1])] = match[2]
        elif line.strip():
            tally.lines_read += 1
            if (row := _row(number, line.split(), _header_number(header, "MaxProcs"), tally)) is not None:
                rows.append(row)
    tally.result()
    processors_per_node, nodes = _size(header, rows, tally)
    begin = _header_number(header, "UnixStartTime")
    if begin is None:
        tally.assume("the log begins in 1970: its header has no UnixStartTime")
    partition_numbers = {int(row[_PARTITION]) for row in rows}
    names = {
        number: partitions.get(number, f"p{number}" if number >= 0 else "batch") for number in sorted(partition_numbers)
    }
    records = [_record(row, begin or 0.0, names, processors_per_node, nodes) for row in rows]
    if processors_per_node > 1:
        tally.assume(f"a node has {processors_per_node} processors, which jobs share as they would GPUs")
    if len(names) > 1:
        tally.assume("all partitions have all nodes")
    hosts = [f"n{number:05d}" for number in range(1, nodes + 1)]
    groups = dict.fromkeys(names.values(), hosts)
    site = synthetic_site(path.name.partition(".")[0], groups, processors_per_node, window, max_days(records))
    first = min(record.submit_at for record in records)
    last = max(record.start_at + record.runs_s for record in records)
    return recording(site, records, first, last, window, tally)


def _row(number: int, words: list[str], most: float | None, tally: Tally) -> list[float] | None:
    """The numbers of a line if it is a job that ran, else None. `most`: number of processors of the cluster."""
    if len(words) != FIELDS:
        tally.reject(number, f"not {FIELDS} fields")
        return None
    try:
        row = [float(word) for word in words]
    except ValueError as error:
        tally.reject(number, "not a number", str(error))
        return None
    if not all(map(math.isfinite, row)):
        tally.reject(number, "not a number")
    elif row[_STATUS] in _PARTIAL:
        tally.skip("part of a job that has a line of its own")
    elif row[_RUN] < 0 and row[_STATUS] == 1:
        tally.reject(number, "completed, and no runtime")
    elif row[_RUN] <= 0:
        tally.skip("it never ran")
    elif row[_SUBMIT] < 0:
        tally.reject(number, "submitted before the log begins", words[_SUBMIT])
    elif row[_SUBMIT] + max(0.0, row[_WAIT]) + row[_RUN] > LAST_S:
        tally.reject(number, "it ends after more than a hundred years")
    elif _processors(row) <= 0:
        tally.reject(number, "no processors")
    elif most and _processors(row) > most:
        tally.reject(number, "more processors than the header's MaxProcs", f"{_processors(row):.0f}")
    else:
        return row
    return None


def _size(header: dict[str, str], rows: list[list[float]], tally: Tally) -> tuple[int, int]:
    """Number of processors of each node, and number of nodes."""
    nodes, processors = _header_number(header, "MaxNodes"), _header_number(header, "MaxProcs")
    widest = max(_processors(row) for row in rows)
    if not nodes or nodes < 1:
        nodes = max(processors or 0, widest)
        tally.assume(f"{nodes:g} nodes of one processor: the header has no MaxNodes")
        tally.check_size(nodes)
        return 1, int(nodes)
    processors_per_node = max(1, round((processors or nodes) / nodes))
    if widest > processors_per_node * nodes:
        nodes = math.ceil(widest / processors_per_node)
        tally.assume(f"{nodes:g} nodes: the widest job needs more than the header says")
    tally.check_size(nodes)
    return processors_per_node, int(nodes)


def _header_number(header: dict[str, str], key: str) -> float | None:
    match = re.match(r"\d+", header.get(key, ""))
    return float(match[0]) if match else None


def _processors(row: list[float]) -> float:
    return row[_PROCESSORS] if row[_PROCESSORS] > 0 else row[_ASKED_PROCESSORS]


def _record(row: list[float], begin: float, names: dict[int, str], processors_per_node: int, nodes: int) -> SimJob:
    submit = begin + row[_SUBMIT]
    processors = int(_processors(row))
    return SimJob(
        job_id=f"{row[_ID]:.0f}",
        user=f"u{row[_USER]:.0f}",
        submit_at=submit,
        start_at=submit + max(0.0, row[_WAIT]),
        runs_s=row[_RUN],
        limit_s=max(row[_ASKED_S], row[_RUN], 60.0) if row[_ASKED_S] > 0 else math.inf,
        partition=names[int(row[_PARTITION])],
        nodes=min(nodes, math.ceil(processors / processors_per_node)),
        gpus_per_node=min(processors, processors_per_node),
        exclusive=processors >= processors_per_node,
    )
