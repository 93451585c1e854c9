"""Failures: when one is the script's own and ends the run, and when a node has had too many. Pure, over the roster.

An exception, and a crash likewise, is told apart from a node's trouble by repetition: the same one, at the same step,
on two nodes has nothing to do with either node. Where all members are on one node, an exception of two of them that
nobody has come past is the script's: no other node can tell. Trouble that comes now and then over weeks is no node's:
failures count against it for an hour, and one that all of its workers have alike counts once. A barred node may have
been mended, so it is tried again, ever later.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fallow.core.roster import Bar, Failure, FailureKind, Roster
from fallow.model import Exit, FallowError

KEPT = 100
"""Failures that are remembered, the newest."""

COUNT_S = 3600.0
"""A failure counts against its node for so long."""

BAR_S, LONGEST_BAR_S = 3600.0, 24 * 3600.0
"""A node is barred for so long, for twice as long each further time, and so long at most."""

MENDED_S = 24 * 3600.0
"""A node that was not barred for this long begins anew."""


APART = "apart: "
"""Signatures that begin so are of a member that found that the members do not follow the script together."""


class Apart(FallowError):
    """The members do not follow the script together: no member's own failure."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.DATA)


STRANGER = "stranger: "
"""Signatures that begin so are of a newcomer that follows another script, or other arguments, than the members."""


class Stranger(FallowError):
    """A newcomer follows another script, or other arguments, than the members: they go on without it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.DATA)


def verdict(roster: Roster, failure: Failure) -> str | None:
    """Why this failure is the script's own and ends the run, in words; None: it may be the node's.

    Must be asked before `note`, while the worker still counts as a member.
    """
    if failure.kind not in (FailureKind.EXCEPTION, FailureKind.CRASH) or failure.signature.startswith(STRANGER):
        return None
    if failure.signature.startswith(APART):
        return f"{failure.text} (step {failure.step}, found by {_where(failure)})"
    same = [f for f in roster.failures if _alike(f, failure)]
    others = [roster.workers[w] for w in roster.staying() + roster.leaving() if w != failure.worker]
    # Members are at most one step apart: others who are further go on without trouble, and this was a newcomer's.
    behind = any(w.step > failure.step + 1 for w in others)
    again = None if behind else next((f for f in same if f.place != failure.place), None)
    if again is None and failure.kind is FailureKind.EXCEPTION:
        past = any((w.token, w.node) != failure.place or w.step > failure.step for w in others)
        again = None if past else next((f for f in same if f.worker != failure.worker), None)
    if again is not None:
        return f"{again.text} (step {failure.step}, on {_where(again)} and again on {_where(failure)})"
    alone = failure.worker in roster.members and not others
    if alone and (failure.kind is FailureKind.EXCEPTION or same):
        return f"{failure.text} (step {failure.step}, on {_where(failure)}, the only member)"
    return None


def _alike(one: Failure, other: Failure) -> bool:
    return (one.kind, one.signature, one.step) == (other.kind, other.signature, other.step)


def _echoes(failure: Failure, one: Failure) -> bool:
    """The node's other workers had come already when one failed: that they do likewise says no more against the node.

    Whether it is the script's fault is for the members elsewhere to show, once they come to that step.
    """
    return _alike(failure, one) and failure.worker != one.worker and failure.index < one.arrived


def _where(failure: Failure) -> str:
    return f"{failure.worker}, node {failure.node}"


def note(roster: Roster, failure: Failure, bar_after: int) -> str | None:
    """Remember a failure; returns why its node is barred if that is the last straw.

    Nobody is barred where a schedule alone decides who takes part.
    """
    roster.failures.append(failure)
    del roster.failures[:-KEPT]
    if roster.scripted or failure.node in roster.barred:
        return None
    since = failure.at - COUNT_S
    recent = [f for f in roster.failures if f.node == failure.node and f.at > since]
    kinds = [f.kind.value for number, f in enumerate(recent) if not any(_echoes(f, one) for one in recent[:number])]
    if len(kinds) < bar_after:
        return None
    reason = f"{len(kinds)} failures on it ({', '.join(sorted(set(kinds)))}), the last: {failure.text}"
    bar(roster, failure.node, reason, failure.at)
    return reason


def bar(roster: Roster, node: str, reason: str, at: float) -> None:
    """The run does without a node for a while, for longer each time."""
    times = roster.bars.get(node, Bar()).times + 1
    roster.bars[node] = Bar(times=times, until=at + _length_s(times))
    roster.barred[node] = reason


def unbar(roster: Roster, nodes: Iterable[str]) -> None:
    """Somebody says that these nodes are all right now."""
    for node in nodes:
        roster.barred.pop(node, None)
        roster.bars.pop(node, None)


def expire(roster: Roster, at: float) -> list[str]:
    """Forget what is too old to count; returns the nodes that are barred no longer."""
    free = [node for node in roster.barred if at >= roster.bars.get(node, Bar()).until]
    for node in free:
        del roster.barred[node]
    for node, bar in list(roster.bars.items()):
        if at >= bar.until + MENDED_S:
            del roster.bars[node]
    return free


def begin_clock(roster: Roster, at: float) -> None:
    """A head begins whose clock may be another host's: nothing lies in the future, no bar is longer than it was."""
    roster.failures = [f if f.at <= at else msgspec.structs.replace(f, at=at) for f in roster.failures]
    for bar in roster.bars.values():
        bar.until = min(bar.until, at + _length_s(bar.times))


def _length_s(times: int) -> float:
    return min(LONGEST_BAR_S, BAR_S * 2.0 ** min(times - 1, 20))
