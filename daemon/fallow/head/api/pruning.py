"""Pruning: the head removes files and records of ended runs by count and age.

If a run has checkpoints, only its logs and ledgers are removed. Its record, script, report and checkpoints stay until
somebody gives the checkpoints up. Without checkpoints, everything is removed. The usage of pruned runs stays in sums
(`head.state.stored`). The head prunes every `EVERY_S`; `fallow prune` does so at once.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import structlog

from fallow.config import Prune
from fallow.control.protocol import Pruned
from fallow.files import read_struct, unwritable, write_struct
from fallow.head.api.reports import report_of
from fallow.head.loop.inbox import FilesFirst
from fallow.head.loop.turn import Turn
from fallow.head.state.registry import Registry, Run
from fallow.model import Exit, FallowError, RunReport
from fallow.model.bounds import Count, Few, Name, Seconds
from fallow.text import quote
from fallow.threads import COUNT_S, SCAN_S, in_thread

log = structlog.get_logger("fallow.head")

EVERY_S = 3600.0
"""Interval at which the head looks for outdated runs. It prunes one run after another: counting samples is slow."""
DAY_S = 86_400.0


class Pruning:
    """Removes files and records of ended runs. `settings`: section of the configuration."""

    def __init__(self, settings: Prune) -> None:
        self._settings = settings
        self._next_look_at = 0.0
        self._outdated: deque[str] = deque()
        self._run = ""
        self.scan: Future[int | str] | None = None
        "scan of an outdated run's files that is under way (`_prepare_scan`)"

    def tick(self, turn: Turn) -> None:
        """Prune the outdated run whose scan has ended, and start the scan of the next one.

        Scans run in a thread: the file system with the checkpoints may hang for hours.
        """
        if self.scan is not None:
            if not self.scan.done():
                return
            finished_scan, self.scan = self.scan, None
            run = turn.registry.runs.get(self._run)
            if run is not None and _is_over(run):
                self._prune(turn, run, finished_scan.result(), dry_run=False)
        if not self._outdated and turn.at >= self._next_look_at:
            self._next_look_at = turn.at + EVERY_S
            older_than_s = self._settings.older_than_days * DAY_S
            self._outdated.extend(outdated(_end_times(turn.registry), turn.now, self._settings.keep, older_than_s))
        run = turn.registry.runs.get(self._outdated.popleft()) if self._outdated else None
        if run is not None and _is_over(run):
            self._run, self.scan = run.id, in_thread(_prepare_scan(turn.registry, run), "prune")

    def prune(
        self,
        turn: Turn,
        runs: Few[Name] | None = None,
        keep: Count | None = None,
        older_than_s: Seconds | None = None,
        checkpoints: bool = False,
        dry_run: bool = False,
    ) -> list[Pruned] | FilesFirst:
        """Prune named runs, or those that are outdated. Return what is removed of each. If checkpoints may stay, the
        files are scanned first.

        Args:
            turn: takes the effects.
            runs: names or ids; None: the outdated runs.
            keep: number of the newest runs that stay; None: as configured.
            older_than_s: age from which a run is outdated; None: as configured.
            checkpoints: remove checkpoints, too.
            dry_run: remove nothing.

        Raises:
            FallowError: a named run has not ended, or still has jobs.
        """
        registry = turn.registry
        if runs:
            chosen_ids = list(dict.fromkeys(self._find_ended_run(registry, name).id for name in runs))
        else:
            keep = self._settings.keep if keep is None else keep
            older_than_s = self._settings.older_than_days * DAY_S if older_than_s is None else older_than_s
            chosen_ids = outdated(_end_times(registry), turn.now, keep, older_than_s)
        chosen_runs = [registry.runs[name] for name in chosen_ids]

        def remove(findings: list[int | str], turn: Turn) -> list[Pruned]:
            finding_by_run = dict(zip(chosen_ids, findings, strict=True))
            for name, finding in finding_by_run.items():
                if runs and isinstance(finding, str):
                    raise FallowError(f"run {quote(name)}: {finding}", Exit.TEMPFAIL)
            over = [run for run in map(registry.runs.get, chosen_ids) if run is not None and _is_over(run)]
            pruned = [self._prune(turn, run, finding_by_run[run.id], dry_run) for run in over]
            return [outcome for outcome in pruned if outcome is not None]

        if checkpoints:
            return remove([0] * len(chosen_ids), turn)
        scans = [_prepare_scan(registry, run, keeps_report=not dry_run) for run in chosen_runs]
        folders = [registry.checkpoint_folder(run) for run in chosen_runs]
        place = " or ".join(map(str, folders[:3]))
        count = FilesFirst(place, lambda: [scan() for scan in scans], remove, COUNT_S)
        # Scans may count samples, which takes long on a file system that answers, too.
        return FilesFirst(place, lambda: [*map(has_entries, folders)], lambda _, turn: count, SCAN_S)

    @staticmethod
    def _find_ended_run(registry: Registry, name: str) -> Run:
        run = registry.get(name, by_name=True)
        if not run.ended:
            raise FallowError(
                f"run {quote(run.id)} is {run.root.status}; only a run that has ended is pruned: "
                f"fallow cancel {run.id} ends it",
                Exit.USAGE,
            )
        if not _is_over(run):
            raise FallowError(f"run {quote(run.id)} still has jobs; prune it when Slurm has ended them", Exit.TEMPFAIL)
        return run

    @staticmethod
    def _prune(turn: Turn, run: Run, checkpoints_kept: int | str, dry_run: bool) -> Pruned | None:
        """Remove what a scan (`_prepare_scan`) allows to remove."""
        if isinstance(checkpoints_kept, str) or (run.record.pruned and checkpoints_kept):
            return None
        pruned = Pruned(
            run=run.id, name=run.spec.name, ended_at=run.record.ended_at or 0.0, checkpoints_kept=checkpoints_kept
        )
        if dry_run:
            return pruned
        paths = turn.registry.paths.run(run.id)
        if checkpoints_kept:
            run.record.pruned = True
            turn.removals += [str(paths.logs), str(paths.ledger)]
            turn.record(run, "prune", f"run {run.id}: its logs and ledgers are removed; report and checkpoints stay")
            return pruned
        turn.removals += [str(turn.registry.checkpoint_folder(run)), str(paths.root)]
        turn.forget(run)
        turn.record(None, "prune", f"run {run.id}: its logs, ledgers and record are removed")
        return pruned


def outdated(ended_at: Mapping[str, float], now: float, keep: int, older_than_s: float) -> list[str]:
    """Return the runs to prune, the oldest first.

    Args:
        ended_at: run -> Unix time of its end, for every run that has ended.
        now: Unix time.
        keep: number of the newest runs that stay, whatever their age.
        older_than_s: time since its end from which a run is outdated.
    """
    newest_first = sorted(ended_at, key=lambda run: (-ended_at[run], run))
    return [run for run in reversed(newest_first[keep:]) if now - ended_at[run] >= older_than_s]


def _prepare_scan(registry: Registry, run: Run, *, keeps_report: bool = True) -> Callable[[], int | str]:
    """Prepare the scan of a run's files. The result is a function for a thread.

    Args:
        registry: with the run.
        run: an ended run.
        keeps_report: write the report if checkpoints stay and the report is missing.

    Returns:
        A function that returns the number of checkpoints that stay, or why everything must stay.
    """
    folder, is_elsewhere = registry.checkpoint_folder(run), bool(run.record.checkpoint_folder)
    root, file = registry.paths.run(run.id).root, registry.paths.run(run.id).report
    complete = None if run.record.pruned or not keeps_report else report_of(registry, run)[1]

    def look() -> int | str:
        try:
            checkpoints_kept = _count_checkpoints(folder, is_elsewhere)
            if checkpoints_kept and complete is not None and root.exists() and not _is_counted(file):
                with unwritable():
                    write_struct(file, complete())
        except FallowError as error:
            log.warning("prune.scan", run=run.id, error=error.message)
            return error.message
        return checkpoints_kept

    return look


def _is_counted(report: Path) -> bool:
    """True if the report from the run's end exists with counted samples, so that they need not be counted again."""
    with contextlib.suppress(OSError, FallowError):
        return not read_struct(report, RunReport).samples.unknown
    return False


def _end_times(registry: Registry) -> dict[str, float]:
    """Run -> Unix time of its end, for ended runs without jobs."""
    return {run.id: run.record.ended_at or 0.0 for run in registry.runs.values() if _is_over(run)}


def _is_over(run: Run) -> bool:
    return run.ended and all(one.is_counted for one in run.allocations.values())


def _count_checkpoints(folder: Path, is_elsewhere: bool) -> int:
    """Number of checkpoints of a run. Raises FallowError if it is unknown, because the folder cannot be read."""
    reason = "its file system is not mounted"
    try:
        return sum(1 for _ in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        # A folder outside of the state folder may be on a file system that is not mounted now.
        if not is_elsewhere or has_entries(folder.parent):
            return 0
    except OSError as error:
        reason = error.strerror or type(error).__name__
    raise FallowError(
        f"checkpoint folder {folder} cannot be read ({reason}); make the folder readable, or give the checkpoints up "
        "with --checkpoints",
        Exit.TEMPFAIL,
    )


def has_entries(folder: Path) -> bool:
    try:
        return next(folder.iterdir(), None) is not None
    except OSError:
        return False
