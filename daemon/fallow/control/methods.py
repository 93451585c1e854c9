"""The methods of the control socket, and the parameters of each with their bounds."""

from __future__ import annotations

from typing import Any

import msgspec

from fallow.model import Exit, FallowError, RunSpec, Struct
from fallow.model.bounds import Code, Count, Few, Id, Many, Name, Positive, Prose, Seconds


class OfRun(Struct, frozen=True, kw_only=True):
    run: Name


class Status(Struct, frozen=True, kw_only=True):
    run: Name | None = None
    recent: bool = False
    "of all runs, an answer that was given to somebody else just now will do"


class Events(Struct, frozen=True, kw_only=True):
    since: Count = 0
    limit: Positive = 1000
    run: Name | None = None


class UsageOf(Struct, frozen=True, kw_only=True):
    by: Name = "run"
    since: Name | None = None
    run: Name | None = None


class OfSpec(Struct, frozen=True, kw_only=True):
    spec: RunSpec


class BaseSubmitted(Struct, frozen=True, kw_only=True):
    run: Name
    token: Id
    job_id: Id


class BaseFailed(Struct, frozen=True, kw_only=True):
    run: Name
    token: Id
    reason: Prose
    unknown: bool


class Resize(Struct, frozen=True, kw_only=True):
    run: Name
    by: Code = 1
    "less than 1 is refused with the run's own limits in the answer"


class Release(Struct, frozen=True, kw_only=True):
    run: Name
    members: Few[Name]


class Drain(Struct, frozen=True, kw_only=True):
    run: Name
    nodes: Many[Name]


class Rollback(Struct, frozen=True, kw_only=True):
    run: Name
    step: Count


class PruneRuns(Struct, frozen=True, kw_only=True):
    runs: Few[Name] | None = None
    keep: Count | None = None
    older_than_s: Seconds | None = None
    checkpoints: bool = False
    dry_run: bool = False


METHODS: dict[str, type[Struct]] = {
    "status": Status,
    "events": Events,
    "report": OfRun,
    "usage": UsageOf,
    "prospect": OfSpec,
    "test_harvest": OfRun,
    "create_run": OfSpec,
    "base_submitted": BaseSubmitted,
    "base_failed": BaseFailed,
    "grow": Resize,
    "shrink": Resize,
    "release": Release,
    "drain": Drain,
    "pause": OfRun,
    "resume": OfRun,
    "cancel": OfRun,
    "checkpoint": OfRun,
    "rollback": Rollback,
    "prune": PruneRuns,
    "local_allocation": OfRun,
}
"""Every method; another one is refused before the head sees it."""


def check(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of one request, each of its type and within its bounds; those left out have their defaults.

    Raises:
        FallowError: one is missing, unknown, of another type or out of bounds; the message names it.
    """
    try:
        given = msgspec.convert(params, METHODS[method])
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise FallowError(f"{method}: {_where(error)}", Exit.USAGE) from error
    return {name: getattr(given, name) for name in given.__struct_fields__}


def _where(error: Exception) -> str:
    """ "spec.min_nodes: expected `int` <= 1000000" of msgspec's "Expected `int` <= 1000000 - at `$.spec.min_nodes`"."""
    text, _, path = str(error)[:500].partition(" - at `$")
    text = text[:1].lower() + text[1:]
    name = path.removesuffix("`").lstrip(".")
    return f"{name}: {text}" if name else text
