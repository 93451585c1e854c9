"""What the head shows and is asked: the control socket's handler."""

import asyncio
import contextlib
import inspect
import os
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from fallow import __version__
from fallow.clock import steady
from fallow.head.api import views
from fallow.head.api.operations import CHANGING, Operations
from fallow.head.api.reports import report_of
from fallow.head.loop.durable import Durable
from fallow.head.loop.faults import Faults, in_thread
from fallow.head.loop.inbox import Inbox
from fallow.head.loop.turn import Turn
from fallow.head.slurm import accounts
from fallow.head.slurm.calls import SlurmCalls
from fallow.head.slurm.harvest import Harvest
from fallow.head.state.book import Book
from fallow.model import (
    Estimate,
    EventRecord,
    Exit,
    FallowError,
    HeadView,
    RunReport,
    RunSpec,
    Snapshot,
    Struct,
    UsageReport,
)
from fallow.model.bounds import Count, Name, Positive


class ControlHandler:
    """Reads the head's state at once; what would change something waits in the inbox for its turn.

    Args:
        operations: what may be changed.
        book, durable, harvest, calls: what is shown.
        inbox: of the head's loop.
        faults: errors that nobody expected.
        stand_in: an agent has started the head.
    """

    def __init__(
        self,
        operations: Operations,
        book: Book,
        durable: Durable,
        harvest: Harvest,
        calls: SlurmCalls,
        inbox: Inbox,
        faults: Faults,
        *,
        stand_in: bool = False,
    ) -> None:
        self._operations = operations
        self._book = book
        self._durable = durable
        self._harvest = harvest
        self._calls = calls
        self._inbox = inbox
        self._faults = faults
        self._stand_in = stand_in
        self._started = steady()

    async def handle(self, method: str, params: dict[str, Any]) -> msgspec.Raw:
        """Answer one control request, in JSON."""
        params = check(method, params)
        try:
            return msgspec.Raw(msgspec.json.encode(await self._answer(method, params)))
        except FallowError:
            raise
        except Exception as error:
            words = self._faults.note(f"request {method}", error)
            text = f"{method}: the head could not carry this out ({words}); its log says more"
            raise FallowError(text, Exit.SOFTWARE) from error

    async def _answer(self, method: str, params: dict[str, Any]) -> Any:
        if method in READING:
            return await getattr(self, method)(**params)
        run: str | None = None
        with contextlib.suppress(FallowError):
            run = self._book.get(params.get("run", "")).id

        def carry_out(turn: Turn) -> Any:
            try:
                return self._operations.handle(turn, method, params)
            except FallowError as refusal:
                return refusal

        return await self._inbox.ask(f"request {method}", carry_out, run)

    # -- what is read; requests are checked by these signatures ----------------------------------------------------

    async def events(self, since: Count = 0, limit: Positive = 1000, run: Name | None = None) -> list[EventRecord]:
        return await self._durable.store.events(since, limit, None if run is None else self._book.get(run).id)

    async def test_harvest(self, run: Name) -> str:
        return await self._calls.test(self._book.get(run))

    async def estimate(self, spec: RunSpec) -> Estimate:
        return self._harvest.estimate(self._book, spec)

    async def report(self, run: Name) -> RunReport:
        found, count = report_of(self._book, self._book.get(run))
        return msgspec.structs.replace(found, samples=await asyncio.wrap_future(in_thread(count, "report")))

    async def usage(self, by: Name = "run", since: Name | None = None, run: Name | None = None) -> UsageReport:
        if by not in ("run", "project", "day"):
            raise FallowError(f"usage by {by[:32]!r}: it is shown by run, project or day", Exit.USAGE)
        runs = list(self._book.runs.values()) if run is None else [self._book.get(run)]
        now = steady()
        prices, pruned = self._book.config.usage, self._book.pruned if run is None else None
        *rows, total = accounts.rows(runs, by, since, prices, now, pruned)
        return UsageReport(
            at=now,
            by=by,
            since=since,
            currency=prices.currency,
            rows=rows,
            total=total,
            others_delayed=self._harvest.neighbours.delays.report(now),
            owner=await self._calls.owner(),
        )

    async def status(self, run: Name | None = None) -> Snapshot:
        """The head and its runs, or one of them, as they are now."""
        at = now = steady()
        runs = list(self._book.runs.values()) if run is None else [self._book.get(run)]
        calls, config = self._calls, self._calls.config
        live = [a for r in runs for a in r.live_allocations()]
        head = HeadView(
            version=__version__,
            host=os.uname().nodename,
            pid=os.getpid(),
            term=self._book.term,
            uptime_s=at - self._started,
            cluster=None if config is None else config.cluster,
            slurm_version=None if config is None else config.slurm_version,
            slurm_error=calls.error,
            poll_age_s=None if calls.polled_at is None else at - calls.polled_at,
            poll_interval_s=calls.interval_s,
            polls=calls.polls,
            endpoint=self._book.endpoint,
            others_delayed=self._harvest.neighbours.delays.report(now),
            stopped=self._harvest.stopped,
            store_problem=self._durable.problem,
            stand_in=self._stand_in,
            not_harvested=self._harvest.neighbours.refused,
            internal_errors=self._faults.view(),
            agents=sum(len(a.hosts) for a in live),
            workers=sum(r.roster.nodes[n].slots for r in runs if not r.ended for n in r.roster.present()),
        )
        return Snapshot(
            at=now,
            head=head,
            nodes=views.node_views(self._harvest.cluster, runs, now, self._harvest.unused),
            runs=[views.run_view(r, at, now) for r in runs],
            last_event=self._durable.last_event,
        )


READING = ("status", "events", "report", "test_harvest", "usage", "estimate")
"""Methods that change nothing."""


def parameters(call: Callable[..., Any]) -> type[msgspec.Struct]:
    """What a request for this function must hold."""
    kinds = get_type_hints(call, include_extras=True)
    fields: list[Any] = []
    for name, given in inspect.signature(call).parameters.items():
        if name not in ("self", "turn"):  # those are the head's to give
            default = () if given.default is given.empty else (given.default,)
            fields.append((name, kinds[name], *default))
    return msgspec.defstruct(call.__name__, fields, bases=(Struct,), frozen=True, kw_only=True)


METHODS = {name: parameters(getattr(ControlHandler, name)) for name in READING}
METHODS |= {call.__name__: parameters(call) for call in CHANGING}
"""Every method; another one is refused."""


def check(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of one request, each of its type and within its bounds; those left out have their defaults.

    Raises:
        FallowError: there is no such method; or a parameter is missing, unknown, of another type or out of bounds, and
            the message names it.
    """
    if method not in METHODS:
        text = f"this head knows no method {method[:64]!r}; its version may differ from ours"
        raise FallowError(text, Exit.DATA)
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
