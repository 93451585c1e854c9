"""What the head knows of its workers from moment to moment: who is heard of, who gets on, whose group seems broken.

None of it is durable. A head that comes back starts with fresh leases and learns the rest from the next beats.

Silence alone proves nothing: the network between the head and a node may be down while the node trains on. So

- a node is silent only in comparison with somebody who is heard, and has longer after an absence of the head;
- a step that others finish is a sign of life of every member of their generation, since a step needs all of them;
- a silent member is ejected only when a member that is heard waits for it, or when its own agent is heard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fallow.core.lease_clock import DEAF_S, RECONNECT_S, Hearing
from fallow.core.proposals import involved, is_involved
from fallow.core.roster import FailureKind, Roster, Worker
from fallow.core.timing import Timing
from fallow.model import Beat, Doing, WorkerPhase

_GENERATIONS = 4
"""Generations of which the newest step is remembered: those that may still step, and a few burned in between."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A group seems to be broken; settled by any newer generation."""

    at: float
    high: int
    "newest generation when it arose"
    reason: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """A worker whose time is up."""

    worker: Worker
    reason: str
    kind: FailureKind | None
    "None: not the node's failure"


class Watch:
    """Times and beats of one run's workers.

    Args:
        roster: read only.
        timing: deadlines.
        at: now, on the events' clock.
    """

    def __init__(self, roster: Roster, timing: Timing, at: float) -> None:
        self.suspicion: Suspicion | None = None
        self._roster = roster
        self._timing = timing
        self._heard: dict[str, float] = dict.fromkeys(roster.workers, at)
        self._beats: dict[str, tuple[float, Beat]] = {}
        "when the last one came, and what it said"
        self._stopped: dict[str, float] = {}
        self._agent_heard: dict[str, float] = {}
        "by worker: when its agent was heard last"
        self._steps: dict[int, tuple[int, float]] = {}
        "generation -> (its newest finished step, when this was seen to grow)"
        self._hearing = Hearing(at)
        self._committed_at = at
        self._spared_at = -math.inf
        "when members that did not get on were last kept, since another one was to blame"

    def hear(self, worker: str, at: float) -> None:
        """Something came from the worker itself."""
        self._heard[worker] = at

    def beat(self, beat: Beat, at: float) -> None:
        self._heard[beat.worker] = at
        self._beats[beat.worker] = at, beat
        self._stopped.pop(beat.worker, None)
        if beat.generation:
            self._note_step(beat, at)

    def _note_step(self, beat: Beat, at: float) -> None:
        step, _ = self._steps.get(beat.generation, (-1, 0.0))
        if beat.step > step:
            # Of the first report nobody knows how old its step is.
            self._steps[beat.generation] = beat.step, -math.inf if step < 0 else at
            for old in sorted(self._steps)[:-_GENERATIONS]:
                del self._steps[old]

    def hear_agent(self, worker: str, at: float) -> None:
        """The worker's agent was heard: the network to its node works."""
        self._agent_heard[worker] = at

    def listen(self, hearing: Hearing) -> None:
        """A tick: this is what the head could hear until now."""
        self._hearing = hearing

    def stopped(self, worker: str, at: float) -> None:
        """Its agent sees it stopped; a beat of its own proves the contrary."""
        self._stopped.setdefault(worker, at)

    def continued(self, worker: str) -> None:
        """Its agent sees it stopped no more. Its own beat may be long in coming, or not begun yet."""
        self._stopped.pop(worker, None)

    def seems_stopped(self, worker: str) -> bool:
        return worker in self._stopped

    def committed(self, at: float) -> None:
        """A generation begins: what its members waited for before is over."""
        self._committed_at = at

    def lasted_s(self, at: float) -> float:
        """Seconds since the current generation was committed, or since this head began if that is shorter."""
        return at - self._committed_at

    def heard(self, worker: str) -> float | None:
        return self._heard.get(worker)

    def forget(self, worker: str) -> None:
        self._heard.pop(worker, None)
        self._beats.pop(worker, None)
        self._stopped.pop(worker, None)
        self._agent_heard.pop(worker, None)

    def overdue(self, at: float) -> list[Overdue]:
        """Workers that have to be ejected now."""
        waits = (self._beats[w][1].doing is Doing.WAITING for w in self._roster.members if w in self._beats)
        others_wait, finishing = any(waits), self._roster.finishing
        stalled = {} if finishing else self._stalled(at, others_wait)
        found = (self._look(worker, at, stalled.get(worker.worker, 0.0)) for worker in self._roster.workers.values())
        return [overdue for overdue in found if overdue is not None]

    def _stalled(self, at: float, others_wait: bool) -> dict[str, float]:
        """Who has to go because it does not get on -> for how many seconds.

        Where a kernel hangs, the others' processes may be stuck as well: in the driver, behind sums that do not come.
        Whose device computes is to blame then, and the others have the whole deadline once more.
        """
        others = (WorkerPhase.STARTING, WorkerPhase.GONE)
        workers = (w for w in self._roster.workers.values() if w.phase not in others and not w.finished)
        seconds = {w.worker: self._stalled_s(w.worker, at, others_wait) for w in workers}
        found = {name: stalled for name, stalled in seconds.items() if stalled > self._timing.progress_s}
        computing = {name: stalled for name, stalled in found.items() if self._beats[name][1].computes}
        if computing and len(computing) < len(found):
            self._spared_at = at
        return computing or found

    def _look(self, worker: Worker, at: float, stalled: float) -> Overdue | None:
        if worker.phase is WorkerPhase.GONE or worker.finished:
            return None
        name, timing = worker.worker, self._timing
        stopped = at - self._stopped.get(name, at)
        if stopped >= timing.stopped_s:
            return Overdue(worker, f"its process is stopped (for {stopped:.1f} s)", None)
        if worker.phase is WorkerPhase.STARTING:
            if self.unheard_s(name, at) > timing.start_s:
                return Overdue(worker, f"did not reach run.updates() within {timing.start_s:.0f} s", FailureKind.HANG)
            return None
        if self._is_lost(name, at):
            return Overdue(worker, f"silent for {self._silent_s(name, at):.1f} s", FailureKind.HANG)
        if stalled:
            return Overdue(worker, f"no progress for {stalled:.1f} s, alive", FailureKind.HANG)
        return None

    def _stalled_s(self, worker: str, at: float, others_wait: bool) -> float:
        """For how long the worker has kept the run from getting on."""
        came, beat = self._beats.get(worker, (at, None))
        if beat is None or beat.doing is Doing.WAITING:
            return 0.0
        if beat.doing is Doing.OUTSIDE and not others_wait:
            # After the loop, or between two: nobody knows whether it will come to another one.
            return 0.0
        # What a worker did while it was not heard nobody knows: it is silent, not without progress.
        return min(self._since(beat, came, min(at, came + self._timing.lease_s)), at - self._spared_at)

    def _since(self, beat: Beat, came: float, at: float) -> float:
        """For how long a worker has done the same thing. A step that was finished since is another one."""
        _, step_at = self._steps.get(beat.generation, (0, -math.inf))
        return min(beat.stalled_s + at - came, max(at - step_at, 0.0))

    def silent(self, worker: str, at: float) -> bool:
        """It gave no sign of life for as long as its lease, while others were heard."""
        return self._silent_s(worker, at) > self._timing.lease_s and not self.may_reconnect(worker, at)

    def unheard_s(self, worker: str, at: float) -> float:
        """For how long nothing came from the worker itself, whatever others tell of it."""
        return at - self._heard.setdefault(worker, at)

    def may_reconnect(self, worker: str, at: float) -> bool:
        """It was not heard since the head's last absence, and its connection may still come back."""
        returned_at = self._hearing.returned_at
        return self._heard.get(worker, math.inf) < returned_at and at < returned_at + RECONNECT_S

    def _silent_s(self, worker: str, at: float) -> float:
        r = self._roster
        signs = [self._heard.setdefault(worker, at)]
        if worker in r.members and r.generation in self._steps:
            signs.append(self._steps[r.generation][1])
        if r.change is not None and r.change.concerns(worker) and r.change.replaces in self._steps:
            signs.append(self._steps[r.change.replaces][1])
        return max(0.0, min(at, self._hearing.newest_at) - max(signs))

    def _is_lost(self, worker: str, at: float) -> bool:
        """It is silent, and this is not known to be its connection to the head alone."""
        timing = self._timing
        if self._silent_s(worker, at) <= timing.lease_s:
            return False
        late = self.may_reconnect(worker, at)
        agent_heard = self._agent_heard.get(worker, -math.inf) >= self._hearing.newest_at - DEAF_S
        if not self._is_needed(worker) or (agent_heard and not late):
            return not late
        # After an absence the others may have reason to wait for one whose connection is the last to come back.
        needed_s = timing.lease_s if late else min(timing.lease_s, timing.probe_s)
        others = (name for name in involved(self._roster) if name != worker and self._roster.alive(name))
        return any(self._waits_s(name, at) >= needed_s for name in others)

    def _is_needed(self, worker: str) -> bool:
        """Others come to wait for it sooner or later."""
        r = self._roster
        has_left = r.change is not None and worker in r.change.leavers and bool(r.change.active)
        return is_involved(r, worker) and not r.finishing and not has_left

    def _waits_s(self, worker: str, at: float) -> float:
        """For how long a member that is heard has waited for others; 0: it does not, or is not heard."""
        came, beat = self._beats.get(worker, (at, None))
        if beat is None or at - came > DEAF_S:
            return 0.0
        if beat.held:
            return math.inf
        return self._since(beat, came, at) if beat.doing is Doing.WAITING else 0.0

    def waits_in_vain(self, worker: str, at: float) -> bool:
        """Others have finished, and it waits for them: for longer than what is on its way already can take."""
        came, beat = self._beats.get(worker, (at, None))
        if beat is None or beat.doing is not Doing.WAITING:
            return False
        patience_s = self._timing.held_grace_s if beat.held else self._timing.probe_s
        return beat.stalled_s + at - came > patience_s

    def waited_s(self, worker: str, at: float) -> float:
        """For how long the worker has waited for the other members: 0 if it does something else, or is not heard."""
        waits_s = self._waits_s(worker, at)
        return 0.0 if waits_s == math.inf else min(waits_s, at - self._committed_at)

    def suspect(self, at: float, generation: int, reason: str) -> None:
        """A group seems to be broken. It is rebuilt in a while, unless the news of a death comes first.

        Only a generation in which somebody still has to compute can be broken: survivors of an interrupt report the
        generation that was taken from them, and that is no news.
        """
        r, change = self._roster, self._roster.change
        if change is None:
            computing = {r.generation}
        elif change.interrupt:
            computing = {change.generation} if change.committed else set()
        else:
            computing = {change.generation, change.replaces} if change.committed else {r.generation}
        if generation in computing and self.suspicion is None:
            self.suspicion = Suspicion(at, r.high, reason)

    def confirmed(self, at: float) -> str | None:
        """Why the group has to be rebuilt now; None: it need not, or the news of a death may still come."""
        if self.suspicion is not None and self.suspicion.high != self._roster.high:
            self.suspicion = None
        if self.suspicion is None or at - self.suspicion.at < self._timing.held_grace_s:
            return None
        return self.suspicion.reason
