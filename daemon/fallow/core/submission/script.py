"""Reading batch scripts: `#SBATCH` and `#FALLOW` lines, and the script that harvest jobs run.

The header is read as sbatch reads it: comment lines before the first command, in any language whose comments begin
with `#`; `#SBATCH hetjob` begins the next component of a heterogeneous job.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Iterator

import msgspec

from fallow.core.submission.deadline import deadline_at
from fallow.core.submission.sbatch_line import Component, Given, parse_nodes, parse_options
from fallow.model import ACCOUNT_PATTERN, Exit, FallowError
from fallow.model.bounds import MOST_MINUTES, MOST_SEED, MOST_SHARE, MOST_SLOTS

MAGIC = ("#SBATCH", "#SLURM")
"""Prefixes that sbatch reads options from; the second with a warning."""

OURS = "#FALLOW"

MAX_SCRIPT = 4 * 1024 * 1024
"""slurmctld's own default limit (`max_script_size`)."""


class FallowLines(msgspec.Struct, frozen=True, kw_only=True):
    """What the script's `#FALLOW` lines say; None: not said."""

    nodes: str | None = None
    workers_per_node: int | None = None
    partitions: tuple[str, ...] | None = None
    budget_node_hours: float | None = None
    weight: float | None = None
    deadline: str | None = None
    "one of `deadline.DEADLINE_FORMS`"
    seed: int | None = None
    min_minutes: int | None = None
    harvest_account: str | None = None
    outlive_base: bool = False


class BatchScript(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    text: str
    components: tuple[Component, ...]
    "options of the `#SBATCH` lines, per component of a heterogeneous job"
    settings: dict[str, str]
    "keys and values of the `#FALLOW` lines, unchecked; see `typed_settings`"
    warnings: tuple[str, ...] = ()


def parse_script(text: str, name: str) -> BatchScript:
    """Reads a batch script; `name` is how messages call it."""
    _check(text, name)
    components: list[list[Given]] = [[]]
    settings: dict[str, str] = {}
    for number, line in _header(text):
        where = f"{name}, line {number}"
        if (rest := _after(line, MAGIC)) is not None:
            words = split_directive(rest, where)
            if words and words[0].lower() in ("hetjob", "packjob"):
                components.append([])
                words = words[1:]
            components[-1] += parse_options(words, where)
        elif (rest := _after(line, (OURS,))) is not None:
            settings |= parse_settings(rest, where)
    typed_settings(settings, name)
    return BatchScript(
        name=name,
        text=text,
        components=tuple(map(tuple, components)),
        settings=settings,
        warnings=tuple(_late(text, name)),
    )


HARVEST_SCRIPT = """#!/bin/sh
# A harvest job: runs the run's own batch script again, as it was submitted. `fallow run` never returns there (but in
# the one job that is elected to run the lines after it). It sends USR1 to this shell and kills the script, so that a
# job that ends as planned is COMPLETED.
trap 'exit 0' USR1
export FALLOW_BATCH_PID=$$
# What this shell says of a killed script would only mislead.
exec 3>&2 2>/dev/null
(exec {interpreter} "$FALLOW_STATE_DIR/runs/$FALLOW_RUN/script" "$@" 2>&3 3>&-)
"""


def harvest_script(text: str) -> str:
    """The batch script of a harvest job of the run whose batch script is `text`.

    The kernel gives an interpreter at most one argument, blanks included (execve(2)).
    """
    words = text.split("\n", 1)[0].removeprefix("#!").strip().split(maxsplit=1)
    return HARVEST_SCRIPT.format(interpreter=shlex.join(words))


def wrap(command: str) -> str:
    """The script that `sbatch --wrap=COMMAND` makes."""
    return f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{command}\n"


def split_directive(text: str, where: str) -> list[str]:
    """Words of a directive as sbatch splits them: quotes, backslashes, and `#` ends the line."""
    words: list[str] = []
    word: list[str] | None = None
    quote = ""
    escaped = False
    for character in text:
        if escaped:
            escaped = False
            word = [*(word or []), character]
        elif character == "\\":
            escaped = True
        elif quote:
            if character == quote:
                quote = ""
            else:
                word = [*(word or []), character]
        elif character in "\"'":
            quote = character
            word = word or []
        elif character == "#":
            break
        elif character.isspace():
            if word is not None:
                words.append("".join(word))
            word = None
        else:
            word = [*(word or []), character]
    if quote:
        raise FallowError(f"{where}: the quote {quote} is not closed", Exit.DATA)
    if word is not None:
        words.append("".join(word))
    return words


def _check(text: str, name: str) -> None:
    """sbatch's own checks, with the reason in words."""
    first = text.split("\n", 1)[0]
    problem = None
    if not text.strip():
        problem = "the batch script is empty"
    elif text.startswith("\ufeff"):
        problem = "it begins with a byte order mark; save it as UTF-8 without one"
    elif not first.startswith("#!") or not first[2:].strip():
        problem = "its first line must be #! and an interpreter, e.g. #!/bin/bash"
    elif "\0" in text:
        problem = "it contains a NUL character"
    elif "\r\n" in text:
        problem = "it has DOS line ends; run: dos2unix on it"
    elif len(text) > MAX_SCRIPT:
        problem = f"it is larger than {MAX_SCRIPT >> 20} MiB; Slurm takes no more"
    if problem:
        raise FallowError(f"{name}: {problem}", Exit.DATA)


def _header(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines before the first command."""
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.lstrip()
        if stripped and not stripped.startswith("#"):
            return
        yield number, line


def _after(line: str, prefixes: tuple[str, ...]) -> str | None:
    """What follows one of the prefixes at the very beginning of a line."""
    return next((line[len(prefix) :] for prefix in prefixes if line.startswith(prefix)), None)


def _late(text: str, name: str) -> Iterator[str]:
    header = sum(1 for _ in _header(text))
    for number, line in enumerate(text.split("\n"), 1):
        if number > header and line.startswith((OURS, "#SBATCH")):
            yield f"{name}, line {number}: {line.split()[0]} after the first command (line {header + 1}) is not read"


def parse_settings(text: str, where: str) -> dict[str, str]:
    """Keys and values of one `#FALLOW` line, `key=value` or `--key=value`; a flag has no value."""
    found: dict[str, str] = {}
    for word in split_directive(text, where):
        key, equals, value = word.removeprefix("--").partition("=")
        if key in _FLAGS:
            if equals:
                raise FallowError(f"{where}: #FALLOW {key} takes no value", Exit.DATA)
            found[key] = ""
            continue
        if key not in _KEYS:
            near = difflib.get_close_matches(key, (*_KEYS, *_FLAGS), n=1)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join((*_KEYS, *_FLAGS))}"
            raise FallowError(f"{where}: #FALLOW has no key {key[:64]!r}; {advice}", Exit.DATA)
        if not equals or not value:
            raise FallowError(f"{where}: #FALLOW {key} needs a value: {key}={_KEYS[key]}", Exit.DATA)
        found[key] = value
    return found


_KEYS = {
    "nodes": "MIN:MAX",
    "workers-per-node": "N",
    "partitions": "A,B",
    "budget-node-hours": "HOURS",
    "weight": "NUMBER",
    "deadline": "YYYY-MM-DD[THH:MM]",
    "seed": "N",
    "min-minutes": "N",
    "harvest-account": "NAME",
}


_FLAGS = ("outlive-base",)


def typed_settings(settings: dict[str, str], name: str) -> FallowLines:
    """Checks and converts the values of `#FALLOW` lines. The bounds are those of `RunSpec`."""

    def whole(key: str, least: int, most: int) -> int | None:
        text = settings.get(key)
        if text is None:
            return None
        if not re.fullmatch("[0-9]{1,19}", text) or not least <= int(text) <= most:
            raise _bad(name, key, text, f"must be a whole number, at least {least} and at most {most}")
        return int(text)

    def above_0(key: str) -> float | None:
        text = settings.get(key)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= MOST_SHARE:
            raise _bad(name, key, text, f"must be a number above 0, and at most {MOST_SHARE:.0f}")
        return value

    nodes = settings.get("nodes")
    if nodes is not None:
        parse_nodes(nodes, f"{name}: #FALLOW nodes")
    deadline = settings.get("deadline")
    if deadline is not None:
        try:
            deadline_at(deadline, 0.0)
        except FallowError as error:
            raise FallowError(f"{name}: #FALLOW {error.message}", Exit.DATA) from error
    account = settings.get("harvest-account")
    if account is not None and not re.fullmatch(ACCOUNT_PATTERN, account):
        raise _bad(name, "harvest-account", account, "is no name of an account")
    partitions = settings.get("partitions")
    names = None if partitions is None else tuple(part for part in partitions.split(",") if part)
    return FallowLines(
        nodes=nodes,
        workers_per_node=whole("workers-per-node", 1, MOST_SLOTS),
        partitions=names,
        budget_node_hours=above_0("budget-node-hours"),
        weight=above_0("weight"),
        deadline=deadline,
        seed=whole("seed", 0, MOST_SEED),
        min_minutes=whole("min-minutes", 1, MOST_MINUTES),
        harvest_account=account,
        outlive_base="outlive-base" in settings,
    )


def _bad(name: str, key: str, value: str, what: str) -> FallowError:
    return FallowError(f"{name}: #FALLOW {key}={value[:64]}: {what}", Exit.DATA)
