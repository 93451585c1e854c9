"""`fallow local`: train on this machine, without Slurm."""

import os
import shutil
import tempfile
from pathlib import Path

import click

from fallow.cli.common import json_option, json_text, play_in, restart_option, say, tell
from fallow.model import Exit, FallowError, RunReport


@click.command(short_help="Train on this machine, without Slurm.", context_settings={"allow_interspersed_args": False})
@click.option("--members", type=click.IntRange(min=1), required=True, help="Nodes at the start.")
@click.option("--workers-per-node", type=click.IntRange(min=1), default=1, show_default=True, help="Workers of each.")
@click.option(
    "--schedule",
    default="",
    metavar="S",
    help="What happens to the membership when STEP steps are finished, e.g. '+2@10,-1@20,kill:0@30'. +K@STEP: K "
    "nodes come. -K@STEP: the K youngest leave. -mI@STEP: node I leaves; nodes are numbered from 0 as they come. "
    "kill:I@STEP, stop:I@STEP, cont:I@STEP: SIGKILL, SIGSTOP, SIGCONT to node I's workers. head-kill@STEP, "
    "store-kill@STEP: the head or its store is killed, and comes back.",
)
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write the report to this file.")
@click.option("--reproducible", is_flag=True, help="The result is the same, bit for bit, for every schedule.")
@restart_option
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def local(
    members: int,
    workers_per_node: int,
    schedule: str,
    report: Path | None,
    reproducible: bool,
    restart: bool,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Train COMMAND on this machine with real head, store, agents and workers: fallow local --members 2 -- CMD

    With --restart, STEP means seconds of training, because such a script does not report its steps.
    """
    from fallow.core.submission.schedule import parse_schedule
    from fallow.local.driver import Driver, name_of

    # Check all arguments before anything is started.
    items = parse_schedule(schedule, members, workers_per_node)
    if report is not None and not report.absolute().parent.is_dir():
        raise FallowError(f"--report {report}: its folder does not exist; create it first", Exit.CANTCREAT)
    if restart and reproducible:
        raise FallowError("--reproducible is for scripts that call fallow.init; leave it or --restart out", Exit.USAGE)
    argv = agent_argv(command, restart)
    folder = Path(tempfile.mkdtemp(prefix="fallow-local-"))
    driver = Driver(
        folder,
        argv,
        members,
        items,
        workers_per_node=workers_per_node,
        name=name_of(command),
        # Standard output is for the report.
        output=2 if as_json else None,
        environ={**os.environ, "FALLOW_REPRODUCIBLE": "1"} if reproducible else os.environ,
        by_seconds=restart,
    )
    result = play_in(folder, driver.train())
    if driver.absent_nodes:
        say(f"{driver.absent_nodes} newcomer(s) did not take part: {driver.absence_reason}")
    for item in driver.pending_items:
        say(f"{item.text} did not happen: the run ended {'before' if restart else f'at step {result.steps}'}")
    return _show_result(result, report, folder, as_json)


def agent_argv(command: tuple[str, ...], restart: bool) -> list[str]:
    """The command that agents start. Raises FallowError if the program does not exist."""
    from fallow.agent.launch import under_torchrun, with_python

    if restart:
        return under_torchrun(command)
    if shutil.which(command[0]) is None:
        what = command[0]
        raise FallowError(f"command {what!r}: not found or not executable{with_python(what)}", Exit.NOINPUT)
    return list(command)


def _show_result(result: RunReport, report: Path | None, folder: Path, as_json: bool) -> int:
    """Print the report, write it to a file and return the exit code. Removes the logs of a sound run."""
    from fallow.cli.show import end_of_traceback, show_report

    report_is_written = report is None or _write(result, report)
    tell(result, as_json, show_report)
    if result.sound:
        if result.message:
            say(result.message)
        shutil.rmtree(folder, ignore_errors=True)
        return Exit.OK if report_is_written else Exit.IOERR
    if as_json and result.traceback:
        click.echo(end_of_traceback(result), err=True)
    say(f"run is {result.status}: {result.message or 'see the report'}; logs in {folder}")
    return Exit.SOFTWARE


def _write(result: RunReport, report: Path) -> bool:
    """Write the report to a file. Returns False, with a message, if that fails; the report is printed all the same."""
    try:
        report.write_text(json_text(result) + "\n")
    except OSError as error:
        say(f"--report {report}: cannot be written ({error.strerror})")
        return False
    return True
