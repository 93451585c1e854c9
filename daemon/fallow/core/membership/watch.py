"""Who is heard and who makes progress. Nothing here is stored: a head that comes back learns it from the next reports.

Silence proves nothing, and a head must not take its own absence for the death of others. So

- `now` is a clock of ticks: each adds the time since the last one, `LONGEST_TICK_S` at most, and nothing while nobody
  has been heard for `DEAF_S`. A head that was stopped or cut off finds all leases and deadlines as they were;
- a node is silent only in comparison with another one that was heard;
- a step that others finish in its generation is a sign of life of a node, because a step needs all members;
- a silent member is given up only when a member that is heard waits for it;
- after an absence of the head, connections have `reconnect_s` to come back.

A worker that says nothing to its own agent, which is heard, is another matter: its process hangs.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from fallow.core.membership.messages import Report
from fallow.core.membership.records import FailureKind, Node
from fallow.core.membership.roster import Roster
from fallow.model import Doing, MemberPhase

LONGEST_TICK_S, DEAF_S = 1.0, 3.0
ABSENCE_S = 5.0
"""Connections outlive a shorter absence of the head."""
GENERATIONS = 4
"""Generations of which the newest step is remembered."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines in seconds."""

    prepare_s: float = 30.0
    "votes for a planned generation have to be in by then"
    rebuild_s: float = 15.0
    "votes for a generation for which members wait"
    start_s: float = 600.0
    "from a node's arrival to READY"
    lease_s: float = 15.0
    "a node that is silent for longer is given up"
    progress_s: float = 300.0
    "a member that keeps others waiting for longer is ejected"
    stopped_s: float = 0.5
    "a node whose process is stopped for so long is ejected"
    probe_s: float = 5.0
    "members that all wait for each other for so long have their links looked at"
    held_grace_s: float = 0.3
    "a broken group waits so long for the news of who died"
    accuse_s: float = 1.0
    "from the first refusal that names an unreachable node to the decision who goes"
    retry_s: float = 1.0
    "after a change that was given up"
    resend_s: float = 2.0
    release_s: float = 20.0
    "a node is asked to leave so long before it goes away"
    last_call_s: float = 3.0
    "a node that is still there so long before it goes away is ejected"
    reconnect_s: float = 30.0
    "after an absence of the head"
    listen_s: float = 2.5
    "a head that comes back decides nothing before it has heard all nodes, or for so long; less than `DEAF_S`"
    bar_after: int = 3
    "failures within an hour after which a host is barred"


class Overdue(NamedTuple):
    """A node whose time is up."""

    node: Node
    reason: str
    kind: FailureKind | None = None
    "None: not its host's fault"
    unheard: bool = False
    "only its silence speaks against it"


class Watch:
    """Times and reports of one run's nodes.

    Args:
        roster: read only.
        timing: deadlines.
        at: now, on the clock of the events.
    """

    def __init__(self, roster: Roster, timing: Timing, at: float) -> None:
        self.now = 0.0
        self.reports: dict[int, Report] = {}
        self.committed_at = 0.0
        self._roster, self._timing = roster, timing
        self._head = _Hearing(at)
        self._sent_after: dict[int, float] = {}
        "node -> the tick before its newest report was handled: it may have lain unread since, on the clock of events"
        self._heard_at: dict[int, float] = dict.fromkeys(roster.nodes, 0.0)
        self._came_at: dict[int, float] = dict.fromkeys(roster.nodes, 0.0)
        self._over_at: dict[int, float] = {}
        "node -> when its script was known to have ended"
        self._steps: dict[int, tuple[int, float]] = {}
        "generation -> its newest finished step, and when that was heard"
        self._came_together: dict[int, float] = {}
        "generation -> a moment before which not all of its members had come to it"
        self._spared_at = -math.inf
        "when nodes without progress were last kept, because another one was to blame"

    # -- what is learned --------------------------------------------------------------------------------------------

    def advance(self, at: float) -> None:
        """A tick."""
        self.now += self._head.advance(at)

    def came(self, node: int) -> None:
        self._came_at[node] = self._heard_at[node] = self.now

    def hear(self, report: Report) -> None:
        self._head.hear(self.now)
        self._sent_after[report.node] = self._head.ticked_at
        last, last_at = self.reports.get(report.node), self._heard_at[report.node]
        self._heard_at[report.node] = self.now
        self.reports[report.node] = report
        if last is not None and last.generation < report.generation:
            self._came_together.setdefault(report.generation, last_at)
        step, _ = self._steps.get(report.generation, (-1, 0.0))
        if report.generation and report.step > step:
            # Nobody knows how old the step of a first report is.
            self._steps[report.generation] = report.step, self.now if step >= 0 else -math.inf
        for known in (self._steps, self._came_together):
            for old in sorted(known)[:-GENERATIONS]:
                del known[old]

    def forget(self, node: int) -> None:
        for known in (self.reports, self._heard_at, self._came_at, self._sent_after, self._over_at):
            known.pop(node, None)

    # -- what follows -----------------------------------------------------------------------------------------------

    def heard_all(self) -> bool:
        """Every node that the records call alive has reported to this head."""
        return all(n in self.reports for n, node in self._roster.nodes.items() if node.alive)

    def unheard_s(self, node: int) -> float:
        """For how long nothing came from the node itself, or from one of its workers, whatever others show."""
        report = self.reports.get(node)
        return self.now - self._heard_at[node] + (report.mute_s if report is not None else 0.0)

    def over_s(self, node: int) -> float:
        """For how long its script has been over. Asked for the first time, it is over since now."""
        return self.now - self._over_at.setdefault(node, self.now)

    def is_past(self, deadline: float) -> bool:
        """The deadline is over, and somebody was heard since. So what had come until then was read.

        A head that stood still knows the time before it knows what has come meanwhile.
        """
        return self._head.heard_at >= deadline

    def may_reconnect(self, node: int) -> bool:
        """It was not heard since the head's last absence, and its connection may still come back."""
        back_at = self._head.back_at
        return self._heard_at[node] < back_at and self.now < back_at + self._timing.reconnect_s

    def ends_within(self, node: Node, seconds: float) -> bool:
        """It goes away so soon, as far as is known."""
        return node.ends_at is not None and self._head.ticked_at >= node.ends_at - seconds

    def overdue(self) -> list[Overdue]:
        """Nodes that must be given up now."""
        stalled = {} if self._roster.finishing else self._stalled()
        nodes = [node for node in self._roster.nodes.values() if node.alive and not node.finished]
        found = (self._look(node, stalled.get(node.id)) for node in nodes)
        return [overdue for overdue in found if overdue is not None]

    def all_wait_s(self) -> float:
        """For how long all members of the committed generation have waited for each other."""
        return min(map(self._waits_s, filter(self._roster.alive, self._roster.inside())), default=0.0)

    def _look(self, node: Node, stalled_s: float | None) -> Overdue | None:
        timing, report, silent_s = self._timing, self.reports.get(node.id), self._silent_s(node)
        is_fresh = self._head.ticked_at - self._sent_after.get(node.id, -math.inf) <= DEAF_S
        is_starting = node.phase is MemberPhase.STARTING
        if self.ends_within(node, timing.last_call_s):
            return Overdue(node, f"still there though it had to leave: {node.leaving}")
        if node.deserted and self.over_s(node.id) > timing.lease_s:
            return Overdue(node, f"still there {timing.lease_s:g} s after its script had ended")
        if report is not None and report.stopped_s >= timing.stopped_s and is_fresh:
            return Overdue(node, f"one of its processes is stopped (for {report.stopped_s:.1f} s)")
        if silent_s > timing.lease_s and self._counts(node):
            return Overdue(node, f"silent for {silent_s:.1f} s", unheard=True)
        if report is not None and is_fresh and not is_starting:
            mute_s = min(report.mute_s, self.now - self._step_at(node))
            if mute_s > timing.lease_s and self._counts(node):
                return Overdue(node, f"its process is silent for {mute_s:.1f} s, alive", FailureKind.HANG)
        if is_starting and self.now - self._came_at[node.id] > timing.start_s:
            return Overdue(node, f"did not reach run.updates() within {timing.start_s:.0f} s", FailureKind.HANG)
        if stalled_s is not None:
            return Overdue(node, f"no progress for {stalled_s:.1f} s, alive", FailureKind.HANG)
        return None

    def _silent_s(self, node: Node) -> float:
        """For how long there was no sign of life of it while somebody else was heard."""
        return self._head.heard_at - max(self._heard_at[node.id], self._step_at(node))

    def _step_at(self, node: Node) -> float:
        """When the newest step or first exchange was finished that needed it; minus infinity: none is known."""
        root, report = self._roster.root, self.reports.get(node.id)
        generations = [report.generation] if report is not None else []
        if node.seat:
            generations.append(root.generation)
            if root.old_may_step and root.change is not None:
                generations.append(root.change.replaces)
        steps = (self._steps[g][1] for g in generations if g in self._steps)
        return max([*steps, *(self._came_together.get(g, -math.inf) for g in generations)], default=-math.inf)

    def _counts(self, node: Node) -> bool:
        """Does a silence that exceeds the lease speak against the node?"""
        roster, timing, late = self._roster, self._timing, self.may_reconnect(node.id)
        is_needed = node.seat > 0 or (node.id in roster.leavers and not roster.root.entered)
        if not is_needed or roster.finishing:
            return not late
        needed_s = timing.lease_s if late else min(timing.lease_s, timing.probe_s)
        others = [n for n in roster.inside() if n != node.id and roster.alive(n)]
        return any(self._has_given_up(n) or self._waits_s(n) >= needed_s for n in others)

    def _has_given_up(self, node: int) -> bool:
        """It is heard, and finishes no step any more in the generation that it was in."""
        report = self._heard(node)
        if report is None:
            return False
        return report.given_up >= self._roster.root.generation or report.given_up >= report.generation > 0

    def _waits_s(self, node: int) -> float:
        """For how long it has waited for members of the committed generation. 0: it has not, or it is not heard."""
        report = self._heard(node)
        if report is None or report.doing is not Doing.WAITING or report.given_up >= self._roster.root.generation:
            return 0.0
        return min(self._unchanged_s(node, report), self.now - self.committed_at)

    def _heard(self, node: int) -> Report | None:
        """What the node says now; None: it is not heard."""
        return self.reports.get(node) if self.unheard_s(node) <= DEAF_S else None

    def _stalled(self) -> dict[int, float]:
        """Who has to go because it makes no progress -> for how many seconds it has made none.

        Where a kernel hangs, the other nodes' processes may be stuck, too: in the driver, behind sums that do not come.
        Then only the node whose device computes is to blame, and the others have the whole deadline once more.
        """
        spared_s = self.now - self._spared_at
        nodes = [self._roster.nodes[n] for n in self._roster.inside() if self._roster.alive(n)]
        reports = [self.reports[node.id] for node in nodes if node.id in self.reports and not node.deserted]
        others_wait = any(report.doing is Doing.WAITING for report in reports)
        # Code outside of the loop may take any time, as long as nobody waits.
        blamed = (Doing.WORKING, Doing.OUTSIDE) if others_wait else (Doing.WORKING,)
        late = {r.node: self._unchanged_s(r.node, r) for r in reports if r.doing in blamed}
        late = {n: stalled_s for n, stalled_s in late.items() if min(stalled_s, spared_s) > self._timing.progress_s}
        computing = {n: stalled_s for n, stalled_s in late.items() if self.reports[n].computes}
        if computing and len(computing) < len(late):
            self._spared_at = self.now
        return computing or late

    def _unchanged_s(self, node: int, report: Report) -> float:
        """For how long it has done the same. A step that was finished since is something else.

        What it did while it was not heard, nobody knows: that is silence, not a lack of progress.
        """
        _, step_at = self._steps.get(report.generation, (0, -math.inf))
        known_s = max(0.0, report.stalled_s - report.mute_s)
        return min(known_s + min(self.unheard_s(node), self._timing.lease_s), self.now - step_at)


class _Hearing:
    """When this head was awake and heard somebody."""

    def __init__(self, at: float) -> None:
        self.heard_at = 0.0
        "when anybody was heard, on the clock of ticks"
        self.back_at = -math.inf
        "when the last absence ended"
        self.ticked_at = at
        self._deaf_s = self._absent_s = 0.0

    def advance(self, at: float) -> float:
        """By how many seconds the clock goes on."""
        passed = max(0.0, at - self.ticked_at)
        counted = min(passed, LONGEST_TICK_S)
        self.ticked_at = max(at, self.ticked_at)
        self._absent_s += passed
        self._deaf_s += counted
        return counted if self._deaf_s < DEAF_S else 0.0

    def hear(self, now: float) -> None:
        if self._absent_s >= ABSENCE_S:
            self.back_at = now
        self._deaf_s = self._absent_s = 0.0
        self.heard_at = now
