"""The membership of a simulated run: changes happen at once. What they cost is for `sim.work` to say."""

from __future__ import annotations

from typing import Any

from fallow.core.membership import events as ev
from fallow.core.membership.machine import Machine
from fallow.core.membership.messages import Report
from fallow.core.membership.names import member_name
from fallow.core.membership.records import Node
from fallow.core.membership.roster import Roster
from fallow.model import ChangeKind, GenerationReport, MemberPhase, Parts, RunStatus


class AtOnce(Machine):
    """Lets in whoever reports, and forgets whoever is gone. No votes are asked for, and nothing is written down.

    Args:
        roster, more: as of `Machine`.
        pause_s: for so long all are said to stop when somebody joins.
    """

    def __init__(self, roster: Roster, pause_s: float, **more: Any) -> None:
        super().__init__(roster, **more)
        self._pause_s = pause_s

    def handle(self, event: ev.Event) -> list[ev.Instruction]:
        nodes, then = self.roster.nodes, list[ev.Instruction]()
        match event:
            case ev.Expected():
                then.append(self._expect_node(event))
            case ev.Reported(report=report):
                then.append(self._join(report))
            case ev.Ends() if event.node in nodes:
                nodes[event.node].ends_at = event.ends_at
            case ev.Release():
                for number in event.nodes:
                    nodes[number].leaving = event.reason
            case ev.Gone() if event.node in nodes:
                self._forget(nodes[event.node])
        return then

    def _expect_node(self, event: ev.Expected) -> ev.Admitted:
        root = self.roster.root
        number, root.next_id = root.next_id, root.next_id + 1
        self.roster.add(
            Node(id=number, host=event.host, token=event.token, boot=event.boot, slots=event.slots, entry=event.entry)
        )
        return ev.Admitted(number, event.host, event.token, event.boot)

    def _join(self, report: Report) -> GenerationReport:
        root, before, number = self.roster.root, self.roster.members, report.node
        members = [*before, number]
        root.generation, root.contract, root.status = root.generation + 1, report.ready, RunStatus.TRAINING
        self.roster.nodes[number].phase = MemberPhase.READY
        self.roster.seat(members, [number])
        return GenerationReport(
            generation=root.generation,
            kind=ChangeKind.ABSORB if before else ChangeKind.START,
            members=[member_name(n) for n in members],
            first_step=0,
            pause_s=self._pause_s if before else None,
            parts=Parts(),
            took_s=0.0,
        )

    def _forget(self, node: Node) -> None:
        self.roster.seat([number for number in self.roster.members if number != node.id], [])
        node.phase, node.exited = MemberPhase.GONE, True
        self.roster.forget(node)
