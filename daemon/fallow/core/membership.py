"""The membership machine: one per run, pure.

`handle(event)` changes the roster and returns instructions. The caller makes the roster durable (compare-and-set
fenced by term and revision) *before* it carries the instructions out, so nobody acts on a decision that a restart could
forget. What happens to a change of the membership is in `changes`, which generation is due in `proposals`, who has
been silent or stuck for too long in `watch`, what becomes of those who go in `losses`, whose failure it is in
`failures`.

The manner is that of `distributed.worker_state_machine` (dask/distributed): events in, instructions out, a table of
handlers, a story for the error message, and a validation switch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from fallow.core import events as ev
from fallow.core import failures
from fallow.core.changes import Changes
from fallow.core.checkpoints import Checkpoints
from fallow.core.effects import Effects
from fallow.core.invariants import check
from fallow.core.joining import difference
from fallow.core.lease_clock import Hearing
from fallow.core.losses import Losses
from fallow.core.proposals import is_involved
from fallow.core.restarts import waiting
from fallow.core.roster import Change, FailureKind, Roster, Worker
from fallow.core.timing import Timing
from fallow.core.watch import Overdue, Watch
from fallow.model import (
    Abort,
    Active,
    Aligned,
    Beat,
    CheckpointDamaged,
    CheckpointFailed,
    Commit,
    Deserted,
    Dismiss,
    Exit,
    Failed,
    Finished,
    Held,
    Left,
    Message,
    Prepare,
    Refused,
    Vote,
    WorkerHello,
    WorkerPhase,
    WorkerReady,
)
from fallow.text import counted


class Membership:
    """Decides who computes in which generation of one run.

    Args:
        roster: the durable state; owned by this object from now on.
        term: the head's term, stamped on every message.
        timing: deadlines.
        at: now, in seconds of the clock that events carry.
        validate: check the invariants after each event (tests, `fallow local`).
    """

    def __init__(self, roster: Roster, *, term: int, timing: Timing, at: float, validate: bool = False) -> None:
        self.roster = roster
        self.story: deque[ev.Event] = deque(maxlen=200)
        self._timing = timing
        self._validate = validate
        self._effects = Effects(roster, term, timing.resend_s)
        self._watch = Watch(roster, timing, at)
        self._changes = Changes(roster, self._effects, self._watch, timing, at)
        self._checkpoints = Checkpoints(roster, self._effects, self._changes)
        self._losses = Losses(roster, self._effects, self._watch, self._changes, timing)
        failures.begin_clock(roster, at)
        self._handlers: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.WorkerExpected: self._expected,
            ev.Said: self._take,
            ev.WorkerStopped: self._stopped,
            ev.WorkerContinued: self._continued,
            ev.WorkerGone: self._losses.gone,
            ev.ReleaseWanted: self._release,
            ev.NodeUnwanted: self._bar,
            ev.LimitChanged: self._limit,
            ev.CheckpointWritten: self._checkpoints.written,
            ev.RollbackWanted: self._checkpoints.roll_back,
            ev.Cancelled: self._cancel,
            ev.Ticked: self._tick,
        }
        self._said: dict[type[Message], Callable[[Any, float], None]] = {
            WorkerHello: self._hello,
            WorkerReady: self._ready,
            Vote: self._vote,
            Active: self._active,
            Held: self._held,
            Aligned: self._aligned,
            Deserted: self._deserted,
            Left: self._left,
            Failed: self._losses.failed,
            Finished: self._finished,
            CheckpointFailed: self._checkpoints.given_up,
            CheckpointDamaged: self._checkpoints.unusable,
        }

    def handle(self, event: ev.Event) -> list[ev.Instruction]:
        """Apply one event; returns what to do, in order."""
        beat = event.message if isinstance(event, ev.Said) and isinstance(event.message, Beat) else None
        if beat is None and not isinstance(event, ev.Ticked | ev.WorkerStopped | ev.WorkerContinued):
            self.story.append(event)
        news = _is_news(event)
        if not self.roster.status.ended:
            if beat is None:
                self._handlers[type(event)](event)
            else:
                news = self._beat(beat, event.at)
        if not self.roster.status.ended:
            news = self._drop_unreachable(event.at) or news
        if not self.roster.status.ended:
            self._changes.plan(event.at, news=news)
        if self._validate:
            check(self.roster, self.story)
        return self._effects.take()

    def seen(self, worker: str) -> float | None:
        """When the worker was last heard of, on the events' clock."""
        return self._watch.heard(worker)

    def seems_stopped(self, worker: str) -> bool:
        """Its agent has seen it stopped, and nothing has been heard since that says otherwise."""
        return self._watch.seems_stopped(worker)

    def hear_agent(self, worker: str, at: float) -> None:
        """The worker's agent was heard: the network to its node works."""
        self._watch.hear_agent(worker, at)

    def put_off(self, at: float) -> str:
        """Which newcomers wait though there is room for them, and why; empty: none."""
        return waiting(self.roster, self._watch.lasted_s(at))

    def forget(self, worker: str) -> None:
        """A worker that is gone will never be heard of again, and no generation needs to know of it."""
        gone = self.roster.workers.pop(worker)
        self.roster.forgotten_step = max(self.roster.forgotten_step, gone.step)
        self._watch.forget(worker)

    def _take(self, event: ev.Said) -> None:
        self._said[type(event.message)](event.message, event.at)

    # -- workers come ---------------------------------------------------------------------------------------------

    def _expected(self, event: ev.WorkerExpected) -> None:
        r = self.roster
        known = r.workers.get(event.worker)
        if known is not None:
            known.node = event.node or known.node
            return
        r.workers[event.worker] = Worker(worker=event.worker, index=r.next_index, token=event.token, node=event.node)
        r.next_index += 1
        self._watch.hear(event.worker, event.at)

    def _hello(self, hello: WorkerHello, at: float) -> None:
        worker = self.roster.workers.get(hello.worker)
        if worker is not None:
            worker.pid, worker.address = hello.pid, hello.address
            if worker.phase is not WorkerPhase.STARTING:
                self._watch.hear(hello.worker, at)

    def _ready(self, ready: WorkerReady, at: float) -> None:
        r = self.roster
        worker = r.workers.get(ready.worker)
        if worker is None or worker.phase is not WorkerPhase.STARTING:
            return
        self._watch.hear(ready.worker, at)
        if r.signature is None:
            r.signature, r.layout = ready.signature, ready.layout
            r.shards, r.global_batch = ready.shards, ready.global_batch
            r.total_steps, r.arithmetic = ready.total_steps, ready.arithmetic
            r.restarts = ready.restarts
        problem = difference(r, ready)
        if problem:
            worker.phase = WorkerPhase.GONE
            message = f"worker {worker.worker} on node {worker.node} was refused: {problem}"
            self._effects.tell(worker.worker, Refused(code=Exit.DATA, message=message))
            self._effects.record("refuse", message, worker=worker.worker)
            self._losses.count_start_failure(message)
            return
        worker.phase = WorkerPhase.READY
        r.start_failures = 0

    # -- a change goes on -----------------------------------------------------------------------------------------

    def _vote(self, vote: Vote, at: float) -> None:
        change = self.roster.change
        if change is None or change.committed or change.generation != vote.generation:
            return
        if not change.concerns(vote.worker):
            return
        unreachable = [worker for worker in vote.unreachable if worker in self.roster.workers]
        if vote.ok:
            change.votes.add(vote.worker)
        elif unreachable:
            change.unreachable[vote.worker] = unreachable
            change.tried[vote.worker] = dict(zip(vote.unreachable, vote.tried, strict=False))
            if change.accused_at is None:
                change.accused_at = at
        else:
            self._effects.record("abort", f"generation {change.generation}: {vote.worker} could not: {vote.reason}")
            if self.roster.workers[vote.worker].phase is WorkerPhase.READY:
                self._effects.dismiss(vote.worker, Exit.TEMPFAIL, f"its group could not be built: {vote.reason}")
            self._changes.burn(at, vote.reason)

    def _drop_unreachable(self, at: float) -> bool:
        """Go on without those whom the others cannot reach, as soon as the votes say who that is; True: they do."""
        change = self.roster.change
        if change is None:
            return False
        overdue = []
        for name in self._changes.cut_off(at):
            accusers = [w for w, names in change.unreachable.items() if name in names]
            others = accusers or change.unreachable.get(name, [])
            reason = f"no connection between it and {', '.join(self._far_end(change, name, one) for one in others)}"
            overdue.append(Overdue(self.roster.workers[name], reason, FailureKind.UNREACHABLE))
        self._losses.eject(at, overdue)
        return bool(overdue) or self.roster.change is not change

    def _far_end(self, change: Change, name: str, other: str) -> str:
        """Another worker in words, with the address and port of the connection to it that did not come about."""
        worker = self.roster.workers[other]
        tried = change.tried.get(other, {}).get(name) or change.tried.get(name, {}).get(other)
        return f"{other} ({worker.node}, {worker.address})" if not tried else f"{other} ({worker.node}; tried {tried})"

    def _beat(self, beat: Beat, at: float) -> bool:
        """Take in a heartbeat. There are many: one that says nothing new must not cost more in a large run.

        Returns:
            it said something new of the change under way.
        """
        r = self.roster
        worker = r.workers.get(beat.worker)
        if worker is None:
            return False
        term = self._effects.term
        if worker.phase is WorkerPhase.GONE:
            # It was let go while it could not hear (stopped, cut off, the head was away): it must not compute on.
            code = Exit.OK if worker.leaving_because else Exit.TEMPFAIL
            self._effects.tell(beat.worker, Dismiss(term=term, code=code, reason="it is no longer in the run"))
            return False
        self._watch.beat(beat, at)
        self._note_unrecorded(worker, beat)
        change = r.change
        if worker.phase is not WorkerPhase.READY and not _is_from_before(change, beat):
            worker.step = max(worker.step, beat.step)
        if change is not None:
            return self._beat_in_change(worker, beat, change, at)
        if beat.prepared > r.generation:
            abort = Abort(term=term, generation=beat.prepared, reason="superseded")
            self._effects.again(beat.worker, beat.prepared, Abort, lambda: abort, at)
        elif beat.held and beat.worker in r.members and beat.generation == r.generation:
            self._watch.suspect(at, beat.generation, f"{beat.worker} is held")
        return False

    def _beat_in_change(self, worker: Worker, beat: Beat, change: Change, at: float) -> bool:
        """A beat is a vote, or proof of the switch, and it shows who missed a message. True: it was new."""
        term, name, number = self._effects.term, beat.worker, change.generation
        if not change.committed:
            if beat.prepared == number and name not in change.votes and change.concerns(name):
                change.votes.add(name)
                return True
            if beat.prepared < number and change.concerns(name):
                self._effects.again(name, number, Prepare, lambda: self._changes.prepare(change, at), at)
        elif beat.generation == number:
            if name not in change.active and name in change.members:
                self._changes.note_active(change, worker)
                return True
        elif not change.concerns(name):
            return False
        elif beat.prepared == number:
            commit = Commit(term=term, generation=number)
            self._effects.again(name, number, Commit, lambda: commit, at)
        elif name not in change.votes:
            # It leaves a broken generation. This one's commit did not wait for its vote: it may not have heard of it.
            self._effects.again(name, number, Prepare, lambda: self._changes.prepare(change, at), at)
        else:
            # It knows this generation no more, so it cannot follow: only a rebuild takes it along.
            self._watch.suspect(at, number, f"{name} missed its commit")
        return False

    def _note_unrecorded(self, worker: Worker, beat: Beat) -> None:
        """Records of samples wait for the disk. They count as unknown should their worker be lost."""
        r, where = self.roster, f"{beat.worker} on {worker.node}"
        if beat.unrecorded is not None and beat.worker not in r.unrecorded:
            r.unrecorded[beat.worker] = beat.unrecorded
            text = f"{where} cannot write down which samples it uses: its file system is full or hangs"
            self._effects.record("ledger", text, worker=beat.worker, step=beat.unrecorded)
        elif beat.unrecorded is None and r.unrecorded.pop(beat.worker, None) is not None:
            self._effects.record("ledger", f"{where} writes down again which samples it uses", worker=beat.worker)

    def _active(self, active: Active, at: float) -> None:
        worker = self.roster.workers.get(active.worker)
        change = self.roster.change
        if worker is None or worker.phase is WorkerPhase.GONE:
            return
        if active.healed:
            self._healed(worker, active.first_step)
        if change is None or change.generation != active.generation:
            return
        self._changes.note_active(change, worker)
        worker.step = max(worker.step, active.first_step)
        change.first_step = active.first_step
        change.bytes_in_pause += active.bytes_received
        change.bytes_behind += active.bytes_behind
        change.steps_discarded = max(change.steps_discarded, active.steps_discarded)
        if active.pause_s > (change.pause_s or 0.0):
            change.pause_s, change.parts = active.pause_s, active.parts

    def _deserted(self, deserted: Deserted, at: float) -> None:
        """Its exit code tells whether it is to blame: nothing is rebuilt until its process has ended, or its lease."""
        worker = self.roster.workers.get(deserted.worker)
        if worker is None or worker.phase is WorkerPhase.GONE or worker.finished or worker.deserted:
            return
        self._watch.hear(deserted.worker, at)
        worker.deserted = True
        worker.step = max(worker.step, deserted.step)
        self._changes.await_deserter(deserted.worker)

    def _aligned(self, aligned: Aligned, at: float) -> None:
        worker = self.roster.workers.get(aligned.worker)
        if worker is not None and worker.phase is not WorkerPhase.GONE:
            self._healed(worker, aligned.step)

    def _healed(self, worker: Worker, step: int) -> None:
        text = (
            f"{worker.worker} on {worker.node}: its weights were not those of most members at step {step}; it has "
            "received theirs. Does this node compute differently?"
        )
        self._effects.record("healed", text, worker=worker.worker, node=worker.node, step=step)

    def _held(self, held: Held, at: float) -> None:
        if is_involved(self.roster, held.worker):
            self._watch.suspect(at, held.generation, f"{held.worker}: {held.reason}")

    def _stopped(self, event: ev.WorkerStopped) -> None:
        if self.roster.alive(event.worker):
            self._watch.stopped(event.worker, event.at)

    def _continued(self, event: ev.WorkerContinued) -> None:
        self._watch.continued(event.worker)

    def _left(self, left: Left, at: float) -> None:
        worker = self.roster.workers.get(left.worker)
        if worker is None:
            return
        change = self.roster.change
        if change is not None and change.committed and left.worker in change.leavers:
            change.left.add(left.worker)
        worker.phase = WorkerPhase.GONE

    def _finished(self, finished: Finished, at: float) -> None:
        r = self.roster
        worker = r.workers.get(finished.worker)
        if worker is None or not is_involved(r, finished.worker):
            return
        worker.finished = True
        worker.step = finished.steps
        self._watch.hear(finished.worker, at)
        if r.final is None:
            r.final = finished
        elif r.final.digest != finished.digest:
            r.diverged = (
                f"members disagree on the final state: {finished.worker} has {finished.digest[:12]}, another one "
                f"{r.final.digest[:12]}: the script trains outside of run.updates, or their nodes compute differently"
            )
            self._effects.record("diverged", r.diverged)
        if r.change is not None and not r.change.committed:
            self._changes.burn(at, "the training is finished")

    def _release(self, event: ev.ReleaseWanted) -> None:
        if event.limit is not None:
            self.roster.limit = event.limit
            self._effects.record("limit", f"at most {counted(event.limit, 'member')}: {event.reason}")
        for name in event.workers:
            worker = self.roster.workers.get(name)
            if worker is None:
                continue
            worker.leaving_because = worker.leaving_because or event.reason
            if worker.phase is WorkerPhase.MEMBER:
                worker.phase = WorkerPhase.LEAVING
            elif worker.phase is WorkerPhase.STARTING:
                worker.phase = WorkerPhase.GONE
                self._effects.add(ev.Kill(name, event.reason))
            elif worker.phase is WorkerPhase.READY:
                change = self.roster.change
                if change is not None and not change.committed and name in change.members:
                    self._changes.burn(event.at, f"{name} has to leave: {event.reason}")
                    self._changes.retry_at = event.at
                self._effects.dismiss(name, Exit.OK, event.reason)

    def _bar(self, event: ev.NodeUnwanted) -> None:
        failures.bar(self.roster, event.node, event.reason, event.at)
        text = f"node {event.node} is barred from this run: {event.reason}"
        self._effects.record("bar", text, node=event.node)
        self._effects.add(ev.NodeBarred(event.node, event.reason))

    def _limit(self, event: ev.LimitChanged) -> None:
        r = self.roster
        r.limit = event.limit
        self._effects.record("limit", f"at most {counted(event.limit, 'member')}: {event.reason}")
        staying = sorted(r.staying(), key=lambda w: r.workers[w].index)
        for name in staying[event.limit :]:
            r.workers[name].phase = WorkerPhase.LEAVING
            r.workers[name].leaving_because = event.reason

    def _cancel(self, event: ev.Cancelled) -> None:
        self._changes.end(event.status, event.reason)

    def _tick(self, event: ev.Ticked) -> None:
        self._watch.listen(event.hearing or Hearing(event.at))
        for node in failures.expire(self.roster, event.at):
            self._effects.record("bar", f"node {node} is barred no longer: it may be tried again", node=node)
        self._losses.eject(event.at, self._watch.overdue(event.at))
        change = self.roster.change
        # Where the head was away, votes lie unread: the time for which nobody was heard does not count.
        heard_at = min(event.at, event.hearing.newest_at) if event.hearing is not None else event.at
        if change is None or change.committed or heard_at < change.deadline_at:
            return
        late = [w for w in change.participants if w not in change.votes and w not in change.unreachable]
        waited_for = change.interrupt or change.probe
        absent = [w for w in late if self._watch.may_reconnect(w, event.at)]
        if waited_for and (absent or self._all_members_are_silent(change, late, event.at)):
            self._changes.extend(change, event.at)
            return
        self._effects.record("abort", f"generation {change.generation}: no vote from {', '.join(late)}")
        blamed = [w for w in late if w not in absent and (waited_for or w not in self.roster.members)]
        out = [self.roster.workers[w] for w in blamed]
        self._losses.eject(event.at, [Overdue(worker, "did not vote in time", None) for worker in out])
        if self.roster.change is change:
            self._changes.burn(event.at, "votes missing")

    def _all_members_are_silent(self, change: Change, late: list[str], at: float) -> bool:
        """No member of the current generation has been heard since the change began.

        A step needs all members. So a generation is over when one of its members has given it up, by a vote for the
        group that takes its place. As long as all of them are silent they may train on, and nobody may begin without
        them.
        """
        members = [w for w in change.participants if w in self.roster.members and self.roster.alive(w)]
        since_s = at - change.began_at
        return bool(members) and all(w in late and self._watch.unheard_s(w, at) > since_s for w in members)


def _is_from_before(change: Change | None, beat: Beat) -> bool:
    """Members have gone back to a checkpoint since it was sent, as others show."""
    if change is None or change.rollback_to is None:
        return False
    return bool(change.active) and beat.generation != change.generation


def _is_news(event: ev.Event) -> bool:
    """May it change which generation is due? A thousand workers come at once, and each look is at all of them."""
    match event:
        case ev.WorkerExpected() | ev.WorkerStopped() | ev.WorkerContinued() | ev.Said(message=WorkerHello() | Held()):
            # Nobody is a member by being on the way, and who is stopped or held has to be so for a while.
            return False
    return True
