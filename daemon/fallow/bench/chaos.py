"""How much of the nodes' time becomes training when there is a fault every ten seconds?

Every `EVERY_S` seconds one of `Fault`, all equally likely, hits one of the members, all equally likely, rank 0 too.
They are drawn with a fixed seed; a fault waits while there is only one member. At the same moment a newcomer starts in
the place of whom it hit, and it starts from nothing: agent, interpreter, imports, model.

The figure is useful node-seconds ÷ available node-seconds, from the first fault until `EVERY_S` after the last:

- Useful: the steps that were finished, each counted once, when somebody first finished it, times the median step time
  of the same world undisturbed, times its members. Nothing else is: no step done again, no pause, no wait for a member
  that is dead or stopped, no time by which fewer members are slower.
- Available: a node from the start of its agent until its fault, or until its agent has ended where it was released. So
  the start-up of a newcomer is available and not useful, and its wait for its turn and for the state likewise. The node
  that is at fault is not available any more, but those that wait for it are.

A shard's time is mostly a sleep: members that compute would share this machine's processors, the others would be faster
as soon as one is gone, and its loss would cost nothing. There are as many shards as can be divided evenly by all
members and by one less. The final digest must be that of the same training undisturbed (and without sleeps, which
change no bit), or there is no figure.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

from fallow.bench import rows, session, steplog
from fallow.bench.rows import Peer, Progress, Row, Settings
from fallow.core.membership.names import member_number
from fallow.core.schedule import Action, Item
from fallow.local.driver import LOOK_S, Driver
from fallow.model import Exit, FallowError, MemberPhase, MemberView, RunView
from fallow.text import counted

PARAMS = 1_000_000
EVERY_S = 10.0
FAULTS = 180
"""Half an hour."""

STEP_S = 0.3
"""What the members sleep in a step while all are there."""

ALONE = 60
"""Steps in which the undisturbed step time is measured."""

SEED = 0


class Fault(StrEnum):
    """What happens to a member."""

    KILL = "kill"
    "SIGKILL to the worker's process"
    STOP = "stop"
    "SIGSTOP to it; nobody lets it go on"
    RAISE = "raise"
    "its training loop raises an exception, and no other member's"
    RELEASE = "release"
    "its node is asked back: it leaves on notice"


_ACTIONS = {Fault.KILL: Action.KILL, Fault.STOP: Action.STOP, Fault.RELEASE: Action.RELEASE_MEMBER}


@dataclass(kw_only=True)
class Node:
    """When a node was there: seconds of CLOCK_MONOTONIC."""

    came: float
    ready: float = inf
    "its worker had started up"
    gone: float = inf


class Hit(NamedTuple):
    """One fault."""

    fault: Fault
    at: float
    main: bool
    "it hit rank 0"


class Span(NamedTuple):
    """Node-seconds between two moments."""

    useful: float
    available: float
    starting: float
    "of those available: start-ups of newcomers"

    @property
    def share(self) -> float:
        """Of what was available, what was useful."""
        return self.useful / self.available

    @property
    def up(self) -> float:
        """The same of the time in which workers had started up: what a start takes is the script's imports."""
        return self.useful / (self.available - self.starting)


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """One row per world, with a model too small to make members of one machine wait for processors."""
    for members in settings.members:
        progress(f"chaos: {members} members, undisturbed")
        yield measure(members, settings.n or FAULTS, progress)


def measure(members: int, faults: int, progress: Progress) -> Row:
    """One run with `faults` faults, between two without: one for the step time, one for the digest."""
    shards = members * (members - 1)
    asleep = ["--reproducible", "--shard-s", str(STEP_S * members / shards)]
    _, finished = session.train_noting(PARAMS, ALONE, members, most=shards, options=asleep)
    step_s = steplog.usual_gap(finished)
    # Undisturbed it would last for a period before the first fault, one after each and a spare one.
    steps = ceil(EVERY_S * (faults + 2) / step_s)
    with session.folder() as scratch:
        log = scratch / "steps"
        log.mkdir()
        argv = session.command(PARAMS, steps, shards, ["--log", str(log), *asleep])
        chaos = Chaos(scratch / "run", argv, members, shards, faults, log, progress)
        disturbed = session.trained(chaos).report
        times = [one.at for one in steplog.progress(steplog.read(log))]
    progress(f"chaos: {members} members, {steps} steps for the digest")
    undisturbed, _ = session.train_noting(PARAMS, steps, members, most=shards, options=["--reproducible"])
    if disturbed.final_digest is None or disturbed.final_digest != undisturbed.report.final_digest:
        raise FallowError(
            f"the disturbed training of {steps} steps ended with the digest {disturbed.final_digest}, the undisturbed "
            f"one with {undisturbed.report.final_digest}: they must be equal",
            Exit.SOFTWARE,
        )
    words = f"a step takes {step_s:.3f} s undisturbed; steps done again: {disturbed.steps_discarded}; "
    words += "digest that of the undisturbed run; samples lost, repeated: 0, 0"
    return row(members, chaos.hits, times, chaos.nodes, step_s, words)


class Chaos(Driver):
    """Drives a run whose members are hit.

    Args:
        folder: private and empty; holds the head's state.
        command: the training's argv.
        members: nodes it starts with, and goes back to after each fault.
        shards: of a step.
        faults: how many.
        log: the training's folder, where it looks for what should make it raise.
        progress: told of each fault.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        members: int,
        shards: int,
        faults: int,
        log: Path,
        progress: Progress,
    ) -> None:
        super().__init__(folder, command, members, max_members=shards, output=sys.stderr.fileno())
        self.nodes: list[Node] = []
        "in order of arrival"
        self.hits: list[Hit] = []
        self._faults = faults
        self._log = log
        self._progress = progress
        self._drawn = random.Random(SEED)

    async def _start_agent(self) -> None:
        self.nodes.append(Node(came=time.monotonic()))
        await super()._start_agent()

    async def _follow(self) -> None:
        due = time.monotonic() + EVERY_S
        while not (view := await self._look()).status.ended:
            now = time.monotonic()
            self._note(view, now)
            members = [member for member in view.members if member.phase is MemberPhase.MEMBER]
            if len(self.hits) < self._faults and now >= due and len(members) > 1:
                due = now + EVERY_S
                await self._hit(self._drawn.choice(list(Fault)), self._drawn.choice(members), view)
            self._check_agents()
            await asyncio.sleep(LOOK_S)

    def _note(self, view: RunView, now: float) -> None:
        """Who has started up, and whose agent has ended."""
        for member in view.members:
            if member.phase is not MemberPhase.STARTING:
                node = self.nodes[_place(member)]
                node.ready = min(node.ready, now)
        for node, agent in zip(self.nodes, self._agents.values(), strict=True):
            if agent.returncode is not None:
                node.gone = min(node.gone, now)

    async def _hit(self, fault: Fault, member: MemberView, view: RunView) -> None:
        """It happens, and a newcomer starts."""
        at, number = time.monotonic(), _place(member)
        self.hits.append(Hit(fault, at, member.rank == 0))
        self._progress(f"fault {len(self.hits)}/{self._faults}: {fault} {member.member} (rank {member.rank})")
        if fault is Fault.RAISE:
            (self._log / f"{member.member}.raise").touch()
        else:
            await self._do(Item(action=_ACTIONS[fault], step=view.step, member=number), view)
        if fault is not Fault.RELEASE:
            self.nodes[number].gone = at
        await self._start_agent()
        # The limit falls with each that goes.
        await self._call("grow", run=self._run, by=1)


def _place(member: MemberView) -> int:
    """In the order of arrival, from 0."""
    return member_number(member.member) - 1


def row(
    members: int, hits: Sequence[Hit], times: Sequence[float], nodes: Sequence[Node], step_s: float, words: str
) -> Row:
    """The figure, and in the note where the rest went.

    Args:
        members: of the undisturbed world.
        hits: in order.
        times: when each step was finished, in order.
        nodes: all that ever were there.
        step_s: time of an undisturbed step.
        words: end of the note.

    Raises:
        FallowError: the training was over too early.
    """
    bounds = [hit.at for hit in hits]
    bounds.append(bounds[-1] + EVERY_S)
    if times[-1] < bounds[-1]:
        raise FallowError(
            f"chaos: the training was over {bounds[-1] - times[-1]:.1f} s before the end of the last fault's time; the "
            "undisturbed step time was measured too long: is something else running?",
            Exit.TEMPFAIL,
        )
    spans = [span(times, nodes, since, until, members * step_s) for since, until in pairwise(bounds)]
    whole = span(times, nodes, bounds[0], bounds[-1], members * step_s)
    kinds = []
    for fault in Fault:
        mine = [one for hit, one in zip(hits, spans, strict=True) if hit.fault is fault]
        if mine:
            kinds.append(f"{fault} {sum(s.useful for s in mine) / sum(s.available for s in mine):.3f} ({len(mine)})")
    starting, main = whole.starting / whole.available, sum(hit.main for hit in hits)
    note = (
        f"by fault: {', '.join(kinds)}, the worst {min(one.share for one in spans):.3f}; "
        f"rank 0 was hit {counted(main, 'time')}; not useful: newcomers' start-ups {starting:.3f}, "
        f"all else {1 - starting - whole.share:.3f}; without start-ups {whole.up:.3f} of what was available; {words}"
    )
    return Row(
        name="chaos",
        members=members,
        params=PARAMS,
        unit="useful",
        ours=rows.ours([one.share for one in spans]),
        peer=Peer(name="undisturbed", p50=1.0),
        ratio=whole.share,
        note=note,
    )


def span(times: Sequence[float], nodes: Sequence[Node], since: float, until: float, step_node_s: float) -> Span:
    """What was useful and available in (since, until].

    Args:
        times: when each step was finished.
        nodes: all that ever were there.
        since, until: seconds of CLOCK_MONOTONIC.
        step_node_s: node-seconds of an undisturbed step.
    """

    def common(begin: float, end: float) -> float:
        return max(0.0, min(end, until) - max(begin, since))

    return Span(
        useful=sum(since < at <= until for at in times) * step_node_s,
        available=sum(common(node.came, node.gone) for node in nodes),
        starting=sum(common(node.came, min(node.ready, node.gone)) for node in nodes),
    )
