"""The control socket's handler: checks requests, answers those that read, and queues those that change something."""

import contextlib
import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

import msgspec

from fallow import __version__
from fallow.clock import steady
from fallow.head.api import views
from fallow.head.api.operations import CHANGING, Operations
from fallow.head.api.pruning import has_entries
from fallow.head.api.reports import report_of
from fallow.head.loop.durable import Durable
from fallow.head.loop.faults import Faults
from fallow.head.loop.inbox import FilesFirst, Inbox
from fallow.head.loop.turn import Turn
from fallow.head.slurm import accounts
from fallow.head.slurm.calls import SlurmCalls
from fallow.head.slurm.harvest import Harvest
from fallow.head.state.registry import Registry
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
from fallow.threads import COUNT_S, FILES_S, FileCalls


class ControlHandler:
    """Answers control requests. Reading happens at once; a change waits in the inbox for its turn.

    Args:
        operations: the methods that change something.
        registry, durable, harvest, calls: sources of answers.
        inbox: queue of the head's loop.
        files: makes calls that use shared files.
        faults: counts unexpected errors.
        stand_in: True if an agent has started the head.
    """

    def __init__(
        self,
        operations: Operations,
        registry: Registry,
        durable: Durable,
        harvest: Harvest,
        calls: SlurmCalls,
        inbox: Inbox,
        files: FileCalls,
        faults: Faults,
        *,
        stand_in: bool = False,
    ) -> None:
        self._operations = operations
        self._registry = registry
        self._durable = durable
        self._harvest = harvest
        self._calls = calls
        self._inbox = inbox
        self._files = files
        self._faults = faults
        self._stand_in = stand_in
        self._started = steady()

    async def handle(self, method: str, params: dict[str, Any]) -> msgspec.Raw:
        params = check(method, params)
        try:
            return msgspec.Raw(msgspec.json.encode(await self._answer(method, params)))
        except FallowError:
            raise
        except Exception as error:
            words = self._faults.note(f"request {method}", error)
            text = f"{method}: the head could not carry this out ({words}). See the head's log"
            raise FallowError(text, Exit.SOFTWARE) from error

    async def _answer(self, method: str, params: dict[str, Any]) -> Any:
        if method in READING:
            return await getattr(self, method)(**params)
        run: str | None = None
        with contextlib.suppress(FallowError):
            run = self._registry.get(params.get("run", "")).id

        def carry_out(turn: Turn) -> Any:
            try:
                return act(turn)
            except FallowError as refusal:
                return refusal

        source = f"request {method}"
        act: Callable[[Turn], Any] = partial(self._operations.handle, method=method, params=params)
        undo_earlier: Callable[[], None] | None = None
        while isinstance(outcome := await self._inbox.ask(source, carry_out, run), FilesFirst):
            try:
                result = await self._files.call(outcome.place, outcome.call, outcome.patience_s, outcome.undo)
            except FallowError:
                if undo_earlier is not None:
                    undo_earlier()
                raise
            act, undo_earlier = partial(outcome.then, result), outcome.undo
        return outcome

    # -- methods that read; their signatures define the parameters of requests -------------------------------------

    async def events(self, since: Count = 0, limit: Positive = 1000, run: Name | None = None) -> list[EventRecord]:
        return await self._durable.store.events(since, limit, None if run is None else self._registry.get(run).id)

    async def test_harvest(self, run: Name) -> str:
        return await self._calls.test(self._registry.get(run))

    async def estimate(self, spec: RunSpec) -> Estimate:
        return self._harvest.estimate(self._registry, spec)

    async def report(self, run: Name, count: bool = True) -> RunReport:
        """Report of a run. Counting its samples may take minutes; without `count` they are not known."""
        asked_run = self._registry.get(run)
        paths, (first, complete) = self._registry.paths.run(asked_run.id), report_of(self._registry, asked_run)
        if not count:
            return first
        # A count may take long on a file system that answers, so find out first whether it does.
        await self._files.call(str(paths.root), partial(has_entries, paths.ledger), FILES_S)
        return await self._files.call(str(paths.ledger), complete, COUNT_S)

    async def usage(self, by: Name = "run", since: Name | None = None, run: Name | None = None) -> UsageReport:
        if by not in ("run", "project", "day"):
            raise FallowError(f"usage by {by[:32]!r} is unknown; choose run, project or day", Exit.USAGE)
        runs = list(self._registry.runs.values()) if run is None else [self._registry.get(run)]
        now = steady()
        prices, pruned = self._registry.config.usage, self._registry.pruned if run is None else None
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
        """Snapshot of the head and its runs, or of one run."""
        at = now = steady()
        runs = list(self._registry.runs.values()) if run is None else [self._registry.get(run)]
        calls, config = self._calls, self._calls.config
        live = [a for r in runs for a in r.live_allocations()]
        head = HeadView(
            version=__version__,
            host=os.uname().nodename,
            pid=os.getpid(),
            term=self._registry.term,
            uptime_s=at - self._started,
            cluster=None if config is None else config.cluster,
            slurm_version=None if config is None else config.slurm_version,
            slurm_error=calls.error,
            poll_age_s=None if calls.polled_at is None else at - calls.polled_at,
            poll_interval_s=calls.interval_s,
            polls=calls.polls,
            endpoint=self._registry.endpoint,
            others_delayed=self._harvest.neighbours.delays.report(now),
            stopped=self._harvest.stopped,
            store_problem=self._durable.problem,
            stand_in=self._stand_in,
            not_harvested=self._harvest.neighbours.refused_partitions,
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
    """The struct of a request's parameters, derived from the signature of its function."""
    kinds = get_type_hints(call, include_extras=True)
    fields: list[Any] = []
    for name, parameter in inspect.signature(call).parameters.items():
        if name not in ("self", "turn"):  # the head supplies these
            default = () if parameter.default is parameter.empty else (parameter.default,)
            fields.append((name, kinds[name], *default))
    return msgspec.defstruct(call.__name__, fields, bases=(Struct,), frozen=True, kw_only=True)


METHODS = {name: parameters(getattr(ControlHandler, name)) for name in READING}
METHODS |= {call.__name__: parameters(call) for call in CHANGING}
"""All control methods and their parameters."""


def check(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Check the parameters of a request and fill in defaults.

    Raises:
        FallowError: the method is unknown, or a parameter is missing, unknown, of a wrong type or out of bounds. The
            message names the parameter.
    """
    if method not in METHODS:
        text = f"this head has no method {method[:64]!r}; its version may differ from that of this command"
        raise FallowError(text, Exit.DATA)
    try:
        request = msgspec.convert(params, METHODS[method])
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise FallowError(f"{method}: {_where(error)}", Exit.USAGE) from error
    return {name: getattr(request, name) for name in request.__struct_fields__}


def _where(error: Exception) -> str:
    """ "spec.min_nodes: expected `int` <= 1000000" of msgspec's "Expected `int` <= 1000000 - at `$.spec.min_nodes`"."""
    text, _, path = str(error)[:500].partition(" - at `$")
    text = text[:1].lower() + text[1:]
    name = path.removesuffix("`").lstrip(".")
    return f"{name}: {text}" if name else text
