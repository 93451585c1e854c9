"""What a site's accounting says of its own last month: the output of `COMMAND`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from fallow.sim.traces.problems import LAST_S, Row, Tally, table
from fallow.sim.traces.recorded import DAY_S, Record, Window, recording
from fallow.sim.traces.sites import LONGEST_S, Profile, made_up
from fallow.sim.types import JobPart, Recording, Scheduler, Site
from fallow.slurm import parse

FIELDS = (
    *("JobID", "JobIDRaw", "User", "Partition", "State", "Submit", "Start", "End", "Timelimit"),
    *("NNodes", "AllocTRES", "ReqTRES", "NodeList", "Priority"),
)
NEEDED = ("JobID", "Partition", "State", "Submit", "Start", "End", "NNodes", "NodeList")
"""Columns without which nothing can be played; the others are used where they are."""

COMMAND = (
    "SLURM_TIME_FORMAT=%s sacct --allusers --allocations --duplicates --parsable2 "
    f"--starttime=2026-10-01 --endtime=2026-11-01 --format={','.join(FIELDS)} > jobs.txt"
)
"""What a site runs to have its own month simulated."""

_NEVER = frozenset(("PENDING", "REQUEUED", "REVOKED"))
_RUNNING = frozenset(("RUNNING", "SUSPENDED", "COMPLETING", "RESIZING"))


@dataclass(frozen=True, slots=True)
class _Row:
    """A job before the sizes of nodes are known."""

    fields: Row
    submit_at: float
    start_at: float
    end_at: float
    nodelist: tuple[str, ...]
    gpus: int
    cpus: int
    "in all"

    @property
    def partition(self) -> str:
        return self.fields["Partition"].split(",")[0].strip()


def read(path: Path, window: Window, profile: Profile, scheduler: Scheduler, site: Site | None = None) -> Recording:
    """The jobs of a site. Names of users become numbers; components of a heterogeneous job become jobs.

    Args:
        path: the output of `COMMAND`, the columns in any order.
        window: what to play of it.
        profile: of a site that is made up from the jobs.
        scheduler: of such a site.
        site: where it is known.

    Raises:
        FallowError: it is no such file, or its times are no Unix seconds.
    """
    tally = Tally(path, f"the output of: {COMMAND}")
    rows: list[_Row] = []
    # --parsable ends lines with a separator, --parsable2 does not; the header ends alike.
    for number, fields in table(path, NEEDED, tally, "|"):
        if (row := _row(number, fields, tally)) is not None:
            tally.use()
            rows.append(row)
    if not rows:
        tally.result()
        raise tally.refuse("no job in it ran")
    if site is None:
        site = _inferred(path, rows, profile, scheduler, tally)
    else:
        rows = _within(site, rows, tally)
        if site.preempt_type not in ("", "preempt/none", "preempt/partition_prio"):
            tally.assume(f"{site.preempt_type} is not simulated: nobody's jobs give way to others'")
    records = _records(rows, site)
    ends = [record.end_at for record in records if math.isfinite(record.end_at)]
    if not ends:
        raise tally.refuse("no job in it has ended")
    last = max([*ends, *(record.start_at for record in records)])
    # sacct shows what had not ended before --starttime.
    first = min(ends)
    if first >= last:
        first = min(record.start_at for record in records)
    return recording(site, records, first, last, window, tally)


def _row(number: int, row: Row, tally: Tally) -> _Row | None:
    job_id, state = row["JobID"].strip(), row["State"].split(" ")[0].upper()
    times = {name: row[name].strip() for name in ("Submit", "Start", "End")}
    for name, text in times.items():
        if re.match(r"\d{4}-\d\d-\d\d", text):
            raise tally.refuse(f"line {number}: {name} is {text}, and must be Unix seconds (SLURM_TIME_FORMAT=%s)")
    submit, start, end = (float(text) if text.isdigit() and text != "0" else None for text in times.values())
    never_ran = state in _NEVER or (start is not None and end == start)
    if start is None:
        never_ran = never_ran or state.startswith(("CANCELLED", "FAILED", "DEADLINE", "NODE_FAIL"))
    listed = row["NodeList"]
    nodelist = tuple(parse.nodes("" if listed.startswith("None") else listed))
    if not re.match(r"\d", job_id):
        tally.bad(number, "no job id", job_id)
    elif "." in job_id:
        tally.left_out("a step of a job")
    elif never_ran:
        tally.left_out("it never ran")
    elif submit is None or start is None:
        tally.bad(number, "no time", times["Submit"] if submit is None else times["Start"])
    elif max(submit, start, end or 0.0) > LAST_S:
        tally.bad(number, "later than 2106", "|".join(times.values()))
    elif end is None and state not in _RUNNING:
        tally.bad(number, "it is over, and has no end", times["End"])
    elif end is not None and end < start:
        tally.bad(number, "it ends before it starts", f"{times['Start']}|{times['End']}")
    elif not nodelist or len(nodelist) != parse.count(row["NNodes"]):
        tally.bad(number, "NNodes is not how many NodeList names", f"{row['NNodes']}|{listed}")
    elif not row["Partition"].strip():
        tally.bad(number, "no partition")
    else:
        tres = row.get("AllocTRES", "") or row.get("ReqTRES", "")
        end_at = math.inf if end is None else end
        return _Row(row, min(submit, start), start, end_at, nodelist, _tres(tres, "gres/gpu"), _tres(tres, "cpu"))
    return None


def _tres(text: str, name: str) -> int:
    """A number in `billing=8,cpu=8,gres/gpu=2,gres/gpu:a100=2,mem=64G,node=1`."""
    found = re.search(rf"(?:^|,){name}=(\d+)", text)
    if found:
        return int(found[1])
    return sum(int(each) for each in re.findall(rf"(?:^|,){name}:[^=,]+=(\d+)", text))


# -- the cluster ----------------------------------------------------------------------------------------------------


def _within(site: Site, rows: list[_Row], tally: Tally) -> list[_Row]:
    """Those that can run on the site that was given."""
    sizes = {p.partition: len(p.nodes) for p in site.partitions}
    kept: list[_Row] = []
    for row in rows:
        if row.partition not in sizes:
            tally.left_out("its partition is not among the site's")
        elif len(row.nodelist) > sizes[row.partition]:
            tally.left_out("it has more nodes than its partition")
        else:
            kept.append(row)
    if not kept:
        raise tally.refuse(f"none of its partitions is among those of the site ({', '.join(sorted(sizes))})")
    return kept


def _inferred(path: Path, rows: list[_Row], profile: Profile, scheduler: Scheduler, tally: Tally) -> Site:
    """Nodes are those that jobs had."""
    groups: dict[str, set[str]] = {}
    gpus: dict[str, int] = {}
    cpus: dict[str, int] = {}
    for row in rows:
        groups.setdefault(row.partition, set()).update(row.nodelist)
        for node in row.nodelist:
            gpus[node] = max(gpus.get(node, 0), -(-row.gpus // len(row.nodelist)))
            cpus[node] = max(cpus.get(node, 1), -(-row.cpus // len(row.nodelist)))
    for partition, nodes in groups.items():
        tally.assume(f"{len(nodes)} nodes in {partition}: those that jobs ran on")
        tally.check_size(len(nodes))
    longest_s = max([LONGEST_S, *(row.end_at - row.start_at for row in rows if math.isfinite(row.end_at))])
    site = made_up(
        path.name.partition(".")[0],
        {partition: sorted(nodes) for partition, nodes in groups.items()},
        gpus=0,
        profile=profile,
        scheduler=scheduler,
        max_time_s=math.ceil(longest_s / DAY_S) * DAY_S,
    )
    tally.assume("GPUs and CPUs of a node are the most that a job had on it")
    return replace(site, nodes=tuple(replace(n, gpus=gpus[n.node], cpus=cpus[n.node]) for n in site.nodes))


def _records(rows: list[_Row], site: Site) -> list[Record]:
    nodes = {node.node: node for node in site.nodes}
    slots = {p.partition: max(nodes[n].gpus or nodes[n].cpus for n in p.nodes) for p in site.partitions if p.nodes}
    cpus = {p.partition: max(nodes[n].cpus for n in p.nodes) for p in site.partitions if p.nodes}
    seen: dict[str, int] = {}
    users: dict[str, int] = {}
    found = []
    for row in rows:
        fields, name = row.fields, row.partition
        job_id = fields.get("JobIDRaw", "").strip() or fields["JobID"].strip()
        times = seen[job_id] = seen.get(job_id, -1) + 1
        found.append(
            Record(
                job_id=f"{job_id}.{times}" if times else job_id,  # a job that was requeued has several rows
                user=f"u{users.setdefault(fields.get('User', ''), len(users) + 1)}",
                submit_at=row.submit_at,
                start_at=row.start_at,
                end_at=row.end_at,
                part=_part(row, slots[name], cpus[name]),
                limit_s=parse.duration(fields.get("Timelimit", "")),
                priority=parse.count(fields.get("Priority", "")),
                nodelist=row.nodelist,
            )
        )
    return found


def _part(row: _Row, slots: int, cpus: int) -> JobPart:
    """Whole nodes where it has all GPUs or all CPUs of them; else the larger of its two shares."""
    nodes = len(row.nodelist)
    gpus = -(-row.gpus // nodes)
    wanted = max(gpus, math.ceil(row.cpus / nodes * slots / cpus))
    whole = wanted >= slots or not (row.gpus or row.cpus)
    return JobPart(
        partition=row.partition, nodes=nodes, gpus_per_node=slots if whole else max(1, wanted), exclusive=whole
    )
