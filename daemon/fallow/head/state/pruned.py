"""What is kept of runs whose records were removed: what they used, and what runs like them learn from them.

`Book.forget` adds a run to these sums, and the head writes them down together with the removal of the run's record. So
`fallow usage`, the fair share of projects and the worth of nodes are the same before and after. The sums grow with
days, accounts and partitions (`core.usage.by_month`), the lessons not beyond `LESSONS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fallow.core import records
from fallow.core.accounting.fairshare import PastUse
from fallow.core.accounting.usage import Tallies, by_month, merge
from fallow.head.state.past import Lesson, account_of, project_of

if TYPE_CHECKING:
    from fallow.head.state.book import Run

NOTE = "pruned"
"""Key of the note in the store."""

LESSONS = 64
"""So many of the newest lessons are kept. An older one has faded (`core.gain.HALF_LIFE_S`), and a run of its script
measures anew within minutes."""


class PrunedRuns(msgspec.Struct, kw_only=True):
    """Sums over all runs that were pruned."""

    usage: dict[str, Tallies] = {}
    "account -> sums"
    harvested: dict[str, PastUse] = {}
    "project -> harvested node-seconds, for its fair share"
    lessons: list[Lesson] = []
    "the newest first"

    def add(self, run: Run, now: float) -> None:
        """Take in a run whose jobs are all in its sums; `now`: Unix time."""
        if run.spec.local:
            return
        account, had = account_of(run), run.record.harvested
        sums = self.usage.get(account, {})
        merge(sums, run.record.usage)
        if sums:
            self.usage[account] = by_month(sums, now)
        if had.node_s:
            self.harvested.setdefault(project_of(run), PastUse()).merge(had)

    def keep_lesson(self, lesson: Lesson) -> list[Lesson]:
        """Keep a lesson; returns those that are dropped for it."""
        newest_first = sorted([*self.lessons, lesson], key=lambda each: -each.created_at)
        self.lessons = newest_first[:LESSONS]
        return newest_first[LESSONS:]


records.SCHEMAS[PrunedRuns] = 1
