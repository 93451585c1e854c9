"""`fallow testbed`: a private, real Slurm on this machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import click

from fallow.cli.common import Finite, json_option, print_json, say
from fallow.testbed.conf import Profile

_folder = click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))

_NAMES = [profile.value for profile in Profile]
_PROFILES = (
    "preempt: a partition `normal` preempts one called `scavenge`, with 10 s of grace; nograce: the same without; "
    "plain: one partition, nothing preempts."
)


@click.group(short_help="A private, real Slurm on this machine.")
def testbed() -> None:
    """A private, real Slurm on this machine: several nodes, fake GPUs, no root needed."""


@testbed.command(short_help="Start one.")
@_folder
@click.option("--nodes", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option("--gpus", type=click.IntRange(0, 16), default=4, show_default=True, help="Fake GPUs per node.")
@click.option("--profile", type=click.Choice(_NAMES), default=Profile.PREEMPT.value, show_default=True, help=_PROFILES)
@click.option(
    "--bf-interval", type=click.IntRange(1, 600), default=1, show_default=True, help="Seconds between backfill cycles."
)
@json_option
def up(folder: Path | None, nodes: int, gpus: int, profile: str, bf_interval: int, as_json: bool) -> None:
    """Start a testbed (in FOLDER, else in a new one) and wait until its nodes are idle."""
    from fallow.testbed.cluster import Testbed

    made = Testbed.up(folder, nodes=nodes, gpus=gpus, profile=profile, bf_interval=bf_interval)
    if as_json:
        print_json(made.status())
    else:
        click.echo(f"export SLURM_CONF={made.conf}")
        say(f"testbed in {made.folder}; end it with: fallow testbed down {made.folder}")


@testbed.command(short_help="Take it down.")
@_folder
@click.option("--all", "everything", is_flag=True, help="All testbeds of yours.")
@json_option
def down(folder: Path | None, everything: bool, as_json: bool) -> None:
    """Take down the testbed in FOLDER (needed if there are several). Leaves no process and no file."""
    from fallow.testbed.cluster import Testbed

    chosen = Testbed.all() if everything else [Testbed.find(folder)]
    for each in chosen:
        each.down()
    if as_json:
        print_json({"down": [str(each.folder) for each in chosen]})
    else:
        for each in chosen:
            click.echo(f"{each.folder}: down")


@testbed.command(short_help="Which there are.")
@json_option
def status(as_json: bool) -> None:
    """List the testbeds of yours."""
    from fallow.cli.tables import show_table
    from fallow.testbed.cluster import Testbed

    found = [each.status() for each in Testbed.all()]
    if as_json:
        print_json(found)
    elif not found:
        click.echo("no testbeds; start one with: fallow testbed up")
    else:
        rows = [
            [
                one.folder,
                "up" if one.up else "down",
                one.slurm_version,
                one.profile,
                _counts(one.nodes),
                _counts(one.jobs),
            ]
            for one in found
        ]
        show_table(["FOLDER", "STATE", "SLURM", "PROFILE", "NODES", "JOBS"], rows)


@testbed.command(short_help="Play other users' jobs on it.")
@_folder
@click.option("--seconds", type=Finite(1, 86_400), default=300.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--utilisation",
    type=Finite(0, 4, min_open=True),
    default=0.7,
    show_default=True,
    help="Part of the nodes that jobs ask for on average; above 1 they queue up.",
)
@click.option("--mean", type=Finite(min=1), default=20.0, show_default=True, help="Length of jobs, seconds.")
@json_option
def load(folder: Path | None, seconds: float, seed: int, utilisation: float, mean: float, as_json: bool) -> None:
    """Play other users' jobs on the testbed in FOLDER, in the foreground.

    SIGTERM and Ctrl-C end it in order: what is left of the jobs is cancelled.
    """
    from fallow.testbed.cluster import Testbed
    from fallow.testbed.load import make_jobs, play

    made, stop = Testbed.find(folder), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    jobs = make_jobs(seed, seconds=seconds, nodes=made.layout.nodes, utilisation=utilisation, mean_s=mean)
    played = play(made, jobs, seconds, stop)
    if as_json:
        print_json(played)
        return
    click.echo(f"{played.submitted} of {played.planned} jobs submitted to {played.folder}, {played.refused} refused")
    if played.refusal:
        say(f"the last refusal: {played.refusal}")


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in found.items()) or "-"
