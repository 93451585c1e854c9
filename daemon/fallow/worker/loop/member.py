"""One worker's objects of a run, which the loop's parts share."""

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from fallow.core.training.shards import Division, Duty, duties, mix
from fallow.worker.checkpoint.saver import Saver
from fallow.worker.data import rng
from fallow.worker.data.ledger import Ledger
from fallow.worker.data.source import DataPosition, Key, Source
from fallow.worker.handover.transfer import StateStatus
from fallow.worker.loop.pace import Pace
from fallow.worker.loop.place import Place
from fallow.worker.prepared.objects import Prepared
from fallow.worker.reduction.buffers import StepBuffers
from fallow.worker.reduction.reduction import Reduction
from fallow.worker.session.session import Session
from fallow.worker.session.status import Progress
from fallow.worker.transport.group import Group


class Member:
    """One worker's share of a run: with an open `session`, or with the `group` of a fixed world."""

    def __init__(self, prepared: Prepared, session: Session | None, group: Group | None) -> None:
        self.prepared = prepared
        self.seed = session.setup.seed if session is not None else 0
        self.session = session
        self.progress = session.progress if session is not None else Progress()
        self.group = group or Group(0, 0, 1, None)
        self.place = Place(in_sync=session is None)
        self.nodes: Sequence[int] = range(self.group.size)
        "number of the node, by rank"
        self.siblings: Sequence[int] = [self.group.rank]
        "ranks on this member's node, including its own rank; in a fixed world only that"
        self.division = Division((0.0,) * self.group.size)
        "division of a step's shards among the members, the same on all of them"
        self.state_status = StateStatus()
        self.source: Source | None = None
        "data of the current run.updates call"
        self.saver = Saver(session) if session is not None else None
        "None in a fixed world, which has no run folder"
        self.last_step_end = time.monotonic()
        "when the last step ended, on the monotonic clock"
        self.recorded_step = -1
        "the current step, if one of its inner loops is complete, so that all its shards are in the ledgers; else -1"
        self.discarded_attempts = 0
        "number of discarded attempts since the last report of a switch"
        path = Path(session.setup.folder) / "ledger" / f"{session.worker}.ledger" if session is not None else None
        self.ledger = Ledger(path, self._unrecorded)

    @cached_property
    def reduction(self) -> Reduction:
        """Sums gradients. Made at first use, when everything is prepared."""
        return Reduction(self.prepared.parameters(), self.prepared.arithmetic, self.buffers)

    @cached_property
    def buffers(self) -> StepBuffers:
        """Copies of the modules' buffers within a step."""
        return StepBuffers(self.prepared.buffers)

    @cached_property
    def pace(self) -> Pace:
        """Measures this member's speed."""
        return Pace(self.prepared.device)

    def plain_values(self) -> dict[str, object]:
        """The part of the run's state that is neither a tensor nor a prepared object."""
        return {"position": msgspec.structs.asdict(self.place.position), "sums": self.reduction.export()}

    def _unrecorded(self, step: int | None) -> None:
        """Tell the head from which step on the ledger lacks records (None: it lacks none)."""
        if self.session is not None:
            self.session.say(unrecorded=step)

    def move(self, *, in_loop: bool = True) -> None:
        """Note progress of the script. A member without progress counts as stalled."""
        self.progress.move(in_loop=in_loop)

    def note_call(self, *, in_call: bool) -> None:
        """Tell the head whether this member waits in a joint call."""
        if self.session is not None:
            self.session.note(in_call=in_call)

    def seed_random(self, *place: int | str) -> None:
        """Seed all random generators, prepared ones too, for this place of the run."""
        rng.seed_everything(mix(self.seed, *place), self.prepared.generators)

    def duties(self, shards: int) -> list[Duty]:
        """Return what this member computes in a step of `shards` shards.

        Siblings have equally many bodies, in which a sharded model has collectives: copies that do not count are added.
        """
        shares = self.division.shares(shards)
        own, longest = duties(shares, self.group.rank), max((duties(shares, rank) for rank in self.siblings), key=len)
        return [*own, *(Duty(duty.shard, False) for duty in longest[len(own) :])]

    def replan(self) -> None:
        """Tell the current loader which shards this member will compute from now on, and show their number."""
        if self.source is not None:
            at = self.place.position
            next_key = Key(at.data_epoch, at.index, 0)
            self.source.replan(next_key, lambda shards: [duty.shard for duty in self.duties(shards)])
            self.progress.tell(shards=self.division.shares(self.source.shards)[self.group.rank])

    def reached(self) -> DataPosition:
        """Place of the members in the data. A newcomer knows only what the head last said."""
        at = self.place.position
        if self.place.has_joined or self.session is None:
            return DataPosition(at.data_epoch, at.index)
        return DataPosition(*self.session.head_status.last_reply.reached)

    def follow(self) -> bool:
        """As long as this worker is a newcomer: skip the samples that the members have read, see `Source.follow`."""
        return self.source is not None and not self.place.has_joined and self.source.follow(self.reached())
