"""The vocabulary: frozen structs and enums shared by every layer.

These types are the wire format (MessagePack between head, agents and workers), the store format (values in
Redis) and the JSON of the command line. They hold no behaviour beyond trivial derived values.

Words: a *run* is one elastic training; a *job* is a Slurm job; an *allocation* is one job held for a run (`base`:
what the user asked for, `harvest`: one node picked up idle); an *agent* is one process per node; a *worker* is one
training process; a *member* is a worker of the current *generation*. See `docs/architecture.md`.

Times: fields ending in `_s` are seconds (float). Points in time that cross a process border are either Unix
seconds (`*_at`, for people) or relative (`*_in_s`, for decisions), so that clock skew never moves a deadline.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any

import msgspec

PROTOCOL = 1
"""Version of the messages below; a peer that says another one is refused."""

ID_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"
"""Run ids, tokens and worker ids. They become job names, file names and Redis keys."""


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all plain data: immutable, keyword-only, unknown fields refused."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="t", tag=True):
    """Base of everything that travels over ZeroMQ, tagged by its class name."""


# ---------------------------------------------------------------------------------------------------------------
# Exit codes
# ---------------------------------------------------------------------------------------------------------------


class Exit(IntEnum):
    """Documented exit codes (sysexits.h where one fits)."""

    OK = 0
    USAGE = 2
    DATA = 65
    "bad input: script, dataset, model that does not match"
    NOINPUT = 66
    "a file that was named does not exist"
    UNAVAILABLE = 69
    "head, Slurm or Redis cannot be reached"
    SOFTWARE = 70
    "a bug in Fallow, or the user's script failed where no better code exists"
    OSERR = 71
    CANTCREAT = 73
    "a second head, or a file that cannot be written"
    IOERR = 74
    TEMPFAIL = 75
    "try again: a deadline passed"
    NOPERM = 77
    CONFIG = 78
    "the configuration file is wrong"
    NO_RESTART = 93
    "this allocation is done; nothing after `fallow run` may run in it"


class FallowError(Exception):
    """Root of all errors that a person can act on.

    `message` says what failed, on which object and what to do next; `code` is the exit status.
    """

    def __init__(self, message: str, code: Exit = Exit.SOFTWARE) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


# ---------------------------------------------------------------------------------------------------------------
# Enums
# ---------------------------------------------------------------------------------------------------------------


class AllocationKind(StrEnum):
    BASE = "base"
    HARVEST = "harvest"


class AllocationState(StrEnum):
    UNKNOWN = "unknown"
    "sbatch failed or timed out: the job may exist; looked up by token until the horizon passes"
    PENDING = "pending"
    RUNNING = "running"
    RELEASING = "releasing"
    ENDED = "ended"
    LOST = "lost"
    "never appeared in Slurm within the horizon"


class RunStatus(StrEnum):
    WAITING = "waiting"
    "no member yet; waits for the first allocation"
    TRAINING = "training"
    SUSPENDED = "suspended"
    "no member; state is in a durable checkpoint; goes on when a node arrives"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (RunStatus.FINISHED, RunStatus.FAILED, RunStatus.CANCELLED)


class WorkerPhase(StrEnum):
    STARTING = "starting"
    "its process runs, READY has not come"
    READY = "ready"
    "rehearsed; a warm standby until a generation takes it in"
    MEMBER = "member"
    LEAVING = "leaving"
    "a member that will not be in the next generation"
    GONE = "gone"


class ChangeKind(StrEnum):
    START = "start"
    ABSORB = "absorb"
    RELEASE = "release"
    EJECT = "eject"
    MIXED = "mixed"


# ---------------------------------------------------------------------------------------------------------------
# Worker -> head
# ---------------------------------------------------------------------------------------------------------------


class WorkerHello(Message, frozen=True, kw_only=True):
    """First message after every (re)connect; answered by `Welcome` or `Refused`."""

    worker: str
    protocol: int
    pid: int
    version: str
    torch: str
    address: str
    "address on which this worker's process group listens"
    generation: int = 0
    "0 while it is not a member"
    step: int = 0


class WorkerReady(Message, frozen=True, kw_only=True):
    """Rehearsal done. Sent again until the head answers with a `Prepare` or a `BeatAck(ready=True)`."""

    worker: str
    signature: str
    "SHA-256 over names, shapes and dtypes of the prepared state"
    layout: list[str]
    'one line per tensor, e.g. "model.0.weight float32[64,3]"; used to say what differs'
    shards: int
    "shards in one global batch: the most members that can do something useful"
    global_batch: int
    total_steps: int | None = None


class Vote(Message, frozen=True, kw_only=True):
    """Answer to `Prepare`: the group of that generation stands (ok) or could not be built."""

    worker: str
    generation: int
    ok: bool
    reason: str = ""


class Beat(Message, frozen=True, kw_only=True):
    """Heartbeat every `Welcome.beat_s` from the communication thread; answered by `BeatAck`."""

    worker: str
    generation: int
    "generation it computes in; 0: none"
    prepared: int
    "highest generation whose group stands here; 0: none"
    step: int
    "finished optimizer steps since the run began"
    held: bool
    "stopped at the turn of the loop: its group is broken, it waits for a new generation"
    epoch: int = 0
    loss: float | None = None
    samples_per_s: float = 0.0
    "of the whole global batch"
    total_steps: int | None = None
    scalars: dict[str, float] = {}


class Parts(Struct, frozen=True, kw_only=True):
    """Where a pause went, in seconds."""

    drain: float = 0.0
    group: float = 0.0
    state: float = 0.0
    data: float = 0.0


class Active(Message, frozen=True, kw_only=True):
    """The worker took part in the first exchange of `generation` and now computes in it."""

    worker: str
    generation: int
    first_step: int
    "the step (0-based) that this generation computes first"
    pause_s: float
    "end of the last step in the old generation to start of the first in this one; 0 for a newcomer"
    parts: Parts
    bytes_received: int = 0
    steps_discarded: int = 0


class Held(Message, frozen=True, kw_only=True):
    """Its group broke (a peer's connection was lost): it has stopped at the turn of the loop."""

    worker: str
    generation: int
    step: int
    reason: str


class Left(Message, frozen=True, kw_only=True):
    """The worker switched out of `generation` at a boundary and is ending its process."""

    worker: str
    generation: int
    step: int


class Checkpointed(Message, frozen=True, kw_only=True):
    """A durable checkpoint is complete on disk."""

    worker: str
    step: int
    path: str
    digest: str


class Finished(Message, frozen=True, kw_only=True):
    """The user's script ended normally on a member."""

    worker: str
    generation: int
    steps: int
    digest: str
    "SHA-256 over the model's state, names sorted"
    loss: float | None
    samples: int
    "samples consumed by all finished steps of the run"


class Failed(Message, frozen=True, kw_only=True):
    """The user's script raised, or Fallow refused something it did. The process ends after this."""

    worker: str
    code: int
    message: str
    "what failed, on which object, what to do"
    traceback: str = ""


class KvOp(StrEnum):
    SET = "set"
    GET = "get"
    ADD = "add"
    CHECK = "check"
    CAS = "cas"


class KvRequest(Message, frozen=True, kw_only=True):
    """Rendezvous store of one generation, kept in the head's memory. Carries a process group's addresses.

    `GET` waits until all `keys` exist or `timeout_s` has passed. `ADD` adds `amount` to an integer value.
    `CAS` sets `value` where the key holds `expected` (or is missing and `expected` is empty).
    """

    id: int
    generation: int
    op: KvOp
    keys: list[str]
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    timeout_s: float = 0.0


FromWorker = (
    WorkerHello | WorkerReady | Vote | Beat | Active | Held | Left | Checkpointed | Finished | Failed | KvRequest
)

# ---------------------------------------------------------------------------------------------------------------
# Head -> worker
# ---------------------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """What a worker must know before the script reaches `prepare`."""

    term: int
    run: str
    seed: int
    max_workers: int
    "the run's maximum number of workers; the default number of shards"
    beat_s: float
    lease_s: float
    "the worker is ejected when no beat came for this long"
    head_patience_s: float
    "a held or ready worker gives up when the head was silent for this long"
    folder: str
    "the run's folder on the shared file system (0700)"
    checkpoint: str | None = None
    "newest durable checkpoint; loaded by whoever starts a generation in which nobody has the state"
    epoch: int = 0
    "epoch that the members are in; a hint for `run.epochs`, corrected at the switch"


class Peer(Struct, frozen=True, kw_only=True):
    """One place in a generation's rank map; its rank is its position in the list."""

    worker: str
    address: str


class Prepare(Message, frozen=True, kw_only=True):
    """Build the group of `generation` beside the old one, in the background, then `Vote`.

    `members` is empty when the run is being suspended. `replaces` is the generation it follows.
    A worker that is in `replaces` but not in `members` votes too and leaves at the switch.
    """

    term: int
    generation: int
    replaces: int
    members: list[Peer]
    interrupt: bool
    "True: `replaces` is broken; abandon its collectives now, stop at the turn of the loop and switch on `Commit`"
    timeout_s: float
    checkpoint: str | None = None


class Commit(Message, frozen=True, kw_only=True):
    """`generation` is committed (durable). Members agree on the boundary among themselves and switch."""

    term: int
    generation: int


class Abort(Message, frozen=True, kw_only=True):
    """`generation` is burned; train on in the old one (or stay held for the next `Prepare`)."""

    term: int
    generation: int
    reason: str


class Interrupt(Message, frozen=True, kw_only=True):
    """A member of `generation` is gone: abandon its collectives and stop at the turn of the loop."""

    term: int
    generation: int
    reason: str


class BeatAck(Message, frozen=True, kw_only=True):
    """The head is alive. `ready`: it has this worker's `WorkerReady`."""

    term: int
    ready: bool = False
    deadline_in_s: float | None = None
    "seconds until this worker's node goes away; None: unknown"


class SaveCheckpoint(Message, frozen=True, kw_only=True):
    """Write a durable checkpoint at the next boundary."""

    term: int


class Dismiss(Message, frozen=True, kw_only=True):
    """Not (or no longer) needed: end the process with `code`. Sent to non-members, and to members of an ended run."""

    term: int
    code: int
    reason: str


class KvReply(Message, frozen=True, kw_only=True):
    id: int
    ok: bool
    values: list[bytes] = []
    number: int = 0


class Refused(Message, frozen=True, kw_only=True):
    """The head will not talk to this peer; it prints `message` and ends with `code`."""

    code: int
    message: str


ToWorker = Welcome | Prepare | Commit | Abort | Interrupt | BeatAck | SaveCheckpoint | Dismiss | KvReply | Refused

# ---------------------------------------------------------------------------------------------------------------
# Agent <-> head
# ---------------------------------------------------------------------------------------------------------------


class AgentHello(Message, frozen=True, kw_only=True):
    """First message of an agent after every (re)connect; answered by `AgentPlan` or `Refused`."""

    agent: str
    "unique among the agents of a token: the node's name"
    token: str
    protocol: int
    version: str
    job_id: str
    "Slurm job id of the allocation (the leader's of a heterogeneous job), or local-PID"
    node: str
    "SLURMD_NODENAME, else the host name"
    slots: int
    "workers this node runs"
    pid: int
    running: list[str] = []
    "workers already started (the head or the connection came back)"


class WorkerKey(Message, frozen=True, kw_only=True):
    """Public key (Z85) made in memory for one worker; answered by `KeyAccepted`, after which it is started."""

    worker: str
    public_key: str


class WorkerExit(Message, frozen=True, kw_only=True):
    """A worker's process is gone. Sent until acknowledged by `ExitNoted`."""

    worker: str
    code: int | None
    "exit status; None when a signal ended it"
    signal: int | None
    tail: str = ""
    "last lines of its standard error, sanitized"


class AgentBeat(Message, frozen=True, kw_only=True):
    alive: list[str]


class Notice(Message, frozen=True, kw_only=True):
    """The node was warned: SIGTERM at the step (preemption, scancel or time limit)."""

    signal: int


class AgentLeft(Message, frozen=True, kw_only=True):
    """All its workers are gone and the agent is ending."""

    code: int


FromAgent = AgentHello | WorkerKey | WorkerExit | AgentBeat | Notice | AgentLeft


class AgentPlan(Message, frozen=True, kw_only=True):
    """Start these workers, in this order."""

    term: int
    run: str
    workers: list[str]
    folder: str
    beat_s: float


class KeyAccepted(Message, frozen=True, kw_only=True):
    worker: str


class ExitNoted(Message, frozen=True, kw_only=True):
    worker: str


class StopWorker(Message, frozen=True, kw_only=True):
    """Kill one worker now (ejected, or it did not leave by itself)."""

    term: int
    worker: str
    reason: str


class ShowOutput(Message, frozen=True, kw_only=True):
    """Copy this worker's output to the agent's own (it is the main member now); None: none of yours is."""

    term: int
    worker: str | None


class AgentEnd(Message, frozen=True, kw_only=True):
    """End: workers are given `kill_after_s` to exit by themselves, then killed; exit with `code`.

    Code 0 means that the run is finished and the lines after `fallow run` belong to this allocation.
    """

    term: int
    code: int
    reason: str
    kill_after_s: float = 5.0


class AgentBeatAck(Message, frozen=True, kw_only=True):
    term: int


ToAgent = AgentPlan | KeyAccepted | ExitNoted | StopWorker | ShowOutput | AgentEnd | AgentBeatAck | Refused

FromPeer = FromWorker | FromAgent


# ---------------------------------------------------------------------------------------------------------------
# What Slurm says (filled by a Slurm client, read by the core)
# ---------------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------------
# Files that the head leaves for others (all 0600 in 0700 folders)
# ---------------------------------------------------------------------------------------------------------------


class HeadFile(Struct, frozen=True, kw_only=True):
    """`STATE/head.json`: where the head is. Rewritten at every start."""

    protocol: int
    version: str
    host: str
    pid: int
    term: int
    endpoint: str
    "ZeroMQ, tcp://ADDRESS:PORT"
    public_key: str
    control: str
    "path of the control socket on `host`"
    started_at: float


class KeyFile(Struct, frozen=True, kw_only=True):
    """`STATE/runs/RUN/keys/TOKEN.json`: what an allocation's agents need to reach the head."""

    run: str
    token: str
    kind: AllocationKind
    public_key: str
    secret_key: str
    head_file: str
    "path of head.json, read again when the head does not answer"
    workers_per_node: int | None = None
    "None: one per visible GPU, else one"


class WorkerSecret(Struct, frozen=True, kw_only=True):
    """What an agent writes, once, into the pipe whose descriptor FALLOW_CHANNEL_FD names; then it closes the pipe.

    A worker's key exists in this message and in the two processes' memory only.
    """

    endpoint: str
    "ZeroMQ endpoint of the head, tcp://ADDRESS:PORT"
    server_key: str
    "the head's public key (Z85)"
    public_key: str
    secret_key: str
    head_file: str | None
    "path of head.json, read again when the head does not answer"
    address: str
    "address on which this worker's process groups listen"


# ---------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------


class RunSpec(Struct, frozen=True, kw_only=True):
    """What the user asked for; fixed for the life of the run."""

    run: str
    name: str
    min_nodes: int
    max_nodes: int
    workers_per_node: int | None = None
    harvest_partitions: list[str] = []
    "empty: the head's configured ones"
    script: str = ""
    "the batch script as submitted"
    args: list[str] = []
    sbatch_options: list[str] = []
    "options of the base submission, in canonical --long=value form, script header included"
    harvest_options: list[str] = []
    "the subset that may reach harvest jobs (account, gres, constraint ...)"
    environment: dict[str, str] = {}
    cwd: str = ""
    umask: int = 0o077
    budget_node_hours: float | None = None
    min_harvest_minutes: int = 2
    seed: int = 0
    local: bool = False
    "True under `fallow local`: no Slurm"
    created_at: float = 0.0


# ---------------------------------------------------------------------------------------------------------------
# Reports and snapshots (the JSON of DESIGN section 6)
# ---------------------------------------------------------------------------------------------------------------


class Quantiles(Struct, frozen=True, kw_only=True):
    p50: float | None
    p95: float | None
    max: float | None = None


class PauseReport(Struct, frozen=True, kw_only=True):
    planned: Quantiles
    unplanned: Quantiles


class SampleReport(Struct, frozen=True, kw_only=True):
    consumed: int
    lost: int
    duplicated: int


class GenerationReport(Struct, frozen=True, kw_only=True):
    generation: int
    kind: ChangeKind
    members: list[str]
    first_step: int | None
    pause_s: float | None
    parts: Parts
    reason: str = ""
    at: float = 0.0


class RunReport(Struct, frozen=True, kw_only=True):
    """Report of `fallow local`, `fallow demo` and finished runs."""

    run: str
    status: RunStatus
    steps: int
    samples: SampleReport
    final_digest: str | None
    final_loss: float | None
    generations: list[GenerationReport]
    pause_s: PauseReport
    steps_discarded: int
    message: str = ""


class EventRecord(Struct, frozen=True, kw_only=True):
    """One line of the event log. `seq` strictly increases over the life of the state folder."""

    seq: int
    at: float
    run: str | None
    kind: str
    "e.g. absorb, release, eject, submit, poll, refuse, finish"
    text: str
    data: dict[str, Any] = {}


class MemberView(Struct, frozen=True, kw_only=True):
    worker: str
    node: str
    token: str
    allocation: AllocationKind
    phase: WorkerPhase
    rank: int | None
    step: int
    ends_in_s: float | None
    last_seen_s: float
    pid: int = 0


class AllocationView(Struct, frozen=True, kw_only=True):
    token: str
    kind: AllocationKind
    state: AllocationState
    job_id: str | None
    partition: str
    nodes: list[str]
    ends_in_s: float | None
    reason: str = ""


class RunView(Struct, frozen=True, kw_only=True):
    run: str
    name: str
    status: RunStatus
    min_nodes: int
    max_nodes: int
    limit: int
    "members wanted at most now (grow/shrink move it)"
    generation: int
    step: int
    total_steps: int | None
    epoch: int
    loss: float | None
    samples_per_s: float
    members: list[MemberView]
    allocations: list[AllocationView]
    change: str | None
    "a membership change under way, in words"
    scalars: dict[str, float] = {}
    message: str = ""
    created_at: float = 0.0
    useful: int = 0
    "members that would have something to do: the limit, or the shards in a step if they are fewer"


class NodeOwner(StrEnum):
    IDLE = "idle"
    OURS = "ours"
    OTHERS = "others"
    PLANNED = "planned"
    DOWN = "down"


class NodeView(Struct, frozen=True, kw_only=True):
    node: str
    partitions: list[str]
    state: str
    "as Slurm says it"
    owner: NodeOwner
    run: str | None = None
    gpus: int = 0
    ends_in_s: float | None = None


class HeadView(Struct, frozen=True, kw_only=True):
    version: str
    host: str
    pid: int
    term: int
    uptime_s: float
    cluster: str | None
    slurm_version: str | None
    slurm_error: str | None
    poll_age_s: float | None
    poll_interval_s: float
    polls: int
    agents: int
    workers: int


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything that `status`, `top` and a subscriber see."""

    at: float
    head: HeadView
    nodes: list[NodeView]
    runs: list[RunView]
    last_event: int
