"""Runs that tests submit to a real Slurm: what becomes of them, and what must hold at the end of each."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fallow.model import EventRecord, MemberPhase, MemberView, RunReport, RunStatus, RunView
from waiting import wait_for

T = TypeVar("T")

START_S = 300.0
"""From a submission to a member: two processes that import torch, on cores shared with others."""
REACT_S = 180.0
"""From a signal or a decision to what follows from it, a start of a node included."""
SAMPLES_PER_STEP = 16
SUBMITTED = re.compile(r"^(\S+): job (\d+)")

_GONE = frozenset(("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY"))


def train_words(folder: Path, steps: int, pace_s: float) -> str:
    """The script of all of them and its arguments: as many steps as are said, which end when a test says so."""
    script = Path(__file__).parent / "e2e" / "local_training.py"
    size = f"--samples 64 --batch-size 2 --global-batch {SAMPLES_PER_STEP}"
    return f"{script} {size} --steps {steps} --pace {pace_s} --hurry {folder}/hurry --trace {folder}"


@dataclass(frozen=True)
class Trace:
    """What one worker process wrote about its steps."""

    worker: str
    pid: int
    steps: list[tuple[int, int, int]]
    "(generation, step, rank) in order"


class Training:
    """One submitted run.

    Args:
        rig: asks the head (`status`, `ask`) and Slurm (`job_states`), and tells the `story` when a test fails.
        folder: where the run writes.
        run, job: its names for the head and for Slurm.
        steps: of the whole training.
    """

    def __init__(self, rig: Any, folder: Path, run: str, job: str, steps: int) -> None:
        self.rig, self.folder, self.run, self.job, self.steps = rig, folder, run, job, steps

    def view(self) -> RunView:
        view: RunView = self.rig.status(self.run).runs[0]
        return view

    def members(self, view: RunView | None = None) -> list[MemberView]:
        """Members of the current generation: those of the base job first, then by rank. Args: view: else the newest."""
        seated = (m for m in (view or self.view()).members if m.rank is not None)
        return sorted(seated, key=lambda m: (m.allocation != "base", m.rank))

    def events(self, *kinds: str) -> list[EventRecord]:
        """The run's events, oldest first; all of them, or those of some kinds."""
        found: list[EventRecord] = self.rig.ask("events", list[EventRecord], run=self.run, limit=10_000)
        return [event for event in found if not kinds or event.kind in kinds]

    def changes(self, *kinds: str) -> list[EventRecord]:
        """Completed changes of the membership of some kinds."""
        return [event for event in self.events(*kinds) if "generation" in event.data]

    def jobs(self) -> dict[str, str]:
        """Job id -> token of everything that was submitted for this run."""
        found = (SUBMITTED.match(event.text) for event in self.events("submit"))
        return {match[2]: match[1] for match in found if match}

    def job_of(self, member: MemberView) -> str:
        return next(job for job, token in self.jobs().items() if token == member.token)

    def harvest_jobs(self) -> list[str]:
        return [job for job, token in self.jobs().items() if re.search(r"-h\d+-", token)]

    def base_jobs(self) -> list[str]:
        return [job for job, token in self.jobs().items() if re.search(r"-b\d+-", token)]

    def traces(self) -> list[Trace]:
        """The workers' own notes, by worker number."""
        found = []
        for path in self.folder.glob("*.steps"):
            worker, _, pid = path.stem.rpartition("-")
            # The last line may be half written.
            lines = path.read_text().rpartition("\n")[0].splitlines()
            rows = [tuple(int(word) for word in line.split()) for line in lines]
            found.append(Trace(worker, int(pid), [(row[0], row[1], row[2]) for row in rows]))
        return sorted(found, key=lambda trace: [int(number) for number in trace.worker[1:].split(".")])

    def trace(self, worker: str) -> Trace:
        """The notes of a worker that must have been one single process."""
        (found,) = (trace for trace in self.traces() if trace.worker == worker)
        return found

    def step(self) -> int:
        """The newest step that any member has begun, without asking the head."""
        return max((trace.steps[-1][1] for trace in self.traces() if trace.steps), default=-1)

    def undisturbed_digest(self) -> str:
        """Of the same training under `fallow local`, on one node that nothing happens to."""
        (self.folder / "alone").mkdir()
        (self.folder / "alone" / "hurry").touch()
        train = train_words(self.folder / "alone", self.steps, 0.0).split()
        local = ["fallow", "local", "--members=1", "--reproducible", "--json", "--", sys.executable, *train]
        digest: str = json.loads(self.rig.command(*local))["final_digest"]
        return digest

    def wait_for(self, what: str, condition: Callable[[], T], seconds: float = REACT_S) -> T:
        return wait_for(f"run {self.run}: {what}", condition, seconds, self.rig.story)

    def wait_members(self, count: int, seconds: float = START_S) -> list[MemberView]:
        """Wait for exactly so many members, all of which the head has heard, and no change under way."""

        def settled() -> list[MemberView]:
            view = self.view()
            assert not view.status.ended, f"ended before its time: {view}\n{self.rig.story()}"
            members = self.members(view)
            calm = view.change is None and all(m.phase is MemberPhase.MEMBER and m.pids for m in members)
            return members if calm and len(members) == count else []

        return self.wait_for(f"{count} members", settled, seconds)

    def wait_steps(self, count: int = 5, seconds: float = REACT_S) -> None:
        """Wait until the training has gone on by so many steps."""
        start = self.step()
        self.wait_for(f"{count} steps after step {start}", lambda: self.step() >= start + count, seconds)

    def finish(self) -> RunReport:
        """Let the training run to its end, and check what must hold at the end of every one of them."""
        view = self.view()
        assert not view.status.ended, f"ended before its time: {view}"
        (self.folder / "hurry").touch()
        self.wait_for("the end of the training", lambda: self.view().status.ended, START_S)
        report: RunReport = self.rig.ask("report", RunReport, run=self.run)
        assert report.status is RunStatus.FINISHED, report
        assert report.steps == self.steps
        assert (report.samples.lost, report.samples.duplicated) == (0, 0), report.samples
        assert report.samples.consumed == self.steps * SAMPLES_PER_STEP
        assert report.final_digest, report
        assert not self.events("diverged"), "the members' final states differ"
        self.wait_jobs_gone()
        return report

    def wait_jobs_gone(self) -> None:
        """Wait until Slurm runs nothing more for this run, and nothing waits."""
        self.wait_for("none of its jobs in Slurm", lambda: not self.jobs_alive())

    def jobs_alive(self) -> list[str]:
        states = self.rig.job_states()
        return [job for job in self.jobs() if states.get(job, "GONE").split("+")[0] not in _GONE | {"GONE"}]

    def lines_after(self) -> list[str]:
        """Jobs in which the lines after `fallow run` were run."""
        path = self.folder / "after"
        return path.read_text().split() if path.exists() else []
