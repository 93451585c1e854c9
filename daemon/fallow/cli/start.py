"""Commands that start something big and get out of the way: daemon, local, top, demo."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import click

from fallow.cli.common import Finite, json_option, restart_option
from fallow.model import Exit, FallowError


@click.command(short_help="Run the head in the foreground.")
def daemon() -> int:
    """Run the head in the foreground (under systemd: Type=notify). One per state folder."""
    from fallow.head.main import main

    return int(main())


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

    With --restart a STEP of the schedule is so many seconds of training, since such a script tells no steps.
    """
    from fallow.core.submission.schedule import parse_schedule
    from fallow.local.main import main

    # Before anything is started, so that a bad item costs nothing.
    parse_schedule(schedule, members, workers_per_node)
    if report is not None and not report.absolute().parent.is_dir():
        raise FallowError(f"--report {report}: its folder does not exist; make it first", Exit.CANTCREAT)
    if restart and reproducible:
        raise FallowError("--reproducible is for scripts that call fallow.init; leave it or --restart out", Exit.USAGE)
    return int(main(list(command), members, workers_per_node, schedule, report, as_json, reproducible, restart))


@click.command(short_help="Watch runs and nodes live.")
@click.option("--read-only", is_flag=True, help="Keys that change something do nothing.")
@click.option("--demo", is_flag=True, help="Made-up data; needs no head.")
def top(read_only: bool, demo: bool) -> int:
    """Live view of runs, members and nodes."""
    if importlib.util.find_spec("textual") is None:
        raise FallowError("fallow top needs Textual; run: pip install 'fallow[tui]'", Exit.UNAVAILABLE)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise FallowError("fallow top needs a terminal; elsewhere: fallow status, fallow events --follow", Exit.USAGE)
    from fallow.config import load_config
    from fallow_tui.app import main

    if not demo:
        load_config()
    return int(main(read_only=read_only, demo=demo))


@click.command(short_help="The whole story on a private Slurm.")
@click.option("--seconds", type=Finite(10, 3600), default=120.0, show_default=True, help="About how long it may take.")
@json_option
def demo(seconds: float, as_json: bool) -> int:
    """Start a private Slurm on this machine, train on its idle nodes while others use it, and report."""
    from fallow.demo.main import main

    return int(main(seconds=seconds, json=as_json))
