"""The membership machine of one run: events in, instructions out. Pure: it has no clock and does no I/O.

The two tables in `tables` hold all decisions. This module takes events in and carries the tables out.

Why it is safe. *All* members of a generation finish a step, or none does. So a generation is certainly over once one of
its members can finish no step any more: the member has voted for a plan that interrupts the generation, has passed the
boundary behind it, or has provably ended. Silence proves nothing. The machine commits a new generation only when every
generation that may still finish steps is over (`tables.may_commit`). A planned change needs no such proof, because the
members of the old generation agree on the boundary among themselves. Votes are not stored: a restarted head burns every
generation that was not committed. Numbers and commits are stored before any node learns of them.

The design follows `distributed.worker_state_machine` (dask/distributed): events, instructions, tables, a trace for the
error message, and a switch for validation.
"""

from collections.abc import Callable
from typing import Any

from fallow.core.membership import events as ev
from fallow.core.membership import failures, losses, tables
from fallow.core.membership.facts import keep_checkpoint, recover, resend
from fallow.core.membership.proposals import planned, put_off_s
from fallow.core.membership.records import Node
from fallow.core.membership.state import State
from fallow.core.training.restarts import EVERY_S
from fallow.model import Exit, MemberPhase, RollbackReport
from fallow.text import counted

MOST_RULES = 20
"""Most rules that one event may set off."""


class InvalidMembership(AssertionError):
    """The machine broke one of its own invariants. The message contains the trace of the last events."""


class Machine(State):
    """Decides which nodes compute in which generation. `State` documents its parts and its arguments."""

    def handle(self, event: ev.Event) -> list[ev.Instruction]:
        """Apply one event. If this raises, drop the machine and make another one from the stored records.

        Returns:
            Instructions that follow from the event. Write the changed records before carrying any of them out.

        Raises:
            InvalidMembership: an invariant is broken, or more than `MOST_RULES` rules follow from one event.
        """
        self.at, self.is_tick = event.at, isinstance(event, ev.Ticked)
        self.may_be_due = self.may_be_due or isinstance(event, ev.Ticked | ev.NodeEnded | ev.Rollback)
        if self.is_tick:
            self.watch.advance(event.at)
            is_early = self.watch.now < self.timing.listen_s
            self.is_listening = self.is_listening and is_early and not self.watch.heard_all()
        elif not isinstance(event, ev.Reported):
            self.trace.append(str(event))
        if not self.roster.root.status.ended or isinstance(event, ev.Reported | ev.NodeEnded):
            _HANDLERS[type(event)](self, event)
            self._apply_rules()
        if self._validate:
            _check(self)
        return self.take_instructions()

    def waiting(self) -> str:
        """Return why ready nodes within the limit do not compute; empty: none is ready, or they are about to."""
        r = self.roster
        standbys = r.fitting(r.present(MemberPhase.MEMBER), r.standbys())
        if not standbys or r.root.status.ended:
            return ""
        proposal = planned(self) if self.ballot is None else None
        left_s = 0.0 if proposal is None else put_off_s(self, proposal)
        if left_s:
            verb = "waits" if len(standbys) == 1 else "wait"
            return (
                f"{r.names(standbys)} {verb} for another {left_s / 60:.0f} min: a newcomer restarts the script "
                f"everywhere, which has to run for {EVERY_S / 60:.0f} min from one such restart to the next"
            )
        nodes = [r.nodes[n] for n in r.inside() if n in r.nodes and not r.nodes[n].proved_gone]
        unheard = [node.id for node in nodes if not node.alive or self.watch.unheard_s(node.id) > self.timing.lease_s]
        if unheard:
            return f"{r.names(standbys)} cannot begin before {r.names(unheard)} is heard, or is certain to have ended"
        return ""

    def _apply_rules(self) -> None:
        for _ in range(MOST_RULES):
            phase = self.phase
            rule = next((rule for rule in tables.RUN[phase] if rule.condition(self)), None)
            if rule is None:
                self.may_be_due = False
                return
            name = f"{phase}: {rule.name}"
            self.carried_out[name] += 1
            self.trace.append(f"{self.at:.2f} {name}")
            rule.action(self)
            self.roster.mark("root")
            self.may_be_due = True
        raise InvalidMembership(f"run {self.roster.root.run} does not come to rest:\n" + "\n".join(self.trace))

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _expect(self, event: ev.Expected) -> None:
        r = self.roster
        of_agent = r.at_place(event.host, event.token)
        if any(node.boot > event.boot for node in of_agent):
            return  # an introduction that was overtaken
        node = next((node for node in of_agent if node.boot == event.boot), None)
        if node is None:
            # The store may have lost the node's number. The node keeps the number unless another node has got it since.
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
            self.watch.add_node(number)
            for old in [old for old in of_agent if not old.exited]:
                self._lose(ev.NodeEnded(at=event.at, node=old.id, reason="its agent has started its workers anew"))
        # A known node may have missed the last order: its connection broke, or another head sent the order.
        self.tell([node.id])
        self.outbox.instructions.append(ev.Admitted(node.id, node.host, node.token, node.boot))

    def _report(self, event: ev.Reported) -> None:
        report = event.report
        recover(self, report, event.host)
        if report.term > self.outbox.term:
            # The node obeys a newer head, or it lies. The next write to the store shows whether a newer head exists.
            return
        node, last = self.roster.nodes.get(report.node), self.watch.reports.get(report.node)
        if node is None or (node.host, node.boot) != (event.host, report.boot):
            self.outbox.instructions.append(ev.Unknown(report.node, event.host))
            return
        if last is not None and report.seq <= last.seq:
            return
        self.watch.hear(report)
        before = node.phase
        if self.roster.root.status.ended:
            if not self.outbox.has_heard(node.id, report):
                resend(self, node, report)
            return
        for fact in tables.NODE:
            if node.phase in fact.phases and fact.condition(self, node, report):
                self.carried_out[fact.name] += 1
                fact.action(self, node, report)
                if self.roster.root.status.ended:
                    return
        self.may_be_due = self.may_be_due or node.phase is not before

    def _lose(self, event: ev.NodeEnded) -> None:
        node = self.roster.nodes.get(event.node)
        if node is None or (event.boot and (node.host, node.boot) != (event.host, event.boot)):
            return
        last = event.report
        if last is not None:
            self._report(ev.Reported(at=event.at, host=node.host, report=last))
        if event.node_failed and not self.roster.root.scripted and not failures.is_barred(self.roster, node.host):
            losses.bar(self, node.host, f"Slurm says NODE_FAIL: {event.reason}")
        if not node.exited:
            self.roster.touch(node).exited = node.proved_gone = True
        if event.is_ordered:
            node.leaving = node.leaving or event.reason
        if self.roster.root.status.ended:
            node.phase = MemberPhase.GONE
        elif node.finished and node.phase is not MemberPhase.GONE:
            losses.end_finished(self, node, event)
        elif node.phase is not MemberPhase.GONE:
            losses.end_early(self, node, event)
        losses.forget_if_unneeded(self, node)

    # -- requests of people and Slurm ---------------------------------------------------------------------------------

    # Nodes leave with the next tick, so that nodes released by several events leave in one generation.

    def _release(self, event: ev.Release) -> None:
        nodes = event.nodes
        if event.limit is not None:
            self.roster.root.limit = event.limit
            self.roster.mark("root")
            self.outbox.log("limit", f"at most {counted(event.limit, 'node')}: {event.reason}")
            nodes = nodes or tuple(sorted(self.roster.present(MemberPhase.MEMBER))[event.limit :])
        for n in nodes:
            if n in self.roster.nodes:
                self._ask_to_leave(self.roster.nodes[n], event.reason)

    def _ask_to_leave(self, node: Node, reason: str) -> None:
        if node.phase is MemberPhase.GONE or node.finished:
            return
        self.roster.touch(node).leaving = node.leaving or reason
        if node.phase is MemberPhase.MEMBER:
            node.phase = MemberPhase.LEAVING
        elif node.phase in (MemberPhase.STARTING, MemberPhase.READY):
            name = self.roster.name(node.id)
            self.spoil(f"{name} has to leave: {reason}", node.id)
            self.outbox.log("dismiss", f"{name} is not needed: {reason}", node=node.id)
            losses.dismiss(self, node, Exit.OK, reason)

    def _note_end(self, event: ev.Ends) -> None:
        node = self.roster.nodes.get(event.node)
        if node is not None and node.ends_at != event.ends_at:
            self.roster.touch(node).ends_at = event.ends_at

    def _bar(self, event: ev.Bar) -> None:
        losses.bar(self, event.host, event.reason)
        for node in [node for node in self.roster.nodes.values() if node.host == event.host]:
            self._ask_to_leave(node, event.reason)

    def _unbar(self, event: ev.Unbar) -> None:
        for host in event.hosts:
            self.roster.failures.bars.pop(host, None)
        self.roster.mark("failures")

    def _roll_back(self, event: ev.Rollback) -> None:
        """Have members go back to the checkpoint, with the next planned change or with an earlier loss."""
        r, root, step = self.roster, self.roster.root, event.step
        reached = [saved.checkpoint.step for saved in r.checkpoints.saved if not saved.aside]
        from_step = max([r.front, step, *reached])
        for saved in r.checkpoints.saved:
            saved.aside = saved.aside or saved.checkpoint.step > step
        r.history.rollbacks.append(RollbackReport(generation=root.highest + 1, from_step=from_step, to_step=step))
        for node in r.nodes.values():
            r.touch(node).step = min(node.step, step)
        root.front, root.complete, root.rollback_below = min(root.front, step), 0, root.highest
        r.unwritten |= {"checkpoints", "history"}
        text = f"rolled back to step {step}"
        data = {"step": step, "from_step": from_step, "generation": root.highest}
        self.outbox.log("rollback", f"{text}, from step {from_step}", **data)
        self.spoil(text)

    # -- time ---------------------------------------------------------------------------------------------------------

    def _tick(self, event: ev.Ticked) -> None:
        for host in failures.expire(self.roster, event.at):
            self.outbox.log("bar", f"{host} is barred no longer: it may be tried again", host=host)
        for node in [node for node in self.roster.nodes.values() if node.alive and not node.finished]:
            if not node.leaving and self.watch.ends_within(node, self.timing.release_s):
                self._ask_to_leave(node, "its time is over")
        losses.eject(self, *self.watch.overdue())


_HANDLERS: dict[type[ev.Event], Callable[[Machine, Any], None]] = {
    ev.Expected: Machine._expect,
    ev.Reported: Machine._report,
    ev.NodeEnded: Machine._lose,
    ev.Ends: Machine._note_end,
    ev.Release: Machine._release,
    ev.Bar: Machine._bar,
    ev.Unbar: Machine._unbar,
    ev.Rollback: Machine._roll_back,
    ev.CheckpointFound: lambda m, event: keep_checkpoint(m, event.checkpoint),
    ev.Cancel: lambda m, event: losses.end_run(m, event.status, event.reason),
    ev.Ticked: Machine._tick,
}


def _check(m: State) -> None:
    r, root, ballot, change = m.roster, m.roster.root, m.ballot, m.roster.root.change
    concerned = {*m.participants(), *r.inside()}
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
        trace = "\n".join(m.trace)
        raise InvalidMembership(f"run {root.run}: {'; '.join(broken)}\n{root}\ntrace:\n{trace}")
