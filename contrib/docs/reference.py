"""Writes the pages of docs/ that are made from the code: the settings and the commands. `make reference` runs it.

A setting's description is the text below its field in fallow/config.py; a command's is what its `--help` says.
"""

import ast
import inspect
import re
import sys
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import msgspec

from fallow import config
from fallow.cli.main import cli

DOCS = Path(__file__).parents[2] / "docs"
NOTE = "<!-- This page is made by `make reference`. Do not edit it by hand. -->\n\n"
SETTINGS = """# Which settings are there?

Fallow reads three sources. The later one counts:

1. `/etc/fallow/config.toml`
2. `~/.config/fallow/config.toml`, or the file that `$FALLOW_CONFIG` names
3. variables such as `FALLOW_HARVEST__MAX_NODES=4`

`fallow config show` prints all settings, and where each comes from. A running head has the settings of its start.

A key that Fallow does not know is refused, and the nearest known key is named.

```toml
[harvest]
partitions = ["scavenge"]
max_nodes = 16

[checkpoint]
path = "/scratch/me/fallow"
```

In a variable, a list has commas (`a,b`), a table has `name=number` pairs with commas, and an empty value means none.
"""
COMMAND_PAGES = {
    "commands.md": (
        """# Which commands are there for runs?

RUN is a name, a unique prefix of a name, or a Slurm job id. Members are called n0, n1 … in the order in which they
came. `--json` prints exactly one value. Everything below is what `--help` prints. See also the
[commands for the head](commands-head.md) and [without a cluster](commands-without-cluster.md).
""",
        "submit run status why logs events top wait report grow shrink drain pause resume checkpoint rollback export "
        "cancel",
    ),
    "commands-head.md": (
        """# Which commands are there for the head and its files?

Everything below is what `--help` prints. See also the [commands for runs](commands.md).
""",
        "daemon config doctor bugreport service usage prune completion",
    ),
    "commands-without-cluster.md": (
        """# Which commands try and simulate?

These commands need no cluster. Everything below is what `--help` prints. See also the [commands for runs](commands.md).
""",
        "local check testbed demo simulate",
    ),
}
"""File name -> how the page begins, and the names of its commands."""


def pages() -> dict[str, str]:
    """File name in docs/ -> text."""
    told = [name for _, names in COMMAND_PAGES.values() for name in names.split()]
    assert sorted(told) == sorted(cli.list_commands(click.Context(cli)))
    made = {file: NOTE + begin + _commands(names.split()) for file, (begin, names) in COMMAND_PAGES.items()}
    made["commands.md"] += _exits()
    return made | {"settings.md": NOTE + SETTINGS + "".join(_section(name) for name in config.SECTIONS)}


def _section(name: str) -> str:
    struct = config.SECTIONS[name]
    texts = _texts(struct)
    hints = typing.get_type_hints(struct, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(struct):
        text, default = _default(field, texts[field.name])
        rows.append(f"| `{field.name}` | {default} | {_kind(hints[field.name])} | {text} |")
    intro = inspect.getdoc(struct) or ""
    return "\n".join(
        ["", f"## `[{name}]`", "", intro, "", "| setting | default | value | meaning |", "|---|---|---|---|", *rows, ""]
    )


def _texts(struct: type) -> dict[str, str]:
    """The texts below the fields."""
    (tree,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for line, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[line.target.id] = str(below.value.value)
    return found


def _default(field: msgspec.structs.FieldInfo, text: str) -> tuple[str, str]:
    """What the setting means, and its default in words where the value itself says little."""
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # type: ignore[operator]
    meaning, _, words = text.partition("None: " if value is None else "empty: ")
    if value in (None, [], {}, ""):
        assert words, f"the text of {field.name} does not say what its default means"
        return meaning.strip(), words
    if isinstance(value, bool):
        return text, str(value).lower()
    return text, f"`{value}`" if isinstance(value, str) else f"{value:g}" if value < 1e5 else str(value)


def _kind(hint: Any) -> str:
    """The type of a setting, in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        (meta,) = parts[1:]
        above, least, most = meta.gt, meta.ge, meta.le
        if above is not None:
            return f"{_kind(parts[0])} > {above:g}"
        if least is not None:
            return f"{_kind(parts[0])} ≥ {least:g}" if most is None else f"{_kind(parts[0])}, {least:g} to {most:.10g}"
        return "absolute path" if meta.pattern == "^/" else _kind(parts[0])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (types.UnionType, typing.Union):
        (some,) = (part for part in parts if part is not type(None))
        return _kind(some)
    if origin is list:
        return "list"
    if origin is dict:
        return f"table of {_kind(parts[1])}".replace("number", "numbers", 1)
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}[hint]


def _commands(names: list[str]) -> str:
    context = click.Context(cli, info_name="fallow")
    parts = ["\n| command | does |\n|---|---|\n"]
    helps = []
    for name in names:
        command = cli.get_command(context, name)
        assert command is not None
        parts.append(f"| [`fallow {name}`](#fallow-{name}) | {command.get_short_help_str(80)} |\n")
        helps.append(_help(command, context, name))
    return "".join(parts + helps)


def _help(command: click.Command, parent: click.Context, name: str, level: int = 2) -> str:
    context = command.context_class(command, parent=parent, info_name=name, terminal_width=88)
    lines = [line for line in command.get_help(context).splitlines() if not re.match(r"\s+(-h, )?--help ", line)]
    text = "\n".join(lines).removesuffix("\n\nOptions:").rstrip()
    parts = [f"\n{'#' * level} fallow {context.command_path.removeprefix('fallow ')}\n\n```text\n{text}\n```\n"]
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            assert below is not None
            parts.append(_help(below, context, each, level + 1))
    return "".join(parts)


def _exits() -> str:
    rows = re.findall(r"^  (\d+) +(.*)$", cli.epilog or "", re.MULTILINE)
    table = "".join(f"| {code} | {meaning} |\n" for code, meaning in rows)
    return f"\n## Exit codes\n\n| code | means |\n|---|---|\n{table}\n`fallow submit` passes sbatch's exit code on.\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    for file, text in pages().items():
        (folder / file).write_text(text, encoding="utf-8")
