"""The life of a membership change: begun, voted on, committed, complete; or burned, or broken and begun again.

Planned change (joins, leaves, a rollback):
                  no change -> PREPARE (all participants vote) -> committed (all switch at one boundary) -> done
Unplanned change: a member is gone -> Interrupt -> PREPARE over the survivors -> committed -> done; newcomers whose
                  state was on its way are standbys again, for the next planned change
Anything that fails before the commit burns the generation's number; the old generation trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fallow.core import events as ev
from fallow.core.effects import Effects
from fallow.core.links import to_drop
from fallow.core.proposals import Proposal, after_loss, involved, named, report_of, wanted
from fallow.core.restarts import wait_s
from fallow.core.roster import Change, Roster, Worker
from fallow.core.timing import Timing
from fallow.core.watch import Watch
from fallow.model import (
    Abort,
    ChangeKind,
    Commit,
    Dismiss,
    Exit,
    Interrupt,
    OthersFinished,
    Peer,
    Prepare,
    RollbackReport,
    RunStatus,
    WorkerPhase,
)
from fallow.text import counted

_STUCK = (
    "step {step}: in {times} generations one after the other all members have waited for each other, for {s:.0f} s in "
    "the last, and no step was finished: {last}. They reach each other over the network, so either it does not carry "
    "what they send, or the script has members wait for each other by other means: look at what the nodes' network "
    "interfaces count as lost, and at the script for locks, files and process groups of its own"
)
_TRIES = 3
"""Generations in which the same step may come to nothing though nobody is to blame."""


def exit_unknown(main: Worker, why: str) -> str:
    """What is said of a main member whose training is complete and whose script's exit code nobody can tell."""
    return f"the exit code of the main member {main.worker} (node {main.node}) is not known: {why}"


class Awaited:
    """Workers of whom something is awaited that each does once and for all.

    In a large run all do it at the same time, and each message asks whether that was the last: who has done it is not
    looked at again.
    """

    def __init__(self, workers: Iterable[str]) -> None:
        self._left = list(workers)

    def all(self, done: Callable[[str], bool]) -> bool:
        """Have all of them? `done` never becomes false again where it was true."""
        while self._left and done(self._left[-1]):
            self._left.pop()
        return not self._left


class Changes:
    """Makes and unmakes the run's one change under way."""

    def __init__(self, roster: Roster, effects: Effects, watch: Watch, timing: Timing, at: float) -> None:
        self.retry_at = at
        self._roster = roster
        self._effects = effects
        self._watch = watch
        self._timing = timing
        self._probe_s = timing.probe_s
        "members that wait for each other for so long have their links looked at; doubled when these are good"
        self._stuck_at, self._stuck = -1, 0
        "finished steps of the run when all waited for each other to no end, and how often in a row they did there"
        self._finishing = roster.finishing
        self._content = False
        "no generation is wanted, as the roster is, or it has to wait"
        self._busy: str | None = None
        "who waited least when all were looked at: as long as that is not for long, not all wait for each other"
        self._awaited: tuple[tuple[int, bool], Awaited, Awaited] | None = None
        "(generation, committed), and who has to vote, or to switch, and who to leave"
        change = roster.change
        if change is not None and not change.committed:
            # Its group cannot be built any more: the rendezvous store was lost with the last head.
            if change.interrupt and not roster.finishing:
                self.break_off(at, "another head took over")
            else:
                roster.change = None

    # -- what is due ----------------------------------------------------------------------------------------------

    def plan(self, at: float, *, news: bool) -> None:
        """Look at the roster and do what is due: commit, complete, rebuild, or begin the next change.

        Args:
            at: now.
            news: the roster has changed since it was last looked at, and not only in how far its workers are. Without
                news, as after nearly every heartbeat, only time can make something due, and that is seen without going
                through all workers.
        """
        r = self._roster
        reason = self._watch.confirmed(at)
        if reason is not None and not self._roster.deserters():
            self.break_off(at, f"the group broke ({reason})")
            news = True
        if news:
            self._content = False
            if r.change is not None:
                self._advance(at)
            self._finishing = r.finishing
        if r.status.ended:
            return
        if self._finishing:
            self._end_if_all_finished(at)
            self._free_those_who_wait(at)
        elif r.change is None and at >= self.retry_at and not self._content:
            proposal = wanted(r)
            self._content = proposal is None or self._has_to_wait(proposal, at)
            if proposal is not None and not self._content:
                self.begin(at, proposal)
        self._look_at_links(at, news)

    def _has_to_wait(self, proposal: Proposal, at: float) -> bool:
        """A planned change needs every vote, so none is begun while one of its participants does not hear of it."""
        if wait_s(self._roster, proposal.kind, self._watch.lasted_s(at)) > 0:
            return True
        watch, lease_s = self._watch, self._timing.lease_s
        asked = [*proposal.members, *proposal.leavers]
        return any(watch.unheard_s(w, at) > lease_s or watch.may_reconnect(w, at) for w in asked)

    def _advance(self, at: float) -> None:
        r, change = self._roster, self._roster.change
        assert change is not None
        if not change.committed:
            voters, _ = self._who_is_awaited(change)
            if voters.all(lambda w: w in change.votes or (not change.interrupt and not r.alive(w))):
                if change.probe:
                    self._probe_s *= 2
                    self.burn(at, "its members reach each other: the links are slow, not cut")
                    self.retry_at = at
                    return
                self._commit(change, at)
        if change.committed:
            members, leavers = self._who_is_awaited(change)
            here = members.all(lambda w: w in change.active or r.workers[w].finished)
            if here and leavers.all(lambda w: w in change.left or not r.alive(w)):
                self._complete(change, at)

    def _who_is_awaited(self, change: Change) -> tuple[Awaited, Awaited]:
        key = change.generation, change.committed
        if self._awaited is None or self._awaited[0] != key:
            # Of a rebuild those who leave need not vote.
            leavers = change.leavers if change.committed else []
            voters = change.members if change.committed or change.interrupt else change.participants
            self._awaited = key, Awaited(voters), Awaited(leavers)
        return self._awaited[1:]

    def _look_at_links(self, at: float, news: bool) -> None:
        """All members wait for each other: a link is cut or slow. A group built beside the old one tells which."""
        r, change = self._roster, self._roster.change
        if r.status.ended or self._finishing or not r.members or (change is not None and not change.committed):
            return
        if self._one_is_busy(at, news):
            return
        # A leaver that has not left keeps the others waiting as a member does.
        alive = [w for w in involved(r) if r.alive(w)]
        waited = {w: self._watch.waited_s(w, at) for w in alive}
        self._busy = min(waited, key=waited.__getitem__, default=None)
        stuck = min(waited.values(), default=0.0)
        if stuck > self._timing.progress_s:
            self._begin_again(at, stuck)
        elif stuck > self._probe_s and len(r.members) > 1:
            reason = f"all members wait for each other, for {stuck:.1f} s now"
            if change is None:
                self.begin(at, Proposal(ChangeKind.EJECT, list(r.members), [], reason), probe=True)
                self._effects.record("probe", f"generation {r.high} looks at the links: {reason}")
            else:
                # The first exchange: a state that is still on its way counts as getting on, and hardly a step can be
                # lost. So it is done again, by a group that is built by those who reach each other.
                self._probe_s *= 2
                self.break_off(at, f"the first exchange of generation {r.generation} does not end: {reason}")

    def _begin_again(self, at: float, stuck: float) -> None:
        """Rebuild the group of members that wait for each other to no end; the run ends if that does not help."""
        r = self._roster
        self._stuck = self._stuck + 1 if r.front == self._stuck_at else 1
        self._stuck_at = r.front
        if self._stuck == _TRIES:
            self.end(RunStatus.FAILED, _STUCK.format(step=r.front, times=_TRIES, s=stuck, last=named(r, r.members)))
            return
        self.break_off(at, f"all members waited for each other for {stuck:.1f} s")

    def _one_is_busy(self, at: float, news: bool) -> bool:
        """The one that waited least still does: so nobody's links need a look."""
        r, name = self._roster, self._busy
        if name is None or self._watch.waited_s(name, at) > min(self._probe_s, self._timing.progress_s):
            return False
        leavers = [] if r.change is None else r.change.leavers
        return not news or (r.alive(name) and (name in r.members or name in leavers))

    # -- steps of a change ----------------------------------------------------------------------------------------

    def begin(self, at: float, proposal: Proposal, *, interrupt: bool = False, probe: bool = False) -> None:
        r = self._roster
        r.high += 1
        r.change = Change(
            generation=r.high,
            replaces=r.generation,
            kind=proposal.kind,
            members=proposal.members,
            leavers=proposal.leavers,
            interrupt=interrupt,
            probe=probe,
            rollback_to=r.rollback.to_step if r.rollback and proposal.members and not probe else None,
            reason=proposal.reason,
            began_at=at,
            deadline_at=at + self._patience_s(interrupt or probe),
        )
        self._effects.forget_sent()
        message = self.prepare(r.change, at)
        for name in r.change.participants:
            self._effects.note_sent(name, r.high, Prepare, at)
            self._effects.tell(name, message)

    def extend(self, change: Change, at: float) -> None:
        """Wait for votes as long again: those that are missing may be on their way, or their voters know of nothing."""
        change.deadline_at = at + self._patience_s(change.interrupt or change.probe)

    def _patience_s(self, waited_for: bool) -> float:
        timing = self._timing
        return min(timing.prepare_s, timing.rebuild_s) if waited_for else timing.prepare_s

    def prepare(self, change: Change, at: float) -> Prepare:
        """The message that has a participant build its group; said again to those who missed it."""
        r = self._roster
        workers = [r.workers[name] for name in change.members]
        nodes: dict[tuple[str, str], int] = {}
        return Prepare(
            term=self._effects.term,
            generation=change.generation,
            replaces=change.replaces,
            members=[
                Peer(
                    worker=one.worker,
                    address=one.address,
                    node=nodes.setdefault((one.token, one.node), len(nodes)),
                )
                for one in workers
            ],
            interrupt=change.interrupt,
            timeout_s=max(0.1, change.deadline_at - at),
            checkpoints=[written.path for written in r.usable_checkpoints()],
            outcome=r.outcome,
            rollback=change.rollback_to is not None,
        )

    def _commit(self, change: Change, at: float) -> None:
        r = self._roster
        self._watch.committed(at)
        change.committed = True
        r.generation = change.generation
        r.members = list(change.members)
        for name in change.members:
            if r.workers[name].phase is WorkerPhase.READY:
                r.workers[name].phase = WorkerPhase.MEMBER
        commit = Commit(term=self._effects.term, generation=change.generation)
        for name in change.participants:
            # Beats that were on their way when it was said do not show that anybody missed it.
            self._effects.note_sent(name, change.generation, Commit, at)
            self._effects.tell(name, commit)

    def note_active(self, change: Change, worker: Worker) -> None:
        """A member computes in a generation that was committed: all of its members have passed the boundary."""
        if change.rollback_to is not None and not change.active:
            self._note_rollback(change.generation, change.rollback_to)
        change.active.add(worker.worker)
        worker.has_state = True

    def _note_rollback(self, generation: int, step: int) -> None:
        """All members have dropped what they held. What was reached before says nothing of them any more."""
        r, front = self._roster, max(self._roster.front, step)
        if r.rollback is not None and r.rollback.to_step == step:
            front, r.rollback = max(front, r.rollback.from_step), None
        r.rollbacks.append(RollbackReport(generation=generation, from_step=front, to_step=step))
        for worker in r.workers.values():
            worker.has_state = False
            worker.step = min(worker.step, step)
        r.forgotten_step = min(r.forgotten_step, step)

    def _complete(self, change: Change, at: float) -> None:
        r = self._roster
        r.change = None
        r.steps_discarded += change.steps_discarded
        if not change.interrupt:  # else newcomers may be about to repeat a first exchange that did not end
            self._probe_s = self._timing.probe_s
        report = report_of(change, at)
        if change.members:
            r.status = RunStatus.TRAINING
            r.history.append(report)
        else:
            r.status = RunStatus.SUSPENDED
        pause = "" if change.pause_s is None else f", pause {change.pause_s:.3f} s"
        then = "" if change.members else f"; the run goes on from {self._kept()}"
        self._effects.record(
            change.kind.value if change.members else "suspend",
            f"generation {change.generation}: {change.reason}; {counted(len(change.members), 'member')}{pause}{then}",
            generation=change.generation,
            members=list(change.members),
            nodes=[r.workers[w].node for w in change.members],
            first_step=change.first_step,
            pause_s=change.pause_s,
        )

    def burn(self, at: float, reason: str) -> None:
        """Give up a change that is not committed. Its number is never used again."""
        change = self._roster.change
        assert change is not None
        assert not change.committed
        self.retry_at = at + self._timing.retry_s
        for name in change.participants:
            if self._roster.alive(name):
                self._effects.tell(name, Abort(term=self._effects.term, generation=change.generation, reason=reason))
        if change.interrupt and not self._roster.finishing:
            # The generation it was to replace is broken already, so there is nothing to go back to.
            self.break_off(at, reason)
        else:
            self._roster.change = None

    def break_off(self, at: float, reason: str, code: int | None = None) -> None:
        """A generation lost a member (or its links): abandon it and go on with whoever is left.

        Args:
            at: now.
            reason: why, in words.
            code: exit status of the member that was lost, where it is known.
        """
        r, change = self._roster, self._roster.change
        self._watch.suspicion = None
        if r.finishing:
            return
        if change is not None and change.interrupt:
            # It never became complete, so no report would say why it was begun.
            reason = f"{change.reason}; {reason}"
        names = [w for w in involved(r) if r.workers[w].phase in (WorkerPhase.MEMBER, WorkerPhase.LEAVING)]
        broken = {r.generation} | ({change.generation, change.replaces} if change is not None else set())
        r.change = None
        for name in names:
            for generation in sorted(broken - {0}):
                self._effects.tell(name, Interrupt(term=self._effects.term, generation=generation, reason=reason))
        proposal = after_loss(r, names, reason)
        if proposal is not None:
            self._set_back([w for w in names if w not in proposal.members and w not in proposal.leavers])
            self.begin(at, proposal, interrupt=True)
            return
        r.members = []
        if code not in (None, Exit.OK, Exit.TEMPFAIL):
            self.end(RunStatus.FAILED, r.message or reason)
        elif code == Exit.OK:
            self.end(RunStatus.FAILED, f"the script left the training loop on every member: {reason}")
        else:
            r.status = RunStatus.SUSPENDED
            self._effects.record("lost", f"every member is gone ({reason}); the run goes on from {self._kept()}")
            for name in names:  # those who were leaving, before they had the state
                self._effects.dismiss(name, Exit.OK, r.workers[name].leaving_because)

    def _set_back(self, newcomers: list[str]) -> None:
        """Newcomers whose state was still on its way are standbys again: the next planned change absorbs them."""
        r = self._roster
        r.members = [w for w in r.members if w not in newcomers]
        for name in newcomers:
            r.workers[name].phase = WorkerPhase.READY

    def await_deserter(self, worker: str) -> None:
        """Build no group with a member whose script has ended: it would be taken for one that is cut off or slow."""
        change = self._roster.change
        if change is None or change.committed or worker not in change.members:
            return
        for name in change.participants:
            if self._roster.alive(name):
                reason = f"the script of {worker} has ended"
                self._effects.tell(name, Abort(term=self._effects.term, generation=change.generation, reason=reason))
        self._roster.change = None

    def _kept(self) -> str:
        """Where those begin who come when nobody is left."""
        if self._roster.restarts:
            return "what its script has saved"
        usable = self._roster.usable_checkpoints()
        return f"the checkpoint of step {usable[0].step}" if usable else "its beginning"

    def cut_off(self, at: float) -> list[str]:
        """Members whom the votes so far prove unreachable, once enough votes are in. A planned change is burned.

        In a planned change members that do not reach each other stay: their own generation may work all the same.
        """
        r, change = self._roster, self._roster.change
        if change is None or change.committed or change.accused_at is None:
            return []
        accused = {name for names in change.unreachable.values() for name in names}
        silent = set(change.participants) - change.votes - change.unreachable.keys() - accused
        if silent and at < min(change.accused_at + self._timing.accuse_s, change.deadline_at):
            return []
        by_age = sorted(change.members, key=lambda w: r.workers[w].index)
        holders = [w for w in change.members if r.workers[w].has_state]
        if change.interrupt or change.probe:
            return to_drop(change.unreachable, by_age, holders)
        newcomers = [w for w in change.members if w not in r.members]
        dropped = to_drop(change.unreachable, [*(w for w in by_age if w not in newcomers), *newcomers], holders)
        dropped = [w for w in dropped if w in newcomers]
        told = "; ".join(f"{w} does not reach {', '.join(names)}" for w, names in sorted(change.unreachable.items()))
        self._effects.record("abort", f"generation {change.generation}: {told}")
        self.burn(at, told)
        self.retry_at = at if dropped else at + self._timing.prepare_s
        return dropped

    # -- the end --------------------------------------------------------------------------------------------------

    def _end_if_all_finished(self, at: float) -> None:
        r = self._roster
        main = r.final_main()
        if main is not None and not r.alive(main.worker) and not main.finished:
            r.traceback = main.traceback
            why = main.ended_because or "it is gone"
            self.end(
                RunStatus.FAILED,
                f"the main member {main.worker} (node {main.node}) ended after the training, before its script had: "
                f"{why}",
            )
            return
        # A newcomer without state was overtaken by the end: the others never came to the boundary of its generation.
        awaited = [w for w in r.members if r.alive(w) and r.workers[w].has_state]
        if not all(r.workers[w].finished for w in awaited):
            return
        if main is not None and r.alive(main.worker):
            # With which exit code its script has ended is known when its process is gone.
            if not self._watch.silent(main.worker, at):
                return
            why = f"its process was still there {self._timing.lease_s:g} s after its script had ended"
            main.ended_because = exit_unknown(main, why)
            self._effects.record("exit", main.ended_because, worker=main.worker)
        self.end(RunStatus.FINISHED, (main.ended_because if main is not None else "") or r.diverged)

    def _free_those_who_wait(self, at: float) -> None:
        """Some have finished, so nothing is rebuilt: who waits for them hears what they know, and ends by itself."""
        r = self._roster
        if r.status.ended or r.final is None:
            return
        for name in r.members:
            if r.alive(name) and not r.workers[name].finished and self._watch.waits_in_vain(name, at):
                self._effects.again(name, r.high, OthersFinished, self._others_finished, at)

    def _others_finished(self) -> OthersFinished:
        final = self._roster.final
        assert final is not None
        return OthersFinished(term=self._effects.term, steps=final.steps, agreed=final.agreed, answer=final.answer)

    def end(self, status: RunStatus, message: str) -> None:
        """The run is over."""
        r = self._roster
        r.status, r.message, r.change = status, message, None
        code = Exit.OK if status is not RunStatus.FAILED else Exit.SOFTWARE
        for worker in r.workers.values():
            if worker.phase is not WorkerPhase.GONE and not worker.finished:
                self._effects.tell(
                    worker.worker, Dismiss(term=self._effects.term, code=code, reason=f"the run is {status}")
                )
        self._effects.add(ev.RunEnded(status, message))
