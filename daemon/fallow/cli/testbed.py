"""`fallow testbed`: a private, real Slurm on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fallow.cli.common import Finite, json_option, print_json, say
from fallow.model import Exit, FallowError

_folder = click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))

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
@click.option("--profile", default="preempt", show_default=True, help=_PROFILES)
@click.option(
    "--bf-interval", type=click.IntRange(min=1), default=1, show_default=True, help="Seconds between backfill cycles."
)
@json_option
def up(folder: Path | None, nodes: int, gpus: int, profile: str, bf_interval: int, as_json: bool) -> None:
    """Start a testbed (in FOLDER, else in a new one) and wait until its nodes are idle."""
    import msgspec

    from fallow.testbed import api
    from fallow.testbed.conf import Profile

    if profile not in list(Profile):
        raise FallowError(f"--profile {profile}: choose one of {', '.join(Profile)}", Exit.USAGE)
    made = api.up(folder, nodes=nodes, gpus=gpus, profile=profile, bf_interval=bf_interval)
    if as_json:
        print_json(msgspec.to_builtins(made.status()))
    else:
        click.echo(f"export SLURM_CONF={made.conf}")
        say(f"testbed in {made.folder}; end it with: fallow testbed down {made.folder}")


@testbed.command(short_help="Take it down.")
@_folder
@click.option("--all", "everything", is_flag=True, help="All testbeds of yours.")
@json_option
def down(folder: Path | None, everything: bool, as_json: bool) -> None:
    """Take down the testbed in FOLDER (needed if there are several). Leaves no process and no file."""
    from fallow.testbed import api

    gone = api.down(folder, all=everything)
    if as_json:
        print_json({"down": gone})
    else:
        for name in gone:
            click.echo(f"{name}: down")


@testbed.command(short_help="Which there are.")
@json_option
def status(as_json: bool) -> None:
    """List the testbeds of yours."""
    from fallow.cli.tables import show_table
    from fallow.testbed import api

    found = api.status()
    if as_json:
        print_json(found)
        return
    if not found:
        click.echo("no testbeds; start one with: fallow testbed up")
        return
    rows = [
        [
            str(one["folder"]),
            "up" if one["up"] else "down",
            str(one["slurm_version"]),
            str(one["profile"]),
            _counts(one["nodes"]),
            _counts(one["jobs"]),
        ]
        for one in found
    ]
    show_table(["FOLDER", "STATE", "SLURM", "PROFILE", "NODES", "JOBS"], rows)


@testbed.command(short_help="Play other users' jobs on it.")
@_folder
@click.option("--seconds", type=Finite(min=1), default=300.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--utilisation", type=Finite(0, 1, min_open=True), default=0.7, show_default=True, help="Of the nodes.")
@click.option("--mean", type=Finite(min=1), default=20.0, show_default=True, help="Length of jobs, seconds.")
@click.option("--trace", help="Play a recorded cluster instead: a name (helios) or a file.")
@click.option("--as-user", help="Submit as this user (root only).")
@json_option
def load(
    folder: Path | None,
    seconds: float,
    seed: int,
    utilisation: float,
    mean: float,
    trace: str | None,
    as_user: str | None,
    as_json: bool,
) -> None:
    """Play other users' jobs on the testbed in FOLDER, in the foreground."""
    from fallow.testbed import api

    result = api.load(
        folder, seed=seed, seconds=seconds, utilisation=utilisation, mean_s=mean, trace=trace, as_user=as_user
    )
    if as_json:
        print_json(result)
    else:
        for name, value in result.items():
            click.echo(f"{name}: {value}")


def _counts(found: dict[str, Any]) -> str:
    return ", ".join(f"{count} {state}" for state, count in found.items()) or "-"
