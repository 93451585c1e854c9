"""Reports of runs, and the audit of the samples in their workers' ledgers."""

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
from fallow.head.state.registry import Registry, Run
from fallow.model import ChangeKind, FallowError, GenerationReport, PauseReport, Quantiles, RunReport, SampleReport
from fallow.worker.data.ledger import Record, read_ledger


def report_of(registry: Registry, run: Run) -> tuple[RunReport, Callable[[], RunReport]]:
    """The JSON report of DESIGN section 6 without counted samples, and a function for a thread that completes it
    (`sample_count`). For a pruned run, whose ledgers are removed, the function reads the report that was stored."""
    root, final, contract, history = run.root, run.root.final, run.root.contract, list(run.generations)
    unknown_samples = 0 if contract is None else contract.global_batch * run.roster.front
    report = RunReport(
        run=run.id,
        status=root.status,
        steps=final.steps if final is not None else run.roster.front,
        samples=SampleReport(consumed=0, lost=0, duplicated=0, unknown=unknown_samples),
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
    paths = registry.paths.run(run.id)
    count = sample_count(paths.ledger, run.roster, history)

    def complete() -> RunReport:
        samples: SampleReport | FallowError
        try:
            samples = count()
        except FallowError as error:
            samples = error
        current = registry.runs.get(run.id)
        if current is None or current.record.pruned:  # set before its ledgers are removed
            with contextlib.suppress(FileNotFoundError):
                return read_struct(paths.report, RunReport)
            return report
        if isinstance(samples, FallowError):
            raise samples
        return replace(report, samples=samples)

    return report, complete


def _pauses(history: Sequence[GenerationReport], unplanned: bool) -> Quantiles:
    changes = [g for g in history if g.kind is not ChangeKind.START and (g.kind is ChangeKind.EJECT) == unplanned]
    return quantiles([g.pause_s for g in changes if g.pause_s is not None])


def sample_count(folder: Path, roster: Roster, history: Sequence[GenerationReport]) -> Callable[[], SampleReport]:
    """Prepare the audit of a run: consumed, lost and duplicated samples of the steps that are finished now.

    Reading the ledgers of a long run is slow. So the audit is a function for a thread: it reads no state that changes.
    The function raises FallowError if a ledger cannot be read.

    Args:
        folder: folder of the run's ledgers, one file per worker.
        roster: the run's nodes and progress.
        history: reports of all generations, which tell which generation computed which steps.
    """
    first_steps = {g.generation: g.first_step for g in history if g.first_step is not None}
    root = roster.root
    steps = root.final.steps if root.final is not None else roster.front
    highest_step = None if root.final is not None else max((roster.nodes[n].step for n in roster.members), default=0)
    first_unrecorded = root.unrecorded | {n: node.unrecorded for n, node in roster.nodes.items()}
    gaps = [
        Gap(first_step=first, last_step=_last_step(history, member_name(n)))
        for n, first in first_unrecorded.items()
        if first is not None
    ]
    per_step = 0 if root.contract is None else root.contract.global_batch
    records = _Records(folder, root.highest)
    return lambda: audit(records, first_steps, steps, per_step, gaps, highest_step)


@dataclass
class _Records:
    """The records of all ledgers of a folder. Each iteration reads the files again."""

    folder: Path
    newest: int
    "newest generation to read; a later one may repeat steps that are counted now"

    def __iter__(self) -> Iterator[Record]:
        path = self.folder
        try:
            # Not `glob`: it takes an unreadable folder for an empty one, and all samples would count as lost.
            for path in sorted(each for each in self.folder.iterdir() if each.suffix == ".ledger"):
                for record in read_ledger(path):
                    if not isinstance(record, Start) or record.generation <= self.newest:
                        yield record
        except OSError as error:
            if path is not self.folder or not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise unreadable(path, error) from error


def _last_step(history: Sequence[GenerationReport], name: str) -> int:
    """Last step that a member can have recorded: the next generation without the member repeats the later steps."""
    last = max((g.generation for g in history if name in g.members), default=0)
    later_first_steps = (g.first_step for g in history if g.generation > last and g.first_step is not None)
    return next(later_first_steps, sys.maxsize) - 1
