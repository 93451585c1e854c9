"""Messages between an agent and one of its workers, over a socket that the worker inherits (`wire.frames`).

A worker needs no key and no network of its own to be ordered: who has the descriptor is the worker. It says how it
stands (`Status`) at the beat's pace, and at once when anything but progress has changed. What it wrote before its end
is read behind it.
"""

from __future__ import annotations

from fallow.core.membership.messages import (
    Checkpoint,
    Contract,
    Fault,
    Finish,
    Gathered,
    Order,
    Problem,
    Refusal,
    Switch,
    Wire,
)
from fallow.core.protocol.agents import News, Progress, Setup
from fallow.model import Doing
from fallow.model.bounds import Blob, Count, Finite, Id, Name, Prose, Seconds, Slots

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


class Status(Wire, frozen=True, kw_only=True, tag="status"):
    """How one worker stands. Fields that `membership.messages.Report` has, too, mean the same here, of one worker."""

    term: Count = 0
    edition: Count = 0
    ready: Contract | None = None
    generation: Count = 0
    prepared: Count = 0
    refusal: Refusal | None = None
    given_up: Count = 0
    break_reason: Prose = ""
    left: Count = 0
    step: Count = 0
    has_state: bool = False
    switch: Switch | None = None
    doing: Doing = Doing.WORKING
    stalled_s: Finite = 0.0
    computes: bool = False
    "its device is at this worker's own work, or hangs in it; False for a processor"
    in_call: bool = False
    deserted: bool = False
    finish: Finish | None = None
    fault: Fault | None = None
    saved: Checkpoint | None = None
    unsaved: Problem | None = None
    damaged: Problem | None = None
    healed: Count = 0
    unrecorded: Count | None = None
    progress: Progress = Progress()


class Part(Wire, frozen=True, kw_only=True, tag="part"):
    """One worker's part of a gather. Repeated until the answer comes."""

    generation: Count
    key: Name
    part: Blob
    "empty: the question which nodes have not given their part; the agent passes it on at once"
    within_node: bool = False
    "only the workers of this node take part: their agent answers by itself"


FromWorker = Status | Part
