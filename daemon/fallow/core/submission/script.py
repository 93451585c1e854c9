"""Reading batch scripts: `#SBATCH` and `#FALLOW` lines, and the script that harvest jobs run.

The header is read as sbatch reads it: comment lines before the first command, in any language whose comments begin
with `#`; `#SBATCH hetjob` begins the next component of a heterogeneous job.
"""

import difflib
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from fallow.core.submission.sbatch_line import Component, OptionUse, parse_nodes, parse_options
from fallow.core.submission.sbatch_table import FALLOW_KEYS
from fallow.model import ACCOUNT_PATTERN, Exit, FallowError
from fallow.model.bounds import MOST_MINUTES, MOST_SEED, MOST_SHARE, MOST_SLOTS

MAGIC = ("#SBATCH", "#SLURM")
"""Prefixes of the lines that sbatch reads options from; the second one with a warning."""

FALLOW_PREFIX = "#FALLOW"

MAX_SCRIPT = 4 * 1024 * 1024
"""slurmctld's own default limit (`max_script_size`)."""


class BatchScript(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    text: str
    components: tuple[Component, ...]
    "options of the `#SBATCH` lines, per component of a heterogeneous job"
    settings: dict[str, Any]
    "keys and values of the `#FALLOW` lines"
    warnings: tuple[str, ...] = ()


def parse_script(text: str, name: str) -> BatchScript:
    """Read a batch script. Args: name: of the script in messages."""
    _check(text, name)
    components: list[list[OptionUse]] = [[]]
    settings: dict[str, Any] = {}
    for number, line in _header(text):
        where = f"{name}, line {number}"
        if (directive := _directive_text(line, MAGIC)) is not None:
            words = split_directive(directive, where)
            if _begins_component(words):
                if words[1:]:
                    problem = f"{where}: sbatch ignores options after {words[0]}; put them on a new #SBATCH line"
                    raise FallowError(problem, Exit.DATA)  # seen with 22.05
                components.append([])
            else:
                components[-1] += parse_options(words, where)
        elif (directive := _directive_text(line, (FALLOW_PREFIX,))) is not None:
            settings |= parse_settings(directive, where)
    return BatchScript(
        name=name,
        text=text,
        components=tuple(map(tuple, components)),
        settings=settings,
        warnings=tuple(_unread_directives(text, name)),
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
    """The batch script of a harvest job. Args: text: the run's batch script.

    The kernel gives an interpreter at most one argument, blanks included (execve(2)).
    """
    words = text.split("\n", 1)[0].removeprefix("#!").strip().split(maxsplit=1)
    return HARVEST_SCRIPT.format(interpreter=shlex.join(words))


def with_directives(text: str, names: Collection[str]) -> str:
    """The batch script of a base job that the head submits again: same line numbers, but only the options `names`.

    The options of the new submission hold all others that are in force. From the script, sbatch would apply `--begin`,
    `--hold` and similar options once more.
    """
    lines = text.split("\n")
    for number, line in _header(text):
        if (directive := _directive_text(line, MAGIC)) is not None:
            words = split_directive(directive, f"line {number}") if names else []
            if not _begins_component(words):
                uses = parse_options(words, f"line {number}")
                words = [each.canonical for each in uses if each.name in names]
            lines[number - 1] = f"#SBATCH {shlex.join(words)}" if words else "#"
    return "\n".join(lines)


def _begins_component(words: Sequence[str]) -> bool:
    """Return True if this directive begins the next component of a heterogeneous job."""
    return bool(words) and words[0].lower() in ("hetjob", "packjob")


def wrap(command: str) -> str:
    """The script that `sbatch --wrap=COMMAND` makes."""
    return f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{command}\n"


_PIECE = re.compile(
    r"(?P<space>\s+|\\[^\S ]\s*)|(?P<rest>#.*|\\$)|(?P<plain>(?:\\[ \S]|[^\s\"'#\\])+)"
    r"|\"(?P<double>(?:\\.|[^\"\\])*)\"|'(?P<single>(?:\\.|[^'\\])*)'"
)


def split_directive(text: str, where: str) -> list[str]:
    """Split a directive into words as sbatch does: quotes, backslashes, and `#` ends the line.

    A backslash keeps a blank, but no tab (seen with 25.11; 22.05 splits there, and refuses a word that is no option).
    """
    words, is_open, end = list[str](), False, 0
    for piece in _PIECE.finditer(text):
        if piece.start() != end or piece["rest"]:
            break
        end = piece.end()
        if piece["space"] is None:
            words += [] if is_open else [""]
            words[-1] += re.sub(r"\\(.)", r"\1", piece["double"] or piece["single"] or piece["plain"] or "")
        is_open = piece["space"] is None
    if text[end : end + 1] in ("'", '"'):
        raise FallowError(f"{where}: the quote {text[end]} is not closed", Exit.DATA)
    return words


def _check(text: str, name: str) -> None:
    """Make sbatch's own checks, with the reason in words."""
    first = text.split("\n", 1)[0]
    problem = None
    if not text.strip():
        problem = "the batch script is empty"
    elif text.startswith("\ufeff"):
        problem = "it begins with a byte order mark; save it as UTF-8 without the mark"
    elif not first.startswith("#!") or not first[2:].strip():
        problem = "its first line must be #! and an interpreter, e.g. #!/bin/bash"
    elif "\0" in text:
        problem = "it contains a NUL character"
    elif "\r\n" in text:
        problem = "it has DOS line ends; convert it with dos2unix"
    elif len(text) > MAX_SCRIPT:
        problem = f"it is larger than {MAX_SCRIPT >> 20} MiB, which is Slurm's limit"
    if problem:
        raise FallowError(f"{name}: {problem}", Exit.DATA)


def _header(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines before the first command."""
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.lstrip()
        if stripped and not stripped.startswith("#"):
            return
        yield number, line


def _directive_text(line: str, prefixes: tuple[str, ...]) -> str | None:
    """What follows one of the prefixes at the very beginning of a line."""
    return next((line[len(prefix) :] for prefix in prefixes if line.startswith(prefix)), None)


def _unread_directives(text: str, name: str) -> Iterator[str]:
    header = sum(1 for _ in _header(text))
    for number, line in enumerate(text.split("\n"), 1):
        if number > header and line.startswith((FALLOW_PREFIX, "#SBATCH")):
            yield f"{name}, line {number}: {line.split()[0]} after the first command (line {header + 1}) is ignored"


def parse_settings(text: str, where: str) -> dict[str, Any]:
    """Read one `#FALLOW` line: `key=value` or `--key=value`; a flag has no value and is True.

    The bounds are those of `RunSpec`. Only the form of a deadline is checked here: see `deadline_at`.
    """
    settings: dict[str, Any] = {}
    for word in split_directive(text, where):
        key, equals, value = word.removeprefix("--").partition("=")
        form = FALLOW_KEYS.get(key)
        if form == "":
            if equals:
                raise FallowError(f"{where}: #FALLOW {key} takes no value", Exit.DATA)
            settings[key] = True
            continue
        if form is None:
            near = difflib.get_close_matches(key, FALLOW_KEYS, n=1)
            advice = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(FALLOW_KEYS)}"
            raise FallowError(f"{where}: #FALLOW has no key {key[:64]!r}; {advice}", Exit.DATA)
        if not value:
            raise FallowError(f"{where}: #FALLOW {key} needs a value: {key}={form}", Exit.DATA)
        try:
            settings[key] = _READERS[key](value)
        except ValueError as error:
            raise FallowError(f"{where}: #FALLOW {key}={value[:64]}: {error}", Exit.DATA) from error
        except FallowError as error:
            raise FallowError(f"{where}: #FALLOW {error.message}", error.code) from error
    return settings


def _integer(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch("[0-9]{1,19}", text) or not least <= int(text) <= most:
            raise ValueError(f"must be a whole number, at least {least} and at most {most}")
        return int(text)

    return read


def _above_0(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MOST_SHARE:
        raise ValueError(f"must be a number above 0, and at most {MOST_SHARE:.0f}")
    return value


def _account(text: str) -> str:
    if not re.fullmatch(ACCOUNT_PATTERN, text):
        raise ValueError("is not an account name")
    return text


def _nodes(text: str) -> str:
    parse_nodes(text, "nodes")
    return text


def _deadline(text: str) -> str:
    deadline_at(text, 0.0)
    return text


_READERS: dict[str, Callable[[str], Any]] = {
    "nodes": _nodes,
    "workers-per-node": _integer(1, MOST_SLOTS),
    "partitions": lambda text: [part for part in text.split(",") if part],
    "budget-node-hours": _above_0,
    "weight": _above_0,
    "deadline": _deadline,
    "seed": _integer(0, MOST_SEED),
    "min-minutes": _integer(1, MOST_MINUTES),
    "harvest-account": _account,
}

DEADLINE_FORMS = "YYYY-MM-DD, YYYY-MM-DDTHH:MM, a weekday such as friday, or friday-18:00"
"""A day without a time means the end of the day."""

_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_FORM = re.compile(
    rf"(?:(?P<date>\d{{4}}-\d\d-\d\d)|(?P<weekday>{'|'.join(_WEEKDAYS)}))(?:[T-](?P<clock>\d\d:\d\d))?", re.IGNORECASE
)


def deadline_at(text: str, now: float) -> float:
    """Unix time of a deadline, in the local time zone.

    Args:
        text: in one of `DEADLINE_FORMS`; a weekday means the next one, or today if the time is still to come.
        now: Unix time.

    Raises:
        FallowError: the text has none of the forms (USAGE), or the deadline has passed (DATA).
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise FallowError(f"deadline={text[:64]}: must be {DEADLINE_FORMS}", Exit.USAGE)
    today = datetime.fromtimestamp(now)
    try:
        if match["date"]:
            day = datetime.fromisoformat(match["date"])
        else:
            days = (_WEEKDAYS.index(match["weekday"].lower()) - today.weekday()) % 7
            day = datetime(today.year, today.month, today.day) + timedelta(days=days)
        clock = match["clock"]
        end = datetime.fromisoformat(f"{day:%Y-%m-%d}T{clock}") if clock else day + timedelta(days=1)
        if end.timestamp() <= now and match["weekday"]:
            end += timedelta(days=7)
        at = end.timestamp()
    except (ValueError, OverflowError) as error:
        raise FallowError(f"deadline={text[:64]}: {error}", Exit.USAGE) from error
    if at <= now:
        raise FallowError(f"deadline={text[:64]}: has passed; give a later one", Exit.DATA)
    return at
