"""Messages between an agent and one of its workers, over a socket that the worker inherits (`wire.frames`).

A worker needs no key and no network of its own to be ordered: who has the descriptor is the worker. It says how it
stands (`Status`) at the beat's pace, and at once when anything but progress has changed. What it wrote before its end
is read behind it.
"""

from __future__ import annotations

from fallow.core.membership.messages import Gathered, Order, Standing, Wire
from fallow.core.protocol.agents import News, Progress, Setup
from fallow.model.bounds import Blob, Count, Id, Name, Seconds, Slots

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


class Status(Standing, frozen=True, kw_only=True, tag="status"):
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
