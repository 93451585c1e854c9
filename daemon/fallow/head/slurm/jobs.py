"""Jobs of allocations: what is handed to sbatch, and the facts that polls show.

An allocation's job has started, is preempted, has ended, was cancelled by somebody, never came, or is left behind.
"""

from collections.abc import Collection, Sequence
from math import inf

import structlog

from fallow.config import Config
from fallow.control.protocol import BaseJob
from fallow.core.accounting import cancelled, duds
from fallow.core.accounting.backoff import Backoff
from fallow.core.accounting.spans import follow
from fallow.core.allocations import (
    CANCEL_AGAIN_S,
    MISSING_POLLS,
    Allocation,
    PolledJobs,
    begin_again,
    end_sbatch,
    horizon_s,
    observe,
    preemption_end,
    was_requeued,
)
from fallow.core.holes import CLOSED
from fallow.core.membership import events as ev
from fallow.core.neighbour.watch import END_S, LEAVE_S
from fallow.core.states import ENDED_STATES, ENDING
from fallow.core.submission.sbatch import base_options, harvest_options, job_environment, said_later
from fallow.core.submission.script import harvest_script, with_directives
from fallow.files import Paths, read_struct
from fallow.head.loop.turn import Turn
from fallow.head.peers.agents import agent_gone
from fallow.head.state.book import Run
from fallow.model import AllocationKind, AllocationState, ClusterState, FallowError, JobInfo, JobRequest, RunStatus

log = structlog.get_logger("fallow.head")

DUD = frozenset(("COMPLETED", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"))
"""Ends of a job that are the script's own doing."""

REMEMBERED_S = 120.0
"""Slurm surely shows how a job has ended for so long (MinJobAge is 300 s by default)."""

SILENT_S = 60.0
"""A job that polls do not show, and whose agents are silent, is taken for ended after so long or a lease."""


def take_in(turn: Turn, cluster: ClusterState, backoff: Backoff) -> None:
    """Bring every allocation up to date with a poll, also those that are over for us and not yet for Slurm.

    Args:
        turn: takes the effects.
        cluster: the poll.
        backoff: is told of requests that somebody cancelled.
    """
    jobs = PolledJobs(cluster.jobs)
    gpus = {node.node: node.gpus for node in cluster.nodes}
    closed = {node.node for node in cluster.nodes if not CLOSED.isdisjoint(node.flags)}

    def observe_run(run: Run) -> None:
        _adopt_requeued(turn, run, jobs)
        for allocation in list(run.allocations.values()):
            if allocation.is_live:
                left_word(turn, run, allocation)
                _observe(turn, run, allocation, jobs.jobs_of(allocation), cluster.at)
            elif allocation.is_settled:
                _prove_gone(turn, run, allocation)
        for allocation in list(run.allocations.values()):
            mine = jobs.jobs_of(allocation)
            if follow(allocation, mine, cluster.at, gpus):
                turn.dirty.add(run.id)
                if allocation.is_settled:
                    turn.book.close(run, allocation)
                    if cancelled.by_others(allocation, mine, closed):
                        _cancelled(turn, run, allocation, backoff)

    turn.for_each(turn.book.on_slurm, "jobs of a poll", observe_run)


def _adopt_requeued(turn: Turn, run: Run, jobs: PolledJobs) -> None:
    """Take up a base job again that Slurm has requeued. Of an ended run the job is swept up."""
    bases = [a for a in run.bases if not a.is_settled]
    for allocation in bases:
        others = any(a.is_live for a in bases if a is not allocation)
        if run.ended or others or not was_requeued(allocation, jobs.jobs_of(allocation)):
            continue
        for host in list(allocation.hosts):
            agent_gone(turn, run, allocation, host, "Slurm has requeued its job", taken=True)
        begin_again(allocation, turn.now)
        turn.record(run, "job", f"{allocation.token} (job {allocation.job_id}): Slurm has requeued it")


def _observe(turn: Turn, run: Run, allocation: Allocation, jobs: Sequence[JobInfo], at: float) -> None:
    """Bring one up to date. Args: jobs: its own of the poll; at: Unix time of the poll."""
    unseen, was_shown = allocation.job_id is None, allocation.unseen_at is None
    changed = observe(allocation, jobs, at, horizon_s(turn.book.config.slurm.poll_interval_s))
    if allocation.unseen_at is None:
        run.shown_at[allocation.token] = at
    _give_up_forgotten(turn, run, allocation, at)
    if was_shown is not (allocation.unseen_at is None):
        turn.dirty.add(run.id)
    if changed is not None:
        job = f" (job {allocation.job_id})" if allocation.job_id else ""
        turn.record(run, "job", f"{allocation.token}{job}: {changed}")
    grace_end = preemption_end(jobs)
    if grace_end is not None and allocation.state is AllocationState.RUNNING:
        allocation.end_at = grace_end
        turn.release_allocation(run, allocation, "preempted")
    if not allocation.is_live:
        _ended(turn, run, allocation)
    elif (
        allocation.asked_at is not None
        and not allocation.agents
        and allocation.job_id is not None
        and (unseen or abs(at - allocation.asked_at) > CANCEL_AGAIN_S)
    ):
        turn.cancel(run, allocation, allocation.reason)
        allocation.asked_at = turn.now


def _give_up_forgotten(turn: Turn, run: Run, allocation: Allocation, at: float) -> None:
    """Give up the agents of a job that polls have not shown for long, if they are silent for as long.

    Slurm does not forget a job that runs. After a crash it may show an older state; agents that are heard
    prove that their job runs.

    Args:
        turn, run, allocation: takes the effects, and whose job.
        at: Unix time of this poll.
    """
    patience_s = max(SILENT_S, turn.book.config.membership.lease_s)
    missing_s = 0.0 if allocation.unseen_at is None else at - allocation.unseen_at
    if allocation.submit_at is None or allocation.missing < MISSING_POLLS or missing_s <= patience_s:
        return
    heard_at = [run.agent_seen.get((allocation.token, host), turn.at) for host in allocation.hosts]
    if all(turn.at - seen_at > patience_s for seen_at in heard_at):
        for host in allocation.hosts:
            reason = f"agent on {host} is silent, and Slurm no longer has job {allocation.job_id}"
            agent_gone(turn, run, allocation, host, reason, taken=True)


def _end_was_missed(run: Run, allocation: Allocation) -> bool:
    """Return True if Slurm may have shown how a job ended, and forgotten it, while this head was away."""
    shown_at = run.shown_at.get(allocation.token, -inf)
    return allocation.unseen_at is not None and allocation.unseen_at - shown_at > REMEMBERED_S


def _ended(turn: Turn, run: Run, allocation: Allocation) -> None:
    reason = f"job {allocation.job_id} ended ({allocation.reason or 'no longer in Slurm'})"
    taken, node_failed = allocation.reason not in DUD, allocation.reason == "NODE_FAIL"
    for host in list(allocation.hosts):
        agent_gone(turn, run, allocation, host, reason, taken=taken, node_failed=node_failed)
    vanished = allocation.reason == "" and allocation.start_at is None
    lost = allocation.state is AllocationState.LOST
    if allocation.kind is AllocationKind.BASE and (lost or (vanished and _end_was_missed(run, allocation))):
        # Nobody is known to have cancelled it. A run that has trained asks again by itself.
        if is_new(run) and allocation.asked_at is None:
            text = "Slurm never had its job, as its answers show; submit it again"
            if allocation.job_id is not None:
                text = f"Slurm took job {allocation.job_id} and has forgotten it; submit it again"
            turn.apply(run, ev.Cancel(at=turn.at, reason=text, status=RunStatus.FAILED))
    elif allocation.kind is AllocationKind.BASE and vanished and allocation.asked_at is None:
        # It waited, and Slurm has forgotten how it ended. While Slurm remembers, its state tells.
        _base_cancelled(turn, run, allocation)
    elif not (allocation.agents or allocation.told_to_end) and allocation.asked_at is None and allocation.reason in DUD:
        _came_to_nothing(turn, run, allocation)
    turn.book.end_allocation(run, allocation, reason)


def _prove_gone(turn: Turn, run: Run, allocation: Allocation) -> None:
    """The jobs of an allocation that was given up are over, and with them all its processes."""
    for host in allocation.agents:
        for node in run.roster.at_place(host, allocation.token):
            if not node.exited:
                turn.apply(run, ev.NodeEnded(at=turn.at, node=node.id, reason=f"job {allocation.job_id} has ended"))


def _came_to_nothing(turn: Turn, run: Run, allocation: Allocation) -> None:
    """No agent came: the script is wrong, something that it needs is away, or the head cannot be reached from there."""
    how = f"job {allocation.job_id} ended ({allocation.reason})"
    text = f"{how} before an agent of it had come to the head; see {turn.book.output_of(run, allocation)}"
    turn.record(run, "failed", text)
    node = allocation.nodes[0] if allocation.kind is AllocationKind.HARVEST and len(allocation.nodes) == 1 else ""
    there = f"{text} (on {node}, in {allocation.partition})" if node else text
    suspect = node in run.roster.failures.bars
    unfit = duds.ended(run.record.fruitless, node, there, trains=bool(run.roster.present()), suspect=suspect)
    if unfit and node not in run.barred:
        turn.apply(run, ev.Bar(at=turn.at, host=node, reason=unfit))
    if allocation.kind is AllocationKind.BASE and is_new(run):
        turn.apply(run, ev.Cancel(at=turn.at, reason=text, status=RunStatus.FAILED))


def is_new(run: Run) -> bool:
    """No node has ever come to it."""
    return run.root.generation == 0 and run.root.next_id == 1


# -- cancelled by others ------------------------------------------------------------------------------------------


def _cancelled(turn: Turn, run: Run, allocation: Allocation, backoff: Backoff) -> None:
    """Somebody else cancelled it: a base job's run ends; a harvest job's node is left alone, and then all are."""
    if allocation.kind is AllocationKind.BASE:
        _base_cancelled(turn, run, allocation)
        return
    started = allocation.start_at is not None or bool(allocation.spans)
    node = allocation.nodes[0] if started and allocation.nodes else ""
    what = f"job {allocation.job_id}" + (f" on {node}" if node else f", a request in {allocation.partition}")
    text = f"somebody cancelled {what}"
    turn.record(run, "cancelled", text, job=allocation.job_id, node=node)
    if node:
        # No run of ours asks for it for a while, each time for longer.
        for other in turn.book.on_slurm:
            if not other.ended and node not in other.barred:
                turn.apply(other, ev.Bar(at=turn.at, host=node, reason=text))
    else:
        backoff.strike(text, run.asks_as(allocation), allocation.partition, None, turn.now)
    enough = cancelled.note(run.record.cancelled, turn.now, node)
    if enough and not run.record.harvest_paused and not run.ended:
        turn.stop_asking(
            run,
            f"{cancelled.CANCELS} of its harvest jobs were cancelled by somebody within a day, the last: {what}; "
            f"if it may go on: fallow resume {run.id}",
        )
        for request in run.live_allocations():
            if request.kind is AllocationKind.HARVEST and request.start_at is None and not request.agents:
                turn.cancel(run, request, "harvest jobs of the run were cancelled by somebody")


def _base_cancelled(turn: Turn, run: Run, allocation: Allocation) -> None:
    """End the run whose base job was cancelled, unless the user wants it to go on without one."""
    run.record.base_wanted = False
    turn.dirty.add(run.id)
    if run.ended:
        return
    what = f"job {allocation.job_id}, its base job, was cancelled"
    if run.spec.outlives_base:
        turn.record(run, "cancelled", f"{what}; the run outlives it", job=allocation.job_id)
    else:
        turn.apply(run, ev.Cancel(at=turn.at, reason=what))


# -- left behind --------------------------------------------------------------------------------------------------


def sweep(turn: Turn, cluster: ClusterState, wanted: Collection[str] = ()) -> None:
    """Cancel the jobs of allocations that have ended, base jobs included (I9, I15).

    A job is ours if it carries the allocation's token and, once known, its job id (`PolledJobs`). A job that was
    asked to end gets time to end by itself: little, where somebody waits for its nodes (`wanted`: tokens). A job that
    Slurm preempts is Slurm's to end or to requeue. The elected one runs the lines after `fallow run`.
    """
    shown = PolledJobs(cluster.jobs)
    for run in turn.book.on_slurm:
        for allocation in run.allocations.values():
            if allocation.is_live or _ends_by_itself(turn, allocation, allocation.token in wanted):
                continue
            alive = (job for job in shown.jobs_of(allocation) if _is_orphan(job, cluster.at))
            for job_id in dict.fromkeys(job.het_job_id or job.job_id for job in alive):
                turn.record(run, "orphan", f"job {job_id} of the ended {allocation.token} is cancelled")
                turn.cancels.append((run.id, allocation.token, job_id))
                # Whether it was us is asked later (`cancelled.by_others`).
                allocation.asked_at = turn.now


def _ends_by_itself(turn: Turn, allocation: Allocation, is_wanted: bool) -> bool:
    if allocation.is_elected and not (is_wanted and allocation.kind is AllocationKind.HARVEST):
        return True
    if allocation.left_at is not None and abs(turn.now - allocation.left_at) < END_S:
        return True
    time_s = LEAVE_S + END_S if is_wanted else CANCEL_AGAIN_S
    return allocation.asked_at is not None and abs(turn.now - allocation.asked_at) < time_s


def _is_orphan(job: JobInfo, at: float) -> bool:
    is_preempted = job.preempt_at is not None and job.end_at is not None and job.end_at > at
    return job.state not in ENDED_STATES | ENDING and not is_preempted


# -- submitted --------------------------------------------------------------------------------------------------------


def job_request(config: Config, paths: Paths, run: Run, allocation: Allocation, nice: int) -> JobRequest:
    """What to hand to sbatch for an allocation. `nice`: of harvest jobs."""
    spec = run.spec
    exported = job_environment(str(paths.state), run.id, allocation.token, allocation.kind)
    if allocation.kind is AllocationKind.HARVEST:
        options = harvest_options(
            spec,
            token=allocation.token,
            partition=allocation.partition,
            minutes=allocation.minutes or config.harvest.min_minutes,
            output=str(paths.run(run.id).output(allocation.token)),
            nice=0 if allocation.has_normal_priority else nice,
            # Those are jobs of normal priority, in the user's own name.
            qos="" if allocation.has_normal_priority else run.asker.qos,
            account="" if allocation.has_normal_priority else run.asker.account,
            barred=[*run.shunned, *filter(None, [allocation.exclude])],
            part=allocation.part,
            hurried=allocation.has_normal_priority,
        )
        script = harvest_script(spec.script)
    else:
        later = said_later(spec, run.shunned)
        options = base_options(
            spec.sbatch_options, token=allocation.token, exported=exported, barred=run.shunned, by_script=later
        )
        script = with_directives(spec.script, later)
    return JobRequest(
        token=allocation.token,
        options=options,
        script=script,
        args=spec.args,
        environment={**spec.environment, **exported},
        cwd=spec.cwd,
        umask=spec.umask,
    )


def give_up_queued(turn: Turn, why: str) -> None:
    """What was not sent while nobody looked at Slurm: the next plan asks for what is of use by then."""
    turn.for_each(turn.book.current.values(), "withdraw", lambda run: withdraw_queued(turn, run, why))


def withdraw_queued(turn: Turn, run: Run, why: str) -> None:
    """Give up what of one run waits for its turn at sbatch."""
    for allocation in run.live_allocations():
        if allocation.is_queued:
            turn.record(run, "withdraw", f"{allocation.token}: {why}")
            turn.cancel(run, allocation, why)


def submitted(turn: Turn, run: Run, token: str, job_id: str) -> None:
    allocation = run.allocations[token]
    allocation.job_id = job_id
    end_sbatch(allocation, turn.now)
    if allocation.state is AllocationState.UNKNOWN:
        allocation.state = AllocationState.PENDING
    run.record.refusals.pop(allocation.partition if allocation.kind is AllocationKind.HARVEST else "", None)
    # Of a base job the options say it, which are sbatch's to read; the next poll shows it.
    where = f" in {allocation.partition}" if allocation.partition else ""
    limit = "" if allocation.minutes is None else f" for {allocation.minutes} min"
    turn.record(run, "submit", f"{token}: job {job_id}{where}{limit}")


def left_word(turn: Turn, run: Run, allocation: Allocation) -> None:
    """Take in the number of a base job that `fallow submit` could not tell a head, which was away."""
    if allocation.kind is not AllocationKind.BASE or allocation.was_renewed or allocation.job_id is not None:
        return
    try:
        found = read_struct(turn.book.paths.run(run.id).base_job(allocation.token), BaseJob)
    except FileNotFoundError:
        return
    except (FallowError, OSError) as error:
        # The job can be found by its comment as well.
        log.warning("base_job.unreadable", run=run.id, error=str(error))
        return
    submitted(turn, run, allocation.token, found.job_id)
