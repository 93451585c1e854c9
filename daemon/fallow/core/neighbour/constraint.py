"""Constraints on nodes' features, in sbatch's words: `a100&ib`, `[rack1|rack2]`, `(a|b)&c`, `a*2&b*1`. Pure.

Grammar: sbatch(1), --constraint. Counts are not checked: a node with one of the counted features will do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable

Wanted = Callable[[frozenset[str]], bool]
"""Returns True if a node with these features will do."""

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_TOKEN = re.compile(r"[^\s&|(),\[\]*]+|[&|(),]")
_COUNT = re.compile(r"\*\d+")


@functools.lru_cache(maxsize=256)
def alternatives(text: str) -> tuple[Wanted, ...]:
    """Return the alternatives of a constraint: all nodes of a job must meet the same one.

    There is one alternative, unless the constraint has square brackets. Words that cannot be read ask for nothing.
    """
    found = _BRACKETS.search(text)
    if found is None:
        return (_wanted(text),)
    # [a*2&b*4] gives so many nodes of each: any of them has one of the two.
    options = [found[1]] if _COUNT.search(found[1]) else found[1].split("|")
    rest = (f"{text[: found.start()]}({option}){text[found.end() :]}" for option in options)
    return tuple(wanted for each in rest for wanted in alternatives(each))


def suits(features: Iterable[str], constraint: str) -> bool:
    """Return True if a node with these features will do for a job of one node."""
    return any(wanted(frozenset(features)) for wanted in alternatives(constraint))


def _wanted(text: str) -> Wanted:
    if _COUNT.search(text):
        text = _COUNT.sub("", text).replace("&", "|")
    tokens = _TOKEN.findall(text)
    if not tokens:
        return lambda _: True
    wanted, rest = _either(tokens)
    return wanted if wanted is not None and not rest else lambda _: True


def _either(tokens: list[str]) -> tuple[Wanted | None, list[str]]:
    return _joined(tokens, _both, "|", any)


def _both(tokens: list[str]) -> tuple[Wanted | None, list[str]]:
    return _joined(tokens, _one, "&,", all)


def _joined(
    tokens: list[str],
    part: Callable[[list[str]], tuple[Wanted | None, list[str]]],
    marks: str,
    combine: Callable[[Iterable[bool]], bool],
) -> tuple[Wanted | None, list[str]]:
    """Parts with one of `marks` between them; None where one of them is not understood."""
    wanted, rest = part(tokens)
    parts = [wanted]
    while rest and rest[0] in marks:
        wanted, rest = part(rest[1:])
        parts.append(wanted)
    known = [one for one in parts if one is not None]
    if len(known) < len(parts):
        return None, rest
    return (known[0] if len(known) == 1 else lambda has: combine(one(has) for one in known)), rest


def _one(tokens: list[str]) -> tuple[Wanted | None, list[str]]:
    if tokens[:1] == ["("]:
        wanted, rest = _either(tokens[1:])
        return (wanted, rest[1:]) if rest[:1] == [")"] else (None, rest)
    if not tokens or tokens[0] in ("&", "|", ",", ")"):
        return None, tokens
    name = tokens[0]
    return (lambda has: name in has), tokens[1:]
