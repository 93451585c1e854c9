"""The machine's state beside the stored records: the ballot, signs of trouble, and orders that wait to be sent."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from fallow.core.membership import events as ev
from fallow.core.membership import failures
from fallow.core.membership.messages import End, Order, Plan, Refusal, Report
from fallow.core.membership.names import member_name
from fallow.core.membership.records import Change, Node
from fallow.core.membership.roster import Roster
from fallow.core.membership.watch import Timing, Watch
from fallow.model import ChangeKind, Exit, MemberPhase, RunStatus


class RunPhase(StrEnum):
    LISTENING = "listening"
    "a restarted head waits for the nodes' reports before it decides anything"
    DESERTED = "deserted"
    "a member's script ended in the middle of the training; the machine waits for its exit code"
    EMPTY = "empty"
    "the run has no living member"
    STEADY = "steady"
    PREPARING = "preparing"
    "nodes vote on a planned generation; the old generation keeps training"
    PROBING = "probing"
    "members build a spare group to test their links; the old generation keeps training"
    REBUILDING = "rebuilding"
    "the old generation is broken; its survivors vote on a new one"
    SWITCHING = "switching"
    "a generation is committed, and some members still compute in the old one"
    FINISHING = "finishing"
    "a member's script has ended, so the membership is frozen"
    ENDED = "ended"


@dataclass
class Ballot:
    """A generation that nodes vote on, or a committed one that members are switching to. Votes are not stored."""

    change: Change
    members: list[int]
    "in rank order"
    full_plan: Plan
    "for newcomers, and for leavers that stay one generation longer"
    delta_plan: Plan
    "the same plan as a difference, for members of the previous generation"
    began_at: float
    deadline: float
    "both on the clock of `Watch.now`"
    awaited: set[int]
    "nodes that have not voted; after the commit: members that have not switched"
    refusals: dict[int, Refusal] = field(default_factory=dict)
    "node -> its refusal; only refusals that name unreachable nodes"
    refused_at: float | None = None
    spoiled: str = ""
    "why this generation can no longer be committed; empty: it can"
    patience_s: float = 0.0
    "seconds between giving up this generation and the next attempt"

    @property
    def participants(self) -> list[int]:
        return self.members + self.change.leavers


class Broken(NamedTuple):
    """A process group that broke, or the replacement of a broken group that could not be built."""

    node: int
    "first node that reported the break"
    step: int
    "newest step that this node had finished"
    text: str
    rebuild_at: float
    "time to rebuild, unless the end of a node explains the break before; on the clock of `Watch.now`"


@dataclass
class Trouble:
    """Evidence that the committed generation no longer works."""

    lost_members: dict[int, str] = field(default_factory=dict)
    "member lost since the last generation was proposed -> reason"
    code: int | None = None
    "exit status of the member lost last; None: not known"
    broken: int = 0
    "newest generation that was given up; all older ones are given up with it"
    group: Broken | None = None
    attempts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """node -> (its newest finished step, number of consecutive groups that broke first on this node). Key 0 counts
    groups that did not break, but in which all members waited in vain."""
    lists_differ: bool = False
    "a member refused a plan, perhaps because its member list differs: the next plan is sent in full to every node"
    retry_at: float = 0.0
    "earliest time of the next planned change; on the clock of `Watch.now`"
    probe_s: float = 0.0
    "seconds that all members wait for each other before their links are tested; doubled whenever the links are good"

    def times(self, node: int, step: int) -> int:
        """Return how many consecutive groups failed because of this node without bringing it beyond `step`."""
        known_step, times = self.attempts.get(node, (step, 0))
        return times if known_step == step else 0

    def count(self, node: int, step: int) -> int:
        """Count one more group that failed because of this node. Returns the new number."""
        self.attempts[node] = step, self.times(node, step) + 1
        return self.times(node, step)


class Outbox:
    """Instructions that follow from one event. At most one order per node is made, once the event has been handled."""

    def __init__(self, term: int, edition: int) -> None:
        self.term, self.edition = term, edition
        self.nodes: set[int] = set()
        "nodes that need a new order"
        self.sent_orders: dict[int, tuple[int, float]] = {}
        "node -> (edition of its newest order, when the order was sent, on the clock of `Watch.now`)"
        self.ends: dict[int, End] = {}
        self.first_edition = edition + 1
        "a node without an order from this machine gets one, unless it already obeys this edition or a later one"
        self.instructions: list[ev.Instruction] = []

    def log(self, kind: str, text: str, *, node: int = 0, **data: Any) -> None:
        """Append to the run's event log. `node` is the node that the entry is about, 0 for none."""
        about = {"member": member_name(node)} if node else {}
        self.instructions.append(ev.Log(kind, text, about | data))

    def has_heard(self, node: int, report: Report | None) -> bool:
        """Return True if the node has obeyed the newest order that was sent to it."""
        edition, _ = self.sent_orders.get(node, (self.first_edition, 0.0))
        return report is not None and (report.term, report.edition) >= (self.term, edition)


class State:
    """Everything that the functions in the tables read and change.

    Args:
        roster: the stored part. This object owns it from now on.
        term: term of the head, stamped on orders. It is higher than the term of any earlier head.
        timing: deadlines.
        at: now, on the clock of the events.
        edition: edition of the newest order in this term, if this machine replaces another machine of the same head.
        keep: number of usable checkpoints to keep, see `records.Checkpoints`.
        validate: check the invariants after each event.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        term: int,
        timing: Timing,
        at: float,
        edition: int = 0,
        keep: int = 2,
        validate: bool = False,
    ) -> None:
        self.roster, self.timing, self.at, self.keep, self._validate = roster, timing, at, keep, validate
        self.carried_out: Counter[str] = Counter()
        "name of a table row -> how often its action was carried out"
        self.watch = Watch(roster, timing, at)
        self.outbox = Outbox(term, edition)
        self.ballot: Ballot | None = None
        self.trouble = Trouble(probe_s=timing.probe_s)
        self.deserted = {n for n, node in roster.nodes.items() if node.deserted}
        "nodes whose script has ended in the middle of the training"
        self.trace: deque[str] = deque(maxlen=200)
        "the newest events and rules, for error messages"
        self.is_listening = any(node.alive for node in roster.nodes.values())
        self.is_tick = self.may_be_due = True
        "the event is a tick; a planned change may be due (most reports change nothing, and skip that check)"
        self._main = 0
        "node whose newest order says that it is the main one"
        failures.begin_clock(roster, at)
        self._restore()

    def _restore(self) -> None:
        """Continue what the previous head had committed. Generations that it had only proposed are given up."""
        r, change = self.roster, self.roster.root.change
        self.trouble.broken = r.root.recovered
        if change is None and r.root.status is RunStatus.SUSPENDED:
            # The log has all losses. Members that are heard again must not continue in that generation.
            self.trouble.broken = max(r.root.generation, r.root.recovered)
        else:
            self.trouble.lost_members = {n: r.nodes[n].ended for n in r.members if not r.alive(n)}
        if change is not None:
            number = change.generation
            change.bytes_in_pause = change.bytes_behind = 0  # every member reports its bytes again
            plan = Plan(generation=number, replaces=change.replaces, base=number, interrupt=change.interrupt)
            self.ballot = Ballot(change, r.members, plan, plan, 0.0, 0.0, set(filter(r.alive, r.members)))
            lost_leavers = [r.nodes[n] for n in change.leavers if n in r.nodes and not r.alive(n)]
            self.trouble.lost_members.update({node.id: node.ended for node in lost_leavers if not node.proved_gone})

    # -- views ------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> RunPhase:
        root, voting = self.roster.root, self.voting
        if root.status.ended:
            return RunPhase.ENDED
        if self.is_listening:
            return RunPhase.LISTENING
        if self.roster.finishing:
            return RunPhase.FINISHING
        if self.deserters():
            return RunPhase.DESERTED
        if voting is not None:
            if voting.change.probe:
                return RunPhase.PROBING
            return RunPhase.REBUILDING if voting.change.interrupt else RunPhase.PREPARING
        if not any(map(self.roster.alive, self.roster.inside())):
            # If all have left together, the change is complete.
            return RunPhase.SWITCHING if self.going is not None and not self.roster.members else RunPhase.EMPTY
        return RunPhase.STEADY if root.change is None else RunPhase.SWITCHING

    def deserters(self) -> list[int]:
        """Members whose script has ended in the middle of the training while their processes still run."""
        nodes = [self.roster.nodes[n] for n in sorted(self.deserted) if n in self.roster.nodes]
        return [node.id for node in nodes if node.deserted and node.alive and node.seat]

    @property
    def open_ballot(self) -> Ballot:
        """The ballot. Call only in phases that have one."""
        assert self.ballot is not None
        return self.ballot

    @property
    def voting(self) -> Ballot | None:
        """The ballot of a generation that is not committed yet."""
        return None if self.ballot is None or self.ballot.change is self.roster.root.change else self.ballot

    @property
    def going(self) -> Ballot | None:
        """The ballot of a committed generation that members are still switching to."""
        return None if self.ballot is None or self.ballot.change is not self.roster.root.change else self.ballot

    def participants(self) -> list[int]:
        return [] if self.ballot is None else self.ballot.participants

    def has_state(self, node: int) -> bool:
        """Return True if the node is known to hold the complete state."""
        root, record, report = self.roster.root, self.roster.nodes[node], self.watch.reports.get(node)
        if root.rollback_below or not self.roster.is_inside(record):
            return False
        if report is None:
            return 0 < record.joined <= root.complete and root.recovered <= root.complete
        # A state counts only if the node has computed since it got its seat.
        return report.has_state and report.generation >= max(record.joined, root.recovered)

    def main(self) -> int:
        """The node whose first worker is the main worker of the run; 0: the run has no node."""
        nodes = self.roster.nodes
        members = self.roster.members or (self.ballot.members if self.ballot is not None else [])
        if members:
            return members[0]
        starting = (MemberPhase.STARTING, MemberPhase.READY)
        if self._main in nodes and nodes[self._main].phase in starting and not nodes[self._main].leaving:
            return self._main  # an older node that arrives later would print again what has been shown
        return min((n for n, node in nodes.items() if node.phase in starting and not node.leaving), default=0)

    def spoil(self, reason: str, node: int = 0) -> None:
        """Forbid to commit the open ballot: in any case (`node` 0), or only if `node` is one of its members."""
        if self.voting is not None and (not node or node in self.voting.members):
            self.voting.spoiled = reason

    # -- orders ----------------------------------------------------------------------------------------------------

    def tell(self, nodes: Sequence[int]) -> None:
        """Have a new order made for these nodes."""
        self.outbox.nodes.update(nodes)

    def take_instructions(self) -> list[ev.Instruction]:
        """Return the instructions that follow from all events since the last call."""
        outbox, main = self.outbox, self.main()
        if main != self._main:
            self.tell([main, self._main])
            self._main = main
        later = outbox.nodes & self._told_last()
        now = (outbox.nodes - later) & self.roster.nodes.keys()
        if now:
            outbox.edition += 1
            for n in sorted(now):
                outbox.sent_orders[n] = outbox.edition, self.watch.now
                outbox.instructions.append(self.order(n))
        outbox.nodes = later
        instructions, outbox.instructions = outbox.instructions, []
        # `Admitted` comes after the first order, so an agent knows whose output is shown before it starts its workers.
        return sorted(instructions, key=lambda instruction: isinstance(instruction, ev.Admitted))

    def _told_last(self) -> set[int]:
        """Return members of the old generation, as long as a newcomer has not obeyed the order that commits it.

        Members pass the boundary together, once all of them have the order. Behind the boundary they wait for the
        newcomers. A head that dies between two orders must not leave members waiting, so newcomers get their orders
        first. The head waits for a newcomer at most as long as it takes to repeat an order, and at most one tick if a
        node must leave in time.
        """
        going, outbox, reports = self.going, self.outbox, self.watch.reports
        is_late = self.watch.now - self.watch.committed_at >= 2 * self.timing.resend_s
        if going is None or going.change.interrupt or is_late:
            return set()
        newcomers = filter(self.roster.alive, going.change.joined)
        if all(n not in outbox.nodes and outbox.has_heard(n, reports.get(n)) for n in newcomers):
            return set()
        alive = (node for node in self.roster.nodes.values() if node.alive)
        if self.is_tick and any(self.watch.ends_within(node, self.timing.release_s) for node in alive):
            return set()
        return set(going.participants).difference(going.change.joined)

    def order(self, number: int) -> Order:
        """Return the order that says where this node has to be now."""
        node, root, broken = self.roster.nodes[number], self.roster.root, self.trouble.broken
        return Order(
            node=node.id,
            term=self.outbox.term,
            edition=self.outbox.edition,
            committed=root.generation,
            broken=broken if self.roster.is_inside(node) else max(broken, root.generation),
            plan=self._plan_for(node),
            state_since=self._state_since(node),
            accepted=node.accepted,
            is_main=node.id == self._main,
            noted=node.noted,
            unsaved=root.unsaved,
            finish=root.final,
            end=self._end_of(node),
        )

    def _plan_for(self, node: Node) -> Plan | None:
        ballot = self.ballot
        if ballot is None or not node.alive:
            return None
        if node.id in ballot.change.leavers:
            without = {"base": 0, "more": (), "check": 0, "checkpoints": ()}
            return msgspec.structs.replace(ballot.full_plan, leave=True, suspends=not ballot.members, **without)
        if node.id not in ballot.members:
            return None
        was_member = node.seat > 0 and node.joined < ballot.change.generation
        return ballot.delta_plan if was_member else ballot.full_plan

    def _state_since(self, node: Node) -> int:
        """Return the generation since which the node's state counts: where it got its seat, or a later start."""
        ballot, is_inside = self.ballot, self.roster.is_inside(node)
        if ballot is not None and (ballot.change.kind is ChangeKind.START or not is_inside):
            return ballot.change.generation
        return max(node.joined, self.roster.root.recovered) if is_inside else 0

    def _end_of(self, node: Node) -> End | None:
        status = self.roster.root.status
        if node.phase is MemberPhase.GONE:
            code = Exit.OK if node.leaving or not node.ended else Exit.TEMPFAIL
            reason = node.ended or node.leaving or "its script has ended"
            return self.outbox.ends.get(node.id) or End(code=code, reason=reason)
        if status.ended and not node.finished:
            code = Exit.SOFTWARE if status is RunStatus.FAILED else Exit.OK
            return End(code=code, reason=f"the run is {status}")
        return None
