"""Conversations of a head with agents that a test plays: without sockets, with the real turns and machines."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

import runs
from fallow.core.allocations import Allocation
from fallow.core.membership.messages import Order, Report
from fallow.core.protocol import Admitted, AgentLeft, Beat, BeatReply, Ended, FromAgent, Hello, Progress, ToAgent
from fallow.head import deadlines
from fallow.head.loop.turn import Turn, agent_peer
from fallow.head.peers import agents
from fallow.head.state.registry import Registry, Run
from runs import CONTRACT as CONTRACT
from runs import NOW as NOW

M = TypeVar("M")


def hello(allocation: Allocation, host: str = "h1", **more: Any) -> Hello:
    """The first message of an agent."""
    said = {"host": host, "token": allocation.token, "version": "0", "job_id": "7", "boot": 1, "slots": 1}
    return Hello(**{**said, "process": f"{host}.1", "entry": f"{host}:1", **more})


class Talk:
    """A head with agents.

    Args:
        book: of the head.
    """

    def __init__(self, book: Registry) -> None:
        self.book = book
        self.at, self.now = 0.0, NOW
        self.turn = Turn(book, self.at, self.now)
        "the newest"
        self.events: list[tuple[str, str]] = []
        "(kind, text) of all lines for the event log"
        self.unreachable: set[str] = set()
        "peers that nothing reaches"
        self._played: dict[str, Played] = {}

    def play(self, run: Run, allocation: Allocation, host: str = "h1", **more: Any) -> "Played":
        """An agent that has said nothing yet; `more`: fields of its hello."""
        played = Played(self, run.id, allocation, hello(allocation, host, **more))
        self._played[agent_peer(allocation, host)] = played
        return played

    def hear(self, peer: str, message: FromAgent) -> None:
        """One message, in a turn of its own."""
        self.take([(peer, message, self.at)])

    def take(self, received: Sequence[tuple[str, FromAgent, float]]) -> None:
        """Messages that wait together, in one turn. The last part of each says when it was received."""
        self._begin()
        for peer, message, at in received:
            agents.hear(self.turn, peer, message, at)
        self.deliver()

    def tick(self, later_s: float = 0.0) -> None:
        """So many seconds later the head's clock ticks."""
        self.pass_s(later_s)
        self._begin()
        deadlines.tick(self.turn)
        assert not self.turn.failures, self.turn.failures[0].error
        self.deliver()

    def pass_s(self, seconds: float) -> None:
        """Time passes, and nothing happens."""
        self.at, self.now = self.at + seconds, self.now + seconds

    def deliver(self) -> None:
        """Let the played agents have what the newest turn says to them."""
        for peer, message in self.turn.messages:
            if peer in self._played and peer not in self.unreachable:
                self._played[peer].hear(message)
        self.events += [(record.kind, record.text) for record in self.turn.records]

    def forget_played(self) -> None:
        """Drop agents that have ended."""
        live = {a.public_key for run in self.book.runs.values() for a in run.live_allocations()}
        self._played = {peer: played for peer, played in self._played.items() if peer.partition(" ")[0] in live}

    def texts(self, kind: str) -> list[str]:
        """Lines of one kind in the event log."""
        return [text for known, text in self.events if known == kind]

    def _begin(self) -> None:
        self.turn = Turn(self.book, self.at, self.now)


class Played:
    """An agent that a test plays. It obeys each order at once, as far as its reports tell, and starts no workers."""

    def __init__(self, talk: Talk, run: str, allocation: Allocation, first: Hello) -> None:
        self.hello = first
        self.peer = agent_peer(allocation, first.host)
        self.heard: list[ToAgent] = []
        "since it spoke last, or a test has cleared it"
        self.report: Report | None = None
        self.order: Order | None = None
        self._talk, self._run = talk, run

    @property
    def node(self) -> int:
        """Its number; 0: none yet."""
        return self.hello.node

    def hear(self, message: ToAgent) -> None:
        """What the head says."""
        self.heard.append(message)
        match message:
            case Admitted(node=node, boot=boot) if boot == self.hello.boot:
                self.hello = msgspec.structs.replace(self.hello, node=node)
                if self.report is None or self.report.node != node:
                    self.report = Report(node=node, boot=boot, seq=0, term=0, edition=0)
            case Order(node=node) if node == self.node:
                self.order = message

    def all(self, kind: type[M]) -> list[M]:
        """What it has heard of one kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    def only(self, kind: type[M]) -> M:
        """The one message of that kind."""
        (message,) = self.all(kind)
        return message

    @property
    def news(self) -> BeatReply:
        """The answer to its last heartbeat."""
        return self.only(BeatReply)

    def say(self, message: FromAgent) -> "Played":
        """Any message."""
        self.heard.clear()
        self._talk.hear(self.peer, message)
        return self

    def greet(self, **more: Any) -> "Played":
        """Introduce itself; `more`: fields that differ from before."""
        self.hello = msgspec.structs.replace(self.hello, **more)
        return self.say(self.hello)

    def start_again(self, boot: int) -> "Played":
        """Its workers are started anew, as that start of them."""
        self.report = self.order = None
        return self.greet(boot=boot, node=0)

    def beat(self, *, warned: int = 0, progress: Progress = Progress(), brief: bool = False, **what: Any) -> "Played":
        """Report as before, but for `what`."""
        return self.say(msgspec.structs.replace(self.next_beat(warned=warned, progress=progress, **what), brief=brief))

    def next_beat(self, *, warned: int = 0, progress: Progress = Progress(), **what: Any) -> Beat:
        """The heartbeat that is due, for the test to send."""
        if self.report is None:
            return Beat(warned=warned)
        told = {"seq": self.report.seq + 1}
        if self.order is not None:
            told |= {"term": self.order.term, "edition": self.order.edition}
        self.report = msgspec.structs.replace(self.report, **{**told, **what})
        return Beat(report=self.report, progress=progress, warned=warned)

    def idle(self) -> "Played":
        """A heartbeat without workers."""
        return self.say(Beat())

    def end(self, code: int | None = 0, **more: Any) -> "Played":
        """All its workers have ended."""
        return self.say(Ended(node=self.node, boot=self.hello.boot, code=code, **more))

    def leave(self, code: int = 0) -> "Played":
        """It ends."""
        return self.say(AgentLeft(code=code))


def settle(run: Run, *played: Played, step: int = 0) -> None:
    """Vote on what is proposed, and go over, until no change is under way."""
    by_node = {one.node: one for one in played}

    def said(node: int) -> Report:
        report = by_node[node].report
        assert report is not None
        return report

    def arrive(node: int, generation: int) -> None:
        by_node[node].beat(**runs.arrived(generation, step))

    runs.settle(run, said, lambda node, **what: by_node[node].beat(**what), arrive)
