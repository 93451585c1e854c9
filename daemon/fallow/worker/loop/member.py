"""What one worker has of a run: shared by the step, the turn and the rehearsal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from fallow.core.shards import Duty, duties, mix
from fallow.core.shares import Division
from fallow.model import Welcome
from fallow.worker.checkpoint.saver import Saver
from fallow.worker.data import rng
from fallow.worker.data.ledger import Ledger
from fallow.worker.data.source import Key, Reached, Source
from fallow.worker.handover.standing import Standing
from fallow.worker.loop.catch_up import CatchUp
from fallow.worker.loop.pace import Pace
from fallow.worker.loop.place import Place
from fallow.worker.prepared.objects import Gate, Prepared
from fallow.worker.prepared.signature import enforce
from fallow.worker.reduction.buffers import SharedBuffers
from fallow.worker.reduction.reducer import Reducer
from fallow.worker.session.session import Session
from fallow.worker.session.voice import Voice
from fallow.worker.transport.group import Group


class Member:
    """One worker's share of a run.

    Args:
        prepared: the objects of `run.prepare`.
        gate: what prepared objects ask before they act.
        seed: the run's seed.
        session: the conversation with the head; None in a fixed world.
        welcome: what the head said; None in a fixed world.
        group: the fixed world's group, or None under a head.
    """

    def __init__(
        self,
        prepared: Prepared,
        gate: Gate,
        seed: int,
        session: Session | None,
        welcome: Welcome | None,
        group: Group | None,
    ) -> None:
        self.prepared = prepared
        self.gate = gate
        self.seed = seed
        self.session = session
        self.welcome = welcome
        self.group = group or Group(0, 0, 1, None)
        self.place = Place(in_sync=session is None)
        self.pace = Pace()
        self.division = Division((0.0,) * self.group.size)
        "of a step's shards among the members: the same on all of them"
        self.standing = Standing()
        self.catch_up = CatchUp()
        gate.settle = self.standing.complete
        gate.seed_step = self._seed_step
        self.loader: Source | None = None
        "of the run.steps call at work"
        self.saver = Saver(session, welcome) if session and welcome else None
        "None in a fixed world, which has no folder"
        self.voice = Voice()
        self.on_resize: list[Callable[[], None]] = []
        self.boundary = time.monotonic()
        "when the last step ended"
        self.discarded = 0
        "steps that were begun and thrown away since the last change of the membership was reported"
        self._reducer: Reducer | None = None
        path = Path(welcome.folder) / "ledger" / f"{session.worker}.ledger" if session and welcome else None
        self.ledger = Ledger(path, self._unrecorded)

    @property
    def reducer(self) -> Reducer:
        """Made at first use, when everything is prepared."""
        if self._reducer is None:
            prepared = self.prepared
            if prepared.reproducible:
                enforce(prepared.devices())
            buffers = SharedBuffers(prepared.buffers, prepared.statistics)
            self._reducer = Reducer(prepared.parameters(), buffers, prepared.arithmetic)
            self._reducer.flags = self._flags
            self._reducer.elastic = self.session is not None
            self._reducer.drift = not prepared.reproducible
            self.gate.gathered = self._reducer.gathered
            self._reducer.before_control = self.ledger.flush
            self._reducer.complete = lambda: self.standing.intake is None
        return self._reducer

    def rest(self) -> None:
        """The script leaves `run.steps`, however."""
        if self._reducer is not None:
            self._reducer.rest()

    def _flags(self) -> tuple[bool, float]:
        if self.session is None or self.saver is None:
            return False, 0.0
        return self.session.switch_committed, self.saver.wish(self.group.size)

    def _unrecorded(self, step: int | None) -> None:
        """Tell the head, before it may have to count, that the ledger lacks records from this step on (None: none)."""
        if self.session is not None:
            self.session.progress.unrecorded = step
            self.session.beat()

    def move(self, *, in_loop: bool = True) -> None:
        """The script gets on: what the head takes for progress."""
        if self.session is not None:
            self.session.progress.move(in_loop=in_loop)

    def seed_random(self, *place: int | str) -> None:
        """Put all random numbers, those of prepared generators too, to where they begin at that place of the run."""
        rng.seed_everything(mix(self.seed, *place), self.prepared.generators)

    def _seed_step(self, number: int) -> None:
        # Until then they are those of the member's last shard.
        at = self.place.position
        self.seed_random("step", at.step, at.phase, number)

    def duties(self, shards: int) -> list[Duty]:
        """What this member computes in a step of so many shards."""
        return duties(self.division.shares(shards), self.group.rank)

    def most(self, shards: int) -> int:
        """Shards, of so many in a full step, of the member that has most: a step of fewer gives none of them more."""
        return max(self.division.shares(shards))

    def shards(self, shards: int) -> list[int]:
        """The shards of `duties`, for the loader."""
        return [duty.shard for duty in self.duties(shards)]

    def replan(self) -> None:
        """Tell the loader at work, and those who look on, what this member will compute from here on."""
        if self.loader is not None:
            at = self.place.position
            self.loader.replan(Key(at.data_epoch, at.index, 0), self.shards)
            if self.session is not None:
                self.session.progress.shards = self.division.shares(self.loader.shards)[self.group.rank]

    def reached(self) -> Reached:
        """Where the members are; for a newcomer, as far as it has heard of them."""
        at = self.place.position
        if self.place.joined or self.session is None:
            return Reached(at.data_epoch, at.index)
        return Reached(*self.session.members_reached)

    def follow(self) -> bool:
        """While there is no place yet: read what the members have read, see `Source.follow`."""
        return self.loader is not None and not self.place.joined and self.loader.follow(self.reached())

    def buffers(self) -> list[torch.Tensor]:
        """Copies of all buffers, for `restore`."""
        return [buffer.detach().clone() for buffer in self.prepared.buffers()]

    def restore(self, buffers: list[torch.Tensor]) -> None:
        """Put copied buffers back."""
        with torch.no_grad():
            for buffer, value in zip(self.prepared.buffers(), buffers, strict=True):
                buffer.copy_(value)

    def drop_gradients(self) -> None:
        """Forget what a void step has left behind."""
        for _, parameter in self.prepared.parameters():
            parameter.grad = None
