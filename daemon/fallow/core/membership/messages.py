"""Messages between the head and the agents of nodes, and from an agent to its workers.

Two messages carry the protocol: a `Report` gives the state of a node, an `Order` the state that the node must reach.
Neither describes an event. So the newest message by number replaces all older ones, and a lost, repeated or overtaken
message does no harm. An agent reports for its workers together: a node has done something once all its workers have.

The version number precedes each message (`wire.codec`). A field with a default may be added without a new version:
older peers ignore it. A field that is renamed, removed or redefined needs a new version, and so does a new value of an
enum. All fields are bounded, because they come from the network and go to the store.
Progress and metrics (loss, samples per second, busy links) travel in `core.protocol`, because they do not affect the
membership.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated

import msgspec
from msgspec import Meta

from fallow.model import Doing, Exit, FallowError, Parts
from fallow.model.bounds import Blob, Code, Count, Finite, Moment, Name, Prose, Seconds, Shards, Slots

VERSION = 1
"""Version of the messages that this code writes."""

READABLE = frozenset((VERSION,))
"""Versions that this code reads."""


class Unreadable(FallowError):
    """A message or a stored record cannot be decoded."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.DATA)


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages. Unknown fields are ignored; a missing field without a default is an error."""


class Recorded(Wire, frozen=True, kw_only=True, omit_defaults=False):
    """Base of messages that are also stored. All fields are written, as `core.records` demands."""


FEW, MANY = Meta(max_length=1024), Meta(max_length=100_000)


class Contract(Recorded, frozen=True, kw_only=True):
    """What a node that has rehearsed reports about its script. All members must report the same."""

    signature: Name
    "SHA-256 over names, shapes and dtypes of the prepared state"
    shards: Shards
    "number of shards of the global batch, which is the highest useful number of workers"
    global_batch: Shards
    total_steps: Count | None = None
    layout: Annotated[tuple[Prose, ...], MANY] = ()
    "one line per tensor, for the message about a difference"
    arithmetic: Annotated[tuple[Name, ...], FEW] = ()
    "reproducible mode: everything that the bits depend on, one fact per line; empty in the fast mode"
    restarts: bool = False
    "restart mode: each change of the membership restarts the script"

    def difference(self, newcomer: "Contract") -> str | None:
        """Return the first difference that keeps a newcomer from joining these members; None: it may join."""
        if (newcomer.global_batch, newcomer.shards) != (self.global_batch, self.shards):
            return (
                f"its global batch is {newcomer.global_batch} in {newcomer.shards} shards, the members' is "
                f"{self.global_batch} in {self.shards}; start it with the same arguments"
            )
        if newcomer.restarts != self.restarts:
            return "it is started with other arguments than the members: --restart must be given to all or to none"
        if newcomer.signature == self.signature:
            return other_bits(self.arithmetic, newcomer.arithmetic)
        for line, members_line in zip(newcomer.layout, self.layout, strict=False):
            if line != members_line:
                return f"its model differs from the members': it has {line}, they have {members_line}"
        return f"its prepared state has {len(newcomer.layout)} tensors, the members' has {len(self.layout)}"


def other_bits(members: Sequence[str], newcomer: Sequence[str]) -> str | None:
    """Return why a newcomer's results would differ in the last bits, in a reproducible run; None: they would not.

    Args:
        members: arithmetic signature of the members, one fact per line; empty: their run is not reproducible.
        newcomer: arithmetic signature of the newcomer.
    """
    if bool(members) != bool(newcomer):
        newcomer_mode, members_mode = bool(newcomer), bool(members)
        difference = f"it says reproducible={newcomer_mode}, the members reproducible={members_mode}"
        return f"{difference}; start it with the same arguments"
    for newcomer_line, members_line in zip_longest(newcomer, members, fillvalue="nothing of the kind"):
        if newcomer_line != members_line:
            return (
                "the run is reproducible, so all members must compute the same bits: it computes with "
                f"{newcomer_line}, the members with {members_line}; give the run nodes and settings of one kind"
            )
    return None


class Refusal(Wire, frozen=True, kw_only=True):
    """The process group of a generation could not be built on this node."""

    generation: Count
    reason: Prose
    unreachable: Annotated[tuple[Count, ...], MANY] = ()
    "nodes that could not be reached"
    tried: Annotated[tuple[Name, ...], MANY] = ()
    "ADDRESS:PORT of each failed connection, in the order of `unreachable`"


class Outcome(Recorded, frozen=True, kw_only=True):
    """What a node knows of exchanges outside of loop bodies: ends of loops, `run.mean`, `run.barrier`."""

    generation: Count
    agreed: Count
    "number of completed exchanges"
    answer: float
    "result of the last completed exchange"


class Fault(Wire, frozen=True, kw_only=True):
    """The script failed on one of the node's workers. The worker's process ends after this report."""

    code: Code
    message: Prose
    signature: Prose = ""
    "exception and line of the script; equal for equal failures on different nodes"
    traceback: Prose = ""
    step: Count = 0
    outcome: Outcome | None = None


class Switch(Wire, frozen=True, kw_only=True):
    """Figures of the node's switch to the generation in which it computes."""

    generation: Count
    first_step: Count
    pause_s: Seconds = 0.0
    "longest pause of any of its workers"
    parts: Parts = Parts()
    bytes_in_pause: Count = 0
    bytes_behind: Count = 0
    discarded: Count = 0
    "number of computed steps that do not count"


class Finish(Recorded, frozen=True, kw_only=True):
    """The script has come to its end on all of the node's workers."""

    generation: Count
    steps: Count
    digest: Name
    loss: float | None = None
    samples: Count = 0
    repeated: Count = 0
    agreed: Count = 0
    answer: float = 0.0
    "see `Outcome`"


class Checkpoint(Recorded, frozen=True, kw_only=True):
    """A durable checkpoint that is complete on disk."""

    path: Name
    generation: Count
    step: Count
    epoch: Count = 0
    digest: Name = ""
    "SHA-256 of its manifest"
    nbytes: Count = 0
    written_at: Moment = 0.0
    "Unix time"
    took_s: Seconds = 0.0
    by_hand: bool = msgspec.field(default=False, name="asked")
    "requested by a person"


class Problem(Wire, frozen=True, kw_only=True):
    """A checkpoint that could not be written (see `generation` and `step`) or loaded (see `path`)."""

    reason: Prose
    path: Name = ""
    generation: Count = 0
    step: Count = 0


class WorkerState(Wire, frozen=True, kw_only=True):
    """State of a worker, or of a node, which has done something once all its workers have."""

    term: Count = 0
    edition: Count = 0
    "term and edition of the newest order that the worker obeys; 0, 0: none yet"
    ready: Contract | None = None
    "set once the worker has rehearsed; repeated until an order says `accepted`"
    generation: Count = 0
    "generation in which the worker computes; 0: none"
    prepared: Count = 0
    "newest generation whose process group is built; counts as a vote for it"
    refusal: Refusal | None = None
    given_up: Count = 0
    "newest generation in which the worker will finish no more step; older ones are given up with it"
    break_reason: Prose = ""
    "why the newest broken group broke; empty: no group broke but those that an order had given up"
    passed_boundary: Count = msgspec.field(default=0, name="left")
    "newest generation without this node whose boundary it has passed"
    step: Count = 0
    "number of finished steps"
    has_state: bool = False
    "the state is complete"
    switch: Switch | None = None
    doing: Doing = Doing.WORKING
    "a node is WAITING or OUTSIDE only if all its workers are"
    stalled_s: Finite = 0.0
    "seconds since the last progress; of a node: since the last progress of any worker"
    computes: bool = False
    "the device computes for this worker, or hangs in its work; of a node: for any worker. False without a device"
    in_call: bool = False
    "the worker waits in run.mean or run.barrier"
    deserted: bool = False
    "the script ended inside of a loop that other members continue, and its processes have not ended yet"
    finish: Finish | None = None
    fault: Fault | None = None
    saved: Checkpoint | None = None
    "newest checkpoint; repeated until an order names it in `noted`"
    unsaved: Problem | None = None
    "newest checkpoint that could not be written"
    damaged: Problem | None = None
    "newest checkpoint that could not be loaded"
    healed: Count = 0
    "last step at which the worker's weights differed from those of most members and were replaced; 0: never"
    unrecorded: Count | None = None
    "first step that is missing in the ledger, because its file cannot be written; None: nothing is missing"


class Report(WorkerState, frozen=True, kw_only=True, tag="report"):
    """State of a node. Its agent sends a report with each heartbeat, and at once when anything but the step changes."""

    node: Count
    boot: Count
    "counts how often the agent has started its workers; tells nodes apart if the store has lost a number"
    seq: Count
    "counts reports; a report that arrives after a newer one is dropped"
    term: Count
    edition: Count
    highest: Count = 0
    "highest generation that any order has named to the node; the store may have lost that number"
    stopped_s: Finite = 0.0
    "seconds for which a worker's process has been stopped (SIGSTOP)"
    mute_s: Finite = 0.0
    "seconds for which a running worker has been silent towards its agent: its process is starved or hangs in one call"


class Peer(Wire, frozen=True, array_like=True):
    """One node of a generation. Ranks go to workers in the order of nodes."""

    node: Count
    slots: Slots
    "number of its workers"
    entry: Name
    "where its workers listen, and the secret for connecting; both stay while the workers live"


class Plan(Wire, frozen=True, kw_only=True):
    """A generation to build. Its members are those of generation `base` except `without`, followed by `more`."""

    generation: Count
    replaces: Count
    base: Count = 0
    "0: `more` are all members"
    without: Annotated[tuple[Count, ...], MANY] = ()
    more: Annotated[tuple[Peer, ...], MANY] = ()
    check: Count = 0
    "CRC-32 of all members' numbers in order; a node that computes another value refuses the plan"
    leave: bool = False
    "this node will not be a member: it leaves at the boundary and needs no member list"
    suspends: bool = False
    "with `leave`: no member remains, so a checkpoint of the boundary's step is written first"
    interrupt: bool = False
    "give up generation `replaces` and all older ones before building the group"
    timeout_s: Seconds = 0.0
    checkpoints: Annotated[tuple[Name, ...], MANY] = ()
    "usable checkpoints, newest first, to be loaded if no member has the state"
    outcome: Outcome | None = None
    "exchange that a failed member had completed; members that still wait for the exchange adopt its answer"


class End(Wire, frozen=True, kw_only=True):
    """End the workers, and report when their processes have ended."""

    code: Code
    reason: Prose
    kill: bool = False
    "without a grace period"
    stack: bool = False
    "have the workers write their stacks to the log first"


class Order(Wire, frozen=True, kw_only=True, tag="order"):
    """State that a node must reach. The newest (term, edition) counts. The agent hands it to its workers unchanged."""

    node: Count
    "the agent drops the order if its workers have been restarted, as another node, since it was sent"
    term: Count
    edition: Count
    committed: Count = 0
    "newest committed generation; if the plan is for it, switch to it"
    broken: Count = 0
    "newest generation to give up, with all older ones"
    plan: Plan | None = None
    "None: drop every group of a generation that is not committed"
    state_since: Count = 0
    """The node's state counts if it has computed in this generation or a later one. Otherwise the node drops its state
    before it enters the plan's generation: it is new, it was cut off, or the run goes back to a checkpoint."""
    accepted: bool = False
    "the head has accepted the contract"
    is_main: bool = False
    "the node's first worker is the main worker of the run, whose output is shown"
    noted: Name = ""
    "path of this node's newest recorded checkpoint"
    unsaved: tuple[Count, Count] = (0, 0)
    "(generation, step) of the last checkpoint of the run that could not be written"
    finish: Finish | None = None
    "set once a member's script has ended; a worker that waits for ended members ends, too"
    end: End | None = None


class Gather(Wire, frozen=True, kw_only=True, tag="gather"):
    """One node's part of a gather among all participants of a generation."""

    node: Count
    generation: Count
    key: Name
    part: Blob
    "empty: no part, but the question which nodes' parts are missing; answered at once"


class Gathered(Wire, frozen=True, kw_only=True, tag="gathered"):
    """All parts in the order of ranks, sent to all nodes when the last part has come; or the answer to a question."""

    generation: Count
    key: Name
    parts: Annotated[tuple[Blob, ...], MANY] = ()
    missing: Annotated[tuple[Count, ...], MANY] = ()
    "answer to a question: nodes whose parts are missing. `parts` is empty then"
