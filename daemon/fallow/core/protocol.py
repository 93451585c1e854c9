"""What travels between head, agents and workers, besides reports and orders (`core.membership.messages`).

All say how things stand, again and again; the newest counts, so whatever is lost, repeated or late does no harm. Only
ends are said until they are noted.

Between the head and the agent of a node, over ZeroMQ: an agent says `Hello` after every new connection and for each
start of its workers, until it is `Admitted`. From then on it sends a `Beat`, at the beat's pace and at once when
anything but progress has changed, and each is answered by `News`. Orders, and ends of workers, come and go beside that.

Between an agent and one of its workers, over a socket that the worker inherits (`wire.frames`): a worker needs no key
and no network of its own to be ordered, for who has the descriptor is the worker. It says how it stands (`Status`) at
the beat's pace, and at once when anything but progress has changed. What it wrote before its end is read behind it.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from fallow.core.membership.messages import Gather, Gathered, Order, Report, Wire, WorkerState
from fallow.model import DataNetwork
from fallow.model.bounds import (
    Blob,
    Code,
    Count,
    Finite,
    Fractions,
    Id,
    Name,
    Prose,
    Rate,
    Scalars,
    Seconds,
    Shards,
    Slots,
)

Pids = Annotated[tuple[Count, ...], Meta(max_length=1024)]


class Progress(Wire, frozen=True, kw_only=True):
    """How the training gets on, for people and for the planner. It decides nothing about the membership."""

    epoch: Count = 0
    reached: tuple[Count, Count] = (0, 0)
    "number of the pass over data in progress, finished steps in it"
    loss: float | None = None
    samples_per_s: Rate = 0.0
    "of the whole global batch"
    shards: Shards = 0
    "of a full step that the node computes"
    pace_s: Seconds = 0.0
    "seconds per shard that the node measured; its workers compute shards side by side. 0: not known yet"
    total_steps: Count | None = None
    scalars: Scalars = msgspec.field(default_factory=dict)
    busy_links: Fractions = msgspec.field(default_factory=dict)
    "address of another node -> part of the last seconds (0..1) in which the connection to it was busy; the busiest"
    pids: Pids = ()
    "of its workers, in their order"


# -- agent -> head ---------------------------------------------------------------------------------------------------


class Hello(Wire, frozen=True, kw_only=True, tag="hello"):
    """An agent introduces its workers; answered by `Setup` and `Admitted`, or by `Refused`.

    Its form stays: no field is added without a default, renamed or removed, in no version. So a head reads the `Hello`
    of any version, and can say whom it refuses.
    """

    host: Id
    "SLURMD_NODENAME, else the host's name; unique among the agents of a token"
    token: Id
    process: Id = ""
    "made up by the agent when it begins: another agent on this node, after this one, says another"
    version: Name
    "of Fallow, for people: what peers understand is told by the version of their messages"
    job_id: Id
    "Slurm job id of the allocation (the leader's of a heterogeneous job), or local-PID"
    boot: Count
    "which start of its workers, from 1"
    slots: Slots
    entry: Name
    "address on which its workers listen for others"
    node: Count = 0
    "the number that these workers were given before; 0: none yet"


class Beat(Wire, frozen=True, kw_only=True, tag="beat"):
    """Heartbeat of an agent; answered by `News`."""

    report: Report | None = None
    "None: no worker of it is admitted, or all have ended"
    progress: Progress = Progress()
    warned: Code = 0
    "the signal by which Slurm warned this node (preemption, scancel or time limit); 0: it has not"
    brief: bool = False
    "progress is left out: it is as it was told last"


class Ended(Wire, frozen=True, kw_only=True, tag="ended"):
    """All workers of a node have ended. Said until `EndNoted`."""

    node: Count
    boot: Count
    code: Code | None
    "exit status of the worker that ended first, or that ended all; None when a signal ended it"
    signal: Code | None = None
    tail: Prose = ""
    "last lines of its standard error, sanitized"
    report: Report | None = None
    "the last one: it has what workers said at their end"
    is_ordered: bool = False
    "an order had told them to end"


class Left(Wire, frozen=True, kw_only=True, tag="left"):
    """The agent is ending; none of its workers is there any more."""

    code: Code


FromAgent = Hello | Beat | Ended | Left | Gather

# -- head -> agent ---------------------------------------------------------------------------------------------------


class Setup(Wire, frozen=True, kw_only=True, tag="setup"):
    """What an agent and its workers must know before the script reaches `prepare`. Nothing of it changes later."""

    run: Id
    folder: Name
    "the run's folder on the shared file system (0700)"
    seed: Count
    max_workers: Count
    "the run's maximum number of workers; the default number of shards"
    beat_s: Seconds
    lease_s: Seconds
    patience_s: Annotated[float, Meta(gt=0)]
    "a worker that cannot go on gives up when the head was silent for so long; infinity: it never does"
    checkpoint_folder: Name
    "of the run's checkpoints (0700)"
    checkpoint_s: Seconds = 0.0
    "seconds between durable checkpoints; 0: only those that somebody asks for"
    network: DataNetwork = DataNetwork()


class Admitted(Wire, frozen=True, kw_only=True, tag="admitted"):
    """The number of the workers of this start: now they may be started."""

    node: Count
    boot: Count


class Introduce(Wire, frozen=True, kw_only=True, tag="introduce"):
    """No record knows the node that the agent reports for: say `Hello` again, with that number."""

    node: Count


class News(Wire, frozen=True, kw_only=True, tag="news"):
    """The answer to a `Beat`: the head is alive, and how the run stands. An agent hands it to its workers."""

    term: Count
    boot: Count = 1
    "which start of the agent's workers is wanted: where theirs has ended and this is higher, others are started"
    ends_in_s: Finite | None = None
    "seconds until the node goes away; None: not known"
    joins: bool = False
    """members train already and absorb this node when it is ready, so it rehearses first; False before a first start
    and before one after a suspension"""
    step: Count = 0
    "finished steps of the member that is furthest"
    epoch: Count = 0
    "in which the members are; a hint for `run.epochs`, corrected at the switch"
    reached: tuple[Count, Count] = (0, 0)
    "where the foremost member is in its data: a newcomer to a stream reads its way there"
    checkpoint_in_s: Finite | None = None
    "seconds until the next periodic one is due, whoever wrote the last; None: not known, or there are none"
    checkpoints_asked: Count = 0
    "how many somebody has asked for by hand: one is due if this has grown"


class EndNoted(Wire, frozen=True, kw_only=True, tag="end-noted"):
    node: Count
    boot: Count


class EndAgent(Wire, frozen=True, kw_only=True, tag="end-agent"):
    """End the agent: workers are given `kill_after_s` to exit by themselves, then killed; exit with `code`.

    Code 0 means that the run is finished and the lines after `fallow run` belong to this allocation.
    """

    term: Count
    code: Code
    reason: Prose
    kill_after_s: Seconds = 5.0


class Refused(Wire, frozen=True, kw_only=True, tag="refused"):
    """The head will not talk to this agent. An agent that was never admitted prints `message` and ends with `code`.

    Its form stays, as that of `Hello` does: an agent reads the `Refused` of a head of any version.
    """

    code: Code
    message: Prose


ToAgent = Setup | Admitted | Introduce | Order | News | EndNoted | EndAgent | Refused | Gathered

# -- agent -> worker -------------------------------------------------------------------------------------------------


class Start(Wire, frozen=True, kw_only=True, tag="start"):
    """The first message: who the worker is, and all that does not change while it lives."""

    worker: Id
    "its name: `n3`, or `n3.1` where the node has several"
    node: Count
    slot: Count
    "its place among the node's workers, from 0"
    slots: Slots
    address: Name
    "local address from which packets to the head leave"
    setup: Setup


class Heard(Wire, frozen=True, kw_only=True, tag="heard"):
    """Sent at the beat's pace, so that a worker knows for how long the head has been silent."""

    silent_s: Seconds


ToWorker = Start | Order | News | Heard | Gathered

# -- worker -> agent -------------------------------------------------------------------------------------------------


class Status(WorkerState, frozen=True, kw_only=True, tag="status"):
    """How one worker stands."""

    progress: Progress = Progress()


class Part(Wire, frozen=True, kw_only=True, tag="part"):
    """One worker's part of a gather."""

    generation: Count
    key: Name
    part: Blob
    "empty: the question which nodes have not given their part; the agent passes it on at once"
    within_node: bool = False
    "only the workers of this node take part: their agent answers by itself"


FromWorker = Status | Part
