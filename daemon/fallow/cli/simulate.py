"""`fallow simulate`."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fallow.cli.common import Finite, json_option, print_json, say
from fallow.model import Exit, FallowError
from fallow.sim.traces.outages import EVENTS, RESERVATIONS
from fallow.sim.traces.sacct import COMMAND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fallow.model import SimReport
    from fallow.sim.hole_lengths import HoleLengths
    from fallow.sim.plots import Plot
    from fallow.sim.report import Played
    from fallow.sim.simulate import Setup

REPORT, PAGE = "report.json", "index.html"

_folder = click.Path(file_okay=False, path_type=Path)
_number = Finite(min=0)
_above = Finite(min=0, min_open=True)

_HELP = f"""What Fallow would have made of a recorded cluster's idle nodes: the head's own planner in virtual time.

--trace is a file (sacct, SWF, Helios; .gz too) or the name of one that comes with Fallow: earth, philly, summit.
The jobs of your own cluster in a month:

\b
{COMMAND}

With `scontrol -o show node > SITE/nodes.txt`, and likewise partition (partitions.txt) and config (config.txt), --site
SITE has the real nodes and scheduler; else they are guessed from the jobs, and what was guessed is told. When nodes
were down or drained, and when they were maintained (--outages FILE, twice):

\b
{EVENTS}
{RESERVATIONS}

\b
Policies beside `ours` (--policy, several times; `all`: a table of them):
  greedy          every idle node at once
  hold:S          a run grows at most once in S seconds
  gated:S         a run grows if that pays within S seconds
  milp:S          BFTrainer's integer program, S seconds ahead
  pilot:M         one-node jobs of M minutes; pilots:set: of several lengths
  NAME/UP-DOWN    the same with restarts that take so many seconds: greedy/18-12

Ctrl-C ends it with what is known so far (exit code 75).
"""


@click.command(short_help="What your idle nodes could have trained.", help=_HELP)
@click.option("--trace", metavar="FILE|NAME", help="Recorded jobs, or holes.")
@click.option("--policy", "policies", multiple=True, metavar="P", help="Default: ours.")
@click.option(
    "--runs",
    metavar="NxMAX:CURVE;...",
    help="Runs of MAX nodes at most (or MIN-MAX), and how fast they are: bftrainer:MODEL, adaptdl:MODEL, head:FILE (of "
    "`status --json`). NxMAX,base=K:CURVE: K of them are each run's own, outside of the trace; what counts is how much "
    "more it does with idle ones. Default: 10x64:bftrainer:ShuffleNet.",
)
@click.option(
    "--costs",
    metavar="UP-DOWN|FILE",
    help="Seconds that a change costs, or what `python -m bench pause "
    "recovery --json` printed. Default: as measured for Fallow.",
)
@click.option("--start-up", "start_up_s", type=_number, metavar="S", help="From a job's start until its node can join.")
@click.option(
    "--latency",
    type=click.Choice(["none", "slurm"]),
    default="slurm",
    show_default=True,
    help="none: what is asked for starts at once.",
)
@click.option(
    "--plans",
    type=click.Choice(["hidden", "known"]),
    default="hidden",
    show_default=True,
    help="Of a trace of holes: does Slurm's plan tell their ends?",
)
@click.option(
    "--profile",
    type=click.Choice(["preempt", "nograce", "plain"]),
    default="preempt",
    show_default=True,
    help="Does Slurm take our nodes for others?",
)
@click.option("--slurm", "version", type=click.Choice(["22.05", "25.11"]), default="25.11", show_default=True)
@click.option(
    "--bf-interval",
    "bf_interval_s",
    type=Finite(1, 86400),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Between cycles of backfill.",
)
@click.option(
    "--poll", "poll_s", type=Finite(5, 3600), default=30.0, show_default=True, metavar="S", help="Between polls."
)
@click.option("--begin", "begin_day", type=_number, default=0.0, show_default=True, metavar="DAY", help="Of the trace.")
@click.option("--days", type=_above, metavar="N", help="Default: all; summit: 2.")
@click.option("--site", metavar="FOLDER", help="The cluster's nodes, partitions and configuration.")
@click.option(
    "--outages", multiple=True, metavar="FILE", help="When its nodes were down, drained or maintained; see above."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--sweep", is_flag=True, help="Each policy with restarts of several lengths, too.")
@click.option("--jobs", type=click.IntRange(1, 256), default=1, show_default=True, help="Policies played at once.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Plots (SVG, PNG), the report, and a page of them all.",
)
@json_option
def simulate(
    trace: str | None, policies: tuple[str, ...], sweep: bool, jobs: int, out: Path | None, as_json: bool, **given: Any
) -> int:
    if trace is None:
        raise FallowError("--trace: a file, or one of earth, philly, summit; see: fallow simulate --help", Exit.USAGE)
    if given["site"] is not None:
        _apart("--site", ("profile", "version", "bf_interval_s"))
    _has_extra(policies, out)
    from fallow.sim import simulate as simulation

    setup = _setup(simulation.Setup, given, trace=trace, record=out is not None)
    names = simulation.names(policies, sweep)
    simulation.check(setup, names)
    if out is not None:
        _make(out)
    played = _play(setup, names, jobs)
    found, holes = simulation.report_of(setup, played), simulation.holes_of(setup)
    code = Exit.TEMPFAIL if found.stopped else Exit.OK
    if out is not None:
        try:
            _write(out, found, played, holes)
        except FallowError as error:  # what was found in hours is shown all the same
            say(str(error))
            code = error.code
    if as_json:
        print_json(found)
    else:
        _show(found, holes)
    return code


def _given() -> list[click.Parameter]:
    """The options that are on the command line."""
    context = click.get_current_context()
    by_hand = click.core.ParameterSource.COMMANDLINE
    return [each for each in context.command.params if each.name and context.get_parameter_source(each.name) is by_hand]


def _apart(option: str, others: Sequence[str]) -> None:
    """Refuse options about what another one says already."""
    for each in _given():
        if each.name in others:
            raise FallowError(f"{option} says it already: leave {each.opts[0]} away", Exit.USAGE)


def _setup(kind: type[Setup], given: dict[str, Any], **more: Any) -> Setup:
    """From the options, whose names are those of its fields."""
    words = {name: value for name, value in given.items() if value is not None}
    year, month = words.pop("version").split(".")
    return kind(version=(int(year), int(month)), **words, **more)


def _has_extra(policies: Sequence[str], out: Path | None) -> None:
    """Say what is missing before hours of computing, not after."""
    wanted = []
    if out is not None:
        wanted.append(("matplotlib", "plots (--out)"))
    if any(name == "all" or name.startswith("milp") for name in policies):
        wanted.append(("highspy", "the policy milp"))
    for module, what in wanted:
        if importlib.util.find_spec(module) is None:
            raise FallowError(f"{what}: needs {module}; run: pip install 'fallow[sim]'", Exit.UNAVAILABLE)


def _play(setup: Setup, names: Sequence[str], jobs: int) -> list[Played]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from fallow.cli.playing import play_all

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks = [bar.add_task(name, total=1.0, start=jobs > 1 or number == 0) for number, name in enumerate(names)]

        def tell(number: int, share: float, ratio: float) -> None:
            for before in tasks[:number] if jobs == 1 else []:
                bar.update(before, completed=1.0)
            bar.start_task(tasks[number])
            bar.update(tasks[number], completed=share, description=f"{names[number]}: ratio {ratio:.3f}")

        return play_all(setup, names, jobs, tell)


def _make(folder: Path) -> None:
    """The folder, in which a file can be made: told before hours of computing, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FallowError(f"--out {folder}: cannot be written ({error.strerror})", Exit.CANTCREAT) from error


def _write(folder: Path, found: SimReport, played: Sequence[Played], holes: HoleLengths) -> None:
    import msgspec

    from fallow.sim.page import page
    from fallow.sim.plots import plots

    drawn: list[Plot] = plots(played, found.trace.name, holes)
    files = {f"{plot.name}.{kind}": data for plot in drawn for kind, data in (("svg", plot.svg), ("png", plot.png))}
    files[REPORT] = msgspec.json.format(msgspec.json.encode(found)) + b"\n"
    files[PAGE] = page(found, drawn, holes)
    for name, data in files.items():
        try:
            (folder / name).write_bytes(data)
        except OSError as error:
            raise FallowError(f"{folder / name}: cannot be written ({error.strerror})", Exit.CANTCREAT) from error
    say(f"see {folder / PAGE}")


def _show(found: SimReport, holes: HoleLengths) -> None:
    from fallow.cli.tables import show_table
    from fallow.sim.report import COLUMNS, foot, rows
    from fallow.text import clean

    show_table(COLUMNS, rows(found))
    for line in foot(found, holes):
        click.echo(clean(line, 512))
