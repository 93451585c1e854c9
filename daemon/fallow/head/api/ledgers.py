"""Has what the workers wrote about the samples they used audited."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fallow.core.membership.names import member_name
from fallow.core.membership.roster import Roster
from fallow.core.training.audit import Gap, Start, audit
from fallow.files import unreadable
from fallow.model import GenerationReport, SampleReport
from fallow.worker.data.ledger import Record, read_ledger


def sample_count(folder: Path, roster: Roster, history: Sequence[GenerationReport]) -> Callable[[], SampleReport]:
    """Prepare to audit one run: consumed, lost and duplicated samples of the steps that are finished now.

    To read what a long run has written takes a while. What is returned does that; it looks at nothing that changes, so
    it is for a thread. It raises FallowError where a ledger cannot be read.

    Args:
        folder: the run's ledgers, one file per worker.
        roster: how far it is.
        history: of all generations: says which one computed which steps.
    """
    first_steps = {g.generation: g.first_step for g in history if g.first_step is not None}
    root = roster.root
    steps = root.final.steps if root.final is not None else roster.front
    incomplete = root.unrecorded | {n: node.unrecorded for n, node in roster.nodes.items()}
    gaps = [
        Gap(first_step=first, last_step=_last_step(history, member_name(n)))
        for n, first in incomplete.items()
        if first is not None
    ]
    per_step = 0 if root.contract is None else root.contract.global_batch
    records = _Records(folder, root.highest)
    return lambda: audit(records, first_steps, steps, per_step, gaps)


@dataclass
class _Records:
    """Those of all ledgers of a folder, read anew each time they are gone through."""

    folder: Path
    newest: int
    "generation; one that begins later may go back, and do steps again that are counted now"

    def __iter__(self) -> Iterator[Record]:
        path = self.folder
        try:
            # Not `glob`: to it a folder that cannot be read is empty, and all samples would be reported as lost.
            for path in sorted(each for each in self.folder.iterdir() if each.suffix == ".ledger"):
                for record in read_ledger(path):
                    if not isinstance(record, Start) or record.generation <= self.newest:
                        yield record
        except OSError as error:
            if path is not self.folder or not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise unreadable(path, error) from error


def _last_step(history: Sequence[GenerationReport], name: str) -> int:
    """The last of which that member's records can count: another generation took over from there."""
    last = max((g.generation for g in history if name in g.members), default=0)
    after = (g.first_step for g in history if g.generation > last and g.first_step is not None)
    return next(after, sys.maxsize) - 1
