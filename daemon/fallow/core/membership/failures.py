"""Failures: when one is the script's own and ends the run, and when a host has had too many.

An exception or a crash that comes alike, at the same step, on two nodes has nothing to do with either node. Trouble
that comes now and then over weeks is no host's fault, so a failure counts for an hour. A barred host may have been
mended, so it is tried again, after a longer time for each bar.
"""

import msgspec

from fallow.core.membership.names import member_name
from fallow.core.membership.records import Failure, FailureKind, HostBar
from fallow.core.membership.roster import Roster
from fallow.model import Exit, FallowError

KEPT = 100
COUNT_S = 3600.0
BAR_S, LONGEST_BAR_S = 3600.0, 24 * 3600.0
MENDED_S = 24 * 3600.0
"""A host that was not barred for so long begins anew."""

CRASHES = frozenset((4, 6, 7, 8, 11))
"""SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: signals that a process brings upon itself. SIGKILL comes from outside."""

APART, STRANGER = "apart: ", "stranger: "
"""How signatures of these errors begin."""


class Apart(FallowError):
    """The members do not follow the script together: no member's own failure."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.DATA)


class Stranger(FallowError):
    """A newcomer follows another script, or other arguments, than the members: they go on without it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.DATA)


def verdict(roster: Roster, failure: Failure) -> str | None:
    """Why a failure is the script's own and ends the run; None: it may be the node's.

    Must be asked before `note`, while the node still counts as a member.
    """
    if failure.kind not in (FailureKind.EXCEPTION, FailureKind.CRASH) or failure.signature.startswith(STRANGER):
        return None
    if failure.signature.startswith(APART):
        return f"{failure.text} (step {failure.step}, found by {_where(failure)})"
    what = failure.kind, failure.signature, failure.step
    same = [f for f in roster.failures.failures if (f.kind, f.signature, f.step) == what]
    others = [roster.nodes[n] for n in roster.present() if n != failure.node]
    # Members are at most one step apart. Others who are further go on without trouble, so this was a newcomer's.
    is_behind = any(node.step > failure.step + 1 for node in others)
    elsewhere = [f for f in same if (f.token, f.host) != (failure.token, failure.host)]
    if elsewhere and not is_behind:
        earlier = elsewhere[0]
        return f"{earlier.text} (step {failure.step}, on {_where(earlier)} and again on {_where(failure)})"
    if not others and failure.node in roster.members and (failure.kind is FailureKind.EXCEPTION or same):
        return f"{failure.text} (step {failure.step}, on {_where(failure)}, the only member)"
    return None


def note(roster: Roster, failure: Failure, bar_after: int) -> str:
    """Remember a failure. Returns why its host has to be barred; empty: it need not be."""
    known = roster.failures.failures
    known.append(failure)
    del known[:-KEPT]
    roster.mark("failures")
    recent = [f for f in known if f.host == failure.host and f.at > failure.at - COUNT_S]
    if roster.root.scripted or is_barred(roster, failure.host) or len(recent) < bar_after:
        return ""
    kinds = ", ".join(sorted({f.kind.value for f in recent}))
    return f"{len(recent)} failures on it ({kinds}), the last: {failure.text}"


def is_barred(roster: Roster, host: str) -> bool:
    return bool(roster.failures.bars.get(host, HostBar()).reason)


def bar(roster: Roster, host: str, reason: str, at: float) -> None:
    """The run does without a host for a while, for longer each time."""
    times = roster.failures.bars.get(host, HostBar()).times + 1
    roster.failures.bars[host] = HostBar(times=times, until=at + _length_s(times), reason=reason)
    roster.mark("failures")


def expire(roster: Roster, at: float) -> list[str]:
    """Forget what is too old to count. Returns the hosts that are barred no longer."""
    bars = roster.failures.bars
    over = [host for host, bar in bars.items() if bar.reason and at >= bar.until]
    mended = [host for host, bar in bars.items() if at >= bar.until + MENDED_S]
    for host in over:
        bars[host].reason = ""
    for host in mended:
        del bars[host]
    if over or mended:
        roster.mark("failures")
    return over


def begin_clock(roster: Roster, at: float) -> None:
    """A head begins whose clock may be another host's: no failure lies in the future, no bar is longer than it was."""
    known = roster.failures
    known.failures = [f if f.at <= at else msgspec.structs.replace(f, at=at) for f in known.failures]
    for bar in known.bars.values():
        bar.until = min(bar.until, at + _length_s(bar.times))


def _where(failure: Failure) -> str:
    return f"{member_name(failure.node)} ({failure.host})"


def _length_s(times: int) -> float:
    return min(LONGEST_BAR_S, BAR_S * 2.0 ** min(times - 1, 20))
