"""Usage accounting: node time of each run's jobs, and how much of it was useful. `fallow usage` shows it."""

import copy
from collections.abc import Collection, Iterable
from itertools import takewhile

from fallow.config import Usage
from fallow.core.accounting import budget
from fallow.core.accounting.spans import node_periods
from fallow.core.accounting.usage import Prices, Tallies, by_month, is_since, merge, note_members, note_pause, tally
from fallow.core.membership.names import member_number
from fallow.head.loop.turn import Turn
from fallow.head.slurm.demands import budget_left_node_s
from fallow.head.state.registry import Run
from fallow.head.state.stored import PrunedRuns, account_of
from fallow.model import (
    PRUNED,
    AllocationKind,
    AllocationState,
    Amount,
    ChangeKind,
    MemberPhase,
    Source,
    UsageRow,
)

KEEP_S = 3600.0
"""Time after which ended harvest allocations, and renewed base jobs that Slurm refused, are dropped from their run. The
run's sums keep their usage."""


# -- recording ----------------------------------------------------------------------------------------------------


def note(turn: Turn) -> None:
    """Note the present members of every run that the turn changed."""
    runs = [turn.registry.runs[run_id] for run_id in turn.dirty]
    changed_runs = [run for run in runs if not run.spec.local]
    turn.for_each(changed_runs, "accounts", lambda run: _note_run(run, turn.now))


def _note_run(run: Run, now: float) -> None:
    r, record = run.roster, run.record
    allocations = run.allocations.values()
    places = set() if run.ended else _member_places(run, filter(r.alive, r.members))
    note_members(allocations, places, now)
    for report in takewhile(lambda report: report.generation > record.accounted_generation, reversed(run.generations)):
        if report.pause_s is not None and report.kind is not ChangeKind.START:
            note_pause(allocations, _member_places(run, map(member_number, report.members)), report.pause_s, 0.0)
    if run.generations:
        record.accounted_generation = max(record.accounted_generation, run.generations[-1].generation)
    discarded = run.root.discarded - record.accounted_discarded
    if discarded:
        note_pause(allocations, places, 0.0, discarded * _step_s(run))
        record.accounted_discarded = run.root.discarded


def _member_places(run: Run, members: Iterable[int]) -> set[tuple[str, str]]:
    nodes = (run.roster.nodes.get(n) for n in members)
    return {(node.token, node.host) for node in nodes if node is not None}


def _step_s(run: Run) -> float:
    """Seconds per step at the present rate; 0: not known yet."""
    rate = max((run.progress[n].samples_per_s for n in run.roster.members if n in run.progress), default=0.0)
    contract = run.root.contract
    return contract.global_batch / rate if contract is not None and rate > 0 else 0.0


def settle(turn: Turn, at: float) -> None:
    """Add finished allocations to the sums of their runs, drop old ones, and retire ended runs.

    Args:
        turn: takes the effects.
        at: Unix time of the poll.
    """
    turn.for_each(turn.registry.on_slurm, "accounts", lambda run: _settle_run(turn, run, at))


def _settle_run(turn: Turn, run: Run, at: float) -> None:
    record, may_retire = run.record, run.ended
    roster_tokens = {node.token for node in run.roster.nodes.values() if node.phase is not MemberPhase.GONE}
    for token, allocation in list(run.allocations.items()):
        is_lost = allocation.state is AllocationState.LOST and not allocation.spans
        is_old = at - _ended_at(allocation.requested_at, (s.end_at for s in allocation.spans.values())) > KEEP_S
        if (allocation.is_settled or (is_lost and is_old)) and not allocation.is_counted:
            tally(record.usage, allocation, at)
            if allocation.is_harvested:
                record.harvested.add(node_periods(allocation, at), at)
            allocation.is_counted = True
            turn.dirty.add(run.id)
        # Accepted base jobs are kept: the next one gets their time limit.
        is_refused = allocation.was_renewed and allocation.job_id is None and not is_lost
        if (
            allocation.is_counted
            and is_old
            and (allocation.kind is AllocationKind.HARVEST or is_refused)
            and token not in roster_tokens
        ):
            record.spent_node_s += budget.booked_node_s(allocation, at)
            del run.allocations[token]
            turn.dirty.add(run.id)
        may_retire = may_retire and allocation.is_counted and is_old
    if may_retire:
        turn.registry.retire(run)


def _ended_at(requested_at: float, ends: Iterable[float | None]) -> float:
    return max([requested_at, *(end for end in ends if end is not None)])


# -- report -------------------------------------------------------------------------------------------------------


def tallies(run: Run, now: float) -> Tallies:
    """The run's sums, including the node time of its live jobs so far."""
    sums = copy.deepcopy(run.record.usage)
    for allocation in run.allocations.values():
        if not allocation.is_counted:
            tally(sums, allocation, now)
    return sums


def rows(
    runs: Collection[Run], by: str, since: str | None, prices: Usage, now: float, pruned: PrunedRuns | None = None
) -> list[UsageRow]:
    """One row per run, project or day, and the total last. All pruned runs share one row.

    Args:
        runs: runs to report.
        by: run, project or day.
        since: first UTC day; None: all days.
        prices: prices of node and GPU hours.
        now: Unix time.
        pruned: sums over pruned runs; None: leave them out.
    """
    entries = [(run.id, account_of(run.spec), tallies(run, now)) for run in runs if not run.spec.local]
    entries += [(PRUNED, account, sums) for account, sums in ({} if pruned is None else pruned.usage).items()]
    groups: dict[str, Tallies] = {}
    total_sums: Tallies = {}
    for run_id, account, sums in entries:
        for place, one in by_month(sums, now).items():
            day = place.partition(" ")[0]
            if is_since(day, since):
                key = {"run": run_id, "project": account, "day": day}[by]
                merge(groups.setdefault(key, {}), {place: one})
                merge(total_sums, {place: one})
    budgets: dict[str, tuple[float, float]] = {}
    for run in runs:
        if by == "run" and run.spec.budget_node_hours is not None:
            budgets[run.id] = run.spec.budget_node_hours * 3600.0, budget_left_node_s(run, now) or 0.0
    table = Prices(prices.node_hour, prices.gpu_hour)
    # Runs that were pruned come last. No run has such an id.
    keys = sorted(groups, key=lambda key: (key == PRUNED, key))
    return [*(_row(key, groups[key], table, budgets.get(key)) for key in keys), _row("total", total_sums, table, None)]


def _row(key: str, sums: Tallies, prices: Prices, budget_s: tuple[float, float] | None) -> UsageRow:
    def amount(sources: Collection[Source]) -> Amount:
        parts = [
            (place.partition(" ")[2], node_s, one.gpu_s.get(source, 0.0))
            for place, one in sums.items()
            for source, node_s in one.node_s.items()
            if source in sources
        ]
        cost = sum(prices.cost(*each) for each in parts) if prices else None
        return Amount(node_s=sum(each[1] for each in parts), gpu_s=sum(each[2] for each in parts), cost=cost)

    causes = {source for one in sums.values() for source in one.node_s if source.wasted}
    return UsageRow(
        key=key,
        allocated=amount(list(Source)),
        base=amount([Source.BASE]),
        harvested=amount([Source.HARVESTED]),
        wasted=amount(causes),
        causes={source: amount([source]) for source in Source if source in causes},
        jobs=sum(one.jobs for one in sums.values()),
        useless_jobs=sum(one.useless for one in sums.values()),
        budget_node_s=None if budget_s is None else budget_s[0],
        budget_left_s=None if budget_s is None else budget_s[1],
    )
