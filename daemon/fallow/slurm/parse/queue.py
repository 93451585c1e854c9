"""Jobs: `squeue -O`, and what sbatch answers."""

import re
from collections.abc import Mapping

from fallow.model import JobInfo
from fallow.slurm.parse.values import count, duration, gpu_types, megabytes, nodes, other_gres, unix_time, word

JOB_FIELDS = (
    *("JobID", "HetJobID", "UserName", "State", "Partition", "NumNodes", "NodeList", "SchedNodes"),
    *("SubmitTime", "StartTime", "EndTime", "TimeLimit", "PreemptTime", "PriorityLong", "EligibleTime"),
    *("NumCPUs", "NumTasks", "MinMemory", "tres-alloc", "tres-per-job", "tres-per-node", "tres-per-task"),
    *("OverSubscribe", "Exclusive", "ReqNodes", "ExcNodes"),
    *("Account", "QOS", "Reservation", "Feature"),
    *("ArrayJobID", "ArrayTaskID", "RestartCnt", "Licenses"),
    *("Reason", "Name", "Comment"),  # what users or sentences fill, last
)
"""Fields of `squeue -O` from which a `JobInfo` is made.

For an unknown field, squeue of any version prints our separator alone, complains on standard error and continues.
ExcNodes exists since 24.05, Exclusive since 26.05.
"""


def job_format(nonce: str) -> str:
    """Value of `squeue -O`: fields with separators between and after them, and no width, so that nothing is cut off.

    The nonce is new for each call, so no user can give a job a name that reads like another row.
    """
    return f":|{nonce}|,".join(JOB_FIELDS) + f":|{nonce}."


def jobs(text: str, nonce: str) -> list[JobInfo]:
    """Rows of `squeue -h -O` with `job_format(nonce)`. Rows with another number of fields are omitted."""
    rows = (row.lstrip("\n").split(f"|{nonce}|") for row in text.split(f"|{nonce}."))
    return [job(dict(zip(JOB_FIELDS, row, strict=True))) for row in rows if len(row) == len(JOB_FIELDS)]


def job(row: Mapping[str, str]) -> JobInfo:
    """A job from the texts of `JOB_FIELDS`, as squeue prints them; a field may be missing."""
    num_nodes = count(row.get("NumNodes", "1"))
    gpus_each, gpu_type = _job_gpus(row, num_nodes)
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
        submit_at=unix_time(row.get("SubmitTime", "")),
        restarts=count(row.get("RestartCnt", "0")),
        start_at=unix_time(row.get("StartTime", "")),
        end_at=unix_time(row.get("EndTime", "")),
        time_limit_s=duration(row.get("TimeLimit", "")),
        preempt_at=unix_time(row.get("PreemptTime", "")),
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
        gres=other_gres(row.get("tres-per-node", "")),
        licenses=_licenses(row.get("Licenses", "")),
        exclusive=(sharing := _sharing(row)) in ("NO", "NODE", "TOPO"),
        exclusive_user=sharing == "USER",
        required_nodes=nodes(row.get("ReqNodes", "")),
        excluded_nodes=nodes(row.get("ExcNodes", "")),
        eligible_at=unix_time(row.get("EligibleTime", "")),
        reservation=word(row.get("Reservation", "")),
        array_job_id=row["ArrayJobID"].strip() if word(row.get("ArrayTaskID", "")) else "",
        array_tasks=word(row.get("ArrayTaskID", "")) if row["State"].strip() == "PENDING" else "",
    )


def _sharing(row: Mapping[str, str]) -> str:
    """With whom the job shares nodes, in OverSubscribe's words: NO (nobody), USER, OK ...

    Since 26.05 OverSubscribe is NO for nearly every job, and Exclusive says what OverSubscribe said before.
    """
    newer = word(row.get("Exclusive", ""))
    return "OK" if newer == "NO" else newer or word(row.get("OverSubscribe", ""))


def _licenses(text: str) -> dict[str, int]:
    """Licenses of `matlab:2,ansys@server`; of alternatives (`a|b`) all."""
    items = (item.partition(":") for item in re.split("[,|]", word(text)))
    return {name: count(number) or 1 for name, _, number in items if name}


def _each(total: int, num_nodes: int) -> int:
    return -(-total // max(num_nodes, 1))


def _job_memory_mb(row: Mapping[str, str], num_nodes: int) -> int:
    """Memory per node from the TRES. MinMemory alone does not say whether it is per CPU or per node."""
    match = re.search(r"(?:^|,)mem=([^,]+)", row.get("tres-alloc", ""))
    return _each(megabytes(match[1]), num_nodes) if match else megabytes(row.get("MinMemory", ""))


def _job_gpus(row: Mapping[str, str], num_nodes: int) -> tuple[int, str]:
    """GPUs on each node and their type; "" if the job requests any type, or several types."""
    total, kinds = 0, set()
    for field, times, divisor in (
        ("tres-per-node", 1, 1),
        ("tres-per-job", 1, num_nodes),
        ("tres-per-task", count(row.get("NumTasks", "1")), num_nodes),
    ):
        requested = gpu_types(row.get(field, ""))
        total = max(total, _each(sum(requested.values()) * times, divisor))
        kinds |= set(requested)
    return total, kinds.pop() if len(kinds) == 1 else ""


def submitted_id(text: str) -> str | None:
    """Job id in the output of `sbatch --parsable`: the last line that is one, because sites print banners."""
    ids = [line.strip() for line in text.splitlines() if re.fullmatch(r"\s*\d+(;\S+)?\s*", line)]
    return ids[-1].partition(";")[0] if ids else None


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
    """Return True if sbatch's messages prove that no job exists: Slurm or sbatch itself refused it."""
    text = stderr.lower()
    if any(phrase in text for phrase in _UNCERTAIN):
        return False
    return "sbatch: " in text or "allocation failure" in text


def complaint(stderr: str) -> str:
    """The messages of a failed command in one line, without prefixes."""
    lines = [re.sub(r"^\w+: (?:error: |fatal: )?", "", line).strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "no message"
