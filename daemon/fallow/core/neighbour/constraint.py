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
    try:
        wanted = _parse(tokens)
    except ValueError:
        return lambda _: True
    return (lambda _: True) if tokens else wanted


def _parse(tokens: list[str], level: int = 0) -> Wanted:
    """Take what is joined by `|` (level 0), what is joined by `&` or `,` (1), or a name or bracket (2) off the front.

    Raises:
        ValueError: it cannot be read.
    """
    if level < 2:
        parts = [_parse(tokens, level + 1)]
        while tokens and tokens[0] in ("|", "&,")[level]:
            del tokens[0]
            parts.append(_parse(tokens, level + 1))
        combine = (any, all)[level]
        return lambda has: combine(part(has) for part in parts)
    if not tokens or tokens[0] in "&|,)":
        raise ValueError
    name = tokens.pop(0)
    if name != "(":
        return lambda has: name in has
    wanted = _parse(tokens)
    if tokens[:1] != [")"]:
        raise ValueError
    del tokens[0]
    return wanted
