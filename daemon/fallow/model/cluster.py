"""What Slurm says (filled by a Slurm client, read by the core), and what it is asked for."""

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
    "as `uname -m` says: x86_64, aarch64; empty when not known"
    cpus: int = 0
    "that jobs can get: none that are kept for the system; so with memory"
    cpus_used: int = 0
    memory_mb: int = 0
    memory_used_mb: int = 0
    "what jobs were given, not what they use"
    gpus: int = 0
    gpus_used: int = 0
    gpu_types: dict[str, int] = {}
    "type -> GPUs; the type is empty where the site names none"
    gpu_types_used: dict[str, int] = {}
    gres: list[str] = []
    "names of what it has besides GPUs: nvme, shard ..."
    features: list[str] = []
    "active ones"
    owner: str = ""
    "the only user whose jobs may run there now (ExclusiveUser)"
    reservation: str = ""
    "in which it is now, and which a run of the head's owner names"


class JobInfo(Struct, frozen=True, kw_only=True):
    job_id: str
    "as squeue -O JobID gives it: the component's own id for a heterogeneous job"
    name: str
    user: str
    state: str
    "PENDING, RUNNING, COMPLETING, COMPLETED, CANCELLED, FAILED, TIMEOUT, PREEMPTED, NODE_FAIL ..."
    partition: str
    reason: str = ""
    nodes: list[str] = []
    num_nodes: int = 1
    planned_nodes: list[str] = []
    "nodes that backfill has set aside for a pending job"
    restarts: int = 0
    "how often Slurm has requeued it; 0 also where that is not known"
    submit_at: float | None = None
    clock_offset_s: float = 0.0
    "what slurmctld's clock was ahead of ours, as has been taken off its times"
    start_at: float | None = None
    "for a pending job: the planned start, if the scheduler gave one"
    end_at: float | None = None
    time_limit_s: float | None = None
    preempt_at: float | None = None
    priority: int = 0
    comment: str = ""
    het_job_id: str | None = None
    account: str = ""
    qos: str = ""
    constraint: str = ""
    "features that it asks for, in sbatch's words: a100&ib, [rack1|rack2]"
    cpus_per_node: int = 1
    "these four: what a node must have for it at least; totals are divided by num_nodes and rounded up"
    memory_mb_per_node: int = 0
    "0: nothing asked for, or all of the node"
    gpus_per_node: int = 0
    gpu_type: str = ""
    "empty: any"
    gres: list[str] = []
    "names of what else each of its nodes must have; how many of each is not told"
    licenses: dict[str, int] = {}
    "of the cluster, as long as it runs: name -> number"
    exclusive: bool = False
    "takes whole nodes, because it or its partition says so"
    exclusive_user: bool = False
    "shares nodes with jobs of its own user alone (--exclusive=user)"
    required_nodes: list[str] = []
    excluded_nodes: list[str] = []
    "empty where the client does not say: squeue has no field for it before 24.05"
    eligible_at: float | None = None
    "before that it cannot start (--begin); None while it waits for a dependency"
    reservation: str = ""
    array_job_id: str = ""
    "of an element of a job array, or of all its elements that wait"
    array_tasks: str = ""
    "elements of a job array that wait, in Slurm's words: 3-9,12%2"

    @property
    def submitted(self) -> float | None:
        """The time of submission by slurmctld's own clock: it stays the same however the clocks differ from then on."""
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
    "in capitals, of this partition's jobs: OFF, CANCEL, REQUEUE, SUSPEND (`core.neighbour.preemption`)"
    grace_s: float = 0.0
    preempted_by: list[str] | None = None
    "QOS whose jobs may preempt ours, if they alone decide; None: the tiers do"
    unpreempted: frozenset[str] = frozenset()
    "where its jobs are preempted: those of its nodes on which nobody may do so"
    qos: str = ""
    "whose limits hold for its jobs; empty: none"
    exclusive: bool = False
    "OverSubscribe=EXCLUSIVE: every job takes whole nodes"
    exclusive_user: bool = False
    "a node runs the jobs of one user at a time"
    min_nodes: int = 1
    max_nodes: int | None = None
    "both per job; None: unlimited"
    root_only: bool = False
    allow_accounts: list[str] = []
    "these five: empty means all may, or nobody is denied"
    deny_accounts: list[str] = []
    allow_qos: list[str] = []
    deny_qos: list[str] = []
    allow_groups: list[str] = []
    requires_reservation: bool = False

    @property
    def preempts(self) -> bool:
        """Does Slurm itself give nodes back? A suspended job keeps its GPUs."""
        return self.preempt_mode in ("CANCEL", "REQUEUE")


class ReservationInfo(Struct, frozen=True, kw_only=True):
    reservation: str
    nodes: list[str]
    start_at: float
    end_at: float
    flags: list[str] = []
    own: bool = False
    "it has begun, and a run of the head's owner names it"


class ClusterState(Struct, frozen=True, kw_only=True):
    """One batched poll. `at` is Unix time of the answer; all times are on the clock of who asked, not on Slurm's."""

    at: float
    nodes: list[NodeInfo]
    jobs: list[JobInfo]
    partitions: list[PartitionInfo]
    reservations: list[ReservationInfo] = []
    clock_offset_s: float = 0.0
    "slurmctld's clock is so far ahead; taken off every time here"


class ClusterConfig(Struct, frozen=True, kw_only=True):
    """What rarely changes; read at start and hourly."""

    cluster: str
    slurm_version: str
    controllers: list[str] = []
    "hosts of slurmctld, the first is the primary; an address where the site gives one"
    preempt_type: str = ""
    "preempt/partition_prio, preempt/qos; empty: none"
    preempt_mode: str = "OFF"
    "of jobs whose partition or QOS has none of its own; as in `PartitionInfo`"
    qos_preempt_modes: dict[str, str] = {}
    "under preempt/qos: QOS -> how its jobs are preempted; those alone that some other QOS may preempt"
    qos_preempted_by: dict[str, list[str]] = {}
    "and those others"
    qos_grace_s: dict[str, float] = {}
    "and what its jobs are left, once they have been told; those alone that are left any time"
    preempt_exempt_s: float = 0.0
    "nobody preempts a job before it has run for so long, where no QOS says otherwise"
    qos_exempt_s: dict[str, float] = {}
    "QOS -> the same; those alone that have a value of their own"
    qos_unknown: bool = False
    "the accounting has not answered yet, so what is about QOS may lack what it would say"
    accounting: bool = False
    "the cluster has one"
    kill_wait_s: float = 30.0
    backfill_interval_s: float = 30.0
    "negative: there is no backfill"
    message_timeout_s: float = 10.0
    private_data: list[str] = []
    priority_type: str = ""
    scheduler_parameters: str = ""
    priority_weights: dict[str, int] = {}
    "factor -> weight, of priority/multifactor: Age, FairShare, ..., each TRES"
    priority_flags: list[str] = []
    site_factor: str = ""
    "plugin that adds to priorities what it likes; empty: none"
    select_type: str = ""
    "select/cons_tres and select/cons_res share nodes between jobs, select/linear never does"


def slurm_release(text: str) -> tuple[int, ...]:
    """The release that a text names, of Slurm or of pyslurm: (22, 5) of `slurm-wlm 22.05.8`; empty: it names none."""
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
