"""Reader of a site's accounting: the output of sacct (`COMMAND`)."""

import math
import re
from pathlib import Path

from msgspec.structs import replace

from fallow.sim.traces.problems import LAST_S, Row, Tally, table
from fallow.sim.traces.recorded import Window, recording
from fallow.sim.traces.sites import max_days, synthetic_site
from fallow.sim.types import Recording, SimJob, Site
from fallow.slurm import parse

FIELDS = (
    *("JobID", "JobIDRaw", "User", "Partition", "State", "Submit", "Start", "End", "Timelimit"),
    *("NNodes", "AllocTRES", "ReqTRES", "NodeList", "Priority"),
)
REQUIRED_COLUMNS = ("JobID", "Partition", "State", "Submit", "Start", "End", "NNodes", "NodeList")
"""Required columns; the other ones of `FIELDS` are optional."""

COMMAND = (
    "SLURM_TIME_FORMAT=%s sacct --allusers --allocations --duplicates --parsable2 "
    f"--starttime=2026-10-01 --endtime=2026-11-01 --format={','.join(FIELDS)} > jobs.txt"
)
"""The command that exports a month of a site."""

_STATES_BEFORE_START = frozenset(("PENDING", "REQUEUED", "REVOKED"))
_STATES_BEFORE_END = frozenset(("RUNNING", "SUSPENDED", "COMPLETING", "RESIZING"))


JobUsage = tuple[SimJob, int, int]
"""A job whose share of each node is not known yet, and its total numbers of GPUs and CPUs."""


def read(path: Path, window: Window, site: Site | None = None) -> Recording:
    """Read the jobs of a site. Names of users become numbers; components of a heterogeneous job become jobs.

    Args:
        path: the output of `COMMAND`, with the columns in any order.
        window: the part to play.
        site: the cluster; None: infer it from the jobs.

    Raises:
        FallowError: the file has another format, or its times are not Unix seconds.
    """
    tally = Tally(path, f"the output of: {COMMAND}")
    rows: list[JobUsage] = []
    users: dict[str, int] = {}
    # --parsable ends all lines, with the header, with a separator; --parsable2 does not.
    for number, fields in table(path, REQUIRED_COLUMNS, tally, "|"):
        if (row := _row(number, fields, tally)) is not None:
            job, gpus, cpus = row
            user = users.setdefault(job.user, len(users) + 1)
            rows.append((replace(job, user=f"u{user}"), gpus, cpus))
    tally.result()
    if site is None:
        site = _infer_site(path, rows, window, tally)
    else:
        rows = _rows_on_site(site, rows, tally)
        if site.preempt_type not in ("", "preempt/none", "preempt/partition_prio"):
            tally.assume(f"{site.preempt_type} is not simulated: no job is preempted")
    records = _share_nodes(rows, site)
    ends = [record.start_at + record.runs_s for record in records if math.isfinite(record.runs_s)]
    if not ends:
        raise tally.refuse("no job in it has ended")
    last = max([*ends, *(record.start_at for record in records)])
    # sacct shows jobs that ended after --starttime, so the trace is complete from the first end on.
    first = min(ends)
    if first >= last:
        first = min(record.start_at for record in records)
    return recording(site, records, first, last, window, tally)


def _row(number: int, row: Row, tally: Tally) -> JobUsage | None:
    job_id, state = row["JobID"].strip(), row["State"].split(" ")[0].upper()
    times = {name: row[name].strip() for name in ("Submit", "Start", "End")}
    for name, text in times.items():
        if re.match(r"\d{4}-\d\d-\d\d", text):
            raise tally.refuse(f"line {number}: {name} is {text}, not Unix seconds (SLURM_TIME_FORMAT=%s)")
    submit, start, end = (float(text) if text.isdecimal() and text != "0" else None for text in times.values())
    never_ran = state in _STATES_BEFORE_START or (start is not None and end == start)
    if start is None:
        never_ran = never_ran or state.startswith(("CANCELLED", "FAILED", "DEADLINE", "NODE_FAIL"))
    node_list, partition = row["NodeList"], row["Partition"].split(",")[0].strip()
    nodelist = tuple(parse.nodes("" if node_list.startswith("None") else node_list))
    if not re.match(r"\d", job_id):
        tally.reject(number, "no job id", job_id)
    elif "." in job_id:
        tally.skip("a step of a job")
    elif never_ran:
        tally.skip("it never ran")
    elif submit is None or start is None:
        tally.reject(number, "no time", times["Submit"] if submit is None else times["Start"])
    elif max(submit, start, end or 0.0) > LAST_S:
        tally.reject(number, "later than 2106", "|".join(times.values()))
    elif end is None and state not in _STATES_BEFORE_END:
        tally.reject(number, "it is over, and has no end", times["End"])
    elif end is not None and end < start:
        tally.reject(number, "it ends before it starts", f"{times['Start']}|{times['End']}")
    elif not nodelist or len(nodelist) != parse.count(row["NNodes"]):
        tally.reject(number, "NNodes is not how many NodeList names", f"{row['NNodes']}|{node_list}")
    elif not partition:
        tally.reject(number, "no partition")
    else:
        limit_s = parse.duration(row.get("Timelimit", ""))
        job = SimJob(
            job_id=row.get("JobIDRaw", "").strip() or job_id,
            user=row.get("User", ""),
            submit_at=min(submit, start),
            start_at=start,
            runs_s=math.inf if end is None else end - start,
            limit_s=math.inf if limit_s is None else limit_s,
            partition=partition,
            nodes=len(nodelist),
            priority=parse.count(row.get("Priority", "")),
            nodelist=nodelist,
        )
        tres = row.get("AllocTRES", "") or row.get("ReqTRES", "")
        return job, _tres(tres, "gres/gpu"), _tres(tres, "cpu")
    return None


def _tres(text: str, name: str) -> int:
    """The number of `name` in TRES such as `billing=8,cpu=8,gres/gpu=2,gres/gpu:a100=2,mem=64G,node=1`."""
    match = re.search(rf"(?:^|,){name}=(\d+)", text)
    if match:
        return int(match[1])
    return sum(int(each) for each in re.findall(rf"(?:^|,){name}:[^=,]+=(\d+)", text))


# -- the cluster ----------------------------------------------------------------------------------------------------


def _rows_on_site(site: Site, rows: list[JobUsage], tally: Tally) -> list[JobUsage]:
    """The jobs whose partition exists on the site and is large enough."""
    sizes = {p.partition: len(p.nodes) for p in site.partitions}
    rows_on_site: list[JobUsage] = []
    for row in rows:
        job, _, _ = row
        if job.partition not in sizes:
            tally.skip("its partition is not among the site's")
        elif job.nodes > sizes[job.partition]:
            tally.skip("it has more nodes than its partition")
        else:
            rows_on_site.append(row)
    if not rows_on_site:
        raise tally.refuse(f"no job is in a partition of the site ({', '.join(sorted(sizes))})")
    return rows_on_site


def _infer_site(path: Path, rows: list[JobUsage], window: Window, tally: Tally) -> Site:
    """Infer a site: its nodes are the nodes of the jobs."""
    groups: dict[str, set[str]] = {}
    gpus: dict[str, int] = {}
    cpus: dict[str, int] = {}
    for job, job_gpus, job_cpus in rows:
        groups.setdefault(job.partition, set()).update(job.nodelist)
        for node in job.nodelist:
            gpus[node] = max(gpus.get(node, 0), -(-job_gpus // job.nodes))
            cpus[node] = max(cpus.get(node, 1), -(-job_cpus // job.nodes))
    for partition, nodes in groups.items():
        tally.assume(f"{len(nodes)} nodes in {partition}: those that jobs ran on")
        tally.check_size(len(nodes))
    names = {partition: sorted(nodes) for partition, nodes in groups.items()}
    site = synthetic_site(path.name.partition(".")[0], names, 0, window, max_days(job for job, _, _ in rows))
    tally.assume("GPUs and CPUs of a node are the most that a job had on it")
    return replace(site, nodes=tuple(replace(n, gpus=gpus[n.node], cpus=cpus[n.node]) for n in site.nodes))


def _share_nodes(rows: list[JobUsage], site: Site) -> list[SimJob]:
    """Give jobs whole nodes if they have all GPUs or all CPUs of their nodes, else the larger of the two shares."""
    nodes = {node.node: node for node in site.nodes}
    slots = {p.partition: max(nodes[n].gpus or nodes[n].cpus for n in p.nodes) for p in site.partitions if p.nodes}
    cpus = {p.partition: max(nodes[n].cpus for n in p.nodes) for p in site.partitions if p.nodes}
    jobs: list[SimJob] = []
    for job, job_gpus, job_cpus in rows:
        slots_per_node = slots[job.partition]
        slots_wanted = max(
            -(-job_gpus // job.nodes), math.ceil(job_cpus / job.nodes * slots_per_node / cpus[job.partition])
        )
        is_exclusive = slots_wanted >= slots_per_node or not (job_gpus or job_cpus)
        jobs.append(
            replace(job, gpus_per_node=slots_per_node if is_exclusive else max(1, slots_wanted), exclusive=is_exclusive)
        )
    return jobs
