"""Runs of which nothing more comes: what others still learn from them, however many there are.

They ended, and what their jobs held is in their sums; polls and ticks look at them no more.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from fallow.core.fairshare import PastUse
from fallow.core.valuing import ALIKE, measured

if TYPE_CHECKING:
    from fallow.head.book import Run

Model = tuple[str, str | None, int | None, int | None, int | None]

UNMEASURED = 2
"""So many of the newest that were never measured are kept for each model: they say at least how many shards it had."""


def script_of(run: Run) -> str:
    if not run.script_digest:
        run.script_digest = hashlib.sha256(run.spec.script.encode()).hexdigest()
    return run.script_digest


def model_of(run: Run) -> Model:
    """Runs of a script with the same tensors, shards, global batch and workers per node learn from each other."""
    return script_of(run), run.roster.signature, run.roster.shards, run.roster.global_batch, run.record.slots


def project_of(run: Run) -> str:
    """The account that it was submitted for, whichever its harvest jobs run under; empty: the user's default one."""
    return run.spec.harvest_given.get("account", "")


class Past:
    """All of them."""

    def __init__(self) -> None:
        self._alike: dict[Model, list[Run]] = {}
        "those that runs of that model may learn from, the newest first"
        self._newest: dict[str, Run] = {}
        "script -> the newest of it that said what it has"
        self._use: dict[str, PastUse] = {}
        "project -> what they have harvested"

    def add(self, run: Run) -> None:
        use, had = self._use.setdefault(project_of(run), PastUse()), run.record.harvested
        at = max(use.at, had.at)
        use.node_s, use.at = use.faded(at) + had.faded(at), at
        if run.roster.signature is None:
            return
        alike = sorted([*self._alike.get(model_of(run), []), run], key=lambda each: -each.spec.created_at)
        told = [each for each in alike if measured(each.record.curve)][:ALIKE]
        others = [each for each in alike if not measured(each.record.curve)][:UNMEASURED]
        self._alike[model_of(run)] = [each for each in alike if each in told or each in others]
        newest = self._newest.setdefault(script_of(run), run)
        if run.spec.created_at > newest.spec.created_at:
            self._newest[script_of(run)] = run

    def like(self, model: Model) -> list[Run]:
        """Those of that model to learn from, the newest first."""
        return self._alike.get(model, [])

    def newest(self, script: str) -> list[Run]:
        """The newest of that script that said what it has, if there is one."""
        return [self._newest[script]] if script in self._newest else []

    def faded(self, project: str, at: float) -> float:
        """Node-seconds that the project's have harvested, as they count at that Unix time."""
        return self._use[project].faded(at) if project in self._use else 0.0
