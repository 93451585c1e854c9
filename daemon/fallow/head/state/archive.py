"""What runs have used whose records are gone.

A run that has ended, and whose jobs are in its sums, *rests*: ticks and what is asked of Slurm pass it by. When it is
pruned, its record goes, and what it used moves to `PrunedRuns` in the same write. So `fallow usage` is the same before
and after. These sums grow with days, accounts and partitions (`core.usage.by_month`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fallow.core import records
from fallow.core.accounting.usage import Tallies, by_month, merge

if TYPE_CHECKING:
    from fallow.head.state.book import Run

NOTE = "pruned"
"""Key of `PrunedRuns` among the notes of the store."""

NO_ACCOUNT = "-"
"""Stands for the owner's default account."""


def account_of(run: Run) -> str:
    """The Slurm account on which the run's jobs run."""
    given = [word.partition("=")[2] for word in run.spec.sbatch_options if word.startswith("--account=")]
    return given[-1] if given else NO_ACCOUNT


class PrunedRuns(msgspec.Struct, kw_only=True):
    """Sums over all runs that were pruned."""

    usage: dict[str, Tallies] = {}
    "account -> sums"

    def add(self, run: Run, now: float) -> None:
        """Take in what a run used whose jobs are all in its sums; `now`: Unix time."""
        sums = self.usage.get(account_of(run), {})
        merge(sums, run.record.usage)
        if sums and not run.spec.local:
            self.usage[account_of(run)] = by_month(sums, now)


records.SCHEMAS[PrunedRuns] = 2
records.MIGRATIONS[PrunedRuns, 1] = lambda fields: {"usage": fields["usage"]}
