"""Messages between head, agents and workers. Reports and orders are in `core.membership.messages`.

A message states the sender's current state, and the receiver acts on the newest message only. So a message that is
lost, repeated or late does no harm. The exception is the end of workers: the agent repeats `Ended` until `EndNoted`.

Head and agent talk over ZeroMQ. An agent sends `Hello` on every new connection and for each start of its workers, until
the head answers `Admitted`. Then it sends a `Beat` every `beat_s` seconds, and at once when anything but the progress
changes. The head answers each `Beat` with a `BeatReply`. Orders and ends of workers travel independently of beats.

Agent and worker talk over a socket that the worker inherits (`wire.frames`). The worker needs no key and no network:
the process that holds the descriptor is the worker. It sends a `Status` every `beat_s` seconds, and at once when
anything but the progress changes. The agent still reads what the worker wrote before its process ended.
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
    """Progress of the training, for people and for the planner. The membership does not depend on it."""

    epoch: Count = 0
    reached: tuple[Count, Count] = (0, 0)
    "number of the current pass over the data, finished steps in that pass"
    loss: float | None = None
    samples_per_s: Rate = 0.0
    "samples of the global batch per second"
    shards: Shards = 0
    "number of shards of a full step that the node computes"
    pace_s: Seconds = 0.0
    "measured seconds per shard of the node, whose workers compute shards in parallel; 0: not measured yet"
    total_steps: Count | None = None
    scalars: Scalars = msgspec.field(default_factory=dict)
    busy_links: Fractions = msgspec.field(default_factory=dict)
    "address of another node -> fraction (0..1) of the last seconds in which the connection was busy; busiest only"
    pids: Pids = ()
    "process ids of the node's workers, by slot"


# -- agent -> head ---------------------------------------------------------------------------------------------------


class Hello(Wire, frozen=True, kw_only=True, tag="hello"):
    """An agent introduces its workers. The head answers `Setup` and `Admitted`, or `AgentRefused`.

    No version removes or renames a field, or adds a field without a default. So a head can read the `Hello` of every
    version and name the agent that it refuses.
    """

    host: Id
    "SLURMD_NODENAME, else the host's name; unique among the agents of a token"
    token: Id
    process: Id = ""
    "random id of the agent process; a later agent on the same node has another one"
    version: Name
    "version of Fallow, for people only; the version of the message format decides about compatibility"
    job_id: Id
    "Slurm job id of the allocation (of a heterogeneous job: the leader's id), or local-PID"
    boot: Count
    "number of this start of the node's workers, from 1"
    slots: Slots
    entry: Name
    "address on which the workers listen for other members"
    node: Count = 0
    "node number that the head has given to these workers; 0: none yet"


class Beat(Wire, frozen=True, kw_only=True, tag="beat"):
    """Heartbeat of an agent. The head answers `BeatReply`."""

    report: Report | None = None
    "None: the node has no admitted worker, or all its workers have ended"
    progress: Progress = Progress()
    warned: Code = 0
    "signal by which Slurm has warned this node (preemption, scancel or time limit); 0: no warning"
    brief: bool = False
    "the beat has no progress: the progress of the last beat still holds"


class Ended(Wire, frozen=True, kw_only=True, tag="ended"):
    """All workers of a node have ended. The agent repeats it until `EndNoted`."""

    node: Count
    boot: Count
    code: Code | None
    "exit status of the worker whose end decides (`agent.crew`); None: a signal ended it"
    signal: Code | None = None
    tail: Prose = ""
    "last lines of that worker's standard error, sanitized"
    slot: Count | None = None
    "index of that worker on its node; None: not known"
    report: Report | None = None
    "last report of the node, with what its workers said at their end"
    is_ordered: bool = False
    "an order had told the workers to end"


class AgentLeft(Wire, frozen=True, kw_only=True, tag="left"):
    """The agent is about to exit with `code`. None of its workers runs any more."""

    code: Code


FromAgent = Hello | Beat | Ended | AgentLeft | Gather

# -- head -> agent ---------------------------------------------------------------------------------------------------


class Setup(Wire, frozen=True, kw_only=True, tag="setup"):
    """Settings that an agent and its workers need before the script calls `prepare`. They do not change later."""

    run: Id
    folder: Name
    "the run's folder on the shared file system (0700)"
    seed: Count
    max_workers: Count
    "the run's maximum number of workers, which is the default number of shards"
    beat_s: Seconds
    lease_s: Seconds
    patience_s: Annotated[float, Meta(gt=0)]
    "a blocked worker gives up after the head has been silent for this long, in seconds; infinity: never"
    checkpoint_folder: Name
    "folder of the run's checkpoints (0700)"
    checkpoint_s: Seconds = 0.0
    "seconds between durable checkpoints; 0: checkpoints on request only"
    network: DataNetwork = DataNetwork()


class Admitted(Wire, frozen=True, kw_only=True, tag="admitted"):
    """The head has given a number to the node. The agent may start the workers of this boot."""

    node: Count
    boot: Count


class Introduce(Wire, frozen=True, kw_only=True, tag="introduce"):
    """The head has no record of the node in the agent's report. The agent must send `Hello` again with `node`."""

    node: Count


class BeatReply(Wire, frozen=True, kw_only=True, tag="news"):
    """The head's answer to a `Beat`: the head is alive, and this is the state of the run. Agents pass it to workers."""

    term: Count
    boot: Count = 1
    "start of workers that the head wants; the agent starts new workers if its own have ended and this number is higher"
    ends_in_s: Finite | None = None
    "seconds until the allocation of the node ends; None: not known"
    joins: bool = False
    """True: members are training and absorb this node when it is ready, so the node rehearses first. False before the
    first start and before a start after a suspension"""
    step: Count = 0
    "finished steps of the most advanced member"
    epoch: Count = 0
    "current epoch of the members; a hint for `run.epochs`, corrected at the switch"
    reached: tuple[Count, Count] = (0, 0)
    "data position of the most advanced member; a newcomer to a stream reads up to this position"
    checkpoint_in_s: Finite | None = None
    "seconds until the next periodic checkpoint is due; None: not known, or no periodic checkpoints"
    checkpoints_asked: Count = 0
    "number of checkpoints requested by hand so far; an increase means that one is due"


class EndNoted(Wire, frozen=True, kw_only=True, tag="end-noted"):
    node: Count
    boot: Count


class EndAgent(Wire, frozen=True, kw_only=True, tag="end-agent"):
    """The agent must end with exit code `code`. It kills workers that have not exited after `kill_after_s` seconds.

    Code 0: the run is finished, and this allocation executes the script's lines after `fallow run`.
    """

    term: Count
    code: Code
    reason: Prose
    kill_after_s: Seconds = 5.0


class AgentRefused(Wire, frozen=True, kw_only=True, tag="refused"):
    """The head rejects this agent. An agent that was never admitted prints `message` and exits with `code`.

    Like `Hello`, this message keeps its fields in all versions: an agent can read the refusal of every head.
    """

    code: Code
    message: Prose


ToAgent = Setup | Admitted | Introduce | Order | BeatReply | EndNoted | EndAgent | AgentRefused | Gathered

# -- agent -> worker -------------------------------------------------------------------------------------------------


class Start(Wire, frozen=True, kw_only=True, tag="start"):
    """First message to a worker: its identity and all settings that do not change while it runs."""

    worker: Id
    "name of the worker: `n3`, or `n3.1` on a node with several workers"
    node: Count
    slot: Count
    "index of the worker on its node, from 0"
    slots: Slots
    address: Name
    "local address from which packets to the head leave"
    setup: Setup


class HeadSilence(Wire, frozen=True, kw_only=True, tag="heard"):
    """Tells a worker, every `beat_s` seconds, for how long the head has been silent."""

    silent_s: Seconds


ToWorker = Start | Order | BeatReply | HeadSilence | Gathered

# -- worker -> agent -------------------------------------------------------------------------------------------------


class Status(WorkerState, frozen=True, kw_only=True, tag="status"):
    """State of one worker."""

    progress: Progress = Progress()


class Part(Wire, frozen=True, kw_only=True, tag="part"):
    """One worker's contribution to a gather."""

    generation: Count
    key: Name
    part: Blob
    "empty: the worker asks which nodes are missing, and the agent forwards the question at once"
    within_node: bool = False
    "only the workers of this node take part, and their agent answers without the head"


FromWorker = Status | Part
