"""Constraints on nodes' features, in sbatch's words: `a100&ib`, `[rack1|rack2]`, `(a|b)&c`, `a*2&b*1`. Pure.

Grammar: sbatch(1), --constraint. Counts are not checked: a node with one of the counted features will do.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Wanted = Callable[[frozenset[str]], bool]
"""Does a node with these features do?"""

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_TOKEN = re.compile(r"[^\s&|(),\[\]*]+|[&|(),]")
_COUNT = re.compile(r"\*\d+")


def alternatives(text: str) -> list[Wanted]:
    """What the nodes of a job must have: all of them the same one of these. One, unless there are square brackets.

    Words that cannot be read ask for nothing.
    """
    found = _BRACKETS.search(text)
    if found is None:
        return [_wanted(text)]
    # [a*2&b*4] gives so many nodes of each: any of them has one of the two.
    options = [found[1]] if _COUNT.search(found[1]) else found[1].split("|")
    return [w for option in options for w in alternatives(f"{text[: found.start()]}({option}){text[found.end() :]}")]


def _wanted(text: str) -> Wanted:
    if _COUNT.search(text):
        text = _COUNT.sub("", text).replace("&", "|")
    tokens = _TOKEN.findall(text)
    if not tokens:
        return lambda _: True
    wanted, rest = _either(tokens)
    return wanted if wanted is not None and not rest else lambda _: True


def _either(tokens: list[str]) -> tuple[Wanted | None, list[str]]:
    wanted, rest = _both(tokens)
    options = [wanted]
    while rest[:1] == ["|"]:
        wanted, rest = _both(rest[1:])
        options.append(wanted)
    known = [option for option in options if option is not None]
    if len(known) < len(options):
        return None, rest
    return (known[0] if len(known) == 1 else lambda has: any(option(has) for option in known)), rest


def _both(tokens: list[str]) -> tuple[Wanted | None, list[str]]:
    wanted, rest = _one(tokens)
    needs = [wanted]
    while rest[:1] in (["&"], [","]):
        wanted, rest = _one(rest[1:])
        needs.append(wanted)
    known = [need for need in needs if need is not None]
    if len(known) < len(needs):
        return None, rest
    return (known[0] if len(known) == 1 else lambda has: all(need(has) for need in known)), rest


def _one(tokens: list[str]) -> tuple[Wanted | None, list[str]]:
    if tokens[:1] == ["("]:
        wanted, rest = _either(tokens[1:])
        return (wanted, rest[1:]) if rest[:1] == [")"] else (None, rest)
    if not tokens or tokens[0] in ("&", "|", ",", ")"):
        return None, tokens
    name = tokens[0]
    return (lambda has: name in has), tokens[1:]
