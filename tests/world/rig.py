"""A membership machine whose nodes are played by a test: each keeps its newest report and obeys what it is told."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import msgspec

from fallow.core.membership import events as ev
from fallow.core.membership.machine import Machine
from fallow.core.membership.messages import Contract, End, Fault, Finish, Order, Report, Switch
from fallow.core.membership.records import Root
from fallow.core.membership.roster import Roster
from fallow.core.membership.state import Ballot
from fallow.core.membership.watch import Timing
from fallow.model import Doing, GenerationReport, RunStatus

TIMING = Timing(prepare_s=10, rebuild_s=10, start_s=60, lease_s=10, progress_s=40)
CONTRACT = Contract(signature="s", shards=64, global_batch=64, layout=("w float32[2]",))
WAITS: dict[str, Any] = {"doing": Doing.WAITING, "stalled_s": 20.0}


Told = list[ev.Instruction]

NOTICED_BY: dict[str, Callable[[], None]] = {}
"""Missing guard (`test_mutants`) -> a test that notices."""

Test = TypeVar("Test", bound=Callable[..., None])


def notices(mutant: str, *arguments: Any) -> Callable[[Test], Test]:
    """The test fails where this guard is missing. Args: arguments: of the test, with which it does."""

    def note(test: Test) -> Test:
        NOTICED_BY[mutant] = partial(test, *arguments)
        return test

    return note


class Rig:
    """Args: minimum: of nodes. timing, shards: of the run. root: further fields of the root record."""

    def __init__(
        self, minimum: int = 1, timing: Timing = TIMING, shards: int = 64, *, validate: bool = True, **root: Any
    ) -> None:
        self.store: dict[str, bytes] = {}
        roster = Roster(Root(run="r", minimum=minimum, **{"maximum": 8, "limit": 8, **root}))
        self.timing, self.at = timing, 0.0
        self.m = Machine(roster, term=1, timing=timing, at=0.0, validate=validate)
        self.said: dict[int, Report] = {}
        self.orders: dict[int, Order] = {}
        "the newest of each node"
        self.completed: list[GenerationReport] = []
        self.contract = msgspec.structs.replace(CONTRACT, shards=shards)

    @property
    def r(self) -> Roster:
        return self.m.roster

    @property
    def ballot(self) -> Ballot:
        assert self.m.ballot is not None
        return self.m.ballot

    def end(self, n: int) -> End:
        """What the node's newest order says about its end."""
        end = self.orders[n].end
        assert end is not None
        return end

    def put(self, event: ev.Event) -> Told:
        turn = self.m.handle(event)
        for key, raw in self.r.take_writes().items():
            if raw is None:
                self.store.pop(key, None)
            else:
                self.store[key] = raw
        for instruction in turn:
            if isinstance(instruction, Order):
                self.orders[instruction.node] = instruction
            elif isinstance(instruction, GenerationReport):
                self.completed.append(instruction)
        return turn

    def next_report(self, n: int, **what: Any) -> Report:
        """The node reports as before, but for `what`; it has obeyed its newest order unless it says otherwise."""
        last = self.said.get(n) or Report(node=n, boot=self.r.nodes[n].boot, seq=0, term=0, edition=0)
        order = self.orders.get(n) or Order(node=n, term=0, edition=0)
        told = {"term": order.term, "edition": order.edition}
        self.said[n] = msgspec.structs.replace(last, **{"seq": last.seq + 1, **told, **what})
        return self.said[n]

    def say(self, n: int, **what: Any) -> Told:
        """The head hears the node's next report."""
        return self.put(ev.Reported(at=self.at, host=self.r.nodes[n].host, report=self.next_report(n, **what)))

    def expect(self, host: str, token: str = "", boot: int = 0, slots: int = 1, node: int = 0) -> int:
        boot = boot or self.r.root.next_id
        event = ev.Expected(at=self.at, host=host, token=token or host, boot=boot, slots=slots, entry=host, node=node)
        return next(i.node for i in self.put(event) if isinstance(i, ev.Admitted))

    def join(self, host: str, token: str = "", slots: int = 1, **contract: Any) -> int:
        n = self.expect(host, token, slots=slots)
        self.say(n, ready=msgspec.structs.replace(self.contract, **contract))
        return n

    def vote(self) -> Told:
        """All participants of the ballot vote as its plan asks."""
        ballot, turn = self.ballot, Told()
        for n in ballot.participants:
            given_up = max(self.said[n].given_up, self.orders[n].broken)
            turn += self.say(n, prepared=ballot.change.generation, given_up=given_up)
        return turn

    def switch(self, step: int | None = None) -> None:
        """All leavers leave, all members arrive in the committed generation."""
        ballot = self.ballot
        g = ballot.change.generation
        first = max([self.said[n].step for n in ballot.members], default=0) if step is None else step
        for n in filter(self.r.alive, list(ballot.change.leavers)):
            self.say(n, passed_boundary=g, given_up=g)
        for n in list(ballot.members):
            if self.m.ballot is not None:
                self.arrive(n, g, first)

    def arrive(self, n: int, generation: int, step: int = 0, **more: Any) -> Told:
        switch = Switch(generation=generation, first_step=step)
        what = {"generation": generation, "has_state": True, "step": step, "switch": switch, **more}
        return self.say(n, doing=Doing.WORKING, stalled_s=0.0, **what)

    def change(self, step: int | None = None) -> None:
        self.vote()
        self.switch(step)

    def tick(self, at: float, *heard: int, **what: Any) -> Told:
        """Time passes, a second at a time. These nodes are heard."""
        turn = Told()
        while self.at < at:
            self.at = min(self.at + 1.0, at)
            for n in heard:
                turn += self.say(n, **what)
            turn += self.put(ev.Ticked(at=self.at))
        return turn

    def stand(self, at: float, how: dict[int, tuple[Doing, float]], computing: Collection[int] = ()) -> Told:
        """It is that late, and nodes say what they do for how long; some of them compute on their devices."""
        turn, self.at = Told(), at
        for n, (doing, stalled_s) in how.items():
            turn += self.say(n, doing=doing, stalled_s=float(stalled_s), computes=n in computing)
        return turn + self.put(ev.Ticked(at=at))

    def wait(self, until: float) -> Told:
        """All members wait for each other until then."""
        turn = Told()
        while self.at < until:
            self.at += 1
            for n in self.r.present():
                turn += self.say(n, doing=Doing.WAITING, stalled_s=self.at)
            turn += self.put(ev.Ticked(at=self.at))
        return turn

    def gone(self, n: int, code: int | None = None, signal: int | None = None, **more: Any) -> Told:
        reason = f"exited with {code}" if code is not None else f"killed by signal {signal}"
        return self.put(ev.NodeEnded(at=self.at, node=n, code=code, signal=signal, **{"reason": reason, **more}))

    def fails(self, n: int, step: int = 5, signature: str = "ValueError at t.py:7", **more: Any) -> Told:
        fault = Fault(code=1, message="ValueError: bad", signature=signature, traceback="Traceback", step=step, **more)
        return self.say(n, fault=fault)

    def finish(self, n: int, digest: str = "d", generation: int = 1) -> Told:
        finish = Finish(generation=generation, steps=9, digest=digest, agreed=3, answer=0.5)
        return self.say(n, finish=finish)

    def want(self, kind: type[ev.Event], **what: Any) -> Told:
        """Something that people or Slurm want, and a tick at the same moment."""
        turn = self.put(kind(at=self.at, **what))
        return turn + self.put(ev.Ticked(at=self.at))

    def release(self, *nodes: int, reason: str = "asked", **more: Any) -> Told:
        return self.want(ev.Release, nodes=nodes, reason=reason, **more)

    def limit(self, limit: int) -> Told:
        return self.want(ev.Release, limit=limit, reason="asked")

    def replace_all(self, *hosts: str) -> list[int]:
        """All members die. Newcomers on these hosts begin together; returns their numbers. They have voted."""
        for n in self.r.present():
            self.gone(n, signal=9)
        self.limit(0)
        newcomers = [self.join(host) for host in hosts]
        self.limit(len(hosts))
        self.vote()
        assert self.r.members == newcomers
        return newcomers

    def restart(self, *heard: int, keep: int = 2) -> Told:
        """Another head takes over and hears these nodes. Args: keep: checkpoints."""
        term = self.m.outbox.term + 1
        roster = Roster.load("r", self.store)
        self.m = Machine(roster, term=term, timing=self.timing, at=self.at, keep=keep, validate=True)
        turn = [instruction for n in heard for instruction in self.say(n)]
        return turn + self.tick(self.at + 0.25)


def orders(turn: Told) -> dict[int, Order]:
    return {i.node: i for i in turn if isinstance(i, Order)}


def logs(turn: Told, kind: str) -> list[str]:
    return [i.text for i in turn if isinstance(i, ev.Log) and i.kind == kind]


def started(n: int, **more: Any) -> Rig:
    """A run that trains on nodes 1 to n, on hosts h1 to hn."""
    rig = Rig(minimum=n, **more)
    for i in range(n):
        rig.join(f"h{i + 1}")
    rig.change()
    assert rig.r.root.status is RunStatus.TRAINING
    return rig
