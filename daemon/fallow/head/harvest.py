"""The Slurm side: polls become facts about allocations, the planner's wishes become submissions."""

from __future__ import annotations

from fallow.config import Config
from fallow.core import events as ev
from fallow.core.allocations import Allocation, observe, preempted_until
from fallow.core.neighbour import GiveBack
from fallow.core.planner import Withdraw, plan
from fallow.core.requests import Ask, Demand, HarvestRules
from fallow.core.sbatch import base_options, harvest_options
from fallow.core.script import harvest_copy
from fallow.head.book import Run
from fallow.head.turn import Turn
from fallow.model import (
    AllocationKind,
    AllocationState,
    ClusterState,
    JobRequest,
    RunStatus,
)

REFUSALS = 3
"""Submissions that Slurm refuses in a row before a run's harvesting pauses (HyperQueue pauses after 10)."""

DUDS = 3
"""Jobs in a row that come to nothing (no agent, or no worker that gets ready) before the next ones are put off."""

DUD = frozenset(("COMPLETED", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"))
"""Ends of a job that are the script's own doing."""

BACKOFF_S = 600.0
"""The longest that requests are put off."""

CANCEL_AGAIN_S = 30.0
"""A job that a poll still shows this long after it was cancelled is cancelled again."""


class Harvest:
    """Keeps allocations and Slurm in step, and asks for more."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.cluster: ClusterState | None = None
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

    def polled(self, turn: Turn, cluster: ClusterState) -> None:
        """Take in one poll, then plan."""
        self.cluster = cluster
        for run in list(turn.book.runs.values()):
            for allocation in run.live_allocations():
                if not run.spec.local:
                    self._observe(turn, run, allocation, cluster)
        self._sweep_orphans(turn, cluster)
        self._plan(turn, cluster)

    def _observe(self, turn: Turn, run: Run, allocation: Allocation, cluster: ClusterState) -> None:
        changed = observe(allocation, cluster.jobs, cluster.at, self._horizon_s())
        if changed is not None:
            turn.dirty.add(run.id)
            turn.record(run, "job", f"{allocation.token} (job {allocation.job_id}): {changed}")
        grace_end = preempted_until(allocation, cluster.jobs)
        if grace_end is not None and allocation.state is AllocationState.RUNNING:
            allocation.end_at = grace_end
            turn.release_allocation(run, allocation, "preempted")
        if not allocation.live:
            self._ended(turn, run, allocation)
        elif (
            allocation.asked_at is not None
            and not allocation.agents
            and allocation.job_id is not None
            and cluster.at - allocation.asked_at > CANCEL_AGAIN_S
        ):
            turn.cancel(run, allocation, allocation.reason)
            allocation.asked_at = turn.now

    def _ended(self, turn: Turn, run: Run, allocation: Allocation) -> None:
        reason = f"job {allocation.job_id} ended ({allocation.reason or 'no longer in Slurm'})"
        for worker in allocation.workers:
            if run.roster.alive(worker):
                turn.apply(run, ev.WorkerGone(at=turn.at, worker=worker, reason=reason))
        vanished = allocation.reason in ("CANCELLED", "") and allocation.start_at is None
        cancelled = allocation.reason == "CANCELLED" or vanished
        if allocation.kind is AllocationKind.BASE and cancelled and allocation.asked_at is None:
            run.record.base_wanted = False
            if run.roster.generation == 0 and not run.roster.workers:
                # Cancelled before anything of it ran: the user does not want the run.
                turn.apply(run, ev.Cancelled(at=turn.at, reason=f"job {allocation.job_id} was cancelled"))
        elif not allocation.agents and allocation.asked_at is None and allocation.reason in DUD:
            self._came_to_nothing(turn, run, allocation)
        turn.book.end_allocation(run, allocation, reason)

    @staticmethod
    def _came_to_nothing(turn: Turn, run: Run, allocation: Allocation) -> None:
        """The script ended before `fallow run` had an agent start: it is wrong, or something that it needs is away."""
        run.record.duds += 1
        turn.dirty.add(run.id)
        log = turn.book.paths.run(run.id).logs / f"{allocation.token}.out"
        where = log if allocation.kind is AllocationKind.HARVEST else "its output"
        how = f"job {allocation.job_id} ended ({allocation.reason})"
        text = f"{how} before its script reached `fallow run`; see {where}"
        turn.record(run, "failed", text)
        if allocation.kind is AllocationKind.BASE and run.roster.generation == 0 and not run.roster.workers:
            turn.apply(run, ev.Cancelled(at=turn.at, reason=text, status=RunStatus.FAILED))

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

    def _sweep_orphans(self, turn: Turn, cluster: ClusterState) -> None:
        """Cancel jobs that carry a token of ours which is no longer live (I9, I15: own name and own user only)."""
        for run in turn.book.runs.values():
            for allocation in run.record.allocations.values():
                ending = allocation.asked_at is not None and turn.now - allocation.asked_at < CANCEL_AGAIN_S
                if allocation.live or ending or allocation.kind is AllocationKind.BASE:
                    continue
                for job in cluster.jobs:
                    if job.name == allocation.token and job.state in ("PENDING", "RUNNING"):
                        turn.record(run, "orphan", f"job {job.job_id} of the ended {allocation.token} is cancelled")
                        turn.cancels.append((run.id, allocation.token, job.job_id))

    # -- asking ---------------------------------------------------------------------------------------------------

    def _plan(self, turn: Turn, cluster: ClusterState) -> None:
        runs = {run.id: run for run in turn.book.runs.values() if not run.spec.local}
        put_off = {run.id for run in runs.values() if not run.roster.status.ended and self._put_off(turn, run)}
        demands = [self._demand(run, run.id in put_off) for run in runs.values() if not run.roster.status.ended]
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
                    run, allocation = self._find(runs, token)
                    turn.record(run, "withdraw", f"{token} (job {allocation.job_id}): {reason}")
                    turn.cancel(run, allocation, reason)
                case GiveBack(token, reason):
                    run, allocation = self._find(runs, token)
                    turn.release_allocation(run, allocation, reason)
        for run in runs.values():
            if run.id not in put_off:
                self._renew_base(turn, run)

    @staticmethod
    def _find(runs: dict[str, Run], token: str) -> tuple[Run, Allocation]:
        for run in runs.values():
            if token in run.record.allocations:
                return run, run.record.allocations[token]
        raise KeyError(token)

    def _demand(self, run: Run, put_off: bool = False) -> Demand:
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

    @staticmethod
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

    def request(self, state: str, run: Run, allocation: Allocation, log: str) -> JobRequest:
        """What to hand to sbatch for an allocation."""
        spec = run.spec
        exported = {
            "FALLOW_RUN": run.id,
            "FALLOW_TOKEN": allocation.token,
            "FALLOW_KIND": allocation.kind.value,
            "FALLOW_STATE_DIR": state,
        }
        if allocation.kind is AllocationKind.HARVEST:
            options = harvest_options(
                spec,
                token=allocation.token,
                partition=allocation.partition,
                minutes=allocation.minutes or self._config.harvest.min_minutes,
                output=log,
                nice=self._config.harvest.nice,
                barred=sorted(run.roster.barred),
            )
            script = harvest_copy(spec.script)
        else:
            options = base_options(
                spec.sbatch_options, token=allocation.token, exported=exported, barred=sorted(run.roster.barred)
            )
            script = spec.script
        return JobRequest(
            token=allocation.token,
            options=options,
            script=script,
            args=spec.args,
            environment={**spec.environment, **exported},
            cwd=spec.cwd,
            umask=spec.umask,
        )

    def submitted(self, turn: Turn, run: Run, token: str, job_id: str) -> None:
        allocation = run.record.allocations[token]
        allocation.job_id = job_id
        if allocation.state is AllocationState.UNKNOWN:
            allocation.state = AllocationState.PENDING
        run.record.failures_in_a_row = 0
        turn.dirty.add(run.id)
        limit = "" if allocation.minutes is None else f" for {allocation.minutes} min"
        turn.record(run, "submit", f"{token}: job {job_id} in {allocation.partition or 'default'}{limit}")

    def refused(self, turn: Turn, run: Run, token: str, reason: str) -> None:
        allocation = run.record.allocations[token]
        turn.book.end_allocation(run, allocation, reason)
        run.record.failures_in_a_row += 1
        turn.dirty.add(run.id)
        turn.record(run, "refused", f"{token}: Slurm refused it: {reason}")
        if run.record.failures_in_a_row >= REFUSALS:
            run.record.harvest_paused = f"Slurm refused {REFUSALS} submissions in a row: {reason}"
            turn.record(run, "pause", f"no more nodes are asked for: {run.record.harvest_paused}")

    @staticmethod
    def unknown(turn: Turn, run: Run, token: str, reason: str) -> None:
        """sbatch failed without a clear answer: the job may exist, so it is looked for and never sent again."""
        turn.dirty.add(run.id)
        turn.record(run, "unknown", f"{token}: nobody knows whether Slurm has it ({reason}); it is looked for")

    def _horizon_s(self) -> float:
        # MessageTimeout (10 s) + SAVE_MAX_WAIT (5 s) + margin, and never before two polls.
        return max(30.0, 2.5 * self._config.slurm.poll_interval_s)


def _node_seconds(allocation: Allocation) -> float:
    """Reserved or spent node-seconds, so that the budget holds even for submissions of unknown outcome (I10)."""
    if allocation.state in (AllocationState.LOST,):
        return 0.0
    if allocation.live or allocation.start_at is None or allocation.end_at is None:
        return 60.0 * (allocation.minutes or 0) if allocation.live else 0.0
    return max(0.0, allocation.end_at - allocation.start_at)
