"""`fallow config`: every setting, its value, and where the value comes from."""

import json
import os
from typing import Any

import click
import msgspec

from fallow.cli.common import json_option, tell
from fallow.config import SECTIONS, SYSTEM_FILE, load_with_origins, user_file
from fallow.redaction import mask_secrets
from fallow.text import clean

Settings = dict[str, dict[str, dict[str, Any]]]
"""Section -> key -> {"value": ..., "origin": ...}"""

_MAX_PADDED = 44
"""Longest setting, in characters, that moves the column of origins to the right."""


@click.group(short_help="The settings.", no_args_is_help=False)
def config() -> None:
    """Look at the settings."""


@config.command(short_help="All settings, and where they come from.")
@click.argument("section", required=False, type=click.Choice(list(SECTIONS)), metavar="[SECTION]")
@json_option
def show(section: str | None, as_json: bool) -> None:
    """Show each setting with its value and where the value comes from, or those of one SECTION.

    An origin is: default, the path of a file, or the name of a variable. A password in a URL is not shown. A head that
    runs has the settings of its start.
    """
    tell(settings(section), as_json, lambda table: click.echo(to_text(table)))


def settings(section: str | None = None) -> Settings:
    """Look up all settings, or those of one section. Raises FallowError if the configuration is wrong."""
    loaded, origins = load_with_origins(os.environ, SYSTEM_FILE)
    table: Settings = {}
    for name in [section] if section else SECTIONS:
        values = msgspec.structs.asdict(getattr(loaded, name))
        if name == "head" and loaded.head.redis_url is not None:
            values["redis_url"] = mask_secrets(loaded.head.redis_url)
        table[name] = {key: {"value": value, "origin": origins[name][key]} for key, value in values.items()}
    return table


def to_text(table: Settings) -> str:
    """Write settings as TOML, with the origins as comments."""
    lines = [f"# {path}: {'read' if path.exists() else 'no such file'}" for path in (SYSTEM_FILE, user_file())]
    for section, keys in table.items():
        rows = [(_assignment(key, one["value"]), one["origin"]) for key, one in keys.items()]
        width = max((len(text) for text, _ in rows if len(text) <= _MAX_PADDED), default=0)
        lines += ["", f"[{section}]", *(f"{text:<{width}}  # {origin}" for text, origin in rows)]
    return "\n".join(clean(line, 1 << 20) for line in lines)


def _assignment(key: str, value: Any) -> str:
    return f"# {key} is not set" if value is None else f"{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
