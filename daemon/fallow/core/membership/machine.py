"""The membership machine of one run: events in, instructions out. Pure: it has no clock and does no I/O.

The two tables in `tables` say all of it. This module takes events in and has the tables carried out.

Why it is safe. *All* members of a generation finish a step, or none does. So a generation is over for certain once one
of its members has given it up for good: it has voted for a plan that interrupts it, it has passed the boundary behind
it, or its end is proved. Silence proves nothing. Before that holds of every generation that may still finish steps,
nothing is committed (`conditions.may_commit`). A planned change needs no such proof, because the members of the old
generation agree on the boundary among themselves. Votes are not stored: a head that comes back burns what was not
committed. Numbers and commits are stored before anybody hears of them.

The manner is that of `distributed.worker_state_machine` (dask/distributed): events, instructions, tables, a story for
the error message, and a switch for validation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from fallow.core.membership import checkpoints, failures, losses, tables
from fallow.core.membership import events as ev
from fallow.core.membership.conditions import waiting
from fallow.core.membership.facts import keep_checkpoint, recover, resend
from fallow.core.membership.messages import Order, Report
from fallow.core.membership.records import Node
from fallow.core.membership.roster import Roster
from fallow.core.membership.state import RunPhase, State
from fallow.core.membership.watch import Overdue, Timing
from fallow.model import Exit, MemberPhase
from fallow.text import counted

MOST_RULES = 20
"""Rules that one event may set off."""


class InvalidMembership(AssertionError):
    """The machine broke one of its own rules. The story of the last events is in the message."""


class Machine:
    """Decides who computes in which generation.

    Args:
        roster: the stored part; this object's own from now on.
        term: the head's, stamped on orders; higher than that of any head before, also of one that a store forgot.
        timing: deadlines.
        at: now, on the clock of the events.
        edition: of the newest order of this term, if this machine replaces another one of the same head.
        keep: usable checkpoints that stay, besides those that were asked for by hand.
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
        self.state = State(roster, term=term, timing=timing, at=at, edition=edition, keep=keep)
        self.carried_out: Counter[str] = Counter()
        "how often each row of the tables was"
        self._validate = validate
        failures.begin_clock(roster, at)

    @property
    def roster(self) -> Roster:
        return self.state.roster

    @property
    def phase(self) -> RunPhase:
        return self.state.phase

    def order(self, node: int) -> Order:
        """Where a node has to be, as things are now."""
        return self.state.order(node)

    def handle(self, event: ev.Event) -> list[ev.Instruction]:
        """Apply one event. If it raises, drop this machine and make another one of what is stored.

        Returns:
            What follows from the event. What has changed of the roster must be durable before anything of it is done.

        Raises:
            InvalidMembership: an invariant is broken, or the rules do not come to rest.
        """
        m, is_tick = self.state, isinstance(event, ev.Ticked)
        m.at, m.is_tick = event.at, is_tick
        m.may_be_due = m.may_be_due or isinstance(event, ev.Ticked | ev.Gone | ev.Rollback)
        if is_tick:
            m.watch.advance(event.at)
            m.is_listening = m.is_listening and m.watch.now < m.timing.listen_s and not m.watch.heard_all()
        elif not isinstance(event, ev.Reported):
            m.story.append(str(event))
        if not m.roster.root.status.ended or isinstance(event, ev.Reported | ev.Gone):
            _HANDLERS[type(event)](self, event)
            self._apply_rules()
        if self._validate:
            _check(m)
        return m.take_instructions()

    def waiting(self) -> str:
        """Why nodes that are ready do not compute, in words; empty: none waits, or a change is under way."""
        return waiting(self.state)

    def _apply_rules(self) -> None:
        m = self.state
        for _ in range(MOST_RULES):
            phase = m.phase
            rule = next((rule for rule in tables.RUN[phase] if rule.condition(m)), None)
            if rule is None:
                m.may_be_due = False
                return
            name = f"{phase}: {rule.name}"
            self.carried_out[name] += 1
            m.story.append(f"{m.at:.2f} {name}")
            rule.action(m)
            m.may_be_due = True
        raise InvalidMembership(f"run {m.roster.root.run} does not come to rest:\n" + "\n".join(m.story))

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _expect(self, event: ev.Expected) -> None:
        m, r = self.state, self.roster
        here = r.at_place(event.host, event.token)
        if any(node.boot > event.boot for node in here):
            return  # it was said long ago
        node = next((node for node in here if node.boot == event.boot), None)
        if node is None:
            # A number that a store forgot stays the node's, as long as nobody else has got it since.
            number = event.node if event.node and event.node not in r.nodes else r.root.next_id
            node = Node(
                id=number,
                host=event.host,
                token=event.token,
                boot=event.boot,
                slots=event.slots,
                entry=event.entry,
            )
            r.root.next_id = max(r.root.next_id, number + 1)
            r.add(node)
            m.watch.came(number)
            for old in [old for old in here if not old.exited]:
                self._lose(ev.Gone(at=event.at, node=old.id, reason="its agent has started its workers anew"))
        # A known one may not have heard the last order before its connection broke, or another head has sent that.
        m.tell([node.id])
        m.outbox.admitted.append(ev.Admitted(node.id, node.host, node.token, node.boot))

    def _report(self, event: ev.Reported) -> None:
        m, report = self.state, event.report
        if report.term > m.outbox.term:
            # It obeys a newer head, or it lies. Whether there is a newer head the store says, at the next write.
            return
        recover(m, report, event.host)
        node, last = m.roster.nodes.get(report.node), m.watch.reports.get(report.node)
        if node is None or (node.host, node.boot) != (event.host, report.boot):
            m.outbox.instructions.append(ev.Unknown(report.node, event.host))
        elif last is None or report.seq > last.seq:
            m.watch.hear(report)
            self._take_facts(node, report)

    def _take_facts(self, node: Node, report: Report) -> None:
        m, before = self.state, node.phase
        if m.roster.root.status.ended:
            if not m.outbox.has_heard(node.id, report):
                resend(m, node, report)
            return
        for fact in tables.NODE:
            if node.phase in fact.phases and fact.condition(m, node, report):
                self.carried_out[fact.name] += 1
                fact.action(m, node, report)
                if m.roster.root.status.ended:
                    return
        m.may_be_due = m.may_be_due or node.phase is not before

    def _lose(self, event: ev.Gone) -> None:
        m, node = self.state, self.roster.nodes.get(event.node)
        if node is None or (event.boot and (node.host, node.boot) != (event.host, event.boot)):
            return
        last = event.report
        if last is not None:
            self._report(ev.Reported(at=event.at, host=node.host, report=last))
        if event.node_failed and not m.roster.root.scripted and not failures.is_barred(m.roster, node.host):
            failures.bar(m.roster, node.host, f"Slurm says NODE_FAIL: {event.reason}", event.at)
            losses.tell_barred(m, node.host, event.reason)
        if not node.exited:
            m.roster.touch(node).exited = node.proved_gone = True
        if event.is_ordered:
            node.leaving = node.leaving or event.reason
        if m.roster.root.status.ended:
            node.phase = MemberPhase.GONE
        elif node.finished and node.phase is not MemberPhase.GONE:
            losses.end_finished(m, node, event)
        elif node.phase is not MemberPhase.GONE:
            losses.end_early(m, node, event)
        losses.forget_if_unneeded(m, node)

    # -- what people and Slurm want -----------------------------------------------------------------------------------

    # Nodes leave with the next tick: those that have to go for one reason, in several events, go together.

    def _release(self, event: ev.Release) -> None:
        m, nodes = self.state, event.nodes
        if event.limit is not None:
            m.roster.root.limit = event.limit
            m.roster.mark("root")
            m.outbox.log("limit", f"at most {counted(event.limit, 'node')}: {event.reason}")
            nodes = nodes or tuple(sorted(m.roster.present(MemberPhase.MEMBER))[event.limit :])
        for n in nodes:
            if n in m.roster.nodes:
                self._ask_to_leave(m.roster.nodes[n], event.reason)

    def _ask_to_leave(self, node: Node, reason: str) -> None:
        m, voting = self.state, self.state.voting
        if node.phase is MemberPhase.GONE or node.finished:
            return
        m.roster.touch(node).leaving = node.leaving or reason
        if node.phase is MemberPhase.MEMBER:
            node.phase = MemberPhase.LEAVING
        elif node.phase in (MemberPhase.STARTING, MemberPhase.READY):
            name = m.roster.name(node.id)
            if voting is not None and node.id in voting.members:
                voting.spoiled = f"{name} has to leave: {reason}"
            m.outbox.log("dismiss", f"{name} is not needed: {reason}", node=node.id)
            losses.dismiss(m, node, Exit.OK, reason)

    def _note_end(self, event: ev.Ends) -> None:
        node = self.roster.nodes.get(event.node)
        if node is not None and node.ends_at != event.ends_at:
            self.roster.touch(node).ends_at = event.ends_at

    def _bar(self, event: ev.Bar) -> None:
        failures.bar(self.roster, event.host, event.reason, event.at)
        losses.tell_barred(self.state, event.host, event.reason)
        for node in [node for node in self.roster.nodes.values() if node.host == event.host]:
            self._ask_to_leave(node, event.reason)

    def _unbar(self, event: ev.Unbar) -> None:
        for host in event.hosts:
            self.roster.failures.bars.pop(host, None)
        self.roster.mark("failures")

    def _roll_back(self, event: ev.Rollback) -> None:
        """Members go back with the next planned change, or with a loss before it."""
        m, r = self.state, self.roster
        from_step = checkpoints.roll_back(r, event.step)
        text = f"rolled back to step {event.step}"
        r.root.complete, r.root.rollback_below = 0, r.root.highest
        data = {"step": event.step, "from_step": from_step, "generation": r.root.highest}
        m.outbox.log("rollback", f"{text}, from step {from_step}", **data)
        r.mark("root")
        if m.voting is not None:
            m.voting.spoiled = text

    def _find(self, event: ev.Found) -> None:
        keep_checkpoint(self.state, event.checkpoint)

    def _cancel(self, event: ev.Cancel) -> None:
        losses.end_run(self.state, event.status, event.reason)

    # -- time ---------------------------------------------------------------------------------------------------------

    def _tick(self, event: ev.Ticked) -> None:
        m = self.state
        for host in failures.expire(self.roster, event.at):
            m.outbox.log("bar", f"{host} is barred no longer: it may be tried again", host=host)
        for node in [node for node in self.roster.nodes.values() if node.alive and not node.finished]:
            self._look_at_deadline(node)
            waited_s = m.watch.now - m.finished_at.setdefault(node.id, m.watch.now) if node.deserted else 0.0
            if node.alive and waited_s > m.timing.lease_s:
                losses.eject(m, [Overdue(node, f"still there {m.timing.lease_s:g} s after its script had ended")])
            if m.roster.root.status.ended:
                return
        losses.eject(m, m.watch.overdue())

    def _look_at_deadline(self, node: Node) -> None:
        m = self.state
        if not node.leaving and m.ends_within(node, m.timing.release_s):
            self._ask_to_leave(node, "its time is over")
        if node.alive and m.ends_within(node, m.timing.last_call_s):
            losses.eject(m, [Overdue(node, f"still there though it had to leave: {node.leaving}")])


_HANDLERS: dict[type[ev.Event], Callable[[Machine, Any], None]] = {
    ev.Expected: Machine._expect,
    ev.Reported: Machine._report,
    ev.Gone: Machine._lose,
    ev.Ends: Machine._note_end,
    ev.Release: Machine._release,
    ev.Bar: Machine._bar,
    ev.Unbar: Machine._unbar,
    ev.Rollback: Machine._roll_back,
    ev.Found: Machine._find,
    ev.Cancel: Machine._cancel,
    ev.Ticked: Machine._tick,
}


def _check(m: State) -> None:
    r, root, ballot, change = m.roster, m.roster.root, m.ballot, m.roster.root.change
    concerned = {*m.participants(), *m.inside()}
    leaving = [node.id for node in r.nodes.values() if node.phase is MemberPhase.LEAVING]
    frozen = root.status.ended or r.finishing
    holds = {
        "generations only grow": root.complete <= root.generation <= root.highest,
        "no seat is taken twice": len({r.nodes[n].seat for n in r.members}) == len(r.members),
        "never more nodes than allowed": frozen
        or len(r.present(MemberPhase.MEMBER)) <= max(root.maximum, root.minimum),
        "an ended run changes nothing": not (root.status.ended and (ballot or change)),
        "what is voted on has the newest number": m.voting is None or m.voting.change.generation == root.highest,
        "a node that leaves hears of it": frozen or concerned.issuperset(leaving),
        "no node joins and leaves at once": ballot is None or not set(ballot.members) & set(ballot.change.leavers),
        "a committed change is the generation": change is None or change.generation == root.generation,
        "a look at the links is never committed": change is None or not change.probe,
    }
    broken = [rule for rule, is_kept in holds.items() if not is_kept]
    if broken:
        story = "\n".join(m.story)
        raise InvalidMembership(f"run {root.run}: {'; '.join(broken)}\n{root}\nstory:\n{story}")
