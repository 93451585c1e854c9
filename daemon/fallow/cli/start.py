"""Commands that start the head, its systemd unit, the live view or the demo; and shell completion."""

import codecs
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from fallow.cli.common import Finite, json_option, play_in, say, tell
from fallow.config import config_home, load_config
from fallow.files import shipped
from fallow.model import Exit, FallowError

_SYSTEM_UNITS = Path("/etc/systemd/system")
_COMMAND = "/usr/bin/env fallow daemon"
"""The command in the shipped units, for a `fallow` on systemd's PATH."""


@click.command(short_help="Run the head in the foreground.")
def daemon() -> int:
    """Run the head in the foreground (under systemd: Type=notify). One per state folder."""
    from fallow.head.main import main

    return int(main())


@click.group(short_help="The head as a systemd unit.", no_args_is_help=False)
def service() -> None:
    """Run the head as a systemd unit."""


@service.command(short_help="Write the unit.")
@click.option("--user", "for_user", is_flag=True, help="Write fallow.service of your own user manager.")
@click.option("--force", is_flag=True, help="Replace an existing unit that differs.")
@json_option
def install(for_user: bool, force: bool, as_json: bool) -> None:
    """Write a unit that runs this `fallow`, and print the commands that start it. Nothing is started.

    With --user the unit is fallow.service of your user manager. Without, it is fallow@.service of the system, with one
    instance for each service account; writing it needs root.
    """
    user_units = config_home() / "systemd" / "user"
    name, folder = ("fallow.service", user_units) if for_user else ("fallow@.service", _SYSTEM_UNITS)
    source = shipped("systemd") / ("fallow-user.service" if for_user else "fallow@.service")
    unit, text = folder / name, _with_command(source.read_text())
    systemctl = "systemctl --user" if for_user else "systemctl"
    if unit.exists() and not force and unit.read_text() != text:
        text = f"{unit}: a different unit exists; --force replaces it, `{systemctl} edit {name}` adds to it"
        raise FallowError(text, Exit.CANTCREAT)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unit.write_text(text)
    except OSError as error:
        raise FallowError(f"{unit}: cannot be written: {error.strerror}", Exit.CANTCREAT) from None
    instance = "fallow" if for_user else "fallow@ACCOUNT"
    commands = [f"{systemctl} daemon-reload", f"{systemctl} enable --now {instance}"]
    if for_user:
        commands.append("loginctl enable-linger")
    text = "\n  ".join([f"{unit} is written. To start the head now and with each boot:", *commands])
    tell({"unit": str(unit), "next": commands}, as_json, lambda _: click.echo(text))


def _with_command(text: str) -> str:
    """Put the path of this program into a unit."""
    program = shutil.which(sys.argv[0]) or shutil.which("fallow")
    if program is None or Path(program).name != "fallow":
        program = shutil.which("fallow", path=str(Path(sys.executable).parent))
    return text if program is None else text.replace(_COMMAND, f"{Path(program).absolute()} daemon")


@click.command(short_help="Watch runs and nodes live.")
@click.option("--read-only", is_flag=True, help="Disable the keys that change something.")
@click.option("--demo", is_flag=True, help="Show a simulated cluster; needs no head.")
def top(read_only: bool, demo: bool) -> int:
    """Live view of runs, members and nodes."""
    if importlib.util.find_spec("textual") is None:
        raise FallowError("fallow top needs Textual; run: pip install 'fallow[tui]'", Exit.UNAVAILABLE)
    # Textual draws on standard error.
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise FallowError("fallow top needs a terminal; elsewhere: fallow status, fallow events --follow", Exit.USAGE)
    if codecs.lookup(sys.stderr.encoding).name != "utf-8":
        raise FallowError("fallow top needs UTF-8; try LC_ALL=C.UTF-8 fallow top, else: fallow status", Exit.USAGE)
    from fallow_tui.app import main

    if not demo:
        load_config()
    return int(main(read_only=read_only, demo=demo))


@click.command(short_help="See it work on a private Slurm.")
@click.option(
    "--seconds", type=Finite(10, 3600), default=120.0, show_default=True, help="Approximate length of the training."
)
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
        say(f"the training was not sound, see the report; logs are kept in {folder}")
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
