"""What ended runs have left goes by count and age; checkpoints stay until somebody says so.

Where a run has checkpoints, its logs and ledgers go: they are most of the files. Its record, script and report stay
with the checkpoints. Of a run without checkpoints everything goes. What it used stays in sums (`head.state.stored`).
The head does this by itself, and `fallow prune` at once.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import structlog
from msgspec.structs import replace

from fallow.config import Prune
from fallow.control.protocol import Pruned
from fallow.files import read_struct, write_struct
from fallow.head.api.reports import report_of
from fallow.head.loop.faults import in_thread
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Book, Run
from fallow.model import Exit, FallowError, RunReport, SampleReport
from fallow.model.bounds import Count, Few, Name, Seconds
from fallow.text import quote

log = structlog.get_logger("fallow.head")

EVERY_S = 3600.0
"""So often the head looks for outdated runs. It takes one after the other: counting a run's samples takes a while."""
DAY_S = 86_400.0


class Pruning:
    """Removes what ended runs have left, as the configuration's `settings` say."""

    def __init__(self, settings: Prune) -> None:
        self._settings = settings
        self._look_at = 0.0
        self._outdated: deque[str] = deque()
        self._run = ""
        self.looking: Future[int | None] | None = None
        "beside the main loop, at what an outdated run has left; see `_prepare_look`"

    def tick(self, turn: Turn) -> None:
        """Prune the outdated run whose files have been looked at, if there is one, and have those of another looked at.

        The file system with its checkpoints may hang for hours.
        """
        if self.looking is not None:
            if not self.looking.done():
                return
            looked, self.looking = self.looking, None
            run = turn.book.runs.get(self._run)
            if run is not None and _is_over(run):
                self._prune(turn, run, looked.result(), dry_run=False)
        if not self._outdated and turn.at >= self._look_at:
            self._look_at = turn.at + EVERY_S
            older_than_s = self._settings.older_than_days * DAY_S
            self._outdated.extend(outdated(_ended(turn.book), turn.now, self._settings.keep, older_than_s))
        run = turn.book.runs.get(self._outdated.popleft()) if self._outdated else None
        if run is not None and _is_over(run):
            self._run, self.looking = run.id, in_thread(_prepare_look(turn.book, run), "prune")

    def prune(
        self,
        turn: Turn,
        runs: Few[Name] | None = None,
        keep: Count | None = None,
        older_than_s: Seconds | None = None,
        checkpoints: bool = False,
        dry_run: bool = False,
    ) -> list[Pruned]:
        """Prune runs that somebody names, or those that are outdated; returns what goes of each.

        Raises:
            FallowError: a named run has not ended, or still has jobs.
        """
        if runs:
            named = {run.id: run for run in (self._over(turn.book, name, checkpoints) for name in runs)}
            chosen = list(named.values())
        else:
            keep = self._settings.keep if keep is None else keep
            older_than_s = self._settings.older_than_days * DAY_S if older_than_s is None else older_than_s
            chosen = [turn.book.runs[name] for name in outdated(_ended(turn.book), turn.now, keep, older_than_s)]
        looks = [_prepare_look(turn.book, run, checkpoints=checkpoints, keeps_report=not dry_run) for run in chosen]
        pruned = [self._prune(turn, run, look(), dry_run) for run, look in zip(chosen, looks, strict=True)]
        return [found for found in pruned if found is not None]

    @staticmethod
    def _over(book: Book, name: str, checkpoints: bool) -> Run:
        run = book.get(name, by_name=True)
        if not run.ended:
            raise FallowError(
                f"run {quote(run.id)} is {run.root.status}; only a run that has ended is pruned: "
                f"fallow cancel {run.id} ends it",
                Exit.USAGE,
            )
        if not _is_over(run):
            raise FallowError(f"run {quote(run.id)} still has jobs; prune it when Slurm has ended them", Exit.TEMPFAIL)
        if not checkpoints and _prepare_look(book, run, keeps_report=False)() is None:
            raise FallowError(
                f"run {quote(run.id)}: its checkpoint folder {book.checkpoint_folder(run)} cannot be looked into; make "
                "it readable, or give the checkpoints up with --checkpoints",
                Exit.TEMPFAIL,
            )
        return run

    @staticmethod
    def _prune(turn: Turn, run: Run, kept: int | None, dry_run: bool) -> Pruned | None:
        if kept is None or (run.record.pruned and kept):
            return None
        found = Pruned(run=run.id, name=run.spec.name, ended_at=run.record.ended_at or 0.0, checkpoints_kept=kept)
        if dry_run:
            return found
        paths = turn.book.paths.run(run.id)
        if kept:
            run.record.pruned = True
            turn.removals += [str(paths.logs), str(paths.ledger)]
            turn.record(run, "prune", f"run {run.id}: its logs and ledgers are removed; report and checkpoints stay")
            return found
        turn.removals += [str(turn.book.checkpoint_folder(run)), str(paths.root)]
        turn.forget(run)
        turn.record(None, "prune", f"run {run.id}: its logs, ledgers and record are removed")
        return found


def outdated(ended_at: Mapping[str, float], now: float, keep: int, older_than_s: float) -> list[str]:
    """Return the runs to prune, the oldest first.

    Args:
        ended_at: run -> Unix time of its end, for every run that has ended.
        now: Unix time.
        keep: so many of the newest stay, however old they are.
        older_than_s: no run that ended later than that ago is pruned.
    """
    newest_first = sorted(ended_at, key=lambda run: (-ended_at[run], run))
    return [run for run in reversed(newest_first[keep:]) if now - ended_at[run] >= older_than_s]


def _prepare_look(
    book: Book, run: Run, *, checkpoints: bool = False, keeps_report: bool = True
) -> Callable[[], int | None]:
    """Prepare to look at what a run has left. What is returned does that, and is for a thread.

    Args:
        book: with the run.
        run: that is over.
        checkpoints: these are given up.
        keeps_report: where checkpoints stay, make sure that the report does.

    Returns:
        How many checkpoints stay. None: all that it has left does, for nobody can say, or its report cannot be written
        and the ledgers are all that is known of the samples.
    """
    name, folder, is_elsewhere = run.id, book.checkpoint_folder(run), bool(run.record.checkpoint_folder)
    root, file = book.paths.run(run.id).root, book.paths.run(run.id).report
    report = None if run.record.pruned or not keeps_report else report_of(book, run)

    def look() -> int | None:
        kept = 0 if checkpoints else _count_checkpoints(name, folder, is_elsewhere)
        if kept and report is not None and root.exists() and not _is_counted(file):
            return kept if _keep_report(name, file, *report) else None
        return kept

    return look


def _keep_report(run: str, file: Path, report: RunReport, count: Callable[[], SampleReport]) -> bool:
    try:
        write_struct(file, replace(report, samples=count()))
    except (OSError, FallowError) as error:
        log.warning("prune.report", run=run, error=str(error))
        return False
    return True


def _is_counted(report: Path) -> bool:
    """Is the report there that was made when the run ended? To count the samples again would hold up all runs."""
    with contextlib.suppress(OSError, FallowError):
        return not read_struct(report, RunReport).samples.unknown
    return False


def _ended(book: Book) -> dict[str, float]:
    """Of runs whose jobs are gone as well."""
    return {run.id: run.record.ended_at or 0.0 for run in book.runs.values() if _is_over(run)}


def _is_over(run: Run) -> bool:
    """It has ended, and what its jobs held is in its sums."""
    return run.ended and all(one.counted for one in run.allocations.values())


def _count_checkpoints(run: str, folder: Path, is_elsewhere: bool) -> int | None:
    """Return how many checkpoints the run has left; None: nobody can say, for their file system does not answer."""
    try:
        return sum(1 for _ in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        # A folder elsewhere may be on a file system that is not mounted now.
        return None if is_elsewhere and not _has_entries(folder.parent) else 0
    except OSError as error:
        log.warning("prune.checkpoints", run=run, folder=str(folder), error=error.strerror)
        return None


def _has_entries(folder: Path) -> bool:
    try:
        return next(folder.iterdir(), None) is not None
    except OSError:
        return False
