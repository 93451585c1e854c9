"""Failures of members: when the script itself is to blame and the run ends, and when a host is barred.

The same exception or crash at the same step on two nodes is the script's. Occasional failures over weeks are not the
host's fault, so a failure counts for an hour. A barred host may have been repaired, so the run tries it again, after a
longer time for each bar.
"""

import msgspec

from fallow.core.membership.names import member_name
from fallow.core.membership.records import Failure, FailureKind, HostBar
from fallow.core.membership.roster import Roster
from fallow.model import Exit, FallowError

MAX_FAILURES = 100
COUNT_S = 3600.0
BAR_S, LONGEST_BAR_S = 3600.0, 24 * 3600.0
MENDED_S = 24 * 3600.0
"""Seconds without a bar after which earlier bars of a host no longer count."""

CRASHES = frozenset((4, 6, 7, 8, 11))
"""SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: signals that a process causes itself. SIGKILL comes from outside."""

DIVERGENCE, STRANGER = "apart: ", "stranger: "
"""Prefixes of the signatures of `Divergence` and `Stranger`."""


class Divergence(FallowError):
    """Members have taken different ways through the script. No single member has failed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.DATA)


class Stranger(FallowError):
    """A newcomer has another script or other arguments than the members, which continue without it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.DATA)


def verdict(roster: Roster, failure: Failure) -> str | None:
    """Return why a failure is the script's and ends the run; None: it may be the node's.

    Call before `note`, while the node still counts as a member.
    """
    if failure.kind not in (FailureKind.EXCEPTION, FailureKind.CRASH) or failure.signature.startswith(STRANGER):
        return None
    if failure.signature.startswith(DIVERGENCE):
        return f"{failure.text} (step {failure.step}, found by {_where(failure)})"
    what = failure.kind, failure.signature, failure.step
    alike = [f for f in roster.failures.failures if (f.kind, f.signature, f.step) == what]
    other_nodes = [roster.nodes[n] for n in roster.present() if n != failure.node]
    # Members are at most one step apart. If others are further, the failure happened to a newcomer only.
    is_behind = any(node.step > failure.step + 1 for node in other_nodes)
    elsewhere = [f for f in alike if (f.token, f.host) != (failure.token, failure.host)]
    if elsewhere and not is_behind:
        earlier = elsewhere[0]
        return f"{earlier.text} (step {failure.step}, on {_where(earlier)} and again on {_where(failure)})"
    if not other_nodes and failure.node in roster.members and (failure.kind is FailureKind.EXCEPTION or alike):
        return f"{failure.text} (step {failure.step}, on {_where(failure)}, the only member)"
    return None


def note(roster: Roster, failure: Failure, bar_after: int) -> str:
    """Record a failure. Returns why its host must be barred; empty: it need not be."""
    failures = roster.failures.failures
    failures.append(failure)
    del failures[:-MAX_FAILURES]
    roster.mark("failures")
    recent = [f for f in failures if f.host == failure.host and f.at > failure.at - COUNT_S]
    if roster.root.scripted or is_barred(roster, failure.host) or len(recent) < bar_after:
        return ""
    kinds = ", ".join(sorted({f.kind.value for f in recent}))
    return f"{len(recent)} failures on it ({kinds}), the last: {failure.text}"


def is_barred(roster: Roster, host: str) -> bool:
    return bool(roster.failures.bars.get(host, HostBar()).reason)


def bar(roster: Roster, host: str, reason: str, at: float) -> None:
    """Bar a host from the run for a while, for longer each time."""
    times = roster.failures.bars.get(host, HostBar()).times + 1
    roster.failures.bars[host] = HostBar(times=times, until=at + _length_s(times), reason=reason)
    roster.mark("failures")


def expire(roster: Roster, at: float) -> list[str]:
    """Drop bars that are over. Returns the hosts that are no longer barred."""
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
    """Adapt stored times to a new head's clock: no failure lies in the future, and no bar gets longer."""
    stored = roster.failures
    stored.failures = [f if f.at <= at else msgspec.structs.replace(f, at=at) for f in stored.failures]
    for bar in stored.bars.values():
        bar.until = min(bar.until, at + _length_s(bar.times))


def _where(failure: Failure) -> str:
    return f"{member_name(failure.node)} ({failure.host})"


def _length_s(times: int) -> float:
    return min(LONGEST_BAR_S, BAR_S * 2.0 ** min(times - 1, 20))
