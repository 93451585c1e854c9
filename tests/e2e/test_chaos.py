"""A fault every ten seconds for half an hour: `make soak ARGS="-k chaos -s"`. It prints what the nodes' time was worth.

Each fault hits a random member, rank 0 too. At the same moment a newcomer starts in its place from nothing: agent,
interpreter, imports, model. The figure is useful ÷ available node-seconds, from the first fault until `EVERY_S` after
the last:

- Useful: finished steps, each counted once, times the median step time of the undisturbed world, times its members.
- Available: a node from the start of its agent until its fault, or until its agent has ended where it was released.

A shard's time is mostly a sleep, so that members do not share this machine's processors, and there are as many shards
as all members and one less can divide evenly. `FALLOW_SOAK_FAULTS` takes another number of faults.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench import session
from fallow.core.membership.names import member_number
from fallow.core.submission.schedule import Action, Item
from fallow.local.driver import LOOK_S, Driver
from fallow.model import MemberPhase, MemberView, RunStatus, RunView

MEMBERS, PARAMS = 4, 1_000_000
SHARDS = MEMBERS * (MEMBERS - 1)
EVERY_S = 10.0
FAULTS = int(os.environ.get("FALLOW_SOAK_FAULTS", "180"))
SHARD_S = 0.1
"""What a member sleeps for each shard: 0.3 s a step while all are there."""

ALONE = 60
"""Steps in which the undisturbed step time is measured."""

KINDS: dict[str, Action | None] = {
    "kill": Action.KILL,
    "stop": Action.STOP,
    "raise": None,
    "release": Action.RELEASE_MEMBER,
}
"""Faults: SIGKILL, SIGSTOP for ever, an exception in the training loop, a node that is asked back."""

LEAST = 0.8
"""On two cores, which import torch anew for each newcomer; the aim is 0.9 where nodes have cores of their own."""


@dataclass(kw_only=True)
class Node:
    """When a node was available: seconds of CLOCK_MONOTONIC."""

    came: float
    gone: float = inf


class Chaos(Driver):
    """Drives a run whose members are hit."""

    def __init__(self, folder: Path, argv: list[str], log: Path) -> None:
        super().__init__(folder, argv, MEMBERS, max_members=SHARDS, output=sys.stderr.fileno())
        self.nodes: list[Node] = []
        "in order of arrival"
        self.faults_at: list[float] = []
        self._log = log
        self._dice = random.Random(0)

    async def _start_agent(self) -> None:
        self.nodes.append(Node(came=time.monotonic()))
        await super()._start_agent()

    async def _follow(self) -> None:
        due = time.monotonic() + EVERY_S
        while not (view := await self._look()).status.ended:
            now = time.monotonic()
            for node, agent in zip(self.nodes, self._agents.values(), strict=True):
                if agent.returncode is not None:
                    node.gone = min(node.gone, now)
            members = [member for member in view.members if member.phase is MemberPhase.MEMBER]
            if len(self.faults_at) < FAULTS and now >= due and len(members) > 1:
                due = now + EVERY_S
                await self._hit(self._dice.choice(list(KINDS)), self._dice.choice(members), view)
            self._check_agents()
            await asyncio.sleep(LOOK_S)

    async def _hit(self, kind: str, member: MemberView, view: RunView) -> None:
        """It happens, and a newcomer starts."""
        action, number = KINDS[kind], member_number(member.member) - 1
        self.faults_at.append(time.monotonic())
        print(f"chaos: fault {len(self.faults_at)}/{FAULTS}: {kind} {member.member} (rank {member.rank})")
        if action is None:
            (self._log / f"{member.member}.raise").touch()
        else:
            await self._carry_out(Item(action=action, step=view.step, member=number), view)
        if action is not Action.RELEASE_MEMBER:
            self.nodes[number].gone = self.faults_at[-1]
        await self._start_agent()
        await self._call("grow", run=self._run, by=1)  # the limit falls with each that goes


def useful_share(ends: Sequence[float], nodes: Sequence[Node], since: float, until: float, step_node_s: float) -> float:
    """Useful ÷ available node-seconds in (since, until].

    Args:
        ends: when each step was finished.
        nodes: all that ever were there.
        since, until: seconds of CLOCK_MONOTONIC.
        step_node_s: node-seconds of an undisturbed step.
    """
    assert ends[-1] >= until, f"the training was over {until - ends[-1]:.1f} s too early: is something else running?"
    available = sum(max(0.0, min(node.gone, until) - max(node.came, since)) for node in nodes)
    return sum(since < at <= until for at in ends) * step_node_s / available


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_chaos(tmp_path: Path) -> None:
    options = {"shards": SHARDS, "reproducible": True}
    calm = session.train(PARAMS, MEMBERS, steps=ALONE, shard_s=SHARD_S, **options)
    step_s = session.usual_gap(calm.steps)
    # Undisturbed it would last for a period before the first fault, one after each and a spare one.
    steps = ceil(EVERY_S * (FAULTS + 2) / step_s)
    folder, log = tmp_path / "run", tmp_path / "log"
    folder.mkdir(mode=0o700)
    log.mkdir()
    argv = session.command(PARAMS, log, steps=steps, shard_s=SHARD_S, **options)
    chaos = Chaos(folder, argv, log)
    report = asyncio.run(chaos.train())
    assert (report.status, report.samples.lost, report.samples.duplicated) == (RunStatus.FINISHED, 0, 0)
    undisturbed = session.train(PARAMS, MEMBERS, steps=steps, **options).report
    assert report.final_digest == undisturbed.final_digest is not None
    ends = [one.at for one in session.new_steps(session.read_steps(log))]
    since, until = chaos.faults_at[0], chaos.faults_at[-1] + EVERY_S
    share = useful_share(ends, chaos.nodes, since, until, MEMBERS * step_s)
    print(f"chaos: {share:.3f} of the available node-seconds are useful; a step takes {step_s:.3f} s undisturbed")
    assert share >= LEAST
