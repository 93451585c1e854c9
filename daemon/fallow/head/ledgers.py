"""Has what the workers wrote about the samples they used audited."""

from __future__ import annotations

import sys
from pathlib import Path

from fallow.core.audit import Gap, audit
from fallow.core.roster import Roster
from fallow.model import SampleReport
from fallow.worker.ledger import read_ledger


def count_samples(folder: Path, roster: Roster) -> SampleReport:
    """Audit one run: consumed, lost and duplicated samples of its finished steps.

    Args:
        folder: the run's ledgers, one file per worker.
        roster: says which generation computed which steps.
    """
    first_steps = {g.generation: g.first_step for g in roster.history if g.first_step is not None}
    finished = max((w.step for w in roster.workers.values()), default=0)
    steps = roster.final.steps if roster.final is not None else finished
    records = (record for path in sorted(folder.glob("*.ledger")) for record in read_ledger(path))
    gaps = [Gap(first_step=first, last_step=_last_step(roster, name)) for name, first in roster.unrecorded.items()]
    return audit(records, first_steps, steps, roster.global_batch or 0, gaps)


def _last_step(roster: Roster, name: str) -> int:
    """The last of which that worker's records can count: another generation took over from there."""
    last = max((g.generation for g in roster.history if name in g.members), default=0)
    after = (g.first_step for g in roster.history if g.generation > last and g.first_step is not None)
    return next(after, sys.maxsize) - 1
