"""`fallow simulate`: run the planner on a recorded cluster."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from fallow.cli.common import Finite, duration, json_option, show_items, tell
from fallow.model import Exit, FallowError, PolicyScore, SimReport
from fallow.sim.published import DEFAULT, RESTART
from fallow.sim.traces.sacct import COMMAND
from fallow.text import clean

if TYPE_CHECKING:
    from fallow.sim.traces.recorded import Window

_not_negative = Finite(min=0)
_positive = Finite(min=0, min_open=True)

_HELP = f"""What Fallow would have made of a recorded cluster's idle nodes: the head's own planner in virtual time.

--trace is a file (sacct, SWF, Helios; .gz too) or the name of a trace that comes with Fallow: earth, philly, summit.
To record the jobs of your own cluster in a month:

\b
{COMMAND}

--site FOLDER has the real nodes and scheduler. Write its files with `scontrol -o show node > FOLDER/nodes.txt`,
`... partition > FOLDER/partitions.txt` and `... config > FOLDER/config.txt`. Without --site the nodes and the scheduler
are guessed from the jobs, and the output lists the guesses.

\b
Policies (--policy, several times):
  ours     Fallow's planner
  greedy   every idle node at once, to the smallest run
  restart  as greedy, but each change restarts the run
  ideal    the same idle nodes with free, instant rescaling
"""


COLUMNS: dict[str, Callable[[PolicyScore], str]] = {
    "POLICY": lambda one: one.name,
    "IDEAL": lambda one: f"{one.ideal_ratio:.3f}",
    "UTILITY": lambda one: f"{one.utility:.3f}",
    "HARVESTED": lambda one: f"{one.harvested_node_s / one.idle_node_s:.3f}" if one.idle_node_s else "-",
    "ABSORBS/D": lambda one: f"{one.absorbs_per_day:.0f}",
    "RELEASES/D": lambda one: f"{one.releases_per_day:.0f}",
    "LOST/D": lambda one: f"{one.unannounced_per_day:.0f}",
    "DELAYED": lambda one: str(one.others_delayed.jobs),
    "P95 S": lambda one: f"{one.others_delayed.p95_s:.1f}",
    "MAX S": lambda one: f"{one.others_delayed.max_s:.1f}",
    "RPCS/MIN": lambda one: f"{one.slurmctld_rpcs_per_min:.1f}",
}


@click.command(short_help="What your idle nodes could have trained.", help=_HELP)
@click.option("--trace", metavar="FILE|NAME", help="Recorded jobs, or holes.")
@click.option("--policy", "policies", multiple=True, default=["ours"], metavar="P", help="Default: ours.")
@click.option(
    "--runs",
    default=DEFAULT,
    metavar="NxMAX:CURVE;...",
    help="N runs of at most MAX nodes (or MIN-MAX), and their speed: a published MODEL such as ShuffleNet, AlexNet, "
    "VGG16 or bert, or head:FILE (output of `status --json`). NxMAX,in=P+Q:CURVE: the runs may use only partitions P "
    "and Q. Default: 10x64:ShuffleNet.",
)
@click.option(
    "--costs",
    metavar="UP-DOWN",
    default=RESTART,
    show_default=True,
    help="Seconds that a change costs under the policy restart.",
)
@click.option(
    "--start-up",
    "start_up_s",
    type=_not_negative,
    metavar="S",
    help="Seconds from a job's start until its node can join.",
)
@click.option(
    "--plans",
    type=click.Choice(["hidden", "known"]),
    default="hidden",
    show_default=True,
    help="For a trace of holes: whether Slurm's plan shows their ends.",
)
@click.option(
    "--profile",
    type=click.Choice(["preempt", "nograce", "plain"]),
    default="preempt",
    show_default=True,
    help="How Slurm preempts our jobs: with grace time, without, or not at all.",
)
@click.option(
    "--bf-interval",
    "bf_interval_s",
    type=Finite(1, 86400),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Seconds between cycles of backfill.",
)
@click.option(
    "--poll",
    "poll_s",
    type=Finite(5, 3600),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Seconds between polls.",
)
@click.option(
    "--begin",
    "begin_day",
    type=_not_negative,
    default=0.0,
    show_default=True,
    metavar="DAY",
    help="First day of the trace.",
)
@click.option("--days", type=_positive, metavar="N", help="Number of days. Default: all; summit: 2 of 14.")
@click.option("--site", metavar="FOLDER", help="The cluster's nodes, partitions and configuration.")
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def simulate(trace: str | None, as_json: bool, **options: Any) -> None:
    if trace is None:
        raise FallowError(
            "--trace needs a file, or one of earth, philly, summit; see: fallow simulate --help", Exit.USAGE
        )
    if options["site"] is not None:
        _refuse_site_options()
    from fallow.sim.traces.recorded import Window
    from fallow.sim.types import Scheduler

    scheduler = Scheduler(bf_interval_s=options.pop("bf_interval_s"))
    fields = ("seed", "begin_day", "days", "profile")
    window = Window(scheduler=scheduler, **{name: options.pop(name) for name in fields})
    tell(_simulate(trace, window, **options), as_json, _show)


def _refuse_site_options() -> None:
    """Refuse options for values that --site has."""
    context = click.get_current_context()
    for each in context.command.params:
        is_typed = context.get_parameter_source(each.name or "") is click.core.ParameterSource.COMMANDLINE
        if is_typed and each.name in ("profile", "bf_interval_s"):
            raise FallowError(f"{each.opts[0]} comes from --site; leave {each.opts[0]} out", Exit.USAGE)


def _simulate(trace: str, window: "Window", **options: Any) -> SimReport:
    """Simulate, with a progress bar for each policy."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from fallow.sim.simulate import simulate as play

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(policy: str, share: float, ratio: float) -> None:
            if policy not in tasks:
                tasks[policy] = bar.add_task(policy, total=1.0)
            bar.update(tasks[policy], completed=share, description=f"{policy}: ratio {ratio:.3f}")

        return play(trace, window, progress=show, **options)


def _show(report: SimReport) -> None:
    """Print a table of the policies, and notes on how to read it."""
    show_items(COLUMNS, report.policies)
    for line in _foot(report):
        click.echo(clean(line, 512))


def _foot(report: SimReport) -> list[str]:
    trace = report.trace
    idle_nodes = report.idle_node_s / report.seconds if report.seconds else 0.0
    lines = [
        f"{trace.name}: {duration(report.seconds)}, {trace.jobs} records, {idle_nodes:.1f} idle nodes on average; "
        f"{report.arm}; seed {report.seed}",
    ]
    if trace.bad_lines:
        reasons = ", ".join(f"{count} {reason}" for reason, count in trace.bad_lines.items())
        lines.append(f"skipped lines: {reasons}")
        lines += [f"  {example}" for example in trace.examples]
    lines += [f"note: {each}" for each in trace.assumed]
    return lines + [f"{policy.name}: {note}" for policy in report.policies for note in policy.notes]
