"""`fallow bench`."""

from __future__ import annotations

import importlib.util
import re

import click

from fallow.cli.common import Finite, json_option, print_json
from fallow.model import Exit, FallowError

_TORCHLESS = frozenset({"planner", "head"})
_PEERS = frozenset({"torchrun", "torchft"})


@click.command(short_help="Measure, side by side with peers.")
@click.option("--members", default="4", show_default=True, metavar="N,...", help="Worlds to measure.")
@click.option("--params", default="10", show_default=True, metavar="M,...", help="Models, in millions of parameters.")
@click.option("--seconds", type=Finite(min=30), default=300.0, show_default=True, help="Of harvest.")
@click.option(
    "--profile", type=click.Choice(["plain", "preempt"]), default="plain", show_default=True, help="Of harvest."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of harvest: which jobs others submit.")
@click.option("--n", type=click.IntRange(min=2), help="Measurements per row, about.")
@click.option("--device", default="cpu", show_default=True, metavar="KIND", help="To train on: cpu, cuda.")
@json_option
@click.argument("names", nargs=-1, metavar="[NAME]...")
def bench(
    names: tuple[str, ...],
    members: str,
    params: str,
    n: int | None,
    seconds: float,
    profile: str,
    seed: int,
    device: str,
    as_json: bool,
) -> int:
    """Measure NAMEs (default: all but harvest) on this machine; nothing else should run on it.

    \b
    pause         planned changes of the membership
    recovery      SIGKILL of a member
    chaos         a fault every 10 s for half an hour (--n: so many faults)
    steady        a step, against DDP
    reproducible  a step of the reproducible mode, against the fast one
    state         the state's way to a newcomer, against a checkpoint
    checkpoint    training with durable checkpoints, against training without
    shares        members of unequal speed
    planner       one plan of the harvester, for large clusters
    head          a change among a thousand nodes with eight workers each, under one head
    torchrun      absorb, release and kill under torchrun's elastic agent
    torchft       join and kill under torchft, where it is installed
    harvest       by itself: idle nodes used and others' jobs delayed, with and without Fallow, on private Slurms
    """
    if (not names or not _TORCHLESS.issuperset(names)) and importlib.util.find_spec("torch") is None:
        raise FallowError("fallow bench trains; run: pip install 'fallow[torch]'", Exit.UNAVAILABLE)
    if (not names or _PEERS.intersection(names)) and importlib.util.find_spec("psutil") is None:
        raise FallowError(
            "fallow bench ends peers' processes with psutil, which is not installed; run: pip install 'fallow[bench]'",
            Exit.UNAVAILABLE,
        )
    if "harvest" in names:
        if len(names) > 1:
            raise FallowError("bench harvest: measures another way than the others; run it by itself", Exit.USAGE)
        if device != "cpu":
            raise FallowError(f"bench harvest: trains on the processor; leave out --device {device}", Exit.USAGE)
        return _harvest(seconds, profile, seed, as_json)
    from fallow.bench.main import ALONE, check_names, main
    from fallow.bench.rows import Settings
    from fallow.core.schedule import MOST_WORKERS

    check_names(names, device)
    least = 1 if names and ALONE.issuperset(names) else 2
    worlds = [int(number) for number in _numbers(members, "--members", least=least, most=MOST_WORKERS)]
    sizes = [round(number * 1e6) for number in _numbers(params, "--params", least=0.01, most=100_000)]
    return int(main(names, Settings(members=worlds, params=sizes, n=n, device=device), json=as_json))


def _harvest(seconds: float, profile: str, seed: int, as_json: bool) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from fallow.demo import figures, harvest

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("harvest", total=seconds)

        def progress(passed: float, words: str) -> None:
            bar.update(task, completed=passed, description=words)

        def tell(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

        report = harvest.run(figures.Plan(profile=profile, seconds=seconds, seed=seed), progress, tell)
    if as_json:
        print_json(report)
    else:
        figures.show(report)
    return Exit.TEMPFAIL if report.stopped else Exit.OK


def _numbers(text: str, option: str, least: float, most: int) -> list[float]:
    if not re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?)*", text):
        raise FallowError(f"{option} {text!r}: numbers with commas between them, such as 2,4", Exit.USAGE)
    found = [float(word) for word in text.split(",")]
    if option == "--members" and any(number != int(number) for number in found):
        raise FallowError(f"{option} {text!r}: whole numbers", Exit.USAGE)
    if min(found) < least:
        raise FallowError(f"{option} {text!r}: at least {least:g}", Exit.USAGE)
    if max(found) > most:
        raise FallowError(f"{option} {text!r}: at most {most:,} on one machine", Exit.USAGE)
    return found
