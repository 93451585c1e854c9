"""What travels between the head and the agents of nodes, and from an agent on to its workers.

Two messages carry the protocol: a `Report` says where a node is, an `Order` says where it has to be. Both state a
condition, never an event. So the newest one by number replaces all older ones, and a message that is lost, repeated or
overtaken does no harm. An agent reports for its workers together: a node has done something once all its workers have.

Each message travels behind the number of its version (`wire.codec`). A field with a default may be added without a new
version: older peers ignore it. A field that is renamed, removed or means something else needs a new version, and so
does a new value of an enum. All fields are bounded: they come from the network, and go to the store.
Progress and metrics (loss, samples per second, busy links) are not here: they decide nothing about the membership.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated

import msgspec
from msgspec import Meta

from fallow.model import Doing, Exit, FallowError, Parts
from fallow.model.bounds import Blob, Code, Count, Finite, Moment, Name, Prose, Seconds, Shards, Slots

VERSION = 1
"""Version of the messages that are written here."""

READABLE = frozenset((VERSION,))
"""Versions that are understood."""


class Unreadable(FallowError):
    """A message or a stored record cannot be understood."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.DATA)


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of everything that travels. Unknown fields are ignored, a missing one without a default is an error."""


class Recorded(Wire, frozen=True, kw_only=True, omit_defaults=False):
    """What is in records, too. All its fields are written, so that none is ever missing there (`core.records`)."""


FEW, MANY = Meta(max_length=1024), Meta(max_length=100_000)


class Contract(Recorded, frozen=True, kw_only=True):
    """What a node that has rehearsed says about its script. All members must say the same."""

    signature: Name
    "SHA-256 over names, shapes and dtypes of the prepared state"
    shards: Shards
    "the most workers that can do something useful"
    global_batch: Shards
    total_steps: Count | None = None
    layout: Annotated[tuple[Prose, ...], MANY] = ()
    "one line per tensor; tells what differs"
    arithmetic: Annotated[tuple[Name, ...], FEW] = ()
    "reproducible mode: what the bits depend on, one fact a line; empty in the fast mode"
    restarts: bool = False
    "the script knows nothing of Fallow: each change of the membership restarts it"

    def difference(self, newcomer: "Contract") -> str | None:
        """Why a newcomer cannot join those who have this one: the first thing that is another; None: it can."""
        if (newcomer.global_batch, newcomer.shards) != (self.global_batch, self.shards):
            return (
                f"its global batch is {newcomer.global_batch} in {newcomer.shards} shards, the members' is "
                f"{self.global_batch} in {self.shards}; start it with the same arguments"
            )
        if newcomer.restarts != self.restarts:
            return "it is started with other arguments than the members: --restart must be given to all or to none"
        if newcomer.signature == self.signature:
            return other_bits(self.arithmetic, newcomer.arithmetic)
        for mine, theirs in zip(newcomer.layout, self.layout, strict=False):
            if mine != theirs:
                return f"its model differs from the members': it has {mine}, they have {theirs}"
        return f"its prepared state has {len(newcomer.layout)} tensors, the members' has {len(self.layout)}"


def other_bits(members: Sequence[str], newcomer: Sequence[str]) -> str | None:
    """Why a newcomer's results would differ in the last bits, in a reproducible run.

    Args:
        members: their arithmetic signature, a line per fact; empty: their run is not reproducible.
        newcomer: its own.
    """
    if bool(members) != bool(newcomer):
        ours, theirs = bool(newcomer), bool(members)
        return f"it says reproducible={ours}, the members reproducible={theirs}; start it with the same arguments"
    for mine, theirs_line in zip_longest(newcomer, members, fillvalue="nothing of the kind"):
        if mine != theirs_line:
            return (
                f"the run is reproducible, so all members must compute the same bits: it computes with {mine}, the "
                f"members with {theirs_line}; give the run nodes and settings of one kind"
            )
    return None


class Refusal(Wire, frozen=True, kw_only=True):
    """The process group of a generation could not be built on this node."""

    generation: Count
    reason: Prose
    unreachable: Annotated[tuple[Count, ...], MANY] = ()
    "nodes to which no connection could be made"
    tried: Annotated[tuple[Name, ...], MANY] = ()
    "ADDRESS:PORT of each of these connections"


class Outcome(Recorded, frozen=True, kw_only=True):
    """What a node knows of the exchanges outside of bodies: ends of loops, means and barriers."""

    generation: Count
    agreed: Count
    "how many of them are complete"
    answer: float
    "result of the last one"


class Fault(Wire, frozen=True, kw_only=True):
    """The script failed on one of the node's workers, whose process ends after this."""

    code: Code
    message: Prose
    signature: Prose = ""
    "exception and line of the script: the same wherever the same thing fails"
    traceback: Prose = ""
    step: Count = 0
    outcome: Outcome | None = None


class Switch(Wire, frozen=True, kw_only=True):
    """How the node went over to the generation in which it computes."""

    generation: Count
    first_step: Count
    pause_s: Seconds = 0.0
    "of the worker that stood still the longest"
    parts: Parts = Parts()
    bytes_in_pause: Count = 0
    bytes_behind: Count = 0
    discarded: Count = 0
    "steps that were computed and did not count"


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
    asked: bool = False
    "somebody asked for it by hand"


class Problem(Wire, frozen=True, kw_only=True):
    """A checkpoint that could not be written (`generation` and `step` say which) or loaded (`path` says which)."""

    reason: Prose
    path: Name = ""
    generation: Count = 0
    step: Count = 0


class Standing(Wire, frozen=True, kw_only=True):
    """Where a worker is; or a node, which has done something once all its workers have."""

    term: Count = 0
    edition: Count = 0
    "of the newest order that was obeyed; 0, 0: none yet"
    ready: Contract | None = None
    "rehearsed; repeated until an order says `accepted`"
    generation: Count = 0
    "it computes in this one; 0: in none"
    prepared: Count = 0
    "newest generation whose group stands: a vote for it"
    refusal: Refusal | None = None
    given_up: Count = 0
    "no step will be finished in this generation or an older one any more"
    break_reason: Prose = ""
    "why the newest group that broke did; empty: only groups broke that an order had given up"
    left: Count = 0
    "newest generation that was told to be without this node, and whose boundary it has passed"
    step: Count = 0
    "finished"
    has_state: bool = False
    "the whole of it"
    switch: Switch | None = None
    doing: Doing = Doing.WORKING
    "a node is WAITING or OUTSIDE only if all its workers are"
    stalled_s: Finite = 0.0
    "since it got on; of a node: since the worker that got on last did so"
    computes: bool = False
    "the device is at this worker's own work, or hangs in it; of a node: that of one worker. False for processors"
    in_call: bool = False
    "it waits in run.mean or run.barrier"
    deserted: bool = False
    "the script ended inside of a loop in which others go on; its processes have not ended yet"
    finish: Finish | None = None
    fault: Fault | None = None
    saved: Checkpoint | None = None
    "the newest; repeated until an order names it in `noted`"
    unsaved: Problem | None = None
    "the newest checkpoint that could not be written"
    damaged: Problem | None = None
    "the newest checkpoint that could not be loaded"
    healed: Count = 0
    "the step at which its weights were not those of most members, and it received theirs; 0: never"
    unrecorded: Count | None = None
    "step from which on the ledger lacks records, because its file cannot be written; None: nothing is missing"


class Report(Standing, frozen=True, kw_only=True, tag="report"):
    """Where a node is. Its agent sends one with each heartbeat, and one at once when anything but the step changes."""

    node: Count
    boot: Count
    "which start of its workers by the agent: a number that a store forgot may belong to another node by now"
    seq: Count
    "counts up; a report that arrives after a newer one is dropped"
    term: Count
    edition: Count
    highest: Count = 0
    "highest number of a generation that the node was ever told of: the store may have lost it since"
    stopped_s: Finite = 0.0
    "for how long a worker's process has been stopped (SIGSTOP)"
    mute_s: Finite = 0.0
    "for how long a worker that runs has said nothing to its agent: its process comes to nothing, or hangs in one call"


class Peer(Wire, frozen=True, array_like=True):
    """One node of a generation. Ranks go to workers in the order of nodes."""

    node: Count
    slots: Slots
    "number of its workers"
    entry: Name
    "where its workers listen, and the secret to say there; the same for as long as they live"


class Plan(Wire, frozen=True, kw_only=True):
    """A generation to build. Its members: those of generation `base` except `without`, then `more`."""

    generation: Count
    replaces: Count
    base: Count = 0
    "0: `more` are all members"
    without: Annotated[tuple[Count, ...], MANY] = ()
    more: Annotated[tuple[Peer, ...], MANY] = ()
    check: Count = 0
    "CRC-32 of all members' numbers in order; a node that counts another list refuses the plan"
    leave: bool = False
    "this node will not be a member: it goes at the boundary, and needs no list"
    suspends: bool = False
    "with `leave`: no node will be a member, so a checkpoint of the boundary's step is written first"
    interrupt: bool = False
    "give up generation `replaces` and all older ones first, then build the group"
    timeout_s: Seconds = 0.0
    checkpoints: Annotated[tuple[Name, ...], MANY] = ()
    "usable ones, newest first, to be loaded if no member has the state"
    outcome: Outcome | None = None
    "known to a member that has failed since; who still waits for that exchange takes the answer"


class End(Wire, frozen=True, kw_only=True):
    """End the workers, and say so when their processes are gone."""

    code: Code
    reason: Prose
    kill: bool = False
    "at once"
    stack: bool = False
    "have them write their stacks to the log first"


class Order(Wire, frozen=True, kw_only=True, tag="order"):
    """Where a node has to be. The newest (term, edition) counts; the agent hands it to its workers as it is."""

    node: Count
    "an agent may have started its workers anew, as another node, since this was sent"
    term: Count
    edition: Count
    committed: Count = 0
    "newest durable generation: if the plan is for it, go over to it"
    broken: Count = 0
    "give up this generation and all older ones"
    plan: Plan | None = None
    "None: drop every group that was built for a generation that is not committed"
    state_since: Count = 0
    """What the node holds when it enters the plan's generation counts if it has computed in this generation or a later
    one. Otherwise it drops its state first: it is new, it was away, or all go back to a checkpoint."""
    accepted: bool = False
    "the contract was"
    is_main: bool = False
    "the node's first worker is the main one of the run: its output is shown"
    noted: Name = ""
    "path of this node's newest checkpoint that is on record"
    unsaved: tuple[Count, Count] = (0, 0)
    "(generation, step) of the last checkpoint of the run that could not be written"
    finish: Finish | None = None
    "others' scripts have ended: a worker that waits for them in vain ends, too"
    end: End | None = None


class Gather(Wire, frozen=True, kw_only=True, tag="gather"):
    """One node's part of what all participants of a generation must know of each other."""

    node: Count
    generation: Count
    key: Name
    part: Blob
    "empty: no part, but the question which nodes have not given theirs; answered at once"


class Gathered(Wire, frozen=True, kw_only=True, tag="gathered"):
    """All parts in the order of ranks, sent once to all when the last part has come; or the answer to a question."""

    generation: Count
    key: Name
    parts: Annotated[tuple[Blob, ...], MANY] = ()
    missing: Annotated[tuple[Count, ...], MANY] = ()
    "the answer to a question, while parts are missing: nodes that have not given theirs. Then there are no `parts`"
