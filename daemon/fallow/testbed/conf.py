"""The configuration files of a testbed: pure text, tried on Slurm 22.05.8.

Sources: slurm.conf(5), gres.conf(5), cgroup.conf(5) and https://slurm.schedmd.com/programmer_guide.html
("multiple slurmd support"). Plugins named `*/none` are left out, not written: they are the defaults, and
Slurm 23.11 removed the names.
cgroup.conf differs by version as its manual pages say; a configuration like this one has run 25.11 and 26.05.
"""

from enum import StrEnum
from pathlib import Path

from fallow.model import Struct

PARTITION = "normal"
"The default partition of every profile."
SCAVENGE = "scavenge"
"The preemptible partition of the profiles that have one."

NODES = 8
CPUS_PER_NODE = 4
MEMORY_PER_NODE_MB = 4000
KILL_WAIT_S = 5
"Seconds between SIGTERM and SIGKILL. Slurm's minimum: with less, slurmd still waits 5 s."
GRACE_S = 10
"Seconds between the warning of a preempted job and its end."


class Profile(StrEnum):
    """Kind of site that the testbed imitates."""

    PREEMPT = "preempt"
    """`normal` preempts `scavenge`, whose steps get SIGTERM `grace_s` before the end. Nobody preempts jobs in `normal`,
    though Slurm shows the cluster's PreemptMode for `normal`, too, as on most sites."""
    NOGRACE = "nograce"
    "as `preempt` without a warning: SIGTERM and SIGKILL are KillWait apart"
    PLAIN = "plain"
    "no preemption, one partition"


class Layout(Struct, frozen=True):
    """Parameters of a testbed: all that its files depend on."""

    place: str
    "path of the testbed's folder"
    user: str
    "user who runs the daemons: SlurmUser and SlurmdUser"
    first_port: int
    "port of slurmctld; the ports of the nodes follow"
    version: tuple[int, int]
    "major and minor version of Slurm, e.g. (22, 5)"
    started_at: float
    "Unix time"
    nodes: int = NODES
    gpus: int = 4
    "number of fake GPUs of each node"
    profile: Profile = Profile.PREEMPT
    bf_interval: int = 1
    "seconds between cycles of the backfill scheduler; sites have 30 and more"
    grace_s: int = GRACE_S
    "profile `preempt`: seconds between the warning of a preempted job and its end"
    kill_wait_s: int = KILL_WAIT_S
    "seconds between SIGTERM and SIGKILL"

    @property
    def folder(self) -> Path:
        return Path(self.place)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge" / "socket"

    @property
    def node_names(self) -> list[str]:
        return [f"n{index}" for index in range(1, self.nodes + 1)]

    @property
    def node_range(self) -> str:
        return f"n[1-{self.nodes}]" if self.nodes > 1 else "n1"

    @property
    def node_ports(self) -> str:
        first, last = self.first_port + 1, self.first_port + self.nodes
        return f"[{first}-{last}]" if self.nodes > 1 else str(first)


def slurm_conf(layout: Layout) -> str:
    """Text of slurm.conf."""
    at, cpus = layout.folder, max(CPUS_PER_NODE, layout.gpus)
    gres = f" Gres=gpu:{layout.gpus}" if layout.gpus else ""
    lines = [
        "ClusterName=testbed",
        "SlurmctldHost=localhost(127.0.0.1)",
        f"SlurmUser={layout.user}",
        f"SlurmdUser={layout.user}",
        "AuthType=auth/munge",
        # cred_expire: a requeued job may start again that many seconds (+1) later, 120 by default
        f"AuthInfo=socket={layout.munge_socket},cred_expire=5",
        f"SlurmctldPort={layout.first_port}",
        f"SlurmctldPidFile={at}/slurmctld.pid",
        f"SlurmctldLogFile={at}/slurmctld.log",
        "SlurmctldDebug=info",
        f"StateSaveLocation={at}/state",
        f"SlurmdPidFile={at}/slurmd.%n.pid",
        f"SlurmdLogFile={at}/slurmd.%n.log",
        f"SlurmdSpoolDir={at}/spool/%n",
        "SlurmdDebug=info",
        # several nodes of this size on one small host
        "SlurmdParameters=config_overrides",
        "ProctrackType=proctrack/linuxproc",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        # without it the first job on a node takes all its memory
        f"DefMemPerCPU={MEMORY_PER_NODE_MB // cpus}",
        "SchedulerType=sched/backfill",
        # the default of 22.05; that of later versions, multifactor, needs weights for --nice to put jobs behind others
        "PriorityType=priority/basic",
        # resolution 1 s: planned starts are rounded up to it, and jobs on a testbed last seconds
        f"SchedulerParameters=bf_interval={layout.bf_interval},bf_resolution=1,bf_window=1440,bf_continue,"
        "bf_max_job_test=200,bf_hetjob_prio=min,bf_hetjob_immediate,sched_interval=2,batch_sched_delay=0,"
        "default_queue_depth=200",
        f"KillWait={layout.kill_wait_s}",
        # seconds that ended jobs stay visible: tests and demos ask at their end how all jobs ended
        "MinJobAge=3600",
        "SlurmctldTimeout=30",
        "SlurmdTimeout=15",
        "MessageTimeout=10",
        "ReturnToService=2",
        *(["GresTypes=gpu"] if layout.gpus else []),
        f"NodeName={layout.node_range} NodeHostname=localhost NodeAddr=127.0.0.1 Port={layout.node_ports} "
        f"CPUs={cpus} Boards=1 SocketsPerBoard={cpus} CoresPerSocket=1 ThreadsPerCore=1 "
        f"RealMemory={MEMORY_PER_NODE_MB}{gres} State=UNKNOWN",
        *_partitions(layout),
    ]
    return "\n".join(lines) + "\n"


def gres_conf(layout: Layout) -> str:
    """Text of gres.conf. Only devices that exist as *device* files give jobs a CUDA_VISIBLE_DEVICES."""
    if not layout.gpus:
        return ""
    devices = "gpu0" if layout.gpus == 1 else f"gpu[0-{layout.gpus - 1}]"
    return f"AutoDetect=off\nNodeName={layout.node_range} Name=gpu File={layout.folder}/{devices}\n"


def cgroup_conf(version: tuple[int, int]) -> str:
    """Text of cgroup.conf: from 23.02 on slurmd starts the cgroup plugin even if nothing asks for it."""
    if version >= (24, 5):
        return "CgroupPlugin=disabled\n"
    return "IgnoreSystemd=yes\nConstrainCores=no\nConstrainRAMSpace=no\nConstrainDevices=no\n"


def _partitions(layout: Layout) -> list[str]:
    """Lines for the partitions and for the preemption between them."""
    common = f"Nodes={layout.node_range} MaxTime=1-00:00:00 DefaultTime=10 State=UP"
    if layout.profile is Profile.PLAIN:
        return [f"PartitionName={PARTITION} {common} Default=YES"]
    grace_s = layout.grace_s if layout.profile is Profile.PREEMPT else 0
    return [
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        f"PartitionName={PARTITION} {common} Default=YES PriorityTier=10",
        f"PartitionName={SCAVENGE} {common} PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}",
    ]
