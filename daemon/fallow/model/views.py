"""Reports and snapshots: the JSON of the command line (DESIGN: outside contract)."""

from enum import StrEnum
from typing import Any, NamedTuple

from fallow.model.base import AllocationKind, AllocationState, ChangeKind, MemberPhase, Parts, RunStatus, Struct
from fallow.model.reports import DelayReport


class Quantiles(Struct, frozen=True, kw_only=True):
    p50: float | None
    p95: float | None
    max: float | None = None


class PauseReport(Struct, frozen=True, kw_only=True):
    planned: Quantiles
    unplanned: Quantiles


class SampleReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    consumed: int
    lost: int
    duplicated: int
    unknown: int = 0
    "samples of steps that a full or hanging disk kept out of the ledgers, so the audit is incomplete. Omitted if 0"


class GenerationReport(Struct, frozen=True, kw_only=True):
    generation: int
    kind: ChangeKind
    members: list[str]
    "member names in rank order"
    first_step: int | None
    pause_s: float | None
    parts: Parts
    bytes_in_pause: int = 0
    "bytes of state that newcomers received during the pause"
    bytes_behind: int = 0
    "bytes of state that newcomers received while the others were in the first step"
    reason: str = ""
    at: float = 0.0
    took_s: float | None = None
    "seconds from the head's decision (or from the news of a loss) until all members computed"


class RollbackReport(Struct, frozen=True, kw_only=True):
    """A rollback by hand: the run repeated the steps after `to_step` on purpose."""

    generation: int
    "first generation after the rollback"
    from_step: int
    "finished steps before the rollback, as last reported to the head"
    to_step: int
    "finished steps after the rollback"


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
    rolled_back: list[RollbackReport] = []
    message: str = ""
    traceback: str = ""
    "traceback of the failure that ended the run"
    rest_in: str = ""
    "token of the allocation that executes the script's lines after `fallow run`"
    reproducible: bool = False
    "the result is bitwise independent of the membership"
    steps_repeated: int = 0
    "number of steps repeated because a gradient arrived after the others of its bucket"

    @property
    def sound(self) -> bool:
        """True if the run is finished and every sample was used exactly once."""
        return self.status is RunStatus.FINISHED and not self.samples.lost and not self.samples.duplicated


class NewEvent(NamedTuple):
    """A new line of the event log: an `EventRecord` without `seq`."""

    at: float
    run: str | None
    kind: str
    text: str
    data: dict[str, Any]


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
    """A node of a run whose agent has registered."""

    member: str
    "n0, n1 ... in order of arrival"
    node: str
    "host name"
    token: str
    allocation: AllocationKind
    phase: MemberPhase
    rank: int | None
    "rank of its first worker; None: the node does not compute"
    workers: int
    step: int
    ends_in_s: float | None
    last_seen_s: float
    pids: list[int] = []
    "process ids of its workers"
    shards: int = 0
    "number of shards of a full step that it computes"
    pace_s: float = 0.0
    "seconds per shard; 0: not measured yet"

    @property
    def ranks(self) -> str:
        """Ranks of its workers for people, e.g. `4-7`; `-`: the node does not compute."""
        if self.rank is None:
            return "-"
        return str(self.rank) if self.workers == 1 else f"{self.rank}-{self.rank + self.workers - 1}"


class AllocationView(Struct, frozen=True, kw_only=True):
    token: str
    kind: AllocationKind
    state: AllocationState
    job_id: str | None
    partition: str
    nodes: list[str]
    ends_in_s: float | None
    reason: str = ""


class CheckpointState(StrEnum):
    USABLE = "usable"
    DAMAGED = "damaged"
    ASIDE = "aside"
    "the run has since gone back to an earlier step; such a checkpoint is never loaded"


class CheckpointView(Struct, frozen=True, kw_only=True):
    """A durable checkpoint on disk."""

    step: int
    generation: int
    epoch: int
    written_at: float
    "Unix time of the snapshot"
    nbytes: int
    path: str
    state: CheckpointState
    asked: bool
    "requested by hand; kept until it is deleted by hand"
    problem: str = ""


class SpeedView(Struct, frozen=True, kw_only=True):
    """Speed with a number of nodes. Each entry of a list is faster than the entries before it."""

    nodes: int
    "number of nodes in all allocations"
    steps_per_s: float
    measured: bool
    "measured by this run or an earlier run of the same script and model; False: predicted"


class RunView(Struct, frozen=True, kw_only=True):
    run: str
    name: str
    status: RunStatus
    min_nodes: int
    max_nodes: int
    limit: int
    "current maximum number of nodes, which grow and shrink change"
    generation: int
    step: int
    total_steps: int | None
    epoch: int
    loss: float | None
    samples_per_s: float
    members: list[MemberView]
    allocations: list[AllocationView]
    change: str | None
    "current change of the membership, in words; None: no change"
    scalars: dict[str, float | None] = {}
    "values that the script logs; None: NaN or infinite, which JSON cannot represent"
    message: str = ""
    without_agent: list[str] = []
    "advice for each running job whose agents have not registered"
    paused: str = ""
    "reason why the run requests no nodes; empty: it does"
    created_at: float = 0.0
    useful: int = 0
    "number of nodes that would have work: the limit, or fewer if a step has too few shards"
    barred: dict[str, str] = {}
    "node -> reason why the run does not use it"
    drained: list[str] = []
    "nodes that the run does not use until `fallow resume`"
    checkpoints: list[CheckpointView] = []
    "newest first"
    speeds: list[SpeedView] = []
    "by number of nodes; empty: not known yet"
    target: int | None = None
    "harvested nodes that the run holds or requests after the last plan, without those that it returns"
    weight: float = 1.0
    deadline_at: float | None = None
    ahead_s: float | None = None
    "seconds ahead of the deadline's schedule; negative: behind; None: no deadline, or no prediction yet"

    @property
    def training(self) -> list[MemberView]:
        """Members that compute."""
        return [member for member in self.members if member.rank is not None]


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
    "Slurm's state of the node"
    owner: NodeOwner
    run: str | None = None
    gpus: int = 0
    ends_in_s: float | None = None
    ending: bool = False
    "our job has ended, but Slurm still had it at the last poll"
    unused: str = ""
    "reason why the last plan did not use this idle node"


class InternalError(Struct, frozen=True, kw_only=True):
    """Unexpected errors of one kind: a bug, or input that should have been refused."""

    source: str
    "activity that failed: tick, plan, Slurm poll, message Beat ..."
    error: str
    "type and text of the last error"
    line: str
    "file and line of the code"
    count: int
    "number of errors since the head's start"
    run: str | None
    "run that failed because of the last error; None: no run"
    first_at: float
    last_at: float


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
    endpoint: str = ""
    "address for agents: tcp://ADDRESS:PORT"
    agents: int
    workers: int
    "number of workers of all members"
    others_delayed: DelayReport = DelayReport()
    stopped: str = ""
    "reason why the head harvests nothing; empty: it harvests"
    store_problem: str = ""
    "reason why the head cannot write its state, so that it changes nothing; empty: it can"
    stand_in: bool = False
    "an agent has started this head on a node of a base job"
    not_harvested: dict[str, str] = {}
    "configured partition -> reason why the head does not harvest it"
    internal_errors: list[InternalError] = []
    "unexpected errors since the head's start"


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything that `fallow status` and `fallow top` show."""

    at: float
    head: HeadView
    nodes: list[NodeView]
    runs: list[RunView]
    last_event: int
