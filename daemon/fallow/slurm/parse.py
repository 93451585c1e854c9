"""Readers of what Slurm's commands print: pure functions, tried on real output of 22.05, 24.11, 25.11
and 26.05.

Text, not `--json`: the JSON of 22.05 ignores filters, and its shape changes with every release. What users
can choose (job names, comments) may hold any character, line ends too, so rows of jobs carry separators
that nobody can guess (`JobFormat`). What only administrators choose is read from `scontrol -o`, where the
first `Key=` of a line is the true one.

An unknown state stays as the text it is; a time or number that cannot be read is None or 0, never an error.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from fallow.model import ClusterConfig, JobInfo, NodeInfo, PartitionInfo, ReservationInfo

ENDED_STATES = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
    | {"REVOKED", "TIMEOUT"}
)
"Job states after which nothing of a job is left (squeue(1), JOB STATE CODES)."

_NOTHING = frozenset(
    ["", "(null)", "N/A", "n/a", "None", "Unknown", "UNLIMITED", "INFINITE", "INVALID", "NOT_SET", "Partition_Limit"]
)
# sinfo(1), NODE STATE CODES: one character behind the state stands for a flag
_STATE_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
_FLAG_NAMES = {"MAINT": "MAINTENANCE", "NO_RESPOND": "NOT_RESPONDING", "RES": "RESERVED"}
_MULTIPLES = {"K": 1024, "M": 1024**2, "G": 1024**3}


# ---------------------------------------------------------------------------------------------------------------
# Small values
# ---------------------------------------------------------------------------------------------------------------


def word(text: str) -> str:
    """The text, or "" for Slurm's ways to say that there is none."""
    text = text.strip()
    return "" if text in _NOTHING else text


def nodes(text: str) -> list[str]:
    """Names in a folded node list, sorted; [] for none. A list that cannot be read counts as none."""
    text = word(text)
    if not text or text == "ALL":
        return []
    if not any(mark in text for mark in "[],@"):
        return [text]  # by far the most: jobs of one node
    try:
        # NOGROUP: else `@name` in a node list would make ClusterShell run the site's group commands
        return [str(name) for name in NodeSet(text, resolver=RESOLVER_NOGROUP)]
    except NodeSetException:
        return []


def folded(found: Collection[str]) -> str:
    """Names as a node list, `n[1-3],gpu7`; empty for none."""
    return str(NodeSet.fromlist(sorted(found), resolver=RESOLVER_NOGROUP)) if found else ""


def when(text: str) -> float | None:
    """A point in time in Unix seconds: epoch (SLURM_TIME_FORMAT=%s) or ISO in UTC (TZ=UTC); else None."""
    text = word(text)
    if text.isdigit():
        return float(text) or None
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp()


def duration(text: str) -> float | None:
    """Seconds of `5:00` (minutes:seconds), `1:00:00`, `1-00:00:00`, `2-12` (days-hours), `90` (minutes); None:
    unlimited or not given.
    """
    text = word(text)
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return float(int(days) * 86400 + hours * 3600 + minutes * 60 + seconds)
    if len(numbers) == 3:
        return float(numbers[0] * 3600 + numbers[1] * 60 + numbers[2])
    minutes, seconds = [*numbers, 0][:2]
    return float(minutes * 60 + seconds)


def count(text: str) -> int:
    """A number of things: `8`, `8-8` (the least of a range), `2K`; 0 when there is none."""
    match = re.match(r"(\d+(?:\.\d+)?)([KMG]?)", word(text))
    return int(float(match[1]) * _MULTIPLES.get(match[2], 1)) if match else 0


def gpu_types(text: str) -> dict[str, int]:
    """GPUs by type in a list of gres or TRES, type "" where none is named: `gpu:a100:2(IDX:0,2),nvme:1`,
    `gres:gpu:2`, `gres/gpu:a100=2`, `gpu`.
    """
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", word(text)).split(","):
        name, *rest = re.split("[:=]", re.sub("^gres[:/]", "", item))
        if name == "gpu":
            number = rest.pop() if rest and re.fullmatch(r"\d+[KMG]?", rest[-1]) else "1"
            kind = ":".join(rest)
            found[kind] = found.get(kind, 0) + count(number)
    return found


def gpus(text: str) -> int:
    """GPUs in a gres list: `gpu:4`, `gpu:a100:2(IDX:0,2),gpu:v100:1,nvme:1`."""
    return sum(gpu_types(text).values())


def megabytes(text: str) -> int:
    """MiB of `4000M`, `2.5G`, `1T`, `500` (MiB); 0 when there is none."""
    match = re.match(r"(\d+(?:\.\d+)?)([KMGTP]?)", word(text))
    return int(float(match[1]) * 1024.0 ** ("KMGTP".index(match[2] or "M") - 1)) if match else 0


def names(text: str) -> list[str]:
    """Words of a list with commas; [] for none and for ALL."""
    return [] if text.strip() == "ALL" else [name for name in word(text).split(",") if name]


def node_state(text: str) -> tuple[str, list[str]]:
    """Base state and flags of `IDLE+PLANNED`, `DOWN*`, `mixed-`, `IDLE+CLOUD+POWERED_DOWN`."""
    flags: list[str] = []
    base = ""
    for part in text.strip().upper().split("+"):
        name = part.rstrip("".join(_STATE_SUFFIXES))
        suffixes = [_STATE_SUFFIXES[mark] for mark in part[len(name) :]]
        if not base:
            base = name
        elif name:
            flags.append(_FLAG_NAMES.get(name, name))
        flags += suffixes
    return base, list(dict.fromkeys(flags))


# ---------------------------------------------------------------------------------------------------------------
# Jobs: squeue -O
# ---------------------------------------------------------------------------------------------------------------

JOB_FIELDS = (
    *("JobID", "HetJobID", "UserName", "State", "Partition", "NumNodes", "NodeList", "SchedNodes"),
    *("SubmitTime", "StartTime", "EndTime", "TimeLimit", "PreemptTime", "PriorityLong", "EligibleTime"),
    *("NumCPUs", "NumTasks", "NTPerNode", "MinMemory", "tres-alloc", "tres-per-job", "tres-per-node", "tres-per-task"),
    *("OverSubscribe", "Exclusive", "ReqNodes", "ExcNodes"),
    *("Account", "QOS", "Reservation", "Feature", "Dependency"),
    *("ArrayJobID", "ArrayTaskID"),
    *("Reason", "Name", "Comment"),  # what users or sentences fill, last
)
"""Fields of `squeue -O` that a `JobInfo` is made of.

Of a field that it does not know, squeue of any version prints our separator alone, complains on standard error and goes
on: ExcNodes came with 24.05, Exclusive with 26.05.
"""


@dataclass(frozen=True)
class JobFormat:
    """Order of fields and the separators between and after them.

    With separators made anew for each call no user can give a job a name that reads like another row.
    """

    fields: tuple[str, ...]
    separator: str
    end: str

    @classmethod
    def fresh(cls, nonce: str) -> JobFormat:
        return cls(JOB_FIELDS, f"|{nonce}|", f"|{nonce}.")

    @property
    def option(self) -> str:
        """Value of `squeue -O`: a suffix and no width, so that nothing is cut off."""
        marks = [self.separator] * (len(self.fields) - 1) + [self.end]
        return ",".join(f"{name}:{mark}" for name, mark in zip(self.fields, marks, strict=True))


def jobs(text: str, layout: JobFormat) -> list[JobInfo]:
    """Rows of `squeue -h -O`. Rows with another number of fields are left out."""
    found = []
    for row in text.split(layout.end):
        values = row.lstrip("\n").split(layout.separator)
        if len(values) == len(layout.fields):
            found.append(job(dict(zip(layout.fields, values, strict=True))))
    return found


def job(row: Mapping[str, str]) -> JobInfo:
    """A job from the texts of `JOB_FIELDS`, as squeue prints them; a field may be missing."""
    num_nodes = count(row.get("NumNodes", "1"))
    gpus_each, gpu_type = _job_gpus(row, num_nodes)
    tasks, cpus_per_task, memory_per_task = _tasks(row, num_nodes)
    return JobInfo(
        job_id=row["JobID"].strip(),
        name=row.get("Name", ""),
        user=row.get("UserName", ""),
        state=row["State"].strip().upper(),
        partition=row.get("Partition", ""),
        reason=word(row.get("Reason", "")),
        nodes=nodes(row.get("NodeList", "")),
        num_nodes=num_nodes,
        planned_nodes=nodes(row.get("SchedNodes", "")),
        submit_at=when(row.get("SubmitTime", "")),
        start_at=when(row.get("StartTime", "")),
        end_at=when(row.get("EndTime", "")),
        time_limit_s=duration(row.get("TimeLimit", "")),
        preempt_at=when(row.get("PreemptTime", "")),
        priority=count(row.get("PriorityLong", "")),
        comment=word(row.get("Comment", "")),
        het_job_id=word(row.get("HetJobID", "")) or None,
        account=word(row.get("Account", "")),
        qos=word(row.get("QOS", "")),
        constraint=word(row.get("Feature", "")),
        cpus_per_node=_each(count(row.get("NumCPUs", "1")), num_nodes),
        memory_mb_per_node=_job_memory_mb(row, num_nodes),
        gpus_per_node=gpus_each,
        gpu_type=gpu_type,
        tasks=tasks,
        cpus_per_task=cpus_per_task,
        memory_mb_per_task=memory_per_task,
        exclusive=(shared := _shared(row)) in ("NO", "NODE", "TOPO"),
        exclusive_user=shared == "USER",
        required_nodes=nodes(row.get("ReqNodes", "")),
        excluded_nodes=nodes(row.get("ExcNodes", "")),
        dependency=word(row.get("Dependency", "")),
        eligible_at=when(row.get("EligibleTime", "")),
        reservation=word(row.get("Reservation", "")),
        array_job_id=row["ArrayJobID"].strip() if word(row.get("ArrayTaskID", "")) else "",
        array_tasks=word(row.get("ArrayTaskID", "")) if row["State"].strip() == "PENDING" else "",
    )


def _shared(row: Mapping[str, str]) -> str:
    """With whom it shares nodes, in OverSubscribe's words: NO (nobody), USER, OK ...

    From 26.05 on OverSubscribe is NO for nearly every job, and Exclusive says what it said before.
    """
    newer = word(row.get("Exclusive", ""))
    return "OK" if newer == "NO" else newer or word(row.get("OverSubscribe", ""))


def _each(total: int, num_nodes: int) -> int:
    return -(-total // max(num_nodes, 1))


def _job_memory_mb(row: Mapping[str, str], num_nodes: int) -> int:
    """From the TRES, which say what MinMemory does not: whether it is per CPU or per node."""
    match = re.search(r"(?:^|,)mem=([^,]+)", row.get("tres-alloc", ""))
    return _each(megabytes(match[1]), num_nodes) if match else megabytes(row.get("MinMemory", ""))


def _tasks(row: Mapping[str, str], num_nodes: int) -> tuple[int, int, int]:
    """Tasks that Slurm may spread over the nodes as it likes (0: it may not), and CPUs and MiB for each of them."""
    tasks, cpus = count(row.get("NumTasks", "")), count(row.get("NumCPUs", ""))
    free = row.get("NTPerNode", "").strip() == "0" and not gpu_types(row.get("tres-per-task", ""))
    spread = free and row["State"].strip().upper() == "PENDING" and 1 < num_nodes < tasks
    if not spread or not cpus or cpus % tasks:
        return 0, 1, 0
    per_cpu, total = megabytes(row.get("MinMemory", "")), re.search(r"(?:^|,)mem=([^,]+)", row.get("tres-alloc", ""))
    by_cpu = total is not None and per_cpu * cpus == megabytes(total[1])
    return tasks, cpus // tasks, per_cpu * (cpus // tasks) if by_cpu else 0


def _job_gpus(row: Mapping[str, str], num_nodes: int) -> tuple[int, str]:
    """GPUs on each node and their type; "" where it asks for any, or for several types."""
    total, kinds = 0, set()
    for field, times, over in (
        ("tres-per-node", 1, 1),
        ("tres-per-job", 1, num_nodes),
        ("tres-per-task", count(row.get("NumTasks", "1")), num_nodes),
    ):
        asked = gpu_types(row.get(field, ""))
        total = max(total, _each(sum(asked.values()) * times, over))
        kinds |= set(asked)
    return total, kinds.pop() if len(kinds) == 1 else ""


# ---------------------------------------------------------------------------------------------------------------
# Nodes, partitions, reservations, configuration: scontrol
# ---------------------------------------------------------------------------------------------------------------


def cluster(text: str) -> tuple[list[NodeInfo], list[PartitionInfo], list[ReservationInfo]]:
    """Output of `scontrol -o -d` for `show node`, `show partition` and `show reservation`, in any order.

    Lines that begin otherwise ("No reservations in the system") say nothing.
    """
    found_nodes, partitions, reservations = [], [], []
    for line in text.splitlines():
        # Built without readline, scontrol prints its prompt and the answer in one line.
        line = line.strip().removeprefix("scontrol: ")
        if line.startswith("NodeName="):
            found_nodes.append(node(_values(line)))
        elif line.startswith("PartitionName="):
            partitions.append(partition(_values(line)))
        elif line.startswith("ReservationName="):
            reservations += reservation(_values(line))
    return found_nodes, partitions, reservations


def _values(line: str) -> dict[str, str]:
    """The words `Key=value` of a line, the first of each key; the keys used here stand before any free text."""
    found: dict[str, str] = {}
    for item in line.split():
        key, mark, value = item.partition("=")
        if mark:
            found.setdefault(key, value)
    return found


def node(row: Mapping[str, str]) -> NodeInfo:
    """A node from the words of `scontrol -o -d show node`; any may be missing. So with the next two."""
    state, flags = node_state(row.get("State", ""))
    used = row.get("GresUsed", "")
    return NodeInfo(
        node=row.get("NodeName", ""),
        state=state,
        flags=flags,
        partitions=names(row.get("Partitions", "")),
        arch=word(row.get("Arch", "")),
        # What the system keeps to itself (CoreSpecCount, MemSpecLimit) no job gets; CPUEfctv came with 22.05.
        cpus=count(row.get("CPUEfctv", "")) or count(row.get("CPUTot", "")),
        cpus_used=count(row.get("CPUAlloc", "")),
        memory_mb=max(0, count(row.get("RealMemory", "")) - count(row.get("MemSpecLimit", ""))),
        memory_used_mb=count(row.get("AllocMem", "")),
        gpus=gpus(row.get("Gres", "")),
        # sites that count GPUs as a TRES show it without -d too
        gpus_used=gpus(used) if used else _tres_gpus(row.get("AllocTRES", "")),
        gpu_types=gpu_types(row.get("Gres", "")),
        gpu_types_used={kind: number for kind, number in gpu_types(used).items() if number},
        features=names(row.get("ActiveFeatures", "")),
        owner=word(row.get("Owner", "")).partition("(")[0],
        idle_since=when(row.get("LastBusyTime", "")) if state == "IDLE" else None,
    )


def _tres_gpus(text: str) -> int:
    match = re.search(r"(?:^|,)gres/gpu=(\d+)", text)
    return int(match[1]) if match else 0


def partition(row: Mapping[str, str]) -> PartitionInfo:
    exclusive = row.get("Exclusive", "").upper()  # from 26.05 on, in place of the two older words
    return PartitionInfo(
        partition=row.get("PartitionName", ""),
        nodes=nodes(row.get("Nodes", "")),
        max_time_s=duration(row.get("MaxTime", "")),
        up=row.get("State", "").upper() == "UP",
        default=row.get("Default", "").upper() == "YES",
        priority_tier=count(row.get("PriorityTier", "")),
        preempt_mode=preempt_mode(row.get("PreemptMode", "")),
        grace_s=float(count(row.get("GraceTime", ""))),
        qos=word(row.get("QoS", "")),
        exclusive=exclusive in ("NODE", "TOPO") or row.get("OverSubscribe", "").upper().startswith("EXCLUSIVE"),
        exclusive_user=exclusive == "USER" or row.get("ExclusiveUser", "").upper() == "YES",
        min_nodes=max(1, count(row.get("MinNodes", ""))),
        max_nodes=count(most) if (most := word(row.get("MaxNodes", ""))) else None,
        root_only=row.get("RootOnly", "").upper() == "YES",
        allow_accounts=names(row.get("AllowAccounts", "")),
        deny_accounts=names(row.get("DenyAccounts", "")),
        allow_qos=names(row.get("AllowQos", "")),
        deny_qos=names(row.get("DenyQos", "")),
        allow_groups=names(row.get("AllowGroups", "")),
        requires_reservation=row.get("ReqResv", "").upper() == "YES",
    )


def preempt_mode(text: str) -> str:
    """What happens to a job: `GANG,SUSPEND`, `REQUEUE`, `cancel,within`; OFF where nothing is said."""
    # The other words say whose jobs, or how SUSPEND is carried out.
    modes = [mode for mode in word(text).upper().split(",") if mode in ("CANCEL", "REQUEUE", "SUSPEND")]
    return modes[0] if modes else "OFF"


QOS_COLUMNS = "Name,Preempt,PreemptMode,PreemptExemptTime,GraceTime"
"""Of `sacctmgr -n -P show qos`, for the next four."""


def qos_preempt_modes(text: str, default: str) -> dict[str, str]:
    """QOS that another may preempt -> how.

    `default` is the cluster's mode, which holds for a QOS without one of its own (`cluster`).
    """
    victims = qos_preempted_by(text)
    rows = [row for row in _qos_rows(text) if row[0] in victims]
    return {name: default if mode.lower() in ("", "cluster") else preempt_mode(mode) for name, _, mode, *_ in rows}


def qos_preempted_by(text: str) -> dict[str, list[str]]:
    """The same output: QOS -> others whose jobs may preempt its jobs; those alone that have any."""
    found: dict[str, list[str]] = {}
    for own, preempts, *_ in _qos_rows(text):
        for name in names(preempts):
            if name != own:
                found.setdefault(name, []).append(own)
    return found


def qos_grace_s(text: str) -> dict[str, float]:
    """The same output: QOS -> seconds from the warning to the end of a job that is preempted; those alone that say."""
    return {name: seconds for name, *_, grace in _qos_rows(text) if (seconds := duration(grace))}


def qos_exempt_s(text: str) -> dict[str, float]:
    """The same output: QOS -> seconds for which its jobs are safe; those alone that say."""
    found = {name: duration(exempt) for name, _, _, exempt, _ in _qos_rows(text)}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def _qos_rows(text: str) -> list[list[str]]:
    return [row for line in text.splitlines() if len(row := line.strip().split("|")) == 5]


def reservation(row: Mapping[str, str]) -> list[ReservationInfo]:
    """[] for one without a beginning or an end."""
    start, end = when(row.get("StartTime", "")), when(row.get("EndTime", ""))
    if start is None or end is None:
        return []
    info = ReservationInfo(
        reservation=row.get("ReservationName", ""),
        nodes=nodes(row.get("Nodes", "")),
        start_at=start,
        end_at=end,
        flags=names(row.get("Flags", "")),
    )
    return [info]


def config(text: str) -> tuple[ClusterConfig, float | None]:
    """Output of `scontrol show config`, and slurmctld's clock when it answered."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, mark, value = line.partition("=")
        if mark:
            values.setdefault(key.strip(), word(value))
    scheduler = values.get("SchedulerParameters", "")
    interval = re.search(r"(?:^|,)bf_interval=(-?\d+)", scheduler)
    private = values.get("PrivateData", "")
    as_of = re.search(r"^Configuration data as of (\S+)", text, re.MULTILINE)
    found = ClusterConfig(
        cluster=values.get("ClusterName", ""),
        slurm_version=values.get("SLURM_VERSION", ""),
        preempt_type="" if (kind := values.get("PreemptType", "")).endswith("none") else kind,
        preempt_mode=preempt_mode(values.get("PreemptMode", "")),
        preempt_exempt_s=duration(values.get("PreemptExemptTime", "")) or 0.0,
        accounting=not (kind := values.get("AccountingStorageType", "")).endswith("none") and bool(kind),
        kill_wait_s=_seconds(values.get("KillWait"), 30.0),
        backfill_interval_s=float(interval[1]) if interval else 30.0,
        message_timeout_s=_seconds(values.get("MessageTimeout"), 10.0),
        slurmd_timeout_s=_seconds(values.get("SlurmdTimeout"), 300.0),
        private_data=[name for name in private.split(",") if name and name != "none"],
        priority_type=values.get("PriorityType", ""),
        scheduler_parameters=scheduler,
        priority_weights=_weights(values),
        priority_flags=names(values.get("PriorityFlags", "")),
        site_factor="" if (plugin := values.get("PrioritySiteFactorPlugin", "")).endswith("none") else plugin,
        select_type=values.get("SelectType", ""),
    )
    return found, when(as_of[1]) if as_of else None


def _weights(values: dict[str, str]) -> dict[str, int]:
    """`PriorityWeightAge = 1000`, and `PriorityWeightTRES = CPU=1000,GRES/gpu=3000`; those that are 0 left out."""
    found: dict[str, int] = {}
    for key, value in values.items():
        name = key.removeprefix("PriorityWeight")
        if name == "TRES":
            found |= {f"TRES {kind}": count(weight) for kind, _, weight in (w.partition("=") for w in value.split(","))}
        elif name != key:
            found[name] = count(value)
    return {name: weight for name, weight in found.items() if weight}


def _seconds(text: str | None, default: float) -> float:
    """`5 sec`."""
    match = re.match(r"\d+", text or "")
    return float(match[0]) if match else default


# ---------------------------------------------------------------------------------------------------------------
# sbatch
# ---------------------------------------------------------------------------------------------------------------


def submitted_id(text: str) -> str | None:
    """Job id in the output of `sbatch --parsable`: the last line that is one, for sites print banners."""
    found = [line.strip() for line in text.splitlines() if re.fullmatch(r"\s*\d+(;\S+)?\s*", line)]
    return found[-1].partition(";")[0] if found else None


# Words of slurm_strerror() for everything that may happen after the request has left (slurm_errno.c).
_UNCERTAIN = (
    "timed out",
    "unable to contact",
    "zero bytes",
    "connection",
    "unexpected message",
    "standby mode",
    "communication",
    "protocol",
    "temporarily unable",
    "unspecified error",
    "no error",
    "rate limit exceeded",
    "invalid authentication credential",  # of the *answer* too
)


def is_refusal(stderr: str) -> bool:
    """True when sbatch's messages prove that no job exists: Slurm or sbatch itself said no."""
    text = stderr.lower()
    if any(phrase in text for phrase in _UNCERTAIN):
        return False
    return "sbatch: " in text or "allocation failure" in text


def complaint(stderr: str) -> str:
    """The messages of a failed command in one line, without prefixes."""
    lines = [re.sub(r"^\w+: (?:error: |fatal: )?", "", line).strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "no message"
