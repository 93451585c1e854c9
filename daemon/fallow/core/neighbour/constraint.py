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
        wanted = _either(tokens)
    except ValueError:
        return lambda _: True
    return (lambda _: True) if tokens else wanted


def _either(tokens: list[str]) -> Wanted:
    """Take an alternative off the front. So do the next two with what binds tighter.

    Raises:
        ValueError: it cannot be read.
    """
    parts = [_both(tokens)]
    while tokens[:1] == ["|"]:
        del tokens[0]
        parts.append(_both(tokens))
    return lambda has: any(part(has) for part in parts)


def _both(tokens: list[str]) -> Wanted:
    parts = [_one(tokens)]
    while tokens and tokens[0] in "&,":
        del tokens[0]
        parts.append(_one(tokens))
    return lambda has: all(part(has) for part in parts)


def _one(tokens: list[str]) -> Wanted:
    if not tokens or tokens[0] in "&|,)":
        raise ValueError
    name = tokens.pop(0)
    if name != "(":
        return lambda has: name in has
    wanted = _either(tokens)
    if tokens[:1] != [")"]:
        raise ValueError
    del tokens[0]
    return wanted
