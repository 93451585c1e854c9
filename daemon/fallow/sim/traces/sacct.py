"""What a site's accounting says of its own last month: the output of `COMMAND`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from fallow.sim.traces.problems import LAST_S, Tally, lines
from fallow.sim.traces.recorded import DAY_S, Record, RecordedJobs, Window
from fallow.sim.traces.sites import LONGEST_S, Profile, made_up
from fallow.sim.types import JobPart, Scheduler, Site
from fallow.slurm import parse

FIELDS = (
    *("JobID", "JobIDRaw", "User", "Account", "Partition", "QOS", "State", "Submit", "Start", "End", "Timelimit"),
    *("NNodes", "AllocTRES", "ReqTRES", "NodeList", "Priority"),
)
NEEDED = ("JobID", "Partition", "State", "Submit", "Start", "End", "NNodes")
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
    """A job, or a component of a heterogeneous one, before the sizes of nodes are known."""

    record: Record
    partition: str
    nodes: int
    gpus: int
    cpus: int
    "in all"
    leader: str
    "of a heterogeneous job; else empty"


def read(
    path: Path, window: Window, profile: Profile, scheduler: Scheduler, site: Site | None = None, names: bool = False
) -> RecordedJobs:
    """The jobs of a site.

    Args:
        path: the output of `COMMAND`, the columns in any order.
        window: what to play of it.
        profile: of a site that is made up from the jobs.
        scheduler: of such a site.
        site: where it is known.
        names: keep the names of users and accounts, else they become numbers.

    Raises:
        FallowError: it is no such file, or its times are no Unix seconds.
    """
    tally = Tally(path, f"the output of: {COMMAND}")
    rows = _rows(path, tally, names)
    if not rows:
        tally.problems()
        raise tally.refuse("no job in it ran")
    if site is None:
        site = _inferred(path, rows, profile, scheduler, tally)
    else:
        rows = _within(site, rows, tally)
        if site.preempt_type not in ("", "preempt/none", "preempt/partition_prio"):
            tally.assume(f"{site.preempt_type} is not simulated: nobody's jobs give way to others'")
    site = _in_slots(site)
    records = _joined(rows, _each(site), tally)
    ends = [record.end_at for record in records if math.isfinite(record.end_at)]
    if not ends:
        raise tally.refuse("no job in it has ended")
    last = max([*ends, *(record.start_at for record in records)])
    # sacct shows what had not ended before --starttime.
    first = min(ends)
    if first >= last:
        first = min(record.start_at for record in records)
    return RecordedJobs(site, records, first, last, window, tally)


# ---------------------------------------------------------------------------------------------------------------


def _rows(path: Path, tally: Tally, names: bool) -> list[_Row]:
    header: list[str] = []
    found: list[_Row] = []
    users: dict[str, str] = {}
    accounts: dict[str, str] = {}
    seen: dict[str, int] = {}
    for number, line in lines(path):
        fields = line.split("|")
        if not header:
            header = [name.strip() for name in fields]
            if missing := [name for name in NEEDED if name not in header]:
                raise tally.refuse(f"column {missing[0]} is missing")
            continue
        if not line.strip():
            continue
        tally.read += 1
        # --parsable ends lines with a separator, --parsable2 does not; the header ends alike.
        if len(fields) != len(header):
            tally.bad(number, f"not {len(header)} fields")
            continue
        row = dict(zip(header, fields, strict=True))
        parsed = _row(number, row, tally)
        if parsed is None:
            continue
        tally.use()
        record = parsed.record
        times = seen[record.job_id] = seen.get(record.job_id, -1) + 1
        if not names:
            user, account = _alias(users, "u", record.user), _alias(accounts, "a", record.account)
            record = replace(record, user=user, account=account)
        # A job that was requeued has several rows.
        found.append(replace(parsed, record=replace(record, job_id=f"{record.job_id}.{times}") if times else record))
    return found


def _alias(aliases: dict[str, str], kind: str, name: str) -> str:
    """A number in place of a name, in the order in which they come."""
    return aliases.setdefault(name, f"{kind}{len(aliases) + 1}") if name else ""


def _row(number: int, row: Mapping[str, str], tally: Tally) -> _Row | None:
    job_id, state = row["JobID"].strip(), row["State"].split(" ")[0].upper()
    if not re.match(r"\d", job_id):
        tally.bad(number, "no job id", job_id)
        return None
    if "." in job_id:
        tally.left_out("a step of a job")
        return None
    times = {name: row[name].strip() for name in ("Submit", "Start", "End")}
    for name, text in times.items():
        if re.match(r"\d{4}-\d\d-\d\d", text):
            raise tally.refuse(f"line {number}: {name} is {text}, and must be Unix seconds (SLURM_TIME_FORMAT=%s)")
    submit, start, end = (float(text) if text.isdigit() and text != "0" else None for text in times.values())
    if state in _NEVER or (start is None and state.startswith(("CANCELLED", "FAILED", "DEADLINE", "NODE_FAIL"))):
        tally.left_out("it never ran")
        return None
    if submit is None or start is None:
        tally.bad(number, "no time", times["Submit"] if submit is None else times["Start"])
        return None
    if max(submit, start, end or 0.0) > LAST_S:
        tally.bad(number, "later than 2106", "|".join(times.values()))
        return None
    if end is None and state not in _RUNNING:
        tally.bad(number, "it is over, and has no end", times["End"])
        return None
    if end is not None and end < start:
        tally.bad(number, "it ends before it starts", f"{times['Start']}|{times['End']}")
        return None
    if end == start:
        tally.left_out("it never ran")
        return None
    nodes = parse.count(row["NNodes"])
    if nodes < 1:
        tally.bad(number, "no nodes", row["NNodes"])
        return None
    tres = row.get("AllocTRES", "") or row.get("ReqTRES", "")
    listed = row.get("NodeList", "")
    nodelist = tuple(parse.nodes("" if listed.startswith("None") else listed))
    if nodelist and len(nodelist) != nodes:
        tally.bad(number, "NNodes is not how many NodeList names", f"{row['NNodes']}|{listed}")
        return None
    if not row["Partition"].strip():
        tally.bad(number, "no partition")
        return None
    raw = row.get("JobIDRaw", "").strip() or job_id
    record = Record(
        job_id=raw,
        user=row.get("User", ""),
        submit_at=min(submit, start),
        start_at=start,
        end_at=math.inf if end is None else end,
        parts=(),
        limit_s=parse.duration(row.get("Timelimit", "")),
        priority=parse.count(row.get("Priority", "")),
        account=row.get("Account", ""),
        qos=row.get("QOS", ""),
        nodelist=nodelist,
    )
    return _Row(
        record=record,
        partition=row["Partition"].split(",")[0].strip(),
        nodes=nodes,
        gpus=_tres(tres, "gres/gpu"),
        cpus=_tres(tres, "cpu"),
        leader=job_id.partition("+")[0] if "+" in job_id else "",
    )


def _tres(text: str, name: str) -> int:
    """A number in `billing=8,cpu=8,gres/gpu=2,gres/gpu:a100=2,mem=64G,node=1`."""
    found = re.search(rf"(?:^|,){name}=(\d+)", text)
    if found:
        return int(found[1])
    return sum(int(each) for each in re.findall(rf"(?:^|,){name}:[^=,]+=(\d+)", text))


# -- the cluster ------------------------------------------------------------------------------------------------


def _within(site: Site, rows: list[_Row], tally: Tally) -> list[_Row]:
    """Those that can run on the site that was given."""
    sizes = {p.partition: len(p.nodes) for p in site.partitions}
    kept: list[_Row] = []
    for row in rows:
        if row.partition not in sizes:
            tally.left_out("its partition is not among the site's")
        elif row.nodes > sizes[row.partition]:
            tally.left_out("it has more nodes than its partition")
        else:
            kept.append(row)
    if not kept:
        raise tally.refuse(f"none of its partitions is among those of the site ({', '.join(sorted(sizes))})")
    return kept


def _inferred(path: Path, rows: list[_Row], profile: Profile, scheduler: Scheduler, tally: Tally) -> Site:
    """Nodes are those that jobs had; where none are named, as many as were ever in use at once."""
    of: dict[str, dict[str, None]] = {}
    gpus: dict[str, int] = {}
    cpus: dict[str, int] = {}
    by_partition: dict[str, list[_Row]] = {}
    for row in rows:
        by_partition.setdefault(row.partition, []).append(row)
    for partition, some in by_partition.items():
        nodes = dict.fromkeys(node for row in some for node in row.record.nodelist)
        widest = max(row.nodes for row in some)
        if len(nodes) < widest:
            wanted = max(widest, _peak(some))
            tally.check_size(wanted)
            nodes = dict.fromkeys(f"{partition}-{number:05d}" for number in range(1, wanted + 1))
            tally.assume(f"{len(nodes)} nodes in {partition}: as many as were in use at once, for nobody names them")
        else:
            tally.assume(f"{len(nodes)} nodes in {partition}: those that jobs ran on")
        of[partition] = nodes
        for node in nodes:
            gpus[node] = max(gpus.get(node, 0), max(-(-row.gpus // row.nodes) for row in some))
            cpus[node] = max(cpus.get(node, 1), max(-(-row.cpus // row.nodes) for row in some))
    longest_s = max(
        [LONGEST_S, *(row.record.end_at - row.record.start_at for row in rows if math.isfinite(row.record.end_at))]
    )
    site = made_up(
        path.name.partition(".")[0],
        {partition: sorted(nodes) for partition, nodes in of.items()},
        gpus=0,
        profile=profile,
        scheduler=scheduler,
        max_time_s=math.ceil(longest_s / DAY_S) * DAY_S,
    )
    tally.assume("GPUs and CPUs of a node are the most that a job had on one")
    return msgspec.structs.replace(
        site,
        nodes=tuple(msgspec.structs.replace(n, gpus=gpus[n.node], cpus=cpus[n.node]) for n in site.nodes),
    )


def _peak(rows: list[_Row]) -> int:
    """Most nodes in use at once, jobs of less than a node counted by their GPUs or CPUs."""
    most_gpus = max(-(-row.gpus // row.nodes) for row in rows)
    most_cpus = max(-(-row.cpus // row.nodes) for row in rows)
    steps: list[tuple[float, float]] = []
    for row in rows:
        share = max(
            row.gpus / (row.nodes * most_gpus) if most_gpus else 0.0,
            row.cpus / (row.nodes * most_cpus) if most_cpus else 0.0,
        )
        used = row.nodes * (share or 1.0)
        steps += [(row.record.start_at, used), (row.record.end_at, -used)]
    most = now = 0.0
    for _, change in sorted(steps):
        now += change
        most = max(most, now)
    return math.ceil(most - 1e-6)


def _in_slots(site: Site) -> Site:
    """Nodes without GPUs are shared by CPUs: those count as its GPUs."""
    return msgspec.structs.replace(
        site, nodes=tuple(n if n.gpus else msgspec.structs.replace(n, gpus=n.cpus) for n in site.nodes)
    )


def _each(site: Site) -> dict[str, tuple[int, int]]:
    """Partition -> slots and CPUs of its largest nodes."""
    nodes = {node.node: node for node in site.nodes}
    return {
        p.partition: (max(nodes[name].gpus for name in p.nodes), max(nodes[name].cpus for name in p.nodes))
        for p in site.partitions
        if p.nodes
    }


def _joined(rows: list[_Row], each: Mapping[str, tuple[int, int]], tally: Tally) -> list[Record]:
    """Jobs with their parts; components of a heterogeneous job are one."""
    found: list[Record] = []
    leaders: dict[tuple[str, float], int] = {}
    for row in rows:
        record = replace(row.record, parts=(_part(row, *each[row.partition]),))
        key = (row.leader, record.start_at)
        if row.leader and key in leaders:
            first = found[leaders[key]]
            nodelist = (*first.nodelist, *record.nodelist)
            found[leaders[key]] = replace(first, parts=(*first.parts, *record.parts), nodelist=nodelist)
            continue
        if row.leader:
            leaders[key] = len(found)
        found.append(record)
    if leaders:
        tally.assume(f"components that belong to one of {len(leaders)} heterogeneous jobs start and end together")
    return found


def _part(row: _Row, slots: int, cpus: int) -> JobPart:
    """Whole nodes where it has all GPUs or all CPUs of them; else the larger of its two shares."""
    gpus = -(-row.gpus // row.nodes)
    by_cpu = math.ceil(row.cpus / row.nodes * slots / cpus) if cpus else 0
    wanted = max(gpus, by_cpu)
    whole = wanted >= slots or not (row.gpus or row.cpus)
    return JobPart(
        partition=row.partition, nodes=row.nodes, gpus_per_node=slots if whole else max(1, wanted), exclusive=whole
    )
