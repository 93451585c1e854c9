"""The planner's wishes become submissions, withdrawals and releases."""

from __future__ import annotations

from fallow.config import Config
from fallow.core.allocations import Allocation
from fallow.core.neighbour import GiveBack
from fallow.core.planner import Withdraw, plan
from fallow.core.requests import Ask, Demand, HarvestRules
from fallow.head.book import Run
from fallow.head.turn import Turn
from fallow.model import AllocationKind, AllocationState, ClusterState, RunStatus

DUDS = 3
"""Jobs in a row that come to nothing (no agent, or no worker that gets ready) before the next ones are put off."""

BACKOFF_S = 600.0
"""The longest that requests are put off."""


class Asking:
    """Asks for nodes on behalf of all runs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        "run -> time on the turns' clock before which nothing is asked for"

    def rules(self) -> HarvestRules:
        h = self._config.harvest
        return HarvestRules(
            partitions=tuple(h.partitions),
            allow_without_preemption=h.allow_without_preemption,
            max_pending=h.max_pending,
            max_nodes=h.max_nodes,
            max_minutes=h.max_minutes,
            min_minutes=h.min_minutes,
        )

    def plan(self, turn: Turn, cluster: ClusterState) -> None:
        runs = {run.id: run for run in turn.book.runs.values() if not run.spec.local}
        put_off = {run.id for run in runs.values() if not run.roster.status.ended and self._put_off(turn, run)}
        demands = [_demand(run, run.id in put_off) for run in runs.values() if not run.roster.status.ended]
        live = [a for run in runs.values() for a in run.live_allocations()]
        for wish in plan(cluster, demands, live, self.rules()):
            match wish:
                case Ask(run_id, partition, minutes):
                    run = runs[run_id]
                    allocation = turn.book.new_allocation(
                        run, AllocationKind.HARVEST, turn.now, partition=partition, minutes=minutes
                    )
                    turn.dirty.add(run_id)
                    turn.submissions.append((run_id, allocation.token))
                case Withdraw(token, reason):
                    run, allocation = _find(runs, token)
                    turn.record(run, "withdraw", f"{token} (job {allocation.job_id}): {reason}")
                    turn.cancel(run, allocation, reason)
                case GiveBack(token, reason):
                    run, allocation = _find(runs, token)
                    turn.release_allocation(run, allocation, reason)
        for run in runs.values():
            if run.id not in put_off:
                _renew_base(turn, run)

    def _put_off(self, turn: Turn, run: Run) -> bool:
        """Is it too early to ask for more, because the last jobs came to nothing? Twice as long after each."""
        failures = run.record.duds + run.roster.start_failures
        if failures > self._failures.get(run.id, 0) and failures >= DUDS:
            wait_s = min(BACKOFF_S, self._config.slurm.poll_interval_s * 2.0 ** min(failures - DUDS + 1, 20))
            self._not_before[run.id] = turn.at + wait_s
            turn.record(run, "pause", f"{failures} jobs in a row came to nothing; the next in {wait_s:.0f} s")
        elif not failures:
            self._not_before.pop(run.id, None)
        self._failures[run.id] = failures
        return turn.at < self._not_before.get(run.id, turn.at)


def _find(runs: dict[str, Run], token: str) -> tuple[Run, Allocation]:
    for run in runs.values():
        if token in run.record.allocations:
            return run, run.record.allocations[token]
    raise KeyError(token)


def _demand(run: Run, put_off: bool = False) -> Demand:
    slots = run.record.slots or 1
    useful = run.roster.useful_members
    if run.roster.generation == 0 and run.roster.status is RunStatus.WAITING and run.record.slots is None:
        # Nothing of it has run yet: the base allocation shows first that the script works.
        useful = 0 if run.record.base_wanted else useful
    live = [a for a in run.live_allocations() if a.state is not AllocationState.RELEASING]
    nodes = sum(max(1, len(a.agents)) if a.kind is AllocationKind.HARVEST else a.nodes_wanted for a in live)
    wanted = -(-useful // slots) - nodes
    if run.record.harvest_paused or run.roster.finishing or put_off:
        wanted = min(wanted, 0)
    budget = run.spec.budget_node_hours
    spent = sum(_node_seconds(a) for a in run.record.allocations.values() if a.kind is AllocationKind.HARVEST)
    return Demand(
        run=run.id,
        nodes=wanted,
        partitions=tuple(run.spec.harvest_partitions),
        min_minutes=run.spec.min_harvest_minutes,
        barred=frozenset(run.roster.barred),
        budget_node_s=None if budget is None else budget * 3600.0 - spent,
    )


def _renew_base(turn: Turn, run: Run) -> None:
    """Submit the base job again when the last one is over and the script is not finished."""
    record = run.record
    if run.roster.status.ended or not record.base_wanted or run.roster.finishing or record.harvest_paused:
        return
    bases = [a for a in record.allocations.values() if a.kind is AllocationKind.BASE]
    if not bases or any(a.live for a in bases):
        return
    allocation = turn.book.new_allocation(run, AllocationKind.BASE, turn.now, nodes_wanted=run.spec.min_nodes)
    turn.dirty.add(run.id)
    turn.submissions.append((run.id, allocation.token))


def _node_seconds(allocation: Allocation) -> float:
    """Reserved or spent node-seconds, so that the budget holds even for submissions of unknown outcome (I10)."""
    if allocation.state in (AllocationState.LOST,):
        return 0.0
    if allocation.live or allocation.start_at is None or allocation.end_at is None:
        return 60.0 * (allocation.minutes or 0) if allocation.live else 0.0
    return max(0.0, allocation.end_at - allocation.start_at)
