"""What travels over ZeroMQ: between workers and the head, and between agents and the head."""

from __future__ import annotations

from enum import StrEnum

from fallow.model.base import Doing, Message, Parts, Struct
from fallow.model.bounds import (
    Amount,
    Blob,
    Code,
    Count,
    Few,
    Finite,
    Fractions,
    Id,
    Key,
    Many,
    Moment,
    Name,
    Prose,
    Rate,
    Scalars,
    Seconds,
    Shards,
    Slots,
)
from fallow.model.runs import DataNetwork

# Worker -> head


class WorkerHello(Message, frozen=True, kw_only=True):
    """First message after every (re)connect; answered by `Welcome` or `Refused`."""

    worker: Id
    protocol: Code
    pid: Count
    version: Name
    torch: Name
    address: Name
    "address on which this worker's process group listens"
    generation: Count = 0
    "0 while it is not a member"
    step: Count = 0


class WorkerReady(Message, frozen=True, kw_only=True):
    """Rehearsal done. Sent again until the head answers with a `Prepare` or a `BeatAck(ready=True)`."""

    worker: Id
    signature: Name
    "SHA-256 over names, shapes and dtypes of the prepared state"
    layout: Many[Prose]
    'one line per tensor, e.g. "model.0.weight float32[64,3]"; used to say what differs'
    shards: Shards
    "shards in one global batch: the most members that can do something useful"
    global_batch: Shards
    total_steps: Count | None = None
    arithmetic: Few[Name] = []
    "reproducible mode: what makes its bits, one fact per line; empty in the fast mode"
    restarts: bool = False
    "its script knows nothing of Fallow: every change of the membership restarts it, on all members"


class Vote(Message, frozen=True, kw_only=True):
    """Answer to `Prepare`: the group of that generation stands (ok) or could not be built."""

    worker: Id
    generation: Count
    ok: bool
    reason: Prose = ""
    unreachable: Many[Id] = []
    "workers to whom no connection could be made"
    tried: Many[Prose] = []
    "for each of them ADDRESS:PORT to which the connection was to lead; empty: nobody has said"


class Beat(Message, frozen=True, kw_only=True):
    """Heartbeat every `Welcome.beat_s` from the communication thread; answered by `BeatAck`."""

    worker: Id
    generation: Count
    "generation it computes in; 0: none"
    prepared: Count
    "highest generation whose group stands here; 0: none"
    step: Count
    "finished optimizer steps since the run began"
    held: bool
    "stopped at the turn of the loop: its group is broken, it waits for a new generation"
    epoch: Count = 0
    reached: tuple[Count, Count] = (0, 0)
    "number of the pass over data in progress, finished steps in it"
    loss: float | None = None
    samples_per_s: Rate = 0.0
    "of the whole global batch"
    shards: Shards = 0
    "of a full step that it computes"
    pace_s: Seconds = 0.0
    "seconds per shard that it measured; 0: not known yet"
    total_steps: Count | None = None
    scalars: Scalars = {}
    doing: Doing = Doing.WORKING
    stalled_s: Finite = 0.0
    "seconds since its training thread last got on: began a body or a wait, or ended one"
    computes: bool = False
    "its device is at this member's own work, or hangs in it; False for a processor"
    unrecorded: Count | None = None
    "the step from which on records are missing in its ledger, whose file cannot be written; None: none is"
    busy_links: Fractions = {}
    "address of another member -> part of the last seconds (0..1) in which the connection to it was busy; the busiest"


class Active(Message, frozen=True, kw_only=True):
    """The worker took part in the first exchange of `generation`, now computes in it and has all of the state."""

    worker: Id
    generation: Count
    first_step: Count
    "the step (0-based) that this generation computes first"
    pause_s: Seconds
    "end of the last step in the old generation to start of the first in this one; 0 for a newcomer"
    parts: Parts
    bytes_received: Count = 0
    "bytes of state that it received while others stood still"
    bytes_behind: Count = 0
    "bytes of state that it received while others computed"
    steps_discarded: Count = 0
    healed: bool = False
    "it was as far as the others with other weights than most of them, and received theirs"


class Held(Message, frozen=True, kw_only=True):
    """Its group broke (a peer's connection was lost): it has stopped at the turn of the loop."""

    worker: Id
    generation: Count
    step: Count
    reason: Prose


class Deserted(Message, frozen=True, kw_only=True):
    """Its script has ended inside of a run.updates loop in which others go on. The exit code comes from its agent."""

    worker: str
    generation: int
    step: int


class Aligned(Message, frozen=True, kw_only=True):
    """Between two steps it has received the others' state anew: its weights had come apart from theirs."""

    worker: Id
    generation: Count
    step: Count


class Left(Message, frozen=True, kw_only=True):
    """The worker switched out of `generation` at a boundary and is ending its process."""

    worker: Id
    generation: Count
    step: Count


class Checkpointed(Message, frozen=True, kw_only=True):
    """A durable checkpoint is complete on disk. Sent again with the beats until `CheckpointNoted`."""

    worker: Id
    generation: Count
    "in which it was written"
    step: Count
    "finished optimizer steps that it holds"
    epoch: Count
    path: Name
    "its folder"
    digest: Name
    "SHA-256 of its manifest, which holds those of all its files"
    nbytes: Count
    written_at: Moment
    "Unix time of the snapshot"
    asked: bool = False
    "somebody asked for it by hand"
    took_s: Seconds = 0.0
    "from the snapshot until it was complete"


class CheckpointFailed(Message, frozen=True, kw_only=True):
    """A checkpoint was given up; training goes on and older ones are untouched."""

    worker: Id
    generation: Count
    step: Count
    reason: Prose


class CheckpointDamaged(Message, frozen=True, kw_only=True):
    """A checkpoint that should have been loaded is missing, torn or changed; an older one is tried."""

    worker: Id
    path: Name
    reason: Prose


class Outcome(Struct, frozen=True, kw_only=True):
    """What a member knows of the exchanges outside of bodies: ends of loops, means and barriers."""

    generation: Count
    "in which the member computes"
    agreed: Count
    "how many of them are complete"
    answer: float
    "what the last of them gave"


class Finished(Message, frozen=True, kw_only=True):
    """The user's script came to its end on a member, in order or by a SystemExit: `WorkerExit` tells its exit code."""

    worker: Id
    generation: Count
    "in which the script came to its end"
    steps: Count
    digest: Name
    "SHA-256 over the model's state, names sorted"
    loss: float | None
    samples: Count
    "samples consumed by all finished steps of the run"
    repeated: Count = 0
    "finished steps that were done again because a gradient outgrew its scale (reproducible mode)"
    agreed: Count = 0
    "ends of loops, means and barriers outside of them that the members have gone through together"
    answer: float = 0.0
    "what the last of them gave"


class Failed(Message, frozen=True, kw_only=True):
    """The user's script raised, or Fallow refused something it did. The process ends after this."""

    worker: Id
    code: Code
    message: Prose
    "what failed, on which object, what to do"
    traceback: Prose = ""
    signature: Prose = ""
    "type of the exception and the line of the script, the same wherever the same thing fails"
    step: Count = 0
    "finished steps"
    outcome: Outcome | None = None
    "None: it was in no generation"


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

    id: Count
    generation: Count
    op: KvOp
    keys: Many[Name]
    value: Blob = b""
    expected: Blob = b""
    amount: Amount = 0
    timeout_s: Seconds = 0.0


FromWorker = (
    WorkerHello
    | WorkerReady
    | Vote
    | Beat
    | Active
    | Held
    | Deserted
    | Aligned
    | Left
    | Checkpointed
    | CheckpointFailed
    | CheckpointDamaged
    | Finished
    | Failed
    | KvRequest
)

# Head -> worker


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
    "a held or ready worker gives up when the head was silent for this long; infinity: it never does"
    folder: str
    "the run's folder on the shared file system (0700)"
    checkpoint_folder: str = ""
    "of the run's checkpoints (0700); empty: `checkpoints` in `folder`"
    checkpoint_s: float = 0.0
    "seconds between durable checkpoints; 0: only those that somebody asks for"
    checkpoint_in_s: float | None = None
    "seconds until the next periodic one is due, whoever wrote the last; None: unknown, or there are none"
    epoch: int = 0
    "epoch that the members are in; a hint for `run.epochs`, corrected at the switch"
    reached: tuple[int, int] = (0, 0)
    "where the foremost member is in its data, see `Beat.reached`: a newcomer to a stream reads its way there"
    main: bool = False
    "it is the main one as long as there is no generation"
    joins: bool = False
    """members train already and absorb this worker when it is ready, so it rehearses first; False before a first start
    and before one after a suspension"""
    step: int = 0
    "finished steps of the member that is furthest"


class Peer(Struct, frozen=True, kw_only=True):
    """One place in a generation's rank map; its rank is its position in the list."""

    worker: str
    address: str
    node: int = -1
    "a number that the workers of one node share in this list; -1: not known"


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
    checkpoints: list[str] = []
    "usable ones, newest first; the first that can be read is loaded if nobody in this generation has the state"
    outcome: Outcome | None = None
    "of a member that has failed: who waits for it in the last of those exchanges has the answer, and goes on with it"
    rollback: bool = False
    """nobody has: at the boundary whatever the members hold is dropped, and the newest checkpoint is loaded; also with
    `interrupt`, where the generation broke before"""


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


class OthersFinished(Message, frozen=True, kw_only=True):
    """Others' scripts have ended, so nobody comes to what this worker waits for; said again until it ends, too.

    What the last thing gave that the others went through with it, it learns here.
    """

    term: int
    steps: int
    agreed: int
    answer: float


class BeatAck(Message, frozen=True, kw_only=True):
    """The head is alive. `ready`: it has this worker's `WorkerReady`."""

    term: int
    ready: bool = False
    deadline_in_s: float | None = None
    "seconds until this worker's node goes away; None: unknown"
    reached: tuple[int, int] = (0, 0)
    "see `Welcome.reached`"
    checkpoint_in_s: float | None = None
    "see `Welcome.checkpoint_in_s`"
    checkpoint_given_up: tuple[int, int] = (0, 0)
    "(generation, step) of the last one that was not written"
    main: bool = False
    "see `Welcome.main`"
    joins: bool = False
    "see `Welcome.joins`: others may have begun since"


class SaveCheckpoint(Message, frozen=True, kw_only=True):
    """Write a durable checkpoint at the next boundary."""

    term: int


class CheckpointNoted(Message, frozen=True, kw_only=True):
    """The head has written `Checkpointed` of this folder down."""

    term: int
    path: str


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


ToWorker = (
    Welcome
    | Prepare
    | Commit
    | Abort
    | Interrupt
    | OthersFinished
    | BeatAck
    | SaveCheckpoint
    | CheckpointNoted
    | Dismiss
    | KvReply
    | Refused
)

# Agent <-> head


class AgentHello(Message, frozen=True, kw_only=True):
    """First message of an agent after every (re)connect; answered by `AgentPlan` or `Refused`."""

    agent: Name
    "unique among the agents of a token: the node's name"
    token: Id
    protocol: Code
    version: Name
    job_id: Id
    "Slurm job id of the allocation (the leader's of a heterogeneous job), or local-PID"
    node: Id
    "SLURMD_NODENAME, else the host name"
    slots: Slots
    "workers this node runs"
    pid: Count
    running: Few[Id] = []
    "workers already started (the head or the connection came back)"


class WorkerKey(Message, frozen=True, kw_only=True):
    """Public key (Z85) made in memory for one worker; answered by `KeyAccepted`, after which it is started."""

    worker: Id
    public_key: Key


class WorkerExit(Message, frozen=True, kw_only=True):
    """A worker's process is gone. Sent until acknowledged by `ExitNoted`."""

    worker: Id
    code: Code | None
    "exit status; None when a signal ended it"
    signal: Code | None
    tail: Prose = ""
    "last lines of its standard error, sanitized"


class AgentBeat(Message, frozen=True, kw_only=True):
    alive: Few[Id]
    stopped: Few[Id] = []
    "workers whose process is stopped (SIGSTOP)"


class Notice(Message, frozen=True, kw_only=True):
    """The node was warned: SIGTERM at the step (preemption, scancel or time limit)."""

    signal: Code


class AgentLeft(Message, frozen=True, kw_only=True):
    """All its workers are gone and the agent is ending."""

    code: Code


FromAgent = AgentHello | WorkerKey | WorkerExit | AgentBeat | Notice | AgentLeft


class AgentPlan(Message, frozen=True, kw_only=True):
    """Start these workers, in this order."""

    term: int
    run: str
    workers: list[str]
    folder: str
    beat_s: float
    network: DataNetwork = DataNetwork()


class KeyAccepted(Message, frozen=True, kw_only=True):
    worker: str


class ExitNoted(Message, frozen=True, kw_only=True):
    worker: str


class StopWorker(Message, frozen=True, kw_only=True):
    """Kill one worker now (ejected, or it did not leave by itself)."""

    term: int
    worker: str
    reason: str
    stack: bool = False
    "have it write its training thread's stack to its log first"


class ShowOutput(Message, frozen=True, kw_only=True):
    """Copy this worker's output to the agent's own, unless the worker itself says otherwise (`model.SHOWN`); None: no
    worker's."""

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
