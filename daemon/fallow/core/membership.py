"""The membership machine: one per run, pure.

`handle(event)` changes the roster and returns instructions. The caller makes the roster durable (compare-and-set
fenced by term and revision) *before* it carries the instructions out, so nobody acts on a decision that a restart could
forget.

Planned change:   no change -> PREPARE (all participants vote) -> committed (all switch at one boundary) -> done
Unplanned change: a member is gone -> Interrupt -> PREPARE over the survivors -> committed -> done
Anything that fails before the commit burns the generation's number; the old generation trains on.

The manner is that of `distributed.worker_state_machine` (dask/distributed): events in, instructions out, a table of
handlers, a story for the error message, and a validation switch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fallow.core import events as ev
from fallow.core.invariants import check
from fallow.core.joining import difference
from fallow.core.roster import Change, Final, Roster, Worker
from fallow.model import (
    Abort,
    ChangeKind,
    Commit,
    Dismiss,
    Exit,
    GenerationReport,
    Interrupt,
    Message,
    Peer,
    Prepare,
    Refused,
    RunStatus,
    ToWorker,
    WorkerPhase,
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines, all in seconds."""

    prepare_s: float = 30.0
    "votes have to be in by then"
    start_s: float = 600.0
    "from a worker's start to READY"
    lease_s: float = 30.0
    "a worker that was silent for this long is ejected"
    held_grace_s: float = 0.3
    "a broken group waits this long for the news of who died before it is rebuilt as it is"
    retry_s: float = 1.0
    "after an aborted change"
    resend_s: float = 2.0
    start_failures: int = 3
    "workers in a row that end before READY until the run stops taking new ones"


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """A group seems to be broken; settled by any newer generation."""

    at: float
    high: int
    "newest generation when it arose"
    reason: str


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
        self._term = term
        self._timing = timing
        self._validate = validate
        self._out: list[ev.Instruction] = []
        # Volatile: rebuilt from beats after a restart, so a head that comes back gives everybody a fresh lease.
        self._seen: dict[str, float] = dict.fromkeys(roster.workers, at)
        self._sent: dict[tuple[str, int, type[Message]], float] = {}
        self._retry_at = at
        self._suspect: _Suspicion | None = None
        if roster.change is not None and not roster.change.committed:
            # Prepared but not committed when the last head died: nobody may have switched, so it is burned.
            roster.change = None
        self._handlers: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.WorkerExpected: self._expected,
            ev.WorkerSaidHello: self._hello,
            ev.WorkerIsReady: self._ready,
            ev.VoteCast: self._vote,
            ev.WorkerBeat: self._beat,
            ev.WorkerActive: self._active,
            ev.WorkerHeld: self._held,
            ev.WorkerLeft: self._left,
            ev.WorkerFailed: self._failed,
            ev.WorkerGone: self._gone,
            ev.WorkerFinished: self._finished,
            ev.ReleaseWanted: self._release,
            ev.LimitChanged: self._limit,
            ev.CheckpointWritten: self._checkpoint,
            ev.Cancelled: self._cancel,
            ev.Ticked: self._tick,
        }

    def handle(self, event: ev.Event) -> list[ev.Instruction]:
        """Apply one event; returns what to do, in order."""
        if not isinstance(event, ev.Ticked | ev.WorkerBeat):
            self.story.append(event)
        self._out = []
        if not self.roster.status.ended:
            self._handlers[type(event)](event)
            self._plan(event.at)
        if self._validate:
            check(self.roster, self.story)
        return self._out

    def seen(self, worker: str) -> float | None:
        """When the worker was last heard of, on the events' clock."""
        return self._seen.get(worker)

    # -- workers come ---------------------------------------------------------------------------------------------

    def _expected(self, event: ev.WorkerExpected) -> None:
        r = self.roster
        known = r.workers.get(event.worker)
        if known is not None:
            known.node = event.node or known.node
            return
        r.workers[event.worker] = Worker(worker=event.worker, index=r.next_index, token=event.token, node=event.node)
        r.next_index += 1
        self._seen[event.worker] = event.at

    def _hello(self, event: ev.WorkerSaidHello) -> None:
        worker = self.roster.workers.get(event.worker)
        if worker is not None:
            worker.pid, worker.address = event.pid, event.address
            if worker.phase is not WorkerPhase.STARTING:
                self._seen[event.worker] = event.at

    def _ready(self, event: ev.WorkerIsReady) -> None:
        r = self.roster
        worker = r.workers.get(event.worker)
        if worker is None or worker.phase is not WorkerPhase.STARTING:
            return
        self._seen[event.worker] = event.at
        if r.signature is None:
            r.signature, r.layout = event.signature, event.layout
            r.shards, r.global_batch = event.shards, event.global_batch
            r.total_steps = event.total_steps
        problem = difference(r, event)
        if problem:
            worker.phase = WorkerPhase.GONE
            message = f"worker {worker.worker} on node {worker.node} was refused: {problem}"
            self._tell(worker.worker, Refused(code=Exit.DATA, message=message))
            self._record("refuse", message, worker=worker.worker)
            self._count_start_failure(message)
            return
        worker.phase = WorkerPhase.READY
        r.start_failures = 0

    # -- a change goes on -----------------------------------------------------------------------------------------

    def _vote(self, event: ev.VoteCast) -> None:
        change = self.roster.change
        if change is None or change.committed or change.generation != event.generation:
            return
        if not event.ok:
            self._record("abort", f"generation {change.generation}: {event.worker} could not: {event.reason}")
            if event.worker not in self.roster.members:
                self._dismiss(event.worker, Exit.TEMPFAIL, f"its group could not be built: {event.reason}")
            self._burn(event.at, event.reason)
        elif event.worker in change.participants and event.worker not in change.votes:
            change.votes.append(event.worker)

    def _beat(self, event: ev.WorkerBeat) -> None:
        r = self.roster
        worker = r.workers.get(event.worker)
        if worker is None:
            return
        if worker.phase is WorkerPhase.GONE:
            # It was let go while it could not hear (stopped, cut off, the head was away): it must not compute on.
            code = Exit.OK if worker.leaving_because else Exit.TEMPFAIL
            self._tell(event.worker, Dismiss(term=self._term, code=code, reason="it is no longer in the run"))
            return
        self._seen[event.worker] = event.at
        worker.step = max(worker.step, event.step)
        change = r.change
        if change is None:
            if event.prepared > r.generation:
                self._again(event, Abort(term=self._term, generation=event.prepared, reason="superseded"))
            elif event.held and event.worker in r.members and event.generation == r.generation:
                self._suspect_break(event.at, event.generation, f"{event.worker} is held")
        elif event.worker in change.participants:
            if not change.committed:
                if event.prepared == change.generation and event.worker not in change.votes:
                    change.votes.append(event.worker)
                elif event.prepared < change.generation:
                    self._again(event, self._prepare(change, event.at))
            elif event.generation == change.generation:
                if event.worker not in change.active and event.worker in change.members:
                    change.active.append(event.worker)
                    worker.has_state = True
            elif event.prepared == change.generation:
                self._again(event, Commit(term=self._term, generation=change.generation))
            else:
                # It never heard of this generation, so it cannot follow: only a rebuild takes it along.
                self._suspect_break(event.at, change.generation, f"{event.worker} missed its commit")

    def _active(self, event: ev.WorkerActive) -> None:
        worker = self.roster.workers.get(event.worker)
        change = self.roster.change
        if worker is None or worker.phase is WorkerPhase.GONE:
            return
        if change is None or change.generation != event.generation:
            return
        worker.has_state = True
        worker.step = max(worker.step, event.first_step)
        if event.worker not in change.active:
            change.active.append(event.worker)
        change.first_step = event.first_step
        change.steps_discarded = max(change.steps_discarded, event.steps_discarded)
        if event.pause_s > (change.pause_s or 0.0):
            change.pause_s, change.parts = event.pause_s, event.parts

    def _held(self, event: ev.WorkerHeld) -> None:
        if event.worker in self._involved():
            self._suspect_break(event.at, event.generation, f"{event.worker}: {event.reason}")

    def _suspect_break(self, at: float, generation: int, reason: str) -> None:
        """A group seems to be broken. It is rebuilt in a while, unless the news of a death comes first.

        Only a generation in which somebody still has to compute can be broken: survivors of an interrupt report the
        generation that was taken from them, and that is no news.
        """
        r, change = self.roster, self.roster.change
        if change is None:
            computing = {r.generation}
        elif change.interrupt:
            computing = {change.generation} if change.committed else set()
        else:
            computing = {change.generation, change.replaces} if change.committed else {r.generation}
        if generation in computing and self._suspect is None:
            self._suspect = _Suspicion(at, r.high, reason)

    def _left(self, event: ev.WorkerLeft) -> None:
        worker = self.roster.workers.get(event.worker)
        if worker is None:
            return
        change = self.roster.change
        if change is not None and change.committed and event.worker in change.leavers:
            change.left.append(event.worker)
        worker.phase = WorkerPhase.GONE

    def _checkpoint(self, event: ev.CheckpointWritten) -> None:
        r = self.roster
        if r.checkpoint is None or event.written.step >= r.checkpoint.step:
            r.checkpoint = event.written
        self._record("checkpoint", f"checkpoint of step {event.written.step}", path=event.written.path)

    # -- workers go -----------------------------------------------------------------------------------------------

    def _failed(self, event: ev.WorkerFailed) -> None:
        worker = self.roster.workers.get(event.worker)
        if worker is None:
            return
        self._record("failed", f"{event.worker} on {worker.node}: {event.message}", code=event.code)
        self.roster.message = f"{event.worker} on node {worker.node}: {event.message}"

    def _gone(self, event: ev.WorkerGone) -> None:
        r = self.roster
        worker = r.workers.get(event.worker)
        if worker is None or worker.phase is WorkerPhase.GONE:
            return
        before, worker.phase = worker.phase, WorkerPhase.GONE
        if before is WorkerPhase.STARTING:
            self._ended_before_ready(worker, event)
            return
        change = r.change
        if event.worker not in self._involved():
            self._record("eject", f"standby {event.worker} on {worker.node} is gone: {event.reason}")
            return
        if worker.finished:
            return
        if change is not None and change.committed and event.worker in change.leavers:
            # Whoever is active in the new generation has passed the boundary, and so had the leaver.
            if event.worker in change.left or change.active or event.code == Exit.OK:
                change.left.append(event.worker)
                return
        elif change is not None and not change.committed and event.worker not in r.members:
            self._record("eject", f"joiner {event.worker} on {worker.node} is gone: {event.reason}")
            self._burn(event.at, f"{event.worker} is gone")
            self._retry_at = event.at
            return
        self._record("eject", f"{event.worker} on {worker.node} is gone: {event.reason}", worker=event.worker)
        if r.finishing:
            return
        if r.scripted:
            r.limit = max(0, r.limit - 1)
        self._break(event.at, f"{event.worker} on {worker.node} is gone: {event.reason}", event.code)

    def _ended_before_ready(self, worker: Worker, event: ev.WorkerGone) -> None:
        what = f"worker {worker.worker} on node {worker.node} ended before its training loop: {event.reason}"
        if event.code == Exit.OK:
            what = (
                f"worker {worker.worker} on node {worker.node}: the script ended without reaching run.steps(); "
                "call fallow.init(), run.prepare(...) and loop over run.steps(loader)"
            )
        if not worker.leaving_because:
            self._record("failed", what, worker=worker.worker)
            self._count_start_failure(what)

    def _count_start_failure(self, what: str) -> None:
        r = self.roster
        r.start_failures += 1
        r.message = r.message or what
        others = [w for w in r.workers.values() if w.phase in (WorkerPhase.STARTING, WorkerPhase.READY)]
        if r.generation == 0 and not others:
            self._end(RunStatus.FAILED, r.message)

    def _finished(self, event: ev.WorkerFinished) -> None:
        r = self.roster
        worker = r.workers.get(event.worker)
        if worker is None or event.worker not in self._involved():
            return
        worker.finished = True
        worker.step = event.steps
        final = Final(steps=event.steps, digest=event.digest, loss=event.loss, samples=event.samples)
        if r.final is None:
            r.final = final
        elif r.final.digest != final.digest:
            text = f"members disagree on the final state: {event.worker} has {final.digest[:12]}"
            self._record("diverged", text)
            r.message = text
        if r.change is not None and not r.change.committed:
            self._burn(event.at, "the training is finished")

    def _release(self, event: ev.ReleaseWanted) -> None:
        if event.limit is not None:
            self.roster.limit = event.limit
            self._record("limit", f"at most {event.limit} members: {event.reason}")
        for name in event.workers:
            worker = self.roster.workers.get(name)
            if worker is None:
                continue
            worker.leaving_because = worker.leaving_because or event.reason
            if worker.phase is WorkerPhase.MEMBER:
                worker.phase = WorkerPhase.LEAVING
            elif worker.phase is WorkerPhase.STARTING:
                worker.phase = WorkerPhase.GONE
                self._out.append(ev.Kill(name, event.reason))
            elif worker.phase is WorkerPhase.READY:
                change = self.roster.change
                if change is not None and not change.committed and name in change.members:
                    self._burn(event.at, f"{name} has to leave: {event.reason}")
                    self._retry_at = event.at
                self._dismiss(name, Exit.OK, event.reason)

    def _limit(self, event: ev.LimitChanged) -> None:
        r = self.roster
        r.limit = event.limit
        self._record("limit", f"at most {event.limit} members: {event.reason}")
        staying = sorted(r.staying(), key=lambda w: r.workers[w].index)
        for name in staying[event.limit :]:
            r.workers[name].phase = WorkerPhase.LEAVING
            r.workers[name].leaving_because = event.reason

    def _cancel(self, event: ev.Cancelled) -> None:
        self._end(event.status, event.reason)

    def _tick(self, event: ev.Ticked) -> None:
        for worker in list(self.roster.workers.values()):
            silent = event.at - self._seen.setdefault(worker.worker, event.at)
            if worker.phase is WorkerPhase.GONE or worker.finished:
                continue
            if worker.phase is WorkerPhase.STARTING:
                if silent > self._timing.start_s:
                    self._eject(event.at, worker, f"did not reach run.steps() within {self._timing.start_s:.0f} s")
            elif silent > self._timing.lease_s:
                self._eject(event.at, worker, f"silent for {silent:.1f} s")
        change = self.roster.change
        if change is not None and not change.committed and event.at >= change.deadline_at:
            late = [w for w in change.participants if w not in change.votes]
            self._record("abort", f"generation {change.generation}: no vote from {', '.join(late)}")
            for name in late:
                if name not in self.roster.members or change.interrupt:
                    self._eject(event.at, self.roster.workers[name], "did not vote in time")
            if self.roster.change is change:
                self._burn(event.at, "votes missing")

    # -- decisions ------------------------------------------------------------------------------------------------

    def _plan(self, at: float) -> None:
        """Look at the roster and do what is due: commit, complete, rebuild, or begin the next change."""
        r = self.roster
        if r.status.ended:
            return
        if self._suspect is not None and self._suspect.high != r.high:
            self._suspect = None
        if self._suspect is not None and at - self._suspect.at >= self._timing.held_grace_s:
            self._break(at, f"the group broke ({self._suspect.reason})", None)
        if r.change is not None:
            self._advance(at)
        if r.change is None and not r.status.ended:
            if r.finishing:
                self._end_if_all_finished()
            elif at >= self._retry_at:
                self._begin_next(at)

    def _advance(self, at: float) -> None:
        r, change = self.roster, self.roster.change
        assert change is not None
        if not change.committed:
            needed = change.members if change.interrupt else [w for w in change.participants if r.alive(w)]
            if all(w in change.votes for w in needed):
                self._commit(change)
        if change.committed:
            here = all(w in change.active or r.workers[w].finished for w in change.members)
            away = all(w in change.left or not r.alive(w) for w in change.leavers)
            if here and away:
                self._complete(change, at)
            elif r.finishing:
                self._end_if_all_finished()

    def _commit(self, change: Change) -> None:
        r = self.roster
        change.committed = True
        r.generation = change.generation
        r.members = list(change.members)
        for name in change.members:
            if r.workers[name].phase is WorkerPhase.READY:
                r.workers[name].phase = WorkerPhase.MEMBER
        for name in change.participants:
            self._tell(name, Commit(term=self._term, generation=change.generation))
        self._out.append(ev.MembersChanged(change.members[0] if change.members else None))

    def _complete(self, change: Change, at: float) -> None:
        r = self.roster
        r.change = None
        r.steps_discarded += change.steps_discarded
        report = GenerationReport(
            generation=change.generation,
            kind=change.kind,
            members=list(change.members),
            first_step=change.first_step,
            pause_s=change.pause_s,
            parts=change.parts,
            reason=change.reason,
        )
        if change.members:
            r.status = RunStatus.TRAINING
            r.history.append(report)
        else:
            r.status = RunStatus.SUSPENDED
        pause = "" if change.pause_s is None else f", pause {change.pause_s:.3f} s"
        text = f"generation {change.generation}: {change.reason}; {len(change.members)} members{pause}"
        self._record(
            change.kind.value if change.members else "suspend",
            text,
            generation=change.generation,
            members=list(change.members),
            nodes=[r.workers[w].node for w in change.members],
            first_step=change.first_step,
            pause_s=change.pause_s,
        )

    def _begin_next(self, at: float) -> None:
        """Begin the change that the roster calls for, if any. Joins and leaves known now go together."""
        r = self.roster
        staying, leaving = r.staying(), r.leaving()
        joiners = r.standbys()[: max(0, r.useful_members - len(staying))]
        if not r.members:
            needed = r.min_members if r.status is RunStatus.WAITING else 1
            if joiners and len(joiners) >= min(needed, r.useful_members):
                reason = "started with " if r.generation == 0 else "went on with "
                self._begin(at, ChangeKind.START, joiners, [], False, reason + self._named(joiners))
            return
        if not joiners and not leaving:
            return
        reasons = []
        if joiners:
            reasons.append("absorbed " + self._named(joiners))
        if leaving:
            why = sorted({r.workers[w].leaving_because or "asked" for w in leaving})
            reasons.append(f"released {self._named(leaving)} ({', '.join(why)})")
        kinds = {(True, False): ChangeKind.ABSORB, (False, True): ChangeKind.RELEASE, (True, True): ChangeKind.MIXED}
        kind = kinds[bool(joiners), bool(leaving)]
        self._begin(at, kind, staying + joiners, leaving, False, ", ".join(reasons))

    def _begin(
        self,
        at: float,
        kind: ChangeKind,
        members: list[str],
        leavers: list[str],
        interrupt: bool,
        reason: str,
    ) -> None:
        r = self.roster
        r.high += 1
        r.change = Change(
            generation=r.high,
            replaces=r.generation,
            kind=kind,
            members=members,
            leavers=leavers,
            interrupt=interrupt,
            reason=reason,
            deadline_at=at + self._timing.prepare_s,
        )
        for name in r.change.participants:
            self._sent[name, r.high, Prepare] = at
            self._tell(name, self._prepare(r.change, at))

    def _break(self, at: float, reason: str, code: int | None) -> None:
        """A generation lost a member (or its links): abandon it and go on with whoever is left.

        At least one survivor has to hold the state; a leaver that has not left yet is kept if it alone does.
        """
        r, change = self.roster, self.roster.change
        self._suspect = None
        involved = [w for w in self._involved() if r.alive(w)]
        broken = {r.generation} | ({change.generation, change.replaces} if change is not None else set())
        if change is not None and not change.committed:
            involved = [w for w in involved if w in r.members]
        r.change = None
        for name in involved:
            for generation in sorted(broken - {0}):
                self._tell(name, Interrupt(term=self._term, generation=generation, reason=reason))
        members = [w for w in involved if r.workers[w].phase is WorkerPhase.MEMBER]
        if not any(r.workers[w].has_state for w in members):
            members = [w for w in involved if w not in members and r.workers[w].has_state] + members
        leavers = [w for w in involved if w not in members]
        if members:
            self._begin(at, ChangeKind.EJECT, members, leavers, True, reason)
            return
        r.members = []
        if code not in (None, Exit.OK, Exit.TEMPFAIL):
            self._end(RunStatus.FAILED, r.message or reason)
        elif code == Exit.OK:
            self._end(RunStatus.FAILED, f"the script left the training loop on every member: {reason}")
        else:
            r.status = RunStatus.SUSPENDED
            where = "its beginning" if r.checkpoint is None else f"the checkpoint of step {r.checkpoint.step}"
            self._record("lost", f"every member is gone ({reason}); the run goes on from {where}")

    def _burn(self, at: float, reason: str) -> None:
        """Give up a change that is not committed. Its number is never used again."""
        change = self.roster.change
        assert change is not None
        assert not change.committed
        self.roster.change = None
        self._retry_at = at + self._timing.retry_s
        for name in change.participants:
            if self.roster.alive(name):
                self._tell(name, Abort(term=self._term, generation=change.generation, reason=reason))
        if change.interrupt:
            # The generation it was to replace is broken already, so there is nothing to go back to.
            self._break(at, f"{change.reason}; {reason}", None)

    def _eject(self, at: float, worker: Worker, reason: str) -> None:
        self._out.append(ev.Kill(worker.worker, reason))
        self._gone(ev.WorkerGone(at=at, worker=worker.worker, reason=reason))

    def _end_if_all_finished(self) -> None:
        r = self.roster
        if all(r.workers[w].finished or not r.alive(w) for w in r.members):
            self._end(RunStatus.FINISHED, r.message if r.final is None else "")

    def _end(self, status: RunStatus, message: str) -> None:
        r = self.roster
        r.status, r.message, r.change = status, message, None
        code = Exit.OK if status is not RunStatus.FAILED else Exit.SOFTWARE
        for worker in r.workers.values():
            if worker.phase is not WorkerPhase.GONE and not worker.finished:
                self._tell(worker.worker, Dismiss(term=self._term, code=code, reason=f"the run is {status}"))
        self._out.append(ev.RunEnded(status, message))

    # -- small helpers --------------------------------------------------------------------------------------------

    def _involved(self) -> list[str]:
        """Members of the current generation and of the one being made, and those leaving it."""
        r = self.roster
        names: Iterable[str] = r.members if r.change is None else [*r.members, *r.change.participants]
        return list(dict.fromkeys(names))

    def _prepare(self, change: Change, at: float) -> Prepare:
        r = self.roster
        return Prepare(
            term=self._term,
            generation=change.generation,
            replaces=change.replaces,
            members=[Peer(worker=w, address=r.workers[w].address) for w in change.members],
            interrupt=change.interrupt,
            timeout_s=max(0.1, change.deadline_at - at),
            checkpoint=None if r.checkpoint is None else r.checkpoint.path,
        )

    def _dismiss(self, worker: str, code: int, reason: str) -> None:
        self.roster.workers[worker].phase = WorkerPhase.GONE
        self._tell(worker, Dismiss(term=self._term, code=code, reason=reason))
        self._record("dismiss", f"{worker} on {self.roster.workers[worker].node} is not needed: {reason}")

    def _again(self, event: ev.WorkerBeat, message: Prepare | Commit | Abort) -> None:
        """Repeat what a worker has not followed yet, not more often than `resend_s`."""
        key = (event.worker, message.generation, type(message))
        if event.at - self._sent.get(key, event.at - self._timing.resend_s) >= self._timing.resend_s:
            self._sent[key] = event.at
            self._tell(event.worker, message)

    def _tell(self, worker: str, message: ToWorker) -> None:
        self._out.append(ev.Tell(worker, message))

    def _record(self, kind: str, text: str, **data: Any) -> None:
        self._out.append(ev.Record(kind, text, data))

    def _named(self, workers: list[str]) -> str:
        return ", ".join(f"{w} ({self.roster.workers[w].node})" for w in workers)
