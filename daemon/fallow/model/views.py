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
    "of steps whose records a full or hanging disk kept out of the ledgers: the audit is incomplete. Not shown when 0"


class GenerationReport(Struct, frozen=True, kw_only=True):
    generation: int
    kind: ChangeKind
    members: list[str]
    "names of its nodes in rank order"
    first_step: int | None
    pause_s: float | None
    parts: Parts
    bytes_in_pause: int = 0
    "of state that newcomers received inside the pause"
    bytes_behind: int = 0
    "of state that they received while the others were in the first step"
    reason: str = ""
    at: float = 0.0
    took_s: float | None = None
    "from the head's decision (a loss: from the news of it) until every member computed in it"


class RollbackReport(Struct, frozen=True, kw_only=True):
    """The run was taken back by hand: steps after `to_step` that were done before were done again, on purpose."""

    generation: int
    "the first that began from there"
    from_step: int
    "finished steps when the members went back, as far as the head had heard"
    to_step: int


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
    "of the failure that ended the run"
    rest_in: str = ""
    "token of the allocation in which the lines after `fallow run` run"
    reproducible: bool = False
    "the result does not depend on the membership, bit for bit"
    steps_repeated: int = 0
    "steps that were done again because a gradient came after the others of its bucket"

    @property
    def sound(self) -> bool:
        """Finished, and every sample was used exactly once."""
        return self.status is RunStatus.FINISHED and not self.samples.lost and not self.samples.duplicated


class NewEvent(NamedTuple):
    """A line of the event log that has no number yet: an `EventRecord` but for `seq`."""

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
    """A node of a run, from the time at which its agent comes."""

    member: str
    "n0, n1 ... in order of arrival"
    node: str
    "its host"
    token: str
    allocation: AllocationKind
    phase: MemberPhase
    rank: int | None
    "of its first worker; None: it does not compute"
    workers: int
    step: int
    ends_in_s: float | None
    last_seen_s: float
    pids: list[int] = []
    "of its workers"
    shards: int = 0
    "of a full step that it computes"
    pace_s: float = 0.0
    "seconds per shard; 0: not known yet"


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
    "the run has gone on from an earlier step since; never loaded"


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
    "by hand: kept until it is deleted by hand"
    problem: str = ""


class SpeedView(Struct, frozen=True, kw_only=True):
    """A number of nodes that is worth having: each is faster than the ones before."""

    nodes: int
    "of all allocations together"
    steps_per_s: float
    measured: bool
    "with so many nodes, by this run or an earlier one of the same script and model; else foretold"


class RunView(Struct, frozen=True, kw_only=True):
    run: str
    name: str
    status: RunStatus
    min_nodes: int
    max_nodes: int
    limit: int
    "nodes wanted at most now (grow/shrink move it)"
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
    scalars: dict[str, float | None] = {}
    "what the script logs; None: no number or beyond all, which JSON cannot tell"
    message: str = ""
    without_agent: list[str] = []
    "of each job that runs and whose agents do not come: what to look at"
    paused: str = ""
    "why no nodes are asked for; empty: they are"
    created_at: float = 0.0
    useful: int = 0
    "nodes that would have something to do: the limit, or as many as the shards of a step keep busy if they are fewer"
    barred: dict[str, str] = {}
    "node -> why the run does without it"
    drained: list[str] = []
    "nodes that it does without until it is resumed"
    checkpoints: list[CheckpointView] = []
    "newest first"
    speeds: list[SpeedView] = []
    "empty: nothing is known yet"
    target: int | None = None
    "harvested nodes that it has and asks for, without those that it gives back, as of the last plan"
    weight: float = 1.0
    deadline_at: float | None = None
    ahead_s: float | None = None
    "of the deadline's schedule; negative: behind; None: no deadline, or not known yet how long the run takes"

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
    "as Slurm says it"
    owner: NodeOwner
    run: str | None = None
    gpus: int = 0
    ends_in_s: float | None = None
    ending: bool = False
    "ours, and its job is over but for Slurm, which still had it at the last poll"
    unused: str = ""
    "why an idle node is not used, as of the last plan"


class InternalError(Struct, frozen=True, kw_only=True):
    """Errors of one kind that nobody expected: a bug, or input that should have been refused."""

    source: str
    "what was being done: tick, plan, Slurm poll, message Beat ..."
    error: str
    "type and words of the last one"
    line: str
    "file and line of the code"
    count: int
    "since the head's start"
    run: str | None
    "the run that the last one cost; None: none"
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
    "where agents find it: tcp://ADDRESS:PORT"
    agents: int
    workers: int
    "of all members"
    others_delayed: DelayReport = DelayReport()
    stopped: str = ""
    "why nothing is harvested at all; empty: it is"
    store_problem: str = ""
    "why the head can write nothing down, so that nothing changes; empty: it can"
    stand_in: bool = False
    "an agent has started this head on a node of a base job"
    not_harvested: dict[str, str] = {}
    "partition -> why nodes are not asked for there, though the configuration would have it"
    internal_errors: list[InternalError] = []
    "empty: all went as it should since the head's start"


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything that `status` and `top` see."""

    at: float
    head: HeadView
    nodes: list[NodeView]
    runs: list[RunView]
    last_event: int
