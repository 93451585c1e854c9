"""What is left of runs of which nothing more comes: what others learn from them, and what they used.

A run that has ended, and whose jobs are in its sums, is *archived*: polls and ticks look at it no more. When it is
pruned, its record goes, and what it used moves to `PrunedRuns` in the same write. So `fallow usage`, the fair share of
projects and the worth of nodes are the same before and after. These sums grow with days, accounts and partitions
(`core.usage.by_month`), and the lessons not beyond `LESSONS`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from fallow.core import records
from fallow.core.accounting.fairshare import PastUse
from fallow.core.accounting.usage import Tallies, by_month, merge
from fallow.core.planning.gain import Curve
from fallow.core.planning.valuing import ALIKE, measured

if TYPE_CHECKING:
    from fallow.head.state.book import Run

NOTE = "pruned"
"""Key of `PrunedRuns` among the notes of the store."""

LESSONS = 128
"""So many of the newest lessons are kept. An older one has faded (`core.gain.HALF_LIFE_S`), and a run of its script
measures anew within minutes."""

UNMEASURED = 2
"""Of so many runs of a model is kept what they are, although nothing was measured."""

NO_ACCOUNT = "-"
"""Stands for the owner's default account."""

Model = tuple[str, str | None, int | None, int | None, int | None]


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """What other runs of a script learn from one run."""

    run: str
    script: str
    "digest of its script"
    signature: str | None
    "None: it has not said yet what it trains"
    shards: int | None
    global_batch: int | None
    slots: int | None
    created_at: float
    curve: Curve

    @property
    def model(self) -> Model:
        """Runs of a script with the same tensors, shards, global batch and workers per node learn from each other."""
        return self.script, self.signature, self.shards, self.global_batch, self.slots


def lesson_of(run: Run) -> Lesson:
    contract = run.root.contract
    if not run.script_digest:
        run.script_digest = hashlib.sha256(run.spec.script.encode()).hexdigest()
    return Lesson(
        run=run.id,
        script=run.script_digest,
        signature=None if contract is None else contract.signature,
        shards=None if contract is None else contract.shards,
        global_batch=None if contract is None else contract.global_batch,
        slots=run.record.slots,
        created_at=run.spec.created_at,
        curve=run.record.curve,
    )


def newest(lessons: Iterable[Lesson]) -> list[Lesson]:
    """Those that are kept, the newest first; of each model no more than a run learns from."""
    kept: list[Lesson] = []
    alike = Counter[tuple[Model, bool]]()
    for lesson in sorted(lessons, key=lambda lesson: -lesson.created_at):
        kind = lesson.model, measured(lesson.curve)
        alike[kind] += 1
        if alike[kind] <= (ALIKE if measured(lesson.curve) else UNMEASURED):
            kept.append(lesson)
    return kept[:LESSONS]


def project_of(run: Run) -> str:
    """The account that it was submitted for, whichever its harvest jobs run under; empty: the user's default one."""
    return run.spec.harvest_given.get("account", "")


def account_of(run: Run) -> str:
    """The Slurm account on which the run's jobs run."""
    given = [word.partition("=")[2] for word in run.spec.sbatch_options if word.startswith("--account=")]
    return given[-1] if given else NO_ACCOUNT


class PrunedRuns(msgspec.Struct, kw_only=True):
    """Sums over all runs that were pruned."""

    usage: dict[str, Tallies] = {}
    "account -> sums"
    harvested: dict[str, PastUse] = {}
    "project -> harvested node-seconds, for its fair share"
    lessons: list[Lesson] = []
    "the newest first"

    def add(self, run: Run, now: float) -> None:
        """Take in what a run used whose jobs are all in its sums; `now`: Unix time."""
        if run.spec.local:
            return
        account, had = account_of(run), run.record.harvested
        sums = self.usage.get(account, {})
        merge(sums, run.record.usage)
        if sums:
            self.usage[account] = by_month(sums, now)
        if had.node_s:
            self.harvested.setdefault(project_of(run), PastUse()).merge(had)


records.SCHEMAS[PrunedRuns] = 1


class Archive:
    """All runs of which nothing more comes, those that were pruned included."""

    def __init__(self) -> None:
        self.pruned = PrunedRuns()
        self.lessons: list[Lesson] = []
        "the newest first"
        self._use: dict[str, PastUse] = {}
        "project -> what they have harvested"

    def add(self, run: Run) -> None:
        """Take in a run."""
        self._use.setdefault(project_of(run), PastUse()).merge(run.record.harvested)
        if run.root.contract is not None:
            self.lessons = newest([*self.lessons, lesson_of(run)])

    def prune(self, run: Run, now: float) -> None:
        """The record of a run that is here goes; `now`: Unix time."""
        self.pruned.add(run, now)
        lessons = [lesson for lesson in self.lessons if lesson.run == run.id]
        self.pruned.lessons = newest([*self.pruned.lessons, *lessons])

    def recall(self, note: bytes) -> None:
        """Take in what an earlier head kept of runs that were pruned.

        Raises:
            Unreadable: it is damaged, or of a newer Fallow.
        """
        self.pruned = records.decode(note, PrunedRuns)
        for project, had in self.pruned.harvested.items():
            self._use.setdefault(project, PastUse()).merge(had)
        self.lessons = newest([*self.lessons, *self.pruned.lessons])

    def faded(self, project: str, at: float) -> float:
        """Node-seconds that the project's have harvested, as they count at that Unix time."""
        return self._use[project].faded(at) if project in self._use else 0.0
