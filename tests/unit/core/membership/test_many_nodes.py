"""A large run: what each node says costs no look at all the others.

Counted are lines of Python that are run for each node: the same number whatever the size of the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from fallow.core.membership import events as ev
from fallow.core.protocol.agents import Beat
from fallow.head.loop.turn import Turn, agent_peer
from fallow.head.peers.agents import hear
from runs import CONTRACT, NOW, Nodes, hold, new_book, new_run

FEW, MANY = 30, 300


def lines(what: Callable[[], object]) -> int:
    """Lines that are run."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        what()
    finally:
        sys.settrace(before)
    return count


class World:
    """A training on so many nodes of one base job."""

    def __init__(self, folder: Path, size: int) -> None:
        book = new_book(folder / str(size))
        self.run = new_run(book, min_nodes=size, max_nodes=size)
        self.turn = Turn(book, at=1.0, now=NOW)
        self.nodes = Nodes(self.run, msgspec.structs.replace(CONTRACT, shards=size))
        self.hosts = [f"h{number}" for number in range(size)]
        self.allocation = hold(self.turn, self.run, *self.hosts)
        for host in self.hosts:
            self.nodes.come(self.turn, self.allocation, host)
        self.nodes.ready(self.turn, *self.run.roster.nodes)
        self.nodes.settle(self.turn)

    def beat(self) -> None:
        """Every agent's heartbeat comes and is answered, and nothing is new."""
        for host, agent in self.allocation.agents.items():
            said = self.nodes.said[agent.node]
            beat = Beat(report=msgspec.structs.replace(said, seq=said.seq + 1))
            turn = Turn(self.turn.book, at=1.0, now=NOW)
            hear(turn, agent_peer(self.allocation, host), beat, 1.0)
            assert len(turn.messages) == 1

    def lose(self) -> None:
        """One is killed; the others vote for a generation without it and go over."""
        self.nodes.end(self.turn, 7, None, signal=9)
        self.nodes.settle(self.turn)
        assert len(self.run.roster.members) == len(self.hosts) - 1

    def absorb(self) -> None:
        """Another takes the place of one that is gone; all vote for a generation with it and go over."""
        self.nodes.ready(self.turn, self.nodes.come(self.turn, self.allocation, self.hosts[6]))
        self.nodes.settle(self.turn)
        assert len(self.run.roster.members) == len(self.hosts)

    def tick(self) -> None:
        """All deadlines are looked at."""
        self.turn.apply(self.run, ev.Ticked(at=2.0))


@pytest.mark.parametrize("what", [World.beat, World.lose, World.tick, World.absorb])
def test_a_node_costs_the_same_however_many_there_are(what: Callable[[World], None], tmp_path: Path) -> None:
    few, many = World(tmp_path, FEW), World(tmp_path, MANY)
    if what is World.absorb:
        few.lose()
        many.lose()
    assert lines(lambda: what(many)) / MANY < 1.2 * lines(lambda: what(few)) / FEW
