"""What the head learns from its polls and its nodes, and what of it is written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from fallow.core.allocations import Allocation
from fallow.core.backoff import Asker, LeftAlone, Scope, scope_of
from fallow.core.experience import Experience
from fallow.core.requests import HarvestRules, Known, harvestable
from fallow.head.book import Run
from fallow.head.turn import Turn
from fallow.model import AllocationState, ClusterState

T = TypeVar("T")

NOTE, BACKOFF = "experience", "backoff"
"""Their keys among the notes of the store."""

WRITE_EVERY_S = 300.0
"""And when the head ends. What was learned since is lost when it is killed; it is a statistic."""


class Learning:
    """Keeps `known` up to date."""

    def __init__(self) -> None:
        self.known = Known()
        self._begun: set[str] | None = None
        "tokens whose start has been taken note of; None: this head has seen no poll yet"
        self._trained: set[str] = set()
        "tokens whose first step has been taken note of"
        self._written_at = 0.0

    def recall(self, notes: Mapping[str, bytes]) -> None:
        """Go on with what an earlier head wrote down. What cannot be read is forgotten: it is a statistic."""
        self.known.experience = _read(notes.get(NOTE), Experience)
        self.known.backoff.recall(_read(notes.get(BACKOFF), LeftAlone))

    def note(self, turn: Turn) -> None:
        """Have it written down with this turn."""
        self._written_at = turn.at
        turn.notes[NOTE] = msgspec.msgpack.encode(self.known.experience)
        turn.notes[BACKOFF] = msgspec.msgpack.encode(self.known.backoff.remembered())

    def polled(self, turn: Turn, cluster: ClusterState, rules: HarvestRules) -> None:
        """Take in a poll, after the allocations have been brought up to date."""
        self.known.backoff.bound(turn.now)
        harvest = [
            (run, a)
            for run in turn.book.runs.values()
            if not run.spec.local
            for a in run.record.allocations.values()
            if a.harvested
        ]
        held = (AllocationState.RUNNING, AllocationState.RELEASING)
        whole = [a for _, a in harvest if a.state in held and a.part is None]
        ours = {node: a.start_at or cluster.at for a in whole for node in a.nodes}
        partitions = [p.partition for p in harvestable(cluster, rules)]
        experience = self.known.experience
        for partition, spell in self.known.watch.look(cluster, ours, partitions):
            experience.remember(partition, spell)
        if self._begun is None:
            # Those that began before this head did have been taken note of by the one before.
            self._begun = {a.token for _, a in harvest if a.start_at is not None}
            self._trained = {a.token for _, a in harvest if a.active_at is not None}
        tokens = {a.token for _, a in harvest}
        self._begun &= tokens
        self._trained &= tokens
        for run, allocation in harvest:
            self._follow(turn, run, allocation)
        if turn.at - self._written_at > WRITE_EVERY_S:
            self.note(turn)

    def _follow(self, turn: Turn, run: Run, allocation: Allocation) -> None:
        assert self._begun is not None
        experience, start_at = self.known.experience, allocation.start_at
        if allocation.state is AllocationState.PENDING and allocation.asked_at is None:
            one_node = allocation.pinned or allocation.part is not None
            # What stands against one node says nothing about the partition.
            if not one_node or scope_of(allocation.reason) is Scope.OWNER:
                asker = run.asks_as(allocation)
                self.refused(turn, run, asker, allocation.partition, allocation.minutes, allocation.reason)
        if start_at is None:
            return
        if allocation.token not in self._begun:
            self._begun.add(allocation.token)
            self.known.backoff.started(run.asks_as(allocation), allocation.partition)
            if allocation.least_minutes and allocation.minutes and allocation.end_at:
                experience.granted(allocation.least_minutes, allocation.minutes, allocation.end_at - start_at)
        if allocation.active_at is not None and allocation.token not in self._trained:
            self._trained.add(allocation.token)
            # A successor is ready early and joins when the node before it leaves.
            if not allocation.replaces:
                wait_s = None if allocation.ahead else start_at - allocation.requested_at
                start_s = allocation.active_at - start_at
                experience.started(allocation.partition, wait_s, start_s, allocation.active_at)

    def refused(self, turn: Turn, run: Run, asker: Asker, partition: str, minutes: int | None, reason: str) -> bool:
        """Slurm said no, or lets a request wait, for a reason that may be none to leave anything alone.

        Returns:
            Whether that is news: False for what was on its way while account or partition was left alone already.
        """
        backoff = self.known.backoff
        before = backoff.until(asker, partition)
        backoff.strike(reason, asker, partition, minutes, turn.now)
        if (until := backoff.until(asker, partition)) > before:
            text = f"Slurm says {reason}: nothing is asked for in {partition} for {until - turn.now:.0f} s"
            turn.record(run, "backoff", text)
            return True
        return scope_of(reason) is Scope.NOTHING


def _read(note: bytes | None, type_: type[T]) -> T:
    try:
        return type_() if note is None else msgspec.msgpack.decode(note, type=type_)
    except msgspec.MsgspecError:
        return type_()
