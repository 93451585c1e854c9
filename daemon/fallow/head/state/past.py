"""Runs of which nothing more comes: what others still learn from them, however many there are.

They ended, and what their jobs held is in their sums; polls and ticks look at them no more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from fallow.core.accounting.fairshare import PastUse
from fallow.core.planning.gain import Curve
from fallow.core.planning.valuing import ALIKE, measured

if TYPE_CHECKING:
    from fallow.head.state.book import Run

Model = tuple[str, str | None, int | None, int | None, int | None]

UNMEASURED = 2
"""So many of the newest that were never measured are kept for each model: they say at least how many shards it had."""

NO_ACCOUNT = "-"
"""Stands for the owner's default account."""


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """What other runs of a script learn from one run."""

    run: str
    script: str
    "digest of its script"
    signature: str | None
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
    return Lesson(
        run=run.id,
        script=script_of(run),
        signature=None if contract is None else contract.signature,
        shards=None if contract is None else contract.shards,
        global_batch=None if contract is None else contract.global_batch,
        slots=run.record.slots,
        created_at=run.spec.created_at,
        curve=run.record.curve,
    )


def script_of(run: Run) -> str:
    if not run.script_digest:
        run.script_digest = hashlib.sha256(run.spec.script.encode()).hexdigest()
    return run.script_digest


def project_of(run: Run) -> str:
    """The account that it was submitted for, whichever its harvest jobs run under; empty: the user's default one."""
    return run.spec.harvest_given.get("account", "")


def account_of(run: Run) -> str:
    """The Slurm account on which the run's jobs run."""
    given = [word.partition("=")[2] for word in run.spec.sbatch_options if word.startswith("--account=")]
    return given[-1] if given else NO_ACCOUNT


class Past:
    """All of them."""

    def __init__(self) -> None:
        self._alike: dict[Model, list[Lesson]] = {}
        "those that runs of that model may learn from, the newest first"
        self._newest: dict[str, Lesson] = {}
        "script -> the newest of it that said what it has"
        self._use: dict[str, PastUse] = {}
        "project -> what they have harvested"

    def add(self, run: Run) -> None:
        self.add_use(project_of(run), run.record.harvested)
        if run.root.contract is not None:
            self.learn(lesson_of(run))

    def add_use(self, project: str, had: PastUse) -> None:
        self._use.setdefault(project, PastUse()).merge(had)

    def learn(self, lesson: Lesson) -> None:
        alike = sorted([*self._alike.get(lesson.model, []), lesson], key=lambda each: -each.created_at)
        told = [each for each in alike if measured(each.curve)][:ALIKE]
        others = [each for each in alike if not measured(each.curve)][:UNMEASURED]
        self._alike[lesson.model] = [each for each in alike if each in told or each in others]
        newest = self._newest.setdefault(lesson.script, lesson)
        if lesson.created_at > newest.created_at:
            self._newest[lesson.script] = lesson

    def unlearn(self, lesson: Lesson) -> None:
        """Drop a lesson, if it is still known."""
        left = [each for each in self._alike.pop(lesson.model, []) if each.run != lesson.run]
        if left:
            self._alike[lesson.model] = left
        if (newest := self._newest.get(lesson.script)) is not None and newest.run == lesson.run:
            del self._newest[lesson.script]
            same = [each for each in self.lessons if each.script == lesson.script]
            if same:
                self._newest[lesson.script] = max(same, key=lambda each: each.created_at)

    @property
    def lessons(self) -> Iterator[Lesson]:
        """All that are known."""
        return (lesson for alike in self._alike.values() for lesson in alike)

    def like(self, model: Model) -> list[Lesson]:
        """Those of that model to learn from, the newest first."""
        return self._alike.get(model, [])

    def newest(self, script: str) -> list[Lesson]:
        """The newest of that script that said what it has, if there is one."""
        return [self._newest[script]] if script in self._newest else []

    def faded(self, project: str, at: float) -> float:
        """Node-seconds that the project's have harvested, as they count at that Unix time."""
        return self._use[project].faded(at) if project in self._use else 0.0
