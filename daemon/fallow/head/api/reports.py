"""Reports of runs, and the audit of the samples that their workers say they have used."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from fallow.core.membership.names import member_name
from fallow.core.membership.roster import Roster
from fallow.core.quantile import quantiles
from fallow.core.training.audit import Gap, Start, audit
from fallow.files import read_struct, unreadable
from fallow.head.state.book import Book, Run
from fallow.model import ChangeKind, GenerationReport, PauseReport, Quantiles, RunReport, SampleReport
from fallow.worker.data.ledger import Record, read_ledger


def report_of(book: Book, run: Run) -> tuple[RunReport, Callable[[], SampleReport]]:
    """The JSON report of DESIGN section 6, and what counts its samples (`sample_count`), of which it says nothing yet.

    The report is the one that was kept when the run's ledgers were removed, or how things stand now.
    """
    if run.record.pruned:
        with contextlib.suppress(FileNotFoundError):
            kept = read_struct(book.paths.run(run.id).report, RunReport)
            return kept, lambda: kept.samples
    root, final, contract, history = run.root, run.root.final, run.root.contract, list(run.generations)
    unknown = 0 if contract is None else contract.global_batch * run.roster.front
    report = RunReport(
        run=run.id,
        status=root.status,
        steps=final.steps if final is not None else run.roster.front,
        samples=SampleReport(consumed=0, lost=0, duplicated=0, unknown=unknown),
        final_digest=None if final is None else final.digest,
        final_loss=None if final is None else final.loss,
        generations=history,
        pause_s=PauseReport(planned=_pauses(history, False), unplanned=_pauses(history, True)),
        steps_discarded=root.discarded,
        rolled_back=list(run.roster.history.rollbacks),
        message=root.message,
        traceback=root.traceback,
        rest_in=next((a.token for a in run.allocations.values() if a.is_elected), ""),
        reproducible=contract is not None and bool(contract.arithmetic),
        steps_repeated=0 if final is None else final.repeated,
    )
    return report, sample_count(book.paths.run(run.id).ledger, run.roster, history)


def counted_report(book: Book, run: Run) -> RunReport:
    """The whole report of a run."""
    report, count = report_of(book, run)
    return replace(report, samples=count())


def _pauses(history: Sequence[GenerationReport], unplanned: bool) -> Quantiles:
    changes = [g for g in history if g.kind is not ChangeKind.START and (g.kind is ChangeKind.EJECT) == unplanned]
    return quantiles([g.pause_s for g in changes if g.pause_s is not None])


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
    reached = None if root.final is not None else max((roster.nodes[n].step for n in roster.members), default=0)
    incomplete = root.unrecorded | {n: node.unrecorded for n, node in roster.nodes.items()}
    gaps = [
        Gap(first_step=first, last_step=_last_step(history, member_name(n)))
        for n, first in incomplete.items()
        if first is not None
    ]
    per_step = 0 if root.contract is None else root.contract.global_batch
    records = _Records(folder, root.highest)
    return lambda: audit(records, first_steps, steps, per_step, gaps, reached)


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
