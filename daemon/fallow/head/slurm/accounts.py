"""The accounts of all runs: what their jobs held and what came of it. Kept with the runs, shown by `fallow usage`."""

import copy
from collections.abc import Collection, Iterable
from itertools import takewhile

from fallow.config import Usage
from fallow.core.accounting import budget
from fallow.core.accounting.spans import held
from fallow.core.accounting.usage import Prices, Tallies, by_month, is_since, merge, note_members, note_pause, tally
from fallow.core.membership.names import member_number
from fallow.head.loop.turn import Turn
from fallow.head.slurm.demands import left_s
from fallow.head.state.book import Run
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
"""Harvest allocations that are over for this long are dropped from the run; what they used stays in its sums. So are
renewed base jobs that Slurm refused."""


# -- noting -------------------------------------------------------------------------------------------------------


def note(turn: Turn) -> None:
    """Note who is a member now, for every run that the turn changed."""
    runs = [turn.book.runs[run_id] for run_id in turn.dirty]
    changed = [run for run in runs if not run.spec.local]
    turn.for_each(changed, "accounts", lambda run: _note_run(run, turn.now))


def _note_run(run: Run, now: float) -> None:
    r, record = run.roster, run.record
    allocations = run.allocations.values()
    here = set() if run.ended else _places(run, filter(r.alive, r.members))
    note_members(allocations, here, now)
    for done in takewhile(lambda done: done.generation > record.accounted_generation, reversed(run.generations)):
        if done.pause_s is not None and done.kind is not ChangeKind.START:
            note_pause(allocations, _places(run, map(member_number, done.members)), done.pause_s, 0.0)
    if run.generations:
        record.accounted_generation = max(record.accounted_generation, run.generations[-1].generation)
    discarded = run.root.discarded - record.accounted_discarded
    if discarded:
        note_pause(allocations, here, 0.0, discarded * _step_s(run))
        record.accounted_discarded = run.root.discarded


def _places(run: Run, members: Iterable[int]) -> set[tuple[str, str]]:
    """(token, host) of those that are still known."""
    known = (run.roster.nodes.get(n) for n in members)
    return {(node.token, node.host) for node in known if node is not None}


def _step_s(run: Run) -> float:
    """Seconds that a step takes at the present rate; 0 where nobody has said yet."""
    rate = max((run.progress[n].samples_per_s for n in run.roster.members if n in run.progress), default=0.0)
    contract = run.root.contract
    return contract.global_batch / rate if contract is not None and rate > 0 else 0.0


def settle(turn: Turn, at: float) -> None:
    """Add allocations whose jobs are over to the sums of their runs, drop old ones, and let runs rest that have ended.

    Args:
        turn: takes the effects.
        at: Unix time of the poll.
    """
    turn.for_each(turn.book.on_slurm, "accounts", lambda run: _settle_run(turn, run, at))


def _settle_run(turn: Turn, run: Run, at: float) -> None:
    record, rests = run.record, run.ended
    alive = {node.token for node in run.roster.nodes.values() if node.phase is not MemberPhase.GONE}
    for token, allocation in list(run.allocations.items()):
        lost = allocation.state is AllocationState.LOST and not allocation.spans
        old = at - _over_at(allocation.requested_at, (s.end_at for s in allocation.spans.values())) > KEEP_S
        if (allocation.is_settled or (lost and old)) and not allocation.is_counted:
            tally(record.usage, allocation, at)
            if allocation.is_harvested:
                record.harvested.add(held(allocation, at), at)
            allocation.is_counted = True
            turn.dirty.add(run.id)
        # The length of the next base job is known from those before it that Slurm took.
        refused = allocation.was_renewed and allocation.job_id is None and not lost
        if (
            allocation.is_counted
            and old
            and (allocation.kind is AllocationKind.HARVEST or refused)
            and token not in alive
        ):
            record.spent_node_s += budget.booked(allocation, at)
            del run.allocations[token]
            turn.dirty.add(run.id)
        rests = rests and allocation.is_counted and old
    if rests:
        turn.book.rest(run)


def _over_at(requested_at: float, ends: Iterable[float | None]) -> float:
    return max([requested_at, *(end for end in ends if end is not None)])


# -- showing ------------------------------------------------------------------------------------------------------


def tallies(run: Run, now: float) -> Tallies:
    """The run's sums, with what its live jobs have held so far."""
    sums = copy.deepcopy(run.record.usage)
    for allocation in run.allocations.values():
        if not allocation.is_counted:
            tally(sums, allocation, now)
    return sums


def rows(
    runs: Collection[Run], by: str, since: str | None, prices: Usage, now: float, pruned: PrunedRuns | None = None
) -> list[UsageRow]:
    """One row per run, project or day, and the total last. Runs that were pruned have one row together.

    Args:
        runs: which ones.
        by: run, project or day.
        since: UTC day; None: all.
        prices: what is asked for node and GPU hours.
        now: Unix time.
        pruned: sums over runs that are not among `runs` any more.
    """
    used = [(run.id, account_of(run.spec), tallies(run, now)) for run in runs if not run.spec.local]
    used += [(PRUNED, account, sums) for account, sums in ({} if pruned is None else pruned.usage).items()]
    groups: dict[str, Tallies] = {}
    whole: Tallies = {}
    for run_id, account, sums in used:
        for place, one in by_month(sums, now).items():
            day = place.partition(" ")[0]
            if is_since(day, since):
                key = {"run": run_id, "project": account, "day": day}[by]
                merge(groups.setdefault(key, {}), {place: one})
                merge(whole, {place: one})
    budgets: dict[str, tuple[float, float]] = {}
    for run in runs:
        if by == "run" and run.spec.budget_node_hours is not None:
            budgets[run.id] = run.spec.budget_node_hours * 3600.0, left_s(run, now) or 0.0
    table = Prices(prices.node_hour, prices.gpu_hour)
    # Runs that were pruned come last. No run has such an id.
    keys = sorted(groups, key=lambda key: (key == PRUNED, key))
    return [*(_row(key, groups[key], table, budgets.get(key)) for key in keys), _row("total", whole, table, None)]


def _row(key: str, sums: Tallies, prices: Prices, budget_s: tuple[float, float] | None) -> UsageRow:
    def amount(sources: Collection[Source]) -> Amount:
        held = [
            (place.partition(" ")[2], node_s, one.gpu_s.get(source, 0.0))
            for place, one in sums.items()
            for source, node_s in one.node_s.items()
            if source in sources
        ]
        cost = sum(prices.cost(*each) for each in held) if prices else None
        return Amount(node_s=sum(each[1] for each in held), gpu_s=sum(each[2] for each in held), cost=cost)

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
