"""When nodes were last heard, and whether they make progress. Nothing is stored: a new head learns it from reports.

Silence proves nothing, and a head must not mistake its own absence for the end of nodes. So

- `now` is a clock of ticks. Each tick adds the time since the last one, at most `LONGEST_TICK_S`, and nothing once no
  node has been heard for `DEAF_S`. So leases and deadlines stand still while the head is stopped or cut off;
- a node is silent only in comparison with another node that was heard;
- a finished step is a sign of life of every member of its generation, because a step needs all members;
- a silent member is given up only when a member that is heard waits for it;
- after an absence of the head, connections have `reconnect_s` to come back.

A worker that is silent while its agent is heard has hung.
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
"""Connections survive an absence of the head that is shorter than this."""
GENERATIONS = 4
"""Number of generations whose newest step is remembered."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines in seconds."""

    prepare_s: float = 30.0
    "time for votes on a planned generation"
    rebuild_s: float = 15.0
    "time for votes on a generation that members wait for"
    start_s: float = 600.0
    "time from a node's arrival to READY"
    lease_s: float = 15.0
    "silence after which a node is given up"
    progress_s: float = 300.0
    "time for which a member may keep others waiting before it is ejected"
    stopped_s: float = 0.5
    "time for which a process may be stopped (SIGSTOP) before its node is ejected"
    probe_s: float = 5.0
    "time that all members wait for each other before their links are tested"
    held_grace_s: float = 0.3
    "time between a broken group and its rebuild, in which the end of a node may become known"
    accuse_s: float = 1.0
    "time from the first refusal that names an unreachable node to the decision which node leaves"
    retry_s: float = 1.0
    "time before the next attempt after a change that was given up"
    resend_s: float = 2.0
    release_s: float = 20.0
    "time before its end at which a node is asked to leave"
    last_call_s: float = 3.0
    "time before its end at which a node that has not left is ejected"
    reconnect_s: float = 30.0
    "time for connections to come back after an absence of the head"
    listen_s: float = 2.5
    "time for which a restarted head waits for reports of all nodes before it decides anything; less than `DEAF_S`"
    bar_after: int = 3
    "number of failures within an hour after which a host is barred"


class Overdue(NamedTuple):
    """A node that must be given up."""

    node: Node
    reason: str
    kind: FailureKind | None = None
    "None: not the fault of its host"
    unheard: bool = False
    "its silence is the only evidence"


class Watch:
    """Reports of one run's nodes, and when they came.

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
        "node -> time of the last tick before its newest report, on the clock of events; the report may be that old"
        self._heard_at: dict[int, float] = dict.fromkeys(roster.nodes, 0.0)
        self._came_at: dict[int, float] = dict.fromkeys(roster.nodes, 0.0)
        self._over_at: dict[int, float] = {}
        "node -> when its script became known to have ended"
        self._steps: dict[int, tuple[int, float]] = {}
        "generation -> (its newest finished step, when that step was reported)"
        self._came_together: dict[int, float] = {}
        "generation -> a time before which not all of its members had switched to it"
        self._spared_at = -math.inf
        "when nodes without progress were last spared, because another node was to blame"

    # -- observations -----------------------------------------------------------------------------------------------

    def advance(self, at: float) -> None:
        """Advance the clock of ticks. `at`: time of the tick on the clock of events."""
        self.now += self._head.advance(at)

    def add_node(self, node: int) -> None:
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
            # The age of the step in a first report is not known.
            self._steps[report.generation] = report.step, self.now if step >= 0 else -math.inf
        for by_generation in (self._steps, self._came_together):
            for old in sorted(by_generation)[:-GENERATIONS]:
                del by_generation[old]

    def forget(self, node: int) -> None:
        for by_node in (self.reports, self._heard_at, self._came_at, self._sent_after, self._over_at):
            by_node.pop(node, None)

    # -- conclusions ------------------------------------------------------------------------------------------------

    def heard_all(self) -> bool:
        """Return True if every node that is alive by the records has reported to this head."""
        return all(n in self.reports for n, node in self._roster.nodes.items() if node.alive)

    def unheard_s(self, node: int) -> float:
        """Seconds since the node, or the most silent of its workers, was heard itself. Finished steps do not count."""
        report = self.reports.get(node)
        return self.now - self._heard_at[node] + (report.mute_s if report is not None else 0.0)

    def over_s(self, node: int) -> float:
        """Seconds since the node's script has ended. The first call starts the time."""
        return self.now - self._over_at.setdefault(node, self.now)

    def is_past(self, deadline: float) -> bool:
        """Return True if the deadline is over and a node was heard since, so everything that came before it was read.

        A head that stood still learns the time before it reads the messages that came meanwhile.
        """
        return self._head.heard_at >= deadline

    def may_reconnect(self, node: int) -> bool:
        """Return True if the node was not heard since the head's last absence and may still connect again."""
        back_at = self._head.back_at
        return self._heard_at[node] < back_at and self.now < back_at + self._timing.reconnect_s

    def ends_within(self, node: Node, seconds: float) -> bool:
        """Return True if the node is known to go away within so many seconds."""
        return node.ends_at is not None and self._head.ticked_at >= node.ends_at - seconds

    def overdue(self) -> list[Overdue]:
        """Return the nodes that must be given up now."""
        stalled = {} if self._roster.finishing else self._stalled()
        nodes = [node for node in self._roster.nodes.values() if node.alive and not node.finished]
        verdicts = (self._look(node, stalled.get(node.id)) for node in nodes)
        return [overdue for overdue in verdicts if overdue is not None]

    def all_wait_s(self) -> float:
        """Seconds for which all members of the committed generation have waited for each other."""
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
        """Seconds without a sign of life of this node while other nodes were heard."""
        return self._head.heard_at - max(self._heard_at[node.id], self._step_at(node))

    def _step_at(self, node: Node) -> float:
        """Time of the newest step or first exchange that needed this node; minus infinity: none is known."""
        root, report = self._roster.root, self.reports.get(node.id)
        generations = [report.generation] if report is not None else []
        if node.seat:
            generations.append(root.generation)
            if root.old_may_step and root.change is not None:
                generations.append(root.change.replaces)
        steps = (self._steps[g][1] for g in generations if g in self._steps)
        return max([*steps, *(self._came_together.get(g, -math.inf) for g in generations)], default=-math.inf)

    def _counts(self, node: Node) -> bool:
        """Return True if a silence beyond the lease counts as evidence against the node."""
        roster, timing, may_reconnect = self._roster, self._timing, self.may_reconnect(node.id)
        is_needed = node.seat > 0 or (node.id in roster.leavers and not roster.root.entered)
        if not is_needed or roster.finishing:
            return not may_reconnect
        needed_s = timing.lease_s if may_reconnect else min(timing.lease_s, timing.probe_s)
        other_nodes = [n for n in roster.inside() if n != node.id and roster.alive(n)]
        return any(self._has_given_up(n) or self._waits_s(n) >= needed_s for n in other_nodes)

    def _has_given_up(self, node: int) -> bool:
        """Return True if the node is heard and will finish no more step in the generation that it was in."""
        report = self._current_report(node)
        if report is None:
            return False
        return report.given_up >= self._roster.root.generation or report.given_up >= report.generation > 0

    def _waits_s(self, node: int) -> float:
        """Seconds for which the node has waited for other members; 0: it does not wait, or it is not heard."""
        report = self._current_report(node)
        if report is None or report.doing is not Doing.WAITING or report.given_up >= self._roster.root.generation:
            return 0.0
        return min(self._unchanged_s(node, report), self.now - self.committed_at)

    def _current_report(self, node: int) -> Report | None:
        """Return the node's newest report; None: the node is not heard at present."""
        return self.reports.get(node) if self.unheard_s(node) <= DEAF_S else None

    def _stalled(self) -> dict[int, float]:
        """Return nodes to eject for lack of progress -> seconds without progress.

        When a kernel hangs on one node, the processes of other nodes may be stuck in the driver behind sums that do
        not come. Then only the node whose device computes is to blame. The other nodes get the whole deadline anew.
        """
        spared_s = self.now - self._spared_at
        nodes = [self._roster.nodes[n] for n in self._roster.inside() if self._roster.alive(n)]
        reports = [self.reports[node.id] for node in nodes if node.id in self.reports and not node.deserted]
        others_wait = any(report.doing is Doing.WAITING for report in reports)
        # Code outside of the loop may take any time, as long as no member waits.
        blamed = (Doing.WORKING, Doing.OUTSIDE) if others_wait else (Doing.WORKING,)
        stalled = {r.node: self._unchanged_s(r.node, r) for r in reports if r.doing in blamed}
        stalled = {
            n: stalled_s for n, stalled_s in stalled.items() if min(stalled_s, spared_s) > self._timing.progress_s
        }
        computing = {n: stalled_s for n, stalled_s in stalled.items() if self.reports[n].computes}
        if computing and len(computing) < len(stalled):
            self._spared_at = self.now
        return computing or stalled

    def _unchanged_s(self, node: int, report: Report) -> float:
        """Seconds without progress of the node. A finished step of its generation is progress.

        Time in which the node was not heard counts as silence, not as a lack of progress.
        """
        _, step_at = self._steps.get(report.generation, (0, -math.inf))
        known_s = max(0.0, report.stalled_s - report.mute_s)
        return min(known_s + min(self.unheard_s(node), self._timing.lease_s), self.now - step_at)


class _Hearing:
    """When this head was awake and heard any node."""

    def __init__(self, at: float) -> None:
        self.heard_at = 0.0
        "when any node was last heard, on the clock of ticks"
        self.back_at = -math.inf
        "when the last absence of the head ended"
        self.ticked_at = at
        self._deaf_s = self._absent_s = 0.0

    def advance(self, at: float) -> float:
        """Return the seconds to add to the clock of ticks."""
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
