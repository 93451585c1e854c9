"""Commands that start something big and get out of the way: daemon, top, demo; and the shell's completion."""

from __future__ import annotations

import codecs
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from fallow.cli.common import Finite, json_option, play_in, say, tell
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
    # Textual draws on standard error.
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise FallowError("fallow top needs a terminal; elsewhere: fallow status, fallow events --follow", Exit.USAGE)
    if codecs.lookup(sys.stderr.encoding).name != "utf-8":
        raise FallowError("fallow top needs UTF-8; try LC_ALL=C.UTF-8 fallow top, else: fallow status", Exit.USAGE)
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
    from rich.console import Console

    from fallow.demo.main import Demo
    from fallow.demo.report import LiveView, to_table

    folder = Path(tempfile.mkdtemp(prefix="fallow-demo-"))
    with LiveView() as live:
        report = play_in(folder, Demo(folder, seconds, live).play())
    tell(report, as_json, lambda _: Console().print(to_table(report)))
    if not report.sound:
        say(f"not sound; logs are kept in {folder}")
        return Exit.SOFTWARE
    shutil.rmtree(folder, ignore_errors=True)
    return Exit.OK


@click.command(short_help="Print shell completion.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print completion for SHELL. For bash, in ~/.bashrc: eval "$(fallow completion bash)"."""
    from fallow.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "fallow", "_FALLOW_COMPLETE").source())
