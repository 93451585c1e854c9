"""Runs of a head without its processes: a book in a folder, and runs whose nodes a test plays.

The machines are the real ones. A played node keeps its newest report and has obeyed its newest order, unless the test
says otherwise. So a test brings a run into a state as nodes would, and looks at what the head makes of it.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fallow.config import Config
from fallow.core.allocations import Agent, Allocation
from fallow.core.membership import events as ev
from fallow.core.membership.messages import Contract, Report, Switch
from fallow.core.protocol import Progress
from fallow.files import Paths, unwritable
from fallow.head.loop.inbox import FilesFirst
from fallow.head.loop.turn import Turn
from fallow.head.state.registry import Registry, Run
from fallow.model import AllocationKind, AllocationState, Doing, MemberPhase, RunSpec, RunStatus

NOW = 1_000_000.0
"""Unix time at which tests begin."""

CONTRACT = Contract(signature="sig", shards=8, global_batch=64, total_steps=1000, layout=("w float32[2]",))


def new_book(folder: Path, config: Config = Config(), *, validate: bool = False) -> Registry:
    """An empty registry whose files are below `folder`."""
    paths = Paths(state=folder / "s", runtime=folder / "r").create()
    numbers = itertools.count()
    return Registry(paths, config, lambda: f"{next(numbers):06}", validate=validate)


def new_run(book: Registry, *, at: float = 0.0, now: float = NOW, **spec: Any) -> Run:
    """A run of one to eight nodes, unless `spec` says otherwise. Nothing of it has begun."""
    wanted = {"run": "", "name": "r", "min_nodes": 1, "max_nodes": 8, **spec}
    run = book.add(book.draft(RunSpec(**wanted), now), 0, at)
    book.paths.run(run.id).create()
    return run


def finish(turn: Turn, answer: Any) -> Any:
    """What a request comes to in the end: files are used at once, and not in a thread before another turn."""
    while isinstance(answer, FilesFirst):
        with unwritable():
            result = answer.call()
        answer = answer.then(result, turn)
    return answer


def hold(
    turn: Turn,
    run: Run,
    *hosts: str,
    kind: AllocationKind = AllocationKind.HARVEST,
    state: AllocationState = AllocationState.RUNNING,
    **known: Any,
) -> Allocation:
    """An allocation that Slurm has given these hosts. No agent has come yet."""
    allocation = turn.registry.new_allocation(run, kind, turn.now, **known)
    allocation.state, allocation.nodes = state, list(hosts)
    allocation.job_id = allocation.job_id or str(100 + run.record.next_allocation)
    if state is AllocationState.RUNNING:
        allocation.start_at = turn.now if allocation.start_at is None else allocation.start_at
    return allocation


class Nodes:
    """The nodes of one run.

    Args:
        run: whose nodes they are.
        contract: what their scripts have prepared.
    """

    def __init__(self, run: Run, contract: Contract = CONTRACT) -> None:
        self.run = run
        self.contract = contract
        self.said: dict[int, Report] = {}
        "the newest report of each"

    def come(self, turn: Turn, allocation: Allocation, host: str, *, slots: int = 1, entry: str = "") -> int:
        """An agent introduces its workers; returns the node's number. Their scripts have just been started.

        Args:
            entry: where its workers listen; by default an address that no other host has.
        """
        run = self.run
        run.record.slots = run.record.slots or slots
        agent = allocation.agents.setdefault(host, Agent())
        known = run.roster.nodes.get(agent.node)
        boot = 1 if known is None else known.boot + 1
        node = allocation.reserved if boot == 1 else 0
        event = ev.Expected(
            at=turn.at,
            host=host,
            token=allocation.token,
            boot=boot,
            slots=slots,
            entry=entry or f"address of {host}",
            node=node,
        )
        turn.apply(run, event)
        return agent.node

    def ready(self, turn: Turn, *nodes: int) -> None:
        """They have rehearsed."""
        for n in nodes:
            self.say(turn, n, ready=self.contract)

    def say(self, turn: Turn, node: int, **what: Any) -> Report:
        """A node reports as before, but for `what`."""
        known = self.run.roster.nodes[node]
        order = self.run.machine.order(node)
        last = self.said.get(node) or Report(node=node, boot=known.boot, seq=0, term=0, edition=0)
        told = {"seq": last.seq + 1, "term": order.term, "edition": order.edition}
        report = self.said[node] = msgspec.structs.replace(last, **{**told, **what})
        turn.apply(self.run, ev.Reported(at=turn.at, host=known.host, report=report))
        return report

    def settle(self, turn: Turn, step: int = 0) -> None:
        """Vote on what is proposed, and go over, until no change is under way. A first step is `step`."""
        settle(self.run, self.said.__getitem__, partial(self.say, turn), partial(self.arrive, turn, step=step))

    def arrive(self, turn: Turn, node: int, generation: int, step: int = 0) -> None:
        """A node computes in this generation, with the state."""
        self.say(turn, node, doing=Doing.WORKING, stalled_s=0.0, **arrived(generation, step))

    def step(self, turn: Turn, step: int, **progress: Any) -> None:
        """All members have finished so many steps; `progress`: what else their beats say."""
        for n in self.run.roster.present():
            self.say(turn, n, step=step)
            self.progress(n, reached=(0, step), **progress)

    def progress(self, node: int, **what: Any) -> None:
        """What a node's beats say besides its report."""
        known = self.run.progress.get(node, Progress())
        self.run.progress[node] = msgspec.structs.replace(known, **what)

    def pass_s(self, turn: Turn, seconds: int) -> None:
        """Time passes. All nodes are heard each second, and the head's clock ticks."""
        for _ in range(seconds):
            turn.at, turn.now = turn.at + 1.0, turn.now + 1.0
            for n in [n for n in self.said if self.run.roster.alive(n)]:
                self.say(turn, n)
            turn.apply(self.run, ev.Ticked(at=turn.at))

    def end(self, turn: Turn, node: int, code: int | None = 0, **more: Any) -> None:
        """All processes of a node have ended."""
        reason = f"exited with {code}" if code is not None else "killed by signal 9"
        turn.apply(self.run, ev.NodeEnded(at=turn.at, node=node, code=code, **{"reason": reason, **more}))


def arrived(generation: int, step: int) -> dict[str, Any]:
    """What a node reports that computes in this generation, since this step, with the state."""
    switch = Switch(generation=generation, first_step=step)
    return {"generation": generation, "has_state": True, "step": step, "switch": switch}


def settle(
    run: Run, said: Callable[[int], Report], say: Callable[..., object], arrive: Callable[[int, int], object]
) -> None:
    """Have nodes vote on what is proposed, and go over, until no change is under way.

    Args:
        run: whose nodes they are.
        said: the newest report of a node.
        say: lets a node report as before, but for what it is given by name.
        arrive: lets a node compute in a generation.
    """
    for _ in range(20):
        state = run.machine
        if state.ballot is None:
            return
        ballot, generation = state.ballot, state.ballot.change.generation
        if state.voting is not None:
            for n in ballot.participants:
                say(n, prepared=generation, given_up=max(said(n).given_up, run.machine.order(n).broken))
            continue
        for n in [n for n in ballot.change.leavers if run.roster.alive(n)]:
            say(n, passed_boundary=generation, given_up=generation)
        for n in list(ballot.members):
            if state.going is not None:
                arrive(n, generation)
    raise AssertionError(f"the membership does not settle: {run.machine.ballot}")


def train(turn: Turn, run: Run, hosts: Sequence[str], *, slots: int = 1, contract: Contract = CONTRACT) -> Nodes:
    """Let a run train on these hosts: the first is the base job's, the others are harvested."""
    nodes = Nodes(run, contract)
    for host in hosts:
        kind = AllocationKind.HARVEST if run.roster.nodes else AllocationKind.BASE
        nodes.come(turn, hold(turn, run, host, kind=kind), host, slots=slots)
    nodes.ready(turn, *run.roster.nodes)
    nodes.settle(turn)
    assert run.root.status is RunStatus.TRAINING
    assert len(run.roster.present(MemberPhase.MEMBER)) == len(hosts)
    return nodes
