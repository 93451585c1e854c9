"""Failures: when one is the script's own and ends the run, and when a node has had too many. Pure, over the roster.

An exception, and a crash likewise, is told apart from a node's trouble by repetition: the same one, at the same step,
on two nodes has nothing to do with either node.
"""

from __future__ import annotations

from fallow.core.roster import Failure, FailureKind, Roster

KEPT = 100
"""Failures that are remembered, the newest."""


def verdict(roster: Roster, failure: Failure) -> str | None:
    """Why this failure is the script's own and ends the run, in words; None: it may be the node's.

    Must be asked before `note`, while the worker still counts as a member.
    """
    if failure.kind not in (FailureKind.EXCEPTION, FailureKind.CRASH):
        return None
    same = [f for f in roster.failures if _alike(f, failure)]
    elsewhere = next((f for f in same if f.place != failure.place), None)
    if elsewhere is not None:
        return f"{elsewhere.text} (step {failure.step}, on {_where(elsewhere)} and again on {_where(failure)})"
    others = [w for w in roster.staying() + roster.leaving() if w != failure.worker]
    alone = failure.worker in roster.members and not others
    if alone and (failure.kind is FailureKind.EXCEPTION or same):
        return f"{failure.text} (step {failure.step}, on {_where(failure)}, the only member)"
    return None


def _alike(one: Failure, other: Failure) -> bool:
    return (one.kind, one.signature, one.step) == (other.kind, other.signature, other.step)


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
    kinds = [f.kind.value for f in roster.failures if f.node == failure.node]
    if len(kinds) < bar_after:
        return None
    reason = f"{len(kinds)} failures on it ({', '.join(sorted(set(kinds)))}), the last: {failure.text}"
    roster.barred[failure.node] = reason
    return reason
