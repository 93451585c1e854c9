"""Workers that go, by themselves or because their time is up: whose failure it is, and what it breaks. Part of the
membership machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from fallow.core import events as ev
from fallow.core import failures
from fallow.core.changes import Changes, exit_unknown
from fallow.core.effects import Effects
from fallow.core.proposals import is_involved
from fallow.core.roster import Failure, FailureKind, Roster, Worker
from fallow.core.timing import Timing
from fallow.core.watch import Overdue, Watch
from fallow.model import Exit, Failed, Outcome, RunStatus, WorkerPhase

CRASHES = frozenset((4, 6, 7, 8, 11))
"""SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: signals that a process brings upon itself. SIGKILL comes from outside."""

_DESERTED = (
    "its script ended ({how}) inside of the run.updates loop while the others go on; all have to leave it in the "
    "same step: decide by run.mean(loss) in the final body or by run.step, not by a member's own loss or rank"
)

_ENV = "env:// rendezvous"
"""In the last line of what torch says where an init_process_group finds no fixed world."""


class Losses:
    """Goes on without workers."""

    def __init__(self, roster: Roster, effects: Effects, watch: Watch, changes: Changes, timing: Timing) -> None:
        self._roster = roster
        self._effects = effects
        self._watch = watch
        self._changes = changes
        self._timing = timing

    def failed(self, failed: Failed, at: float) -> None:
        """A worker says that its script failed."""
        r = self._roster
        worker = r.workers.get(failed.worker)
        if worker is None or worker.phase is WorkerPhase.GONE or worker.finished:
            return
        text = f"{failed.worker} on node {worker.node}: {failed.message}"
        self._effects.record(
            "failed", text, worker=failed.worker, code=failed.code, step=failed.step, traceback=failed.traceback
        )
        r.message = text
        worker.ended_because, worker.traceback = failed.message, failed.traceback
        if failed.code == Exit.TEMPFAIL or worker.phase is WorkerPhase.STARTING:
            return  # no failure of the script's, or one that counts when the process has ended
        worker.step = max(worker.step, failed.step)
        self._keep_outcome(failed.outcome)
        signature = failed.signature or f"exit code {failed.code}"
        if not self._is_the_scripts(at, worker, FailureKind.EXCEPTION, signature, failed.message, failed.traceback):
            self._lose(at, [worker], failed.message, failed.code)

    def _keep_outcome(self, outcome: Outcome | None) -> None:
        """Those who still wait for it must not do again, as the main member, what is behind that exchange."""
        known = self._roster.outcome
        if outcome is not None and (known is None or _order(outcome) > _order(known)):
            self._roster.outcome = outcome

    def gone(self, event: ev.WorkerGone) -> None:
        """A worker's process has ended, or nobody knows of it any more."""
        worker = self._roster.workers.get(event.worker)
        if worker is None or worker.phase is WorkerPhase.GONE:
            return
        if worker.finished:
            self._exited(worker, event)
            return
        kind, signature, reason = None, "", event.reason
        if event.signal in CRASHES:
            kind, signature = FailureKind.CRASH, f"signal {event.signal}"
        elif event.code not in (None, Exit.OK, Exit.TEMPFAIL):
            kind, signature = FailureKind.EXCEPTION, f"exit code {event.code}"
        elif event.code == Exit.OK and self._deserts(worker):
            kind, signature = FailureKind.EXCEPTION, failures.APART + "exit code 0"
            reason = _DESERTED.format(how="exit code 0")
        if kind is not None and not worker.leaving_because:
            if kind is FailureKind.EXCEPTION and worker.phase is not WorkerPhase.STARTING:
                text = f"{worker.worker} on node {worker.node}: the script ended with exit code {event.code}"
                self._effects.record("failed", text, worker=worker.worker, code=event.code, step=worker.step)
            if worker.phase is WorkerPhase.STARTING:
                worker.traceback = worker.traceback or event.tail
                self._note(event.at, worker, kind, signature, reason)
            elif self._is_the_scripts(event.at, worker, kind, signature, reason, event.tail):
                return
        self._lose(event.at, [worker], event.reason, event.code)

    def _deserts(self, worker: Worker) -> bool:
        """Its script has ended in order, but in the middle of the training, in which others go on."""
        r = self._roster
        here = worker.phase is WorkerPhase.MEMBER and not worker.leaving_because and not r.finishing
        return here and any(w != worker.worker for w in r.staying())

    def _exited(self, worker: Worker, event: ev.WorkerGone) -> None:
        """Its script had ended, and now its process has: on the main member, how it did decides about the run."""
        worker.phase = WorkerPhase.GONE
        self._watch.forget(worker.worker)
        if event.code == Exit.OK:
            return
        is_main = worker is self._roster.final_main()
        if event.code is None:
            worker.ended_because = exit_unknown(worker, event.reason) if is_main else event.reason
            self._effects.record("exit", f"{worker.worker} on {worker.node}: {event.reason}", worker=worker.worker)
            return
        text = f"{worker.worker} on node {worker.node}: its script ended after the training, but {event.reason}"
        self._effects.record("failed", text, worker=worker.worker, code=event.code, step=worker.step)
        if is_main:
            text = f"the main member {worker.worker} (node {worker.node}) failed after the training: {event.reason}"
            self._changes.end(RunStatus.FAILED, text)

    def eject(self, at: float, overdue: Sequence[Overdue]) -> None:
        """Have these killed, and go on without them."""
        for one in overdue:
            if one.worker.deserted and self._deserts(one.worker):
                text = _DESERTED.format(how=f"its process did not: {one.reason}")
                self._effects.add(ev.Kill(one.worker.worker, one.reason))
                if self._is_the_scripts(at, one.worker, FailureKind.EXCEPTION, failures.APART + "desertion", text, ""):
                    return
            if one.kind is not None:
                self._note(at, one.worker, one.kind, one.kind.value, one.reason)
            self._effects.add(ev.Kill(one.worker.worker, one.reason, stack=one.kind is FailureKind.HANG))
        self._lose(at, [one.worker for one in overdue], "; ".join(dict.fromkeys(one.reason for one in overdue)))

    def _lose(self, at: float, workers: Sequence[Worker], reason: str, code: int | None = None) -> None:
        """These are gone; whatever depended on them is begun again, once."""
        r, change = self._roster, self._roster.change
        broken: list[str] = []
        burned: list[str] = []
        for worker in workers:
            name, where = worker.worker, f"{worker.worker} on {worker.node}"
            before, worker.phase = worker.phase, WorkerPhase.GONE
            self._watch.forget(name)
            worker.ended_because = worker.ended_because or reason
            if before is WorkerPhase.STARTING:
                self._ended_before_ready(worker, reason, code)
                continue
            if not is_involved(r, name):
                self._effects.record("eject", f"standby {where} is gone: {reason}", worker=name)
                continue
            if change is not None and change.committed and name in change.leavers:
                # Whoever is active in the new generation has passed the boundary, and so had the leaver.
                if name in change.left or change.active or code == Exit.OK:
                    change.left.add(name)
                    continue
            elif before is WorkerPhase.READY:
                self._effects.record("eject", f"joiner {where} is gone: {reason}", worker=name)
                burned.append(name)
                continue
            self._effects.record("eject", f"{where} is gone: {reason}", worker=name)
            if r.scripted and not r.finishing:
                r.limit = max(0, r.limit - 1)
            broken.append(where)
        if r.status.ended:
            return
        if broken:
            self._changes.break_off(at, f"{', '.join(broken)} is gone: {reason}", code)
        elif burned and r.change is change and change is not None:
            self._changes.burn(at, f"{', '.join(burned)} is gone")
            self._changes.retry_at = at

    def _is_the_scripts(
        self, at: float, worker: Worker, kind: FailureKind, signature: str, text: str, trace: str
    ) -> bool:
        """Note a failure. True if it is the script's own, which has ended the run."""
        r = self._roster
        verdict = None if r.finishing else failures.verdict(r, self._failure(at, worker, kind, signature, text))
        if verdict is None:
            self._note(at, worker, kind, signature, text)
            return False
        self._effects.record("eject", f"{worker.worker} on {worker.node} is gone: {text}", worker=worker.worker)
        worker.phase = WorkerPhase.GONE
        r.traceback = trace
        self._changes.end(RunStatus.FAILED, verdict)
        return True

    def _note(self, at: float, worker: Worker, kind: FailureKind, signature: str, text: str) -> None:
        failure = self._failure(at, worker, kind, signature, text)
        reason = failures.note(self._roster, failure, self._timing.bar_after)
        if reason is not None:
            self._effects.record("bar", f"node {failure.node} is barred from this run: {reason}", node=failure.node)
            self._effects.add(ev.NodeBarred(failure.node, reason))

    def _failure(self, at: float, worker: Worker, kind: FailureKind, signature: str, text: str) -> Failure:
        return Failure(
            worker=worker.worker,
            node=worker.node,
            token=worker.token,
            kind=kind,
            signature=signature,
            step=worker.step,
            text=text,
            at=at,
            index=worker.index,
            arrived=self._roster.next_index,
        )

    def _ended_before_ready(self, worker: Worker, reason: str, code: int | None) -> None:
        what = f"worker {worker.worker} on node {worker.node} ended before its training loop: {reason}"
        if code == Exit.OK:
            what = (
                f"worker {worker.worker} on node {worker.node}: the script ended without reaching run.updates(); "
                "call fallow.init(), run.prepare(...) and loop over run.updates(loader)"
            )
        elif _ENV in reason:
            what += (
                "; write fallow.init() in the place of torch.distributed's init_process_group: none of its process "
                "groups could follow the membership"
            )
        if not worker.leaving_because:
            self._effects.record("failed", what, worker=worker.worker)
            self.count_start_failure(what)

    def count_start_failure(self, what: str) -> None:
        """A worker could not even begin; where none ever could, the run has failed."""
        r = self._roster
        r.start_failures += 1
        r.message = r.message or what
        others = [w for w in r.workers.values() if w.phase in (WorkerPhase.STARTING, WorkerPhase.READY)]
        if r.generation == 0 and not others:
            r.traceback = next((w.traceback for w in r.workers.values() if w.traceback), "")
            self._changes.end(RunStatus.FAILED, r.message)


def _order(outcome: Outcome) -> tuple[int, int]:
    return outcome.generation, outcome.agreed
