"""What the machine knows beside the records, and what it has to say: the ballot, trouble, orders for nodes."""

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
    "a head has come back: it decides nothing before it has heard the nodes"
    DESERTED = "deserted"
    "a member's script has ended in the middle of the training: its exit code tells what follows"
    EMPTY = "empty"
    "no member is there"
    STEADY = "steady"
    PREPARING = "preparing"
    "votes on a planned generation; the old one trains on"
    PROBING = "probing"
    "a group is built to look at the links; the old generation trains on"
    REBUILDING = "rebuilding"
    "the old generation is broken; votes on one of its survivors"
    SWITCHING = "switching"
    "committed; not all members have gone over"
    FINISHING = "finishing"
    "a member's script has ended: the membership is frozen"
    ENDED = "ended"


@dataclass
class Ballot:
    """A generation that is voted on, or that is committed and that all are going over to. Votes are not stored."""

    change: Change
    members: list[int]
    "in rank order"
    whole: Plan
    "for newcomers, and for leavers that are kept"
    delta: Plan
    "for members of the generation before"
    began_at: float
    deadline: float
    "both on the clock of `Watch.now`"
    awaited: set[int]
    "nodes whose vote is missing, and after the commit nodes that have not gone over"
    refusals: dict[int, Refusal] = field(default_factory=dict)
    "those that name unreachable nodes"
    refused_at: float | None = None
    spoiled: str = ""
    "why it cannot be committed any more"
    patience_s: float = 0.0
    "from giving it up until the next attempt"

    @property
    def participants(self) -> list[int]:
        return self.members + self.change.leavers


class Broken(NamedTuple):
    """A group that broke, or that could not be built in the place of a broken one."""

    node: int
    "the first one that said so"
    step: int
    "that it had finished"
    text: str
    rebuild_at: float
    "unless the news of a death explains it first; on the clock of `Watch.now`"


@dataclass
class Trouble:
    """What speaks against the present generation."""

    lost: dict[int, str] = field(default_factory=dict)
    "members that are gone since the last generation was begun, and why"
    code: int | None = None
    "exit status of the newest of them"
    broken: int = 0
    "this generation and older ones were given up"
    group: Broken | None = None
    attempts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """node -> (step that it had finished, how many groups in a row broke there first); 0: of those that did not break,
    and in which all waited in vain"""
    lists_differ: bool = False
    "a member refused a plan, maybe because it counted another list: all get the whole list next"
    retry_at: float = 0.0
    "no planned change before"
    probe_s: float = 0.0
    "all members wait for so long before their links are looked at; doubled when these are good"

    def times(self, node: int, step: int) -> int:
        """How many groups in a row came to nothing because of this node, none of which brought it beyond this step."""
        known_step, times = self.attempts.get(node, (step, 0))
        return times if known_step == step else 0

    def count(self, node: int, step: int) -> int:
        """One more did. Returns the number of them."""
        self.attempts[node] = step, self.times(node, step) + 1
        return self.times(node, step)


class Outbox:
    """What one event has the head do. Orders are made when the event has been handled, one for each node."""

    def __init__(self, term: int, edition: int) -> None:
        self.term, self.edition = term, edition
        self.nodes: set[int] = set()
        "that need a new order"
        self.told: dict[int, tuple[int, float]] = {}
        "node -> edition of its newest order, and when it was sent"
        self.ends: dict[int, End] = {}
        self.first_edition = edition + 1
        "a node that this machine has told nothing yet is told again where it has to be, unless it obeys a later one"
        self.instructions: list[ev.Instruction] = []

    def log(self, kind: str, text: str, *, node: int = 0, **data: Any) -> None:
        """Append to the run's event log; `node`: which it is about, 0 for none."""
        about = {"member": member_name(node)} if node else {}
        self.instructions.append(ev.Log(kind, text, about | data))

    def has_heard(self, node: int, report: Report | None) -> bool:
        """Has the node obeyed the newest order that it was sent?"""
        edition, _ = self.told.get(node, (self.first_edition, 0.0))
        return report is not None and (report.term, report.edition) >= (self.term, edition)


class State:
    """All that functions of the tables see and change.

    Args:
        roster: the stored part; this object's own from now on.
        term: the head's, stamped on orders; higher than that of any head before, also of one that a store forgot.
        timing: deadlines.
        at: now, on the clock of the events.
        edition: of the newest order of this term, if this machine replaces another one of the same head.
        keep: usable checkpoints that stay, see `records.Checkpoints`.
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
        "how often each row of the tables was"
        self.watch = Watch(roster, timing, at)
        self.outbox = Outbox(term, edition)
        self.ballot: Ballot | None = None
        self.trouble = Trouble(probe_s=timing.probe_s)
        self.deserted = {n for n, node in roster.nodes.items() if node.deserted}
        "nodes whose script has ended in the middle of the training"
        self.story: deque[str] = deque(maxlen=200)
        "the newest events and rules, for error messages"
        self.is_listening = any(node.alive for node in roster.nodes.values())
        self.is_tick = self.may_be_due = True
        "is this a tick? may a planned change have become due? Most reports change nothing, and nodes are many"
        self._main = 0
        "the node that was told so"
        failures.begin_clock(roster, at)
        self._restore()

    def _restore(self) -> None:
        """Take up what the head before had committed. What it only prepared is given up."""
        r, change = self.roster, self.roster.root.change
        self.trouble.broken = r.root.recovered
        if change is None and r.root.status is RunStatus.SUSPENDED:
            # All losses were told, and members that are heard again do not go on in that generation.
            self.trouble.broken = max(r.root.generation, r.root.recovered)
        else:
            self.trouble.lost = {n: r.nodes[n].ended for n in r.members if not r.alive(n)}
        if change is not None:
            number = change.generation
            change.bytes_in_pause = change.bytes_behind = 0  # all members tell theirs again
            plan = Plan(generation=number, replaces=change.replaces, base=number, interrupt=change.interrupt)
            self.ballot = Ballot(change, r.members, plan, plan, 0.0, 0.0, set(filter(r.alive, r.members)))
            lost = [r.nodes[n] for n in change.leavers if n in r.nodes and not r.alive(n)]
            self.trouble.lost.update({node.id: node.ended for node in lost if not node.proved_gone})

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
        """Members whose script has ended in the middle of the training, and whose processes have not."""
        known = [self.roster.nodes[n] for n in sorted(self.deserted) if n in self.roster.nodes]
        return [node.id for node in known if node.deserted and node.alive and node.seat]

    @property
    def open_ballot(self) -> Ballot:
        """The ballot, in phases in which there is one."""
        assert self.ballot is not None
        return self.ballot

    @property
    def voting(self) -> Ballot | None:
        """The generation that is voted on."""
        return None if self.ballot is None or self.ballot.change is self.roster.root.change else self.ballot

    @property
    def going(self) -> Ballot | None:
        """The committed generation that members are going over to."""
        return None if self.ballot is None or self.ballot.change is not self.roster.root.change else self.ballot

    def participants(self) -> list[int]:
        return [] if self.ballot is None else self.ballot.participants

    def has_state(self, node: int) -> bool:
        """Has the node the whole state, as far as is known?"""
        root, known, report = self.roster.root, self.roster.nodes[node], self.watch.reports.get(node)
        if root.rollback_below or not self.roster.is_inside(known):
            return False
        if report is None:
            return 0 < known.joined <= root.complete and root.recovered <= root.complete
        # What it holds counts only if it has computed since it got its seat.
        return report.has_state and report.generation >= max(known.joined, root.recovered)

    def main(self) -> int:
        """The node whose first worker is the main one of the run; 0: there is no node."""
        nodes = self.roster.nodes
        members = self.roster.members or (self.ballot.members if self.ballot is not None else [])
        if members:
            return members[0]
        starting = (MemberPhase.STARTING, MemberPhase.READY)
        if self._main in nodes and nodes[self._main].phase in starting and not nodes[self._main].leaving:
            return self._main  # what it printed has been shown: an older node that comes later would repeat it
        return min((n for n, node in nodes.items() if node.phase in starting and not node.leaving), default=0)

    def spoil(self, reason: str, node: int = 0) -> None:
        """What is voted on cannot be committed any more. Args: node: if it is one of the members; 0: in any case."""
        if self.voting is not None and (not node or node in self.voting.members):
            self.voting.spoiled = reason

    # -- what is said -----------------------------------------------------------------------------------------------

    def tell(self, nodes: Sequence[int]) -> None:
        """These nodes need a new order."""
        self.outbox.nodes.update(nodes)

    def take_instructions(self) -> list[ev.Instruction]:
        """What the events since the last call ask for."""
        outbox, main = self.outbox, self.main()
        if main != self._main:
            self.tell([main, self._main])
            self._main = main
        later = outbox.nodes & self._told_last()
        now = (outbox.nodes - later) & self.roster.nodes.keys()
        if now:
            outbox.edition += 1
            for n in sorted(now):
                outbox.told[n] = outbox.edition, self.watch.now
                outbox.instructions.append(self.order(n))
        outbox.nodes = later
        told, outbox.instructions = outbox.instructions, []
        # Behind the first order: an agent knows whose output is shown before it starts its workers.
        return sorted(told, key=lambda instruction: isinstance(instruction, ev.Admitted))

    def _told_last(self) -> set[int]:
        """Members of the old generation, as long as newcomers have not heard of the commit.

        Members pass the boundary together, once all of them have heard. Behind it they wait for the newcomers. A head
        that dies between its orders must not leave them there, so newcomers hear first. One that does not hear is
        waited for no longer than it takes to repeat an order, and for a tick at most where somebody must leave in time.
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
        """Where a node has to be, as things are now."""
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
            return msgspec.structs.replace(ballot.whole, leave=True, suspends=not ballot.members, **without)
        if node.id not in ballot.members:
            return None
        was_member = node.seat > 0 and node.joined < ballot.change.generation
        return ballot.delta if was_member else ballot.whole

    def _state_since(self, node: Node) -> int:
        """What a node holds counts from the generation in which it got its seat, and not across a start."""
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
