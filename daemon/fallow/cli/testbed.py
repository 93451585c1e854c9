"""`fallow testbed`: a private, real Slurm on this machine."""

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from fallow.cli.common import Finite, json_option, say, show_items, tell
from fallow.model import Exit, FallowError
from fallow.testbed.cluster import Testbed, TestbedStatus
from fallow.testbed.conf import Profile
from fallow.testbed.load import LoadResult, make_jobs, play

_folder = click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))

_NAMES = [profile.value for profile in Profile]
_PROFILES = (
    "preempt: a partition `normal` preempts one called `scavenge`, with 10 s of grace; nograce: the same without "
    "grace; plain: one partition, nothing preempts."
)


@click.group(short_help="A private, real Slurm on this machine.", no_args_is_help=False)
def testbed() -> None:
    """A private, real Slurm on this machine: several nodes, fake GPUs, no root needed."""


@testbed.command(short_help="Start a testbed.")
@_folder
@click.option("--nodes", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option("--gpus", type=click.IntRange(0, 16), default=4, show_default=True, help="Fake GPUs per node.")
@click.option("--profile", type=click.Choice(_NAMES), default=Profile.PREEMPT.value, show_default=True, help=_PROFILES)
@click.option(
    "--bf-interval", type=click.IntRange(1, 600), default=1, show_default=True, help="Seconds between backfill cycles."
)
@json_option
def up(folder: Path | None, nodes: int, gpus: int, profile: str, bf_interval: int, as_json: bool) -> None:
    """Start a testbed in FOLDER (default: a new folder) and wait until its nodes are idle."""
    instance = Testbed.up(folder, nodes=nodes, gpus=gpus, profile=profile, bf_interval=bf_interval)
    tell(instance.status(), as_json, _show_up)


def _show_up(status: TestbedStatus) -> None:
    click.echo(f"export SLURM_CONF={status.conf}")
    say(f"testbed in {status.folder}; end it with: fallow testbed down {status.folder}")


@testbed.command(short_help="Take a testbed down.")
@_folder
@click.option("--all", "everything", is_flag=True, help="All of your testbeds.")
@json_option
def down(folder: Path | None, everything: bool, as_json: bool) -> None:
    """Take down the testbed in FOLDER, with all its processes and files. A single testbed needs no FOLDER."""
    if everything and folder is not None:
        raise FallowError("--all takes down all testbeds; give FOLDER or --all", Exit.USAGE)
    testbeds = Testbed.all() if everything else [Testbed.find(folder)]
    for each in testbeds:
        each.down()
    folders = [str(each.folder) for each in testbeds]
    tell({"down": folders}, as_json, lambda _: click.echo("".join(f"{one}: down\n" for one in folders), nl=False))


@testbed.command(short_help="List testbeds.")
@json_option
def status(as_json: bool) -> None:
    """List your testbeds."""
    tell([each.status() for each in Testbed.all()], as_json, _show)


@testbed.command(short_help="Play other users' jobs on a testbed.")
@_folder
@click.option("--seconds", type=Finite(1, 86_400), default=300.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--utilisation",
    type=Finite(0, 4, min_open=True),
    default=0.7,
    show_default=True,
    help="Share of the nodes that the jobs request on average; above 1 the jobs queue up.",
)
@click.option("--mean", type=Finite(min=1), default=20.0, show_default=True, help="Mean length of the jobs, seconds.")
@json_option
def load(folder: Path | None, seconds: float, seed: int, utilisation: float, mean: float, as_json: bool) -> None:
    """Play other users' jobs on the testbed in FOLDER, in the foreground.

    SIGTERM and Ctrl-C cancel the remaining jobs and end the command.
    """
    instance, stop = Testbed.find(folder), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    jobs = make_jobs(seed, seconds=seconds, nodes=instance.layout.nodes, utilisation=utilisation, mean_s=mean)
    tell(play(instance, jobs, seconds, stop), as_json, _show_load)


def _show_load(result: LoadResult) -> None:
    click.echo(f"{result.submitted} of {result.planned} jobs submitted to {result.folder}, {result.refused} refused")
    if result.refusal:
        say(f"the last refusal: {result.refusal}")


def _show(statuses: list[TestbedStatus]) -> None:
    if not statuses:
        click.echo("no testbeds; start one with: fallow testbed up")
        return
    columns: dict[str, Callable[[TestbedStatus], str]] = {
        "FOLDER": lambda one: one.folder,
        "STATE": lambda one: "up" if one.up else "down",
        "SLURM": lambda one: one.slurm_version,
        "PROFILE": lambda one: one.profile,
        "NODES": lambda one: _counts(one.nodes),
        "JOBS": lambda one: _counts(one.jobs),
    }
    show_items(columns, statuses)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "-"
