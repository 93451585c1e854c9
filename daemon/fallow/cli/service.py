"""`fallow service`: the head as a systemd unit."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from fallow.cli.common import json_option, tell
from fallow.config import config_home
from fallow.model import Exit, FallowError
from fallow.shipped import shipped

_SYSTEM_UNITS = Path("/etc/systemd/system")
_COMMAND = "/usr/bin/env fallow daemon"
"""As the units have it, for a `fallow` on systemd's PATH."""


@click.group(short_help="The head as a systemd unit.", no_args_is_help=False)
def service() -> None:
    """Run the head as a systemd unit."""


@service.command(short_help="Write the unit.")
@click.option("--user", "for_user", is_flag=True, help="For yourself: fallow.service of your own user manager.")
@click.option("--force", is_flag=True, help="Replace a unit that is another one.")
@json_option
def install(for_user: bool, force: bool, as_json: bool) -> None:
    """Write the unit, with this very `fallow` in it, and say what to type next.

    With --user it is fallow.service of your user manager, else fallow@.service of the system, one instance for each
    service account; the latter takes root. Nothing is started.
    """
    user_units = config_home() / "systemd" / "user"
    name, folder = ("fallow.service", user_units) if for_user else ("fallow@.service", _SYSTEM_UNITS)
    source = shipped("systemd") / ("fallow-user.service" if for_user else "fallow@.service")
    unit, text = folder / name, _with_command(source.read_text())
    systemctl = "systemctl --user" if for_user else "systemctl"
    if unit.exists() and not force and unit.read_text() != text:
        text = f"{unit}: another unit is there; --force replaces it, `{systemctl} edit {name}` adds to it"
        raise FallowError(text, Exit.CANTCREAT)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unit.write_text(text)
    except OSError as error:
        raise FallowError(f"{unit}: cannot be written: {error.strerror}", Exit.CANTCREAT) from None
    instance = "fallow" if for_user else "fallow@ACCOUNT"
    following = [f"{systemctl} daemon-reload", f"{systemctl} enable --now {instance}"]
    if for_user:
        following.append("loginctl enable-linger")
    text = "\n  ".join([f"{unit} is written. To start the head now and with each boot:", *following])
    tell({"unit": str(unit), "next": following}, as_json, lambda _: click.echo(text))


def _with_command(text: str) -> str:
    """The unit with the path of this very program."""
    program = shutil.which(sys.argv[0]) or shutil.which("fallow")
    if program is None or Path(program).name != "fallow":
        program = shutil.which("fallow", path=str(Path(sys.executable).parent))
    return text if program is None else text.replace(_COMMAND, f"{Path(program).absolute()} daemon")
