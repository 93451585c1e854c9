"""`fallow check`: whether a script has the same result whoever trains it."""

import asyncio
import os
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from fallow.cli.common import Finite, json_option, number, play_in, say, show_items, tell
from fallow.cli.local import agent_argv
from fallow.cli.show import end_of_traceback
from fallow.core.submission.schedule import parse_schedule
from fallow.core.submission.suitability import CHANGES, REPEAT, Advice, Suitability, Trial, changes, conclude
from fallow.model import Exit, FallowError, RunStatus, RunView
from fallow.text import clean, clean_output

MOST_MEMBERS, MOST_WARNINGS = 2, 10
"""Members at any time, in all trainings alike: the default global batch depends on that. Warnings of a training."""
COLUMNS: dict[str, Callable[[Trial], str]] = {
    "TRAINING": lambda trial: trial.name,
    "STEPS": lambda trial: str(trial.report.steps) if trial.report else "-",
    "SAMPLES": lambda trial: str(trial.report.samples.consumed) if trial.report else "-",
    "LOSS": lambda trial: number(trial.report.final_loss if trial.report else None),
    "WEIGHTS": lambda trial: ((trial.report and trial.report.final_digest) or "-")[:8],
    "SECONDS": lambda trial: f"{trial.seconds:.1f}",
}
_WARNING = re.compile(r"^(?:fallow: .*|.*\b\w*Warning: .*)", re.MULTILINE)


@click.command(short_help="Is my script suitable?", context_settings={"allow_interspersed_args": False})
@click.option(
    "--minutes", type=Finite(0, min_open=True), default=10.0, show_default=True, help="Deadline of each training."
)
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def check(minutes: float, as_json: bool, command: tuple[str, ...]) -> int:
    """Train COMMAND three times on this machine and compare the results: fallow check -- CMD

    One member trains undisturbed, then two; then members join, are killed and leave. The final weights must be the
    same, bit for bit. Where reproducible mode refuses the script, the final losses must agree within 1 %.

    Make the training short by the script's own options: 20 to 200 steps, more if all together take less than 10 s.
    For example: fallow check -- python train.py --steps 100

    Exits with 0 if the script is suitable, 65 if not, 70 if it fails by itself, 75 if it takes too long.
    """
    argv = agent_argv(command, restart=False)
    # Reproducible mode needs the first variable on CUDA.
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, "FALLOW_REPRODUCIBLE": "1"}
    first = _train("1 member", argv, environ, minutes)
    if first.report is not None and "reproducible=True" in first.report.message:
        say("reproducible mode refuses this script, so final losses are compared instead of weights")
        del environ["FALLOW_REPRODUCIBLE"]
        first = _train("1 member", argv, environ, minutes)
    trials = [first]
    if conclude(trials).suitable:
        trials.append(_train("2 members", argv, environ, minutes, members=2))
    if conclude(trials).suitable and first.report is not None:
        trials.append(_train(CHANGES, argv, environ, minutes, schedule=changes(first.report.steps)))
    if len(trials) > 1 and conclude(trials).advice is Advice.STATE:
        trials.append(_train(REPEAT, argv, environ, minutes))
    result = conclude(trials)
    tell(result, as_json, _show)
    return result.code


def _train(
    name: str, argv: list[str], environ: Mapping[str, str], minutes: float, *, members: int = 1, schedule: str = ""
) -> Trial:
    """Train once. Keeps the logs of a training that failed. Raises FallowError if that is not the script's fault."""
    from fallow.local.driver import Driver

    say(f"training: {name}{schedule and ': '}{schedule}")
    folder, items = Path(tempfile.mkdtemp(prefix="fallow-local-")), parse_schedule(schedule, members)
    report, error, is_late, views, began_at = None, "", False, deque[RunView](maxlen=1), time.monotonic()
    with (folder / "output").open("wb") as log:
        driver = Driver(
            folder, argv, members, items, max_members=MOST_MEMBERS, output=log, on_view=views.append, environ=environ
        )
        try:
            report = play_in(folder, asyncio.wait_for(driver.train(), minutes * 60))
        except TimeoutError:
            is_late = True
            error = f"not at its end after {minutes:g} minutes, but at step {views[0].step if views else 0}"
        except FallowError as failure:
            if failure.code is not Exit.SOFTWARE:
                raise
            error = failure.message
    output = "\n".join(path.read_text(errors="replace") for path in folder.glob("state/runs/*/logs/*.log"))
    warnings = tuple(dict.fromkeys(map(clean_output, _WARNING.findall(output))))[:MOST_WARNINGS]
    if report is not None and report.status is RunStatus.FINISHED:
        shutil.rmtree(folder, ignore_errors=True)
    elif report is not None:
        say(f"logs are kept in {folder}")
    absence, seconds = driver.absence_reason * bool(driver.absent_nodes), time.monotonic() - began_at
    return Trial(
        name=name, seconds=seconds, report=report, error=error, is_late=is_late, absence=absence, warnings=warnings
    )


def _show(result: Suitability) -> None:
    """Print the end of a failed script, a row for each training, and the verdict."""
    if (report := result.trials[-1].report) and report.traceback:
        click.echo(end_of_traceback(report))
    show_items(COLUMNS, result.trials)
    for text in dict.fromkeys(text for trial in result.trials for text in trial.warnings):
        click.echo(clean(f"warning: {text}", 512))
    if result.advice is None:
        is_exact = report is not None and report.reproducible
        what = "final weights are the same, bit for bit," if is_exact else "final losses agree within 1 %"
        click.echo(f"suitable: no sample was lost or used twice, and the {what} whoever trains")
    else:
        verdict = "undecided" if result.suitable is None else "not suitable"
        click.echo(clean(f"{verdict}: {result.trial}: {result.problem}") + f"\n  {result.advice}")
