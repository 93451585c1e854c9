"""The deadlines of a run's membership, all in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Set by the head from its configuration; the rest is the protocol's own."""

    prepare_s: float = 30.0
    "votes have to be in by then"
    rebuild_s: float = 15.0
    "as `prepare_s`, where the members wait for a group in place of a broken one"
    start_s: float = 600.0
    "from a worker's start to READY"
    lease_s: float = 15.0
    "a worker that was silent for this long is ejected"
    progress_s: float = 300.0
    "a member that neither waits for the others nor gets on for this long is ejected"
    stopped_s: float = 0.5
    """a worker whose process its agent has seen stopped for this long is ejected: all others wait for it, and another
    start costs one node a few seconds"""
    probe_s: float = 5.0
    "members that all wait for each other for this long have their links looked at"
    held_grace_s: float = 0.3
    "a broken group waits this long for the news of who died before it is rebuilt as it is"
    accuse_s: float = 1.0
    "from the first vote that names somebody unreachable until it is decided who it is"
    retry_s: float = 1.0
    "after an aborted change"
    resend_s: float = 2.0
    bar_after: int = 3
    "failures on one node after which the run does without it"
