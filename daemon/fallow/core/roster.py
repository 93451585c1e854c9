"""The durable state of a run's membership: what a head that comes back must know.

Plain data with derived views; the rules are in `membership`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from fallow.model import (
    ChangeKind,
    Checkpointed,
    Finished,
    GenerationReport,
    Outcome,
    Parts,
    RollbackReport,
    RunStatus,
    WorkerPhase,
)


class Worker(msgspec.Struct, kw_only=True):
    """One training process, as the head knows it."""

    worker: str
    index: int
    "arrival number in the run, from 0; the youngest has the highest"
    token: str
    node: str
    phase: WorkerPhase = WorkerPhase.STARTING
    address: str = ""
    pid: int = 0
    has_state: bool = False
    "it took part in a generation's first exchange, so it holds the model's state"
    step: int = 0
    finished: bool = False
    deserted: bool = False
    "its script has ended inside of a loop in which others go on; its process has not ended yet, or nobody saw how"
    ended_because: str = ""
    "why it is gone before its script had ended; its traceback, where there is one, in `traceback`"
    traceback: str = ""
    leaving_because: str = ""


class FailureKind(StrEnum):
    EXCEPTION = "exception"
    "the script raised, or ended with an exit code"
    CRASH = "crash"
    "its process was ended by a fault of its own (SIGSEGV and the like)"
    HANG = "hang"
    UNREACHABLE = "unreachable"
    "cut off from other members"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of a worker, as `failures` compares them."""

    worker: str
    node: str
    token: str
    kind: FailureKind
    signature: str
    "what failed and where in the script; equal for the same failure elsewhere"
    step: int
    "finished steps of the worker at that time"
    text: str
    at: float = 0.0
    "on the events' clock"
    index: int = 0
    "the worker's arrival number"
    arrived: int = 0
    "workers that had come to the run until then"

    @property
    def place(self) -> tuple[str, str]:
        return self.token, self.node


class Bar(msgspec.Struct, kw_only=True):
    """A node that the run does, or did, without."""

    times: int = 0
    "how often in a row"
    until: float = 0.0
    "on the events' clock"


class Change(msgspec.Struct, kw_only=True):
    """A membership change under way."""

    generation: int
    replaces: int
    kind: ChangeKind
    members: list[str]
    leavers: list[str]
    "members of the old generation that are not in the new one and were alive when it began"
    interrupt: bool
    reason: str
    deadline_at: float
    began_at: float = 0.0
    probe: bool = False
    "made only to see whether its members reach each other; never committed"
    rollback_to: int | None = None
    "its members drop what they hold and load the checkpoint of this step"
    committed: bool = False
    votes: set[str] = set()
    unreachable: dict[str, list[str]] = {}
    "voter -> those it cannot reach"
    tried: dict[str, dict[str, str]] = {}
    "voter -> one of them -> address and port to which the connection was to lead"
    accused_at: float | None = None
    "when the first of those votes came"
    active: set[str] = set()
    left: set[str] = set()
    first_step: int | None = None
    pause_s: float | None = None
    parts: Parts = Parts()
    bytes_in_pause: int = 0
    bytes_behind: int = 0
    steps_discarded: int = 0

    @property
    def participants(self) -> list[str]:
        return self.members + self.leavers

    def concerns(self, worker: str) -> bool:
        """Is it one of the participants?"""
        return worker in self.members or worker in self.leavers


class Saved(msgspec.Struct, kw_only=True):
    """A durable checkpoint."""

    written: Checkpointed
    problem: str = ""
    "why it cannot be used: it is damaged"
    aside: bool = False
    "the run went on from an earlier step since"

    @property
    def usable(self) -> bool:
        return not self.problem and not self.aside


class Roster(msgspec.Struct, kw_only=True):
    """Membership of one run. Only `membership.Membership` changes it."""

    run: str
    min_members: int
    max_members: int
    limit: int
    scripted: bool = False
    "members come and go by a script alone (`fallow local`): no standby takes a lost member's place"
    status: RunStatus = RunStatus.WAITING
    generation: int = 0
    "the committed generation; 0: none yet"
    high: int = 0
    "highest generation ever proposed; never reused"
    members: list[str] = []
    "workers of `generation` in rank order"
    workers: dict[str, Worker] = {}
    forgotten_step: int = 0
    "the highest of workers that are not in `workers` any more"
    next_index: int = 0
    change: Change | None = None
    signature: str | None = None
    layout: list[str] = []
    arithmetic: list[str] = []
    "what the members' bits come from; empty in the fast mode"
    shards: int | None = None
    global_batch: int | None = None
    restarts: bool = False
    "a change of the membership restarts the members' scripts"
    total_steps: int | None = None
    checkpoints: list[Saved] = []
    "all that are on disk, in the order in which they became known"
    checkpoint_problem: str = ""
    "why the last one was not written; empty: it was"
    checkpoint_given_up: tuple[int, int] = (0, 0)
    "(generation, step) of the last one that was not written"
    rollbacks: list[RollbackReport] = []
    rollback: RollbackReport | None = None
    "wanted, and not done yet: the next generation that is made drops what its members hold and loads that checkpoint"
    unrecorded: dict[str, int] = {}
    "worker -> the step from which on its ledger may lack records (`model.Beat.unrecorded`)"
    history: list[GenerationReport] = []
    "the newest; the head keeps older ones elsewhere"
    steps_discarded: int = 0
    final: Finished | None = None
    "what the first member said whose script ended"
    outcome: Outcome | None = None
    "what the last member knew that failed: nobody else may have heard it"
    diverged: str = ""
    "members whose final states differ, in words; empty: they are the same"
    start_failures: int = 0
    "workers in a row that ended before they were ready"
    failures: list[Failure] = []
    "of the life of the run, the newest last"
    barred: dict[str, str] = {}
    "node -> why the run does without it"
    bars: dict[str, Bar] = {}
    "of these nodes, and of some that are not barred any more"
    traceback: str = ""
    "of the failure that ended the run"
    message: str = ""

    def usable_checkpoints(self) -> list[Checkpointed]:
        """Newest step first."""
        good = [saved.written for saved in self.checkpoints if saved.usable]
        return sorted(good, key=lambda written: written.step, reverse=True)

    def alive(self, worker: str) -> bool:
        known = self.workers.get(worker)
        return known is not None and known.phase is not WorkerPhase.GONE

    def staying(self) -> list[str]:
        """Members that nobody asked to leave, in rank order."""
        return [w for w in self.members if self.alive(w) and self.workers[w].phase is WorkerPhase.MEMBER]

    def leaving(self) -> list[str]:
        return [w for w in self.members if self.alive(w) and self.workers[w].phase is WorkerPhase.LEAVING]

    def lost(self) -> list[str]:
        return [w for w in self.members if not self.alive(w)]

    def standbys(self) -> list[str]:
        """Ready workers that are not members, oldest first."""
        ready = [w for w in self.workers.values() if w.phase is WorkerPhase.READY]
        return [w.worker for w in sorted(ready, key=lambda w: w.index)]

    def joins(self, worker: str) -> bool:
        """True if others train, or are about to begin without this worker: it is absorbed once it is ready."""
        starting = self.change.members if self.change is not None else []
        return bool(self.members) or bool(starting and worker not in starting)

    def speaker(self, before: str | None) -> str | None:
        """The one worker that is main, and whose output is shown; None: there is no worker.

        It is rank 0. Before the first generation it is the oldest worker, as long as that lives: the first generation
        makes the oldest of its members rank 0.

        Args:
            before: what this gave last.
        """
        if self.members:
            return self.members[0]
        if self.change is not None and self.change.members:
            return self.change.members[0]
        if before is not None and self._may_speak(before):
            return before
        candidates = [worker for worker in self.workers.values() if self._may_speak(worker.worker)]
        return min(candidates, key=lambda worker: worker.index).worker if candidates else None

    def _may_speak(self, worker: str) -> bool:
        return self.alive(worker) and not self.workers[worker].leaving_because

    @property
    def front(self) -> int:
        """Finished steps of the worker that got furthest."""
        return max([self.forgotten_step, *(worker.step for worker in self.workers.values())])

    @property
    def useful_members(self) -> int:
        """Most members that can do something: the limit, or the number of shards."""
        return self.limit if self.shards is None else min(self.limit, self.shards)

    def main_of(self, generation: int) -> str | None:
        """Rank 0 of a committed generation; None: it is not known any more."""
        if generation == self.generation:
            return self.members[0] if self.members else None
        named = (report.members for report in reversed(self.history) if report.generation == generation)
        return next((members[0] for members in named if members), None)

    def final_main(self) -> Worker | None:
        """The main member of the generation in which the training ended; None: it has not, or nobody knows it."""
        name = None if self.final is None else self.main_of(self.final.generation)
        return None if name is None else self.workers.get(name)

    def deserters(self) -> list[str]:
        """Members whose script has ended in the middle of the training, and whose process has not."""
        return [w for w in self.members if self.alive(w) and self.workers[w].deserted]

    @property
    def finishing(self) -> bool:
        """A member's script has ended: the membership is frozen from here on."""
        if self.final is None:
            return False
        return any(self.workers[w].finished for w in self.members if w in self.workers)
