"""The nodes of a run in the simulation, as its membership sees them: they do at once what they are told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Contract, Report, Switch
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
from fallow.model import ChangeKind, Doing

ROUNDS = 20
"""One change may follow from another so often."""


class Members:
    """Reports that the agents of one run would send.

    Args:
        run: whose nodes they are.
        shards: of a step.
        pause_s: for so long all stop at each change but the first.
    """

    def __init__(self, run: Run, shards: int, pause_s: float) -> None:
        self._run = run
        self._contract = Contract(signature="", shards=shards, global_batch=shards)
        self._pause_s = pause_s
        self._said: dict[int, Report] = {}
        "the newest report of each node"

    def join(self, turn: Turn, node: int) -> None:
        """A node is ready, and is absorbed."""
        self._say(turn, node, ready=self._contract)
        self.settle(turn)

    def forget(self, nodes: Iterable[int]) -> None:
        """They say nothing any more."""
        for node in nodes:
            self._said.pop(node, None)

    def settle(self, turn: Turn) -> None:
        """Vote on what is proposed, and go over, until no change is under way."""
        machine = self._run.machine
        for _ in range(ROUNDS):
            ballot = machine.state.ballot
            if ballot is None:
                return
            generation = ballot.change.generation
            if machine.state.voting is not None:
                for node in ballot.participants:
                    given_up = max(self._said[node].given_up, machine.order(node).broken)
                    self._say(turn, node, prepared=generation, given_up=given_up)
                continue
            for node in [node for node in ballot.change.leavers if self._run.roster.alive(node)]:
                self._say(turn, node, left=generation, given_up=generation)
            for node in list(ballot.members):
                if machine.state.going is not None:
                    self._arrive(turn, node, generation)
        raise AssertionError(f"the membership does not settle: {machine.state.ballot}")

    def _arrive(self, turn: Turn, node: int, generation: int) -> None:
        """A node computes in this generation, with the state."""
        change = self._run.root.change
        pause_s = 0.0 if change is None or change.kind is ChangeKind.START else self._pause_s
        switch = Switch(generation=generation, first_step=0, pause_s=pause_s)
        self._say(turn, node, generation=generation, has_state=True, switch=switch, doing=Doing.WORKING)

    def _say(self, turn: Turn, node: int, **what: Any) -> None:
        """A node reports as before, but for `what`."""
        known, order = self._run.roster.nodes[node], self._run.machine.order(node)
        last = self._said.get(node) or Report(node=node, boot=known.boot, seq=0, term=0, edition=0)
        told = {"seq": last.seq + 1, "term": order.term, "edition": order.edition}
        report = self._said[node] = msgspec.structs.replace(last, **told, **what)
        turn.apply(self._run, ev.Reported(at=turn.at, host=known.host, report=report))
