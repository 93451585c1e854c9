"""What Slurm says (filled by a Slurm client, read by the core), and what it is asked for."""

from __future__ import annotations

from fallow.model.base import Struct


class NodeInfo(Struct, frozen=True, kw_only=True):
    node: str
    state: str
    "base state in capitals: IDLE, ALLOCATED, MIXED, DOWN, UNKNOWN ..."
    flags: list[str] = []
    "DRAIN, COMPLETING, PLANNED, NOT_RESPONDING, MAINTENANCE, RESERVED, POWERED_DOWN ..."
    partitions: list[str] = []
    cpus: int = 0
    gpus: int = 0
    gpus_used: int = 0
    features: list[str] = []


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
    submit_at: float | None = None
    start_at: float | None = None
    "for a pending job: the planned start, if the scheduler gave one"
    end_at: float | None = None
    time_limit_s: float | None = None
    preempt_at: float | None = None
    priority: int = 0
    comment: str = ""
    het_job_id: str | None = None


class PartitionInfo(Struct, frozen=True, kw_only=True):
    partition: str
    nodes: list[str]
    max_time_s: float | None = None
    "None: unlimited"
    up: bool = True
    default: bool = False
    priority_tier: int = 1
    preempt_mode: str = "OFF"
    "in capitals, of this partition's jobs: OFF, CANCEL, REQUEUE, SUSPEND"
    grace_s: float = 0.0


class ReservationInfo(Struct, frozen=True, kw_only=True):
    reservation: str
    nodes: list[str]
    start_at: float
    end_at: float
    flags: list[str] = []


class ClusterState(Struct, frozen=True, kw_only=True):
    """One batched poll. `at` is Unix time of the answer, on the clock that the jobs' times are on."""

    at: float
    nodes: list[NodeInfo]
    jobs: list[JobInfo]
    partitions: list[PartitionInfo]
    reservations: list[ReservationInfo] = []


class ClusterConfig(Struct, frozen=True, kw_only=True):
    """What rarely changes; read at start and hourly."""

    cluster: str
    slurm_version: str
    preempt_type: str = ""
    kill_wait_s: float = 30.0
    backfill_interval_s: float = 30.0
    message_timeout_s: float = 10.0
    private_data: list[str] = []
    priority_type: str = ""
    scheduler_parameters: str = ""


class JobRequest(Struct, frozen=True, kw_only=True):
    """A job to submit. `script` is the batch script's text; `options` are sbatch options in --long=value form."""

    token: str
    options: list[str]
    script: str
    args: list[str] = []
    environment: dict[str, str] = {}
    cwd: str = "/"
    umask: int = 0o077
