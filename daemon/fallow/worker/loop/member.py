"""What one worker has of a run: shared by the loop's parts."""

import time
from functools import cached_property
from pathlib import Path

import msgspec

from fallow.core.training.shards import Division, Duty, duties, mix
from fallow.worker.checkpoint.saver import Saver
from fallow.worker.data import rng
from fallow.worker.data.ledger import Ledger
from fallow.worker.data.source import Key, Reached, Source
from fallow.worker.handover.transfer import Standing
from fallow.worker.loop.pace import Pace
from fallow.worker.loop.place import Place
from fallow.worker.prepared.objects import Prepared
from fallow.worker.reduction.buffers import StepBuffers
from fallow.worker.reduction.reduction import Reduction
from fallow.worker.session.session import Session
from fallow.worker.session.status import Progress
from fallow.worker.transport.group import Group


class Member:
    """One worker's share of a run: either the `session` is there, and open, or the `group` of a fixed world."""

    def __init__(self, prepared: Prepared, session: Session | None, group: Group | None) -> None:
        self.prepared = prepared
        self.seed = session.setup.seed if session is not None else 0
        self.session = session
        self.progress = session.progress if session is not None else Progress()
        self.group = group or Group(0, 0, 1, None)
        self.place = Place(in_sync=session is None)
        self.division = Division((0.0,) * self.group.size)
        "of a step's shards among the members: the same on all of them"
        self.state_status = Standing()
        self.source: Source | None = None
        "of the run.updates call at work"
        self.saver = Saver(session) if session is not None else None
        "None in a fixed world, which has no folder"
        self.last_step_end = time.monotonic()
        "when the last step ended"
        self.recorded_step = -1
        "the step at work, if one of its inner loops is whole: a generation's ledgers have all its shards"
        self.discarded_attempts = 0
        "attempts that were begun and thrown away since the last change of the membership was reported"
        path = Path(session.setup.folder) / "ledger" / f"{session.worker}.ledger" if session is not None else None
        self.ledger = Ledger(path, self._unrecorded)

    # Made at first use, when everything is prepared.

    @cached_property
    def reduction(self) -> Reduction:
        """Sums the gradients. Made at first use, when everything is prepared."""
        return Reduction(self.prepared.parameters(), self.prepared.arithmetic, self.buffers)

    @cached_property
    def buffers(self) -> StepBuffers:
        """The modules' buffers, in a step."""
        return StepBuffers(self.prepared.buffers)

    @cached_property
    def pace(self) -> Pace:
        """This member's speed."""
        return Pace(self.prepared.device)

    def plain_values(self) -> dict[str, object]:
        """Of the run's state, what is neither tensor nor prepared."""
        return {"position": msgspec.structs.asdict(self.place.position), "sums": self.reduction.export()}

    def _unrecorded(self, step: int | None) -> None:
        """Tell the head, before it may have to count, that the ledger lacks records from this step on (None: none)."""
        if self.session is not None:
            self.session.say(unrecorded=step)

    def move(self, *, in_loop: bool = True) -> None:
        """The script gets on: what the head takes for progress."""
        self.progress.move(in_loop=in_loop)

    def note_call(self, *, in_call: bool) -> None:
        """Whether this member waits in a joint call, for the head."""
        if self.session is not None:
            self.session.note(in_call=in_call)

    def seed_random(self, *place: int | str) -> None:
        """Put all random numbers, those of prepared generators too, to where they begin at that place of the run."""
        rng.seed_everything(mix(self.seed, *place), self.prepared.generators)

    def duties(self, shards: int) -> list[Duty]:
        """What this member computes in a step of so many shards."""
        return duties(self.division.shares(shards), self.group.rank)

    def replan(self) -> None:
        """Tell the loader at work, and those who look on, what this member will compute from here on."""
        if self.source is not None:
            at = self.place.position
            next_key = Key(at.data_epoch, at.index, 0)
            self.source.replan(next_key, lambda shards: [duty.shard for duty in self.duties(shards)])
            self.progress.tell(shards=self.division.shares(self.source.shards)[self.group.rank])

    def reached(self) -> Reached:
        """Where the members are; for a newcomer, as far as it has heard of them."""
        at = self.place.position
        if self.place.has_joined or self.session is None:
            return Reached(at.data_epoch, at.index)
        return Reached(*self.session.head_status.last_reply.reached)

    def follow(self) -> bool:
        """While there is no place yet: read what the members have read, see `Source.follow`."""
        return self.source is not None and not self.place.has_joined and self.source.follow(self.reached())
