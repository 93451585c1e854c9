"""Splitting an sbatch command line the way sbatch does, and saying what it means for a run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fallow.core.sbatch_table import ALIASES, BY_LONG, BY_SHORT, OPTIONS, Option, Reach, Value
from fallow.model import Exit, FallowError


class Given(msgspec.Struct, frozen=True):
    """One option as it was given. `value` is None for a flag or where an optional value was left out."""

    name: str
    value: str | None = None

    @property
    def canonical(components: Sequence[Mapping[str, Given]]) -> list[str]:
    """One flat list as sbatch takes it; components are separated by `:`, `--nodes=MIN:MAX` has become MIN."""
    words: list[str] = []
    for index, options in enumerate(components):
        words.extend([":"] if index else [])
        for given in options.values():
            if given.name == "nodes":
                words.append(f"--nodes={parse_nodes(given.value or '').base}")
            elif given.option.reach is not Reach.OWN:
                words.append(given.canonical)
    return words


def refuse(options: Mapping[str, Given]) -> None:
    """Raises for what cannot be part of a run, with what to do instead."""
    for given in options.values():
        if given.option.reach is Reach.REFUSED:
            raise _usage(f"--{given.name} cannot be used for a run: {_REFUSALS[given.name]}")


_REFUSALS = {
    "array": "every array task would be a run of its own. Submit one run per element: for i in …; do "
    "fallow submit … script $i; done",
    "cluster": "one head serves one cluster. Start a head where that cluster's SLURM_CONF is set",
    "clusters": "one head serves one cluster. Start a head where that cluster's SLURM_CONF is set",
    "cluster-constraint": "one head serves one cluster, which federation would undo. Use plain sbatch",
    "external": "such a job starts no script, so nothing would train. Use plain sbatch",
    "uid": "harvest jobs run as yourself. Submit as that user",
    "gid": "harvest jobs run under your own group. Use: sg GROUP -c 'fallow submit …'",
}

# ---------------------------------------------------------------------------------------------------------------
# Nodes
# ---------------------------------------------------------------------------------------------------------------

_RANGE = re.compile(r"^(\d+):(\d+)$")
_COUNT = re.compile(r"^(\d+)([kKmM]?)(?:-(\d+)([kKmM]?))?$")
_SIZES = re.compile(r"^\d+(?:-\d+(?::\d+)?)?(?:,\d+(?:-\d+(?::\d+)?)?)+$|^\d+-\d+:\d+$")
_UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}

MAX_NODES = 65_536


def parse_nodes(text: str, where: str = "--nodes") -> Limits:
    """`MIN:MAX` (Fallow's), or sbatch's own `N`, `MIN-MAX` and size lists, which pass unchanged."""
    if found := _RANGE.match(text):
        low, high = int(found[1]), int(found[2])
        return _limits(where, text, str(low), low, high)
    if found := _COUNT.match(text):
        low = int(found[1]) * _UNITS[found[2].lower()]
        high = int(found[3]) * _UNITS[found[4].lower()] if found[3] else low
        return _limits(where, text, text, low, high)
    if _SIZES.match(text):
        # A list of sizes, with steps after a colon (Slurm 23.11 and later): the steps are no sizes.
        sizes = [int(number) for number in re.findall(r"\d+", re.sub(r":\d+", "", text))]
        return _limits(where, text, text, max(min(sizes), 1), max(sizes))
    raise _usage(f"{where}={text[:64]}: give MIN:MAX for a run that grows and shrinks, e.g. {where}=1:8")


def _limits(where: str, text: str, base: str, low: int, high: int) -> Limits:
    if low < 1:
        raise _usage(f"{where}={text}: a run needs at least one node, e.g. {where}=1:{max(high, 1)}")
    if low > high:
        raise _usage(f"{where}={text}: the minimum is above the maximum; did you mean {where}={high}:{low}?")
    if high > MAX_NODES:
        raise _usage(f"{where}={text}: more than {MAX_NODES} nodes")
    return Limits(base, low, high)


def run_limits(components: Sequence[Mapping[str, Given]], fallow_nodes: str | None, ranged: bool) -> tuple[int, int]:
    """The run's minimum and maximum over all components.

    A `MIN:MAX` on the command line (`ranged`) goes before the script's `#FALLOW nodes=`, which goes before the
    size of the base job. The base job must lie within what the script allows.
    """
    parts = [_component_limits(options) for options in components]
    low, high = sum(part.minimum for part in parts), sum(part.maximum for part in parts)
    if fallow_nodes is None or ranged:
        return low, high
    limits = parse_nodes(fallow_nodes, "#FALLOW nodes")
    if any("nodes" in options for options in components) and not limits.minimum <= low <= limits.maximum:
        raise _usage(
            f"the base job asks for {low} nodes, outside of #FALLOW nodes={fallow_nodes}; "
            "give --nodes=MIN:MAX to override both"
        )
    return limits.minimum, limits.maximum


def _component_limits(options: Mapping[str, Given]) -> Limits:
    nodes = options.get("nodes")
    if nodes is not None:
        return parse_nodes(nodes.value or "")
    # Without --nodes, Slurm takes as many nodes as the tasks need.
    count = 1
    tasks, per_node = _number(options, "ntasks"), _number(options, "ntasks-per-node")
    if tasks and per_node:
        count = -(-tasks // per_node)
    return Limits("", count, count)


def _number(options: Mapping[str, Given], name: str) -> int | None:
    given = options.get(name)
    return int(given.value) if given is not None and given.value and given.value.isdecimal() else None


def _usage(text: str) -> FallowError:
    return FallowError(text, Exit.USAGE)
