"""Commands that start something big and get out of the way: daemon, top, demo."""

from __future__ import annotations

import importlib.util
import sys

import click

from fallow.cli.common import Finite, json_option
from fallow.model import Exit, FallowError


@click.command(short_help="Run the head in the foreground.")
def daemon() -> int:
    """Run the head in the foreground (under systemd: Type=notify). One per state folder."""
    from fallow.head.main import main

    return int(main())


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
