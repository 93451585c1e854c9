"""The state of the cluster, as a Slurm client reads it for the core, and jobs to submit."""

import re

from fallow.model.base import Struct


class NodeInfo(Struct, frozen=True, kw_only=True):
    node: str
    state: str
    "base state in capitals: IDLE, ALLOCATED, MIXED, DOWN, UNKNOWN ..."
    flags: list[str] = []
    "DRAIN, COMPLETING, PLANNED, NOT_RESPONDING, MAINTENANCE, RESERVED, POWERED_DOWN ..."
    partitions: list[str] = []
    arch: str = ""
    "output of `uname -m`: x86_64, aarch64; empty: not known"
    cpus: int = 0
    "CPUs for jobs, without those reserved for the system; likewise `memory_mb`"
    cpus_used: int = 0
    memory_mb: int = 0
    memory_used_mb: int = 0
    "memory allocated to jobs, whether they use it or not"
    gpus: int = 0
    gpus_used: int = 0
    gpu_types: dict[str, int] = {}
    "type -> GPUs; the type is empty where the site names none"
    gpu_types_used: dict[str, int] = {}
    gres: list[str] = []
    "names of its generic resources besides GPUs: nvme, shard ..."
    features: list[str] = []
    "active features"
    owner: str = ""
    "only user whose jobs may run on the node now (ExclusiveUser); empty: any"
    reservation: str = ""
    "current reservation of the node, if a run of the head's owner names it"


class JobInfo(Struct, frozen=True, kw_only=True):
    job_id: str
    "as in squeue -O JobID; of a heterogeneous job, the component's own id"
    name: str
    user: str
    state: str
    "PENDING, RUNNING, COMPLETING, COMPLETED, CANCELLED, FAILED, TIMEOUT, PREEMPTED, NODE_FAIL ..."
    partition: str
    reason: str = ""
    nodes: list[str] = []
    num_nodes: int = 1
    planned_nodes: list[str] = []
    "nodes that backfill plans for a pending job"
    restarts: int = 0
    "number of requeues; 0 also if not known"
    submit_at: float | None = None
    clock_offset_s: float = 0.0
    "seconds by which slurmctld's clock is ahead of ours; already subtracted from the times here"
    start_at: float | None = None
    "start time; of a pending job the planned start, None without a plan"
    end_at: float | None = None
    time_limit_s: float | None = None
    preempt_at: float | None = None
    priority: int = 0
    comment: str = ""
    het_job_id: str | None = None
    account: str = ""
    qos: str = ""
    constraint: str = ""
    "requested features, in sbatch's syntax: a100&ib, [rack1|rack2]"
    cpus_per_node: int = 1
    "minimum per node, as the next three fields; totals are divided by num_nodes and rounded up"
    memory_mb_per_node: int = 0
    "0: no request, or all memory of the node"
    gpus_per_node: int = 0
    gpu_type: str = ""
    "empty: any"
    gres: list[str] = []
    "names of other generic resources that each node must have; their numbers are not known"
    licenses: dict[str, int] = {}
    "cluster licenses of the job: name -> number"
    exclusive: bool = False
    "the job takes whole nodes, because the job or its partition requests it"
    exclusive_user: bool = False
    "the job shares nodes only with jobs of its own user (--exclusive=user)"
    required_nodes: list[str] = []
    excluded_nodes: list[str] = []
    "empty also if not known: squeue has no such field before 24.05"
    eligible_at: float | None = None
    "earliest start (--begin); None while the job waits for a dependency"
    reservation: str = ""
    array_job_id: str = ""
    "id of the job array, of an element or of all waiting elements"
    array_tasks: str = ""
    "waiting elements of a job array, in Slurm's syntax: 3-9,12%2"

    @property
    def submitted(self) -> float | None:
        """Time of submission on slurmctld's clock, which does not change when the clocks drift apart."""
        return None if self.submit_at is None else self.submit_at + self.clock_offset_s


class PartitionInfo(Struct, frozen=True, kw_only=True):
    partition: str
    nodes: list[str]
    max_time_s: float | None = None
    "None: unlimited"
    up: bool = True
    default: bool = False
    priority_tier: int = 1
    preempt_mode: str = "OFF"
    "how its jobs are preempted, in capitals: OFF, CANCEL, REQUEUE, SUSPEND (`core.neighbour.preemption`)"
    grace_s: float = 0.0
    preempted_by: list[str] | None = None
    "QOS whose jobs may preempt ours, under preempt/qos; None: priority tiers decide"
    unpreempted: frozenset[str] = frozenset()
    "nodes of the partition on which no other job can preempt its jobs"
    qos: str = ""
    "partition QOS, whose limits hold for its jobs; empty: none"
    exclusive: bool = False
    "OverSubscribe=EXCLUSIVE: every job takes whole nodes"
    exclusive_user: bool = False
    "a node runs jobs of one user only at a time"
    min_nodes: int = 1
    "minimum nodes of a job"
    max_nodes: int | None = None
    "maximum nodes of a job; None: unlimited"
    root_only: bool = False
    allow_accounts: list[str] = []
    "empty, as in the next four fields: all are allowed, or nobody is denied"
    deny_accounts: list[str] = []
    allow_qos: list[str] = []
    deny_qos: list[str] = []
    allow_groups: list[str] = []
    requires_reservation: bool = False

    @property
    def preempts(self) -> bool:
        """True if Slurm itself takes nodes back. Suspension does not count: a suspended job keeps its GPUs."""
        return self.preempt_mode in ("CANCEL", "REQUEUE")


class ReservationInfo(Struct, frozen=True, kw_only=True):
    reservation: str
    nodes: list[str]
    start_at: float
    end_at: float
    flags: list[str] = []
    own: bool = False
    "the reservation has begun, and a run of the head's owner names it"


class ClusterState(Struct, frozen=True, kw_only=True):
    """Result of one poll. `at` is the Unix time of the answer. All times are on our clock, not on Slurm's."""

    at: float
    nodes: list[NodeInfo]
    jobs: list[JobInfo]
    partitions: list[PartitionInfo]
    reservations: list[ReservationInfo] = []
    clock_offset_s: float = 0.0
    "seconds by which slurmctld's clock is ahead; already subtracted from all times here"


class ClusterConfig(Struct, frozen=True, kw_only=True):
    """Slurm's configuration. Read at the head's start and every hour."""

    cluster: str
    slurm_version: str
    controllers: list[str] = []
    "hosts of slurmctld, the primary first; the address if the site configures one"
    preempt_type: str = ""
    "preempt/partition_prio, preempt/qos; empty: none"
    preempt_mode: str = "OFF"
    "default for partitions and QOS without their own mode; values as in `PartitionInfo`"
    qos_preempt_modes: dict[str, str] = {}
    "under preempt/qos: QOS -> preempt mode of its jobs, for each QOS that another QOS may preempt"
    qos_preempted_by: dict[str, list[str]] = {}
    "under preempt/qos: QOS -> other QOS that may preempt its jobs"
    qos_grace_s: dict[str, float] = {}
    "under preempt/qos: QOS -> grace time of its jobs in seconds, if not 0"
    preempt_exempt_s: float = 0.0
    "seconds for which a job runs before it may be preempted, for QOS without their own value"
    qos_exempt_s: dict[str, float] = {}
    "QOS -> its own value of `preempt_exempt_s`"
    qos_unknown: bool = False
    "the accounting has not answered yet, so the fields about QOS may be incomplete"
    accounting: bool = False
    "the cluster has accounting"
    kill_wait_s: float = 30.0
    backfill_interval_s: float = 30.0
    "negative: no backfill"
    message_timeout_s: float = 10.0
    private_data: list[str] = []
    priority_type: str = ""
    scheduler_parameters: str = ""
    priority_weights: dict[str, int] = {}
    "factor -> weight, of priority/multifactor: Age, FairShare, ..., each TRES"
    priority_flags: list[str] = []
    site_factor: str = ""
    "plugin that changes priorities of jobs; empty: none"
    select_type: str = ""
    "select/cons_tres and select/cons_res share nodes between jobs, select/linear never does"


def slurm_release(text: str) -> tuple[int, ...]:
    """Return the release of Slurm or pyslurm in a text: (22, 5) for `slurm-wlm 22.05.8`; empty: no release."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else ()


class JobRequest(Struct, frozen=True, kw_only=True):
    """A job to submit. `script` is the batch script's text; `options` are sbatch options in --long=value form."""

    token: str
    options: list[str]
    script: str
    args: list[str] = []
    environment: dict[str, str] = {}
    cwd: str = "/"
    umask: int = 0o077
