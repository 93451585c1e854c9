"""Jobs of allocations: requests for sbatch, and the state of jobs in polls.

A poll shows that an allocation's job has started, is preempted, has ended, was cancelled by somebody, is missing, or is
an orphan.
"""

from collections.abc import Collection, Sequence
from functools import partial
from math import inf

import structlog

from fallow.config import Config
from fallow.control.protocol import BaseJob
from fallow.core.accounting import cancelled, launch_failures
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
from fallow.core.submission.sbatch import base_options, harvest_options, job_environment, script_options
from fallow.core.submission.script import harvest_script, with_directives
from fallow.files import Paths, read_struct
from fallow.head.loop.turn import Turn
from fallow.head.peers.agents import note_agent_end
from fallow.head.state.registry import Run
from fallow.model import AllocationKind, AllocationState, ClusterState, FallowError, JobInfo, JobRequest, RunStatus
from fallow.threads import in_thread

log = structlog.get_logger("fallow.head")

SCRIPT_END_STATES = frozenset(("COMPLETED", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"))
"""Final states of a job that the script itself causes."""

REMEMBERED_S = 120.0
"""Time for which Slurm certainly shows an ended job (MinJobAge is 300 s by default)."""

SILENT_S = 60.0
"""Time after which a job counts as ended if polls do not show it and its agents are silent; at least a lease."""


def take_in(turn: Turn, cluster: ClusterState, backoff: Backoff) -> None:
    """Update every allocation from a poll, including those that are over for us and not yet for Slurm.

    Args:
        turn: takes the effects.
        cluster: the poll.
        backoff: notes requests that somebody cancelled.
    """
    jobs = PolledJobs(cluster.jobs)
    gpus = {node.node: node.gpus for node in cluster.nodes}
    closed_nodes = {node.node for node in cluster.nodes if not CLOSED.isdisjoint(node.flags)}

    def observe_run(run: Run) -> None:
        _adopt_requeued(turn, run, jobs)
        for allocation in list(run.allocations.values()):
            if allocation.is_live:
                if not _is_reading_job_id(turn, run, allocation) or jobs.jobs_of(allocation):
                    _update_allocation(turn, run, allocation, jobs.jobs_of(allocation), cluster.at)
            elif allocation.is_settled:
                _end_processes(turn, run, allocation)
        for allocation in list(run.allocations.values()):
            own_jobs = jobs.jobs_of(allocation)
            if follow(allocation, own_jobs, cluster.at, gpus):
                turn.dirty.add(run.id)
                if allocation.is_settled:
                    turn.registry.close(run, allocation)
                    if cancelled.by_others(allocation, own_jobs, closed_nodes):
                        _handle_cancellation(turn, run, allocation, backoff)

    turn.for_each(turn.registry.on_slurm, "jobs of a poll", observe_run)


def _adopt_requeued(turn: Turn, run: Run, jobs: PolledJobs) -> None:
    """Revive the allocation of a base job that Slurm has requeued. `sweep` cancels the job of an ended run."""
    bases = [a for a in run.bases if not a.is_settled]
    for allocation in bases:
        has_other_base = any(a.is_live for a in bases if a is not allocation)
        if run.ended or has_other_base or not was_requeued(allocation, jobs.jobs_of(allocation)):
            continue
        for host in list(allocation.hosts):
            note_agent_end(turn, run, allocation, host, "Slurm has requeued its job", by_slurm=True)
        begin_again(allocation, turn.now)
        turn.record(run, "job", f"{allocation.token} (job {allocation.job_id}): Slurm has requeued it")


def _update_allocation(turn: Turn, run: Run, allocation: Allocation, jobs: Sequence[JobInfo], at: float) -> None:
    """Update one allocation. Args: jobs: its jobs in the poll; at: Unix time of the poll."""
    unseen, was_shown = allocation.job_id is None, allocation.unseen_at is None
    change = observe(allocation, jobs, at, horizon_s(turn.registry.config.slurm.poll_interval_s))
    if allocation.unseen_at is None:
        run.shown_at[allocation.token] = at
    _give_up_forgotten(turn, run, allocation, at)
    if was_shown is not (allocation.unseen_at is None):
        turn.dirty.add(run.id)
    if change is not None:
        job = f" (job {allocation.job_id})" if allocation.job_id else ""
        turn.record(run, "job", f"{allocation.token}{job}: {change}")
    grace_end = preemption_end(jobs)
    if grace_end is not None and allocation.state is AllocationState.RUNNING:
        allocation.end_at = grace_end
        turn.release_allocation(run, allocation, "preempted")
    if not allocation.is_live:
        _handle_end(turn, run, allocation)
    elif (
        allocation.asked_at is not None
        and not allocation.agents
        and allocation.job_id is not None
        and (unseen or abs(at - allocation.asked_at) > CANCEL_AGAIN_S)
    ):
        turn.cancel(run, allocation, allocation.reason)
        allocation.asked_at = turn.now


def _give_up_forgotten(turn: Turn, run: Run, allocation: Allocation, at: float) -> None:
    """Give up the agents of a job that polls no longer show, if the agents have been silent for as long.

    Slurm does not forget a running job. After a crash Slurm may show an older state, but messages of its agents prove
    that a job runs. `at`: Unix time of this poll.
    """
    patience_s = max(SILENT_S, turn.registry.config.membership.lease_s)
    missing_s = 0.0 if allocation.unseen_at is None else at - allocation.unseen_at
    if allocation.submit_at is None or allocation.missing < MISSING_POLLS or missing_s <= patience_s:
        return
    heard_at = [run.agent_seen.get((allocation.token, host), turn.at) for host in allocation.hosts]
    if all(turn.at - seen_at > patience_s for seen_at in heard_at):
        for host in allocation.hosts:
            reason = f"agent on {host} is silent, and Slurm no longer has job {allocation.job_id}"
            note_agent_end(turn, run, allocation, host, reason, by_slurm=True)


def _end_was_missed(run: Run, allocation: Allocation) -> bool:
    """Return True if a job may have ended, and Slurm may have forgotten it, while this head was away."""
    shown_at = run.shown_at.get(allocation.token, -inf)
    return allocation.unseen_at is not None and allocation.unseen_at - shown_at > REMEMBERED_S


def _handle_end(turn: Turn, run: Run, allocation: Allocation) -> None:
    reason = f"job {allocation.job_id} ended ({allocation.reason or 'no longer in Slurm'})"
    by_slurm, node_failed = allocation.reason not in SCRIPT_END_STATES, allocation.reason == "NODE_FAIL"
    for host in list(allocation.hosts):
        note_agent_end(turn, run, allocation, host, reason, by_slurm=by_slurm, node_failed=node_failed)
    vanished = allocation.reason == "" and allocation.start_at is None
    is_lost = allocation.state is AllocationState.LOST
    if allocation.kind is AllocationKind.BASE and (is_lost or (vanished and _end_was_missed(run, allocation))):
        # Nobody is known to have cancelled the job. A run that has trained gets a new base job.
        if is_new(run) and allocation.asked_at is None:
            text = "Slurm never had its job; submit the run again"
            if allocation.job_id is not None:
                text = f"Slurm accepted job {allocation.job_id} and has forgotten it; submit the run again"
            turn.apply(run, ev.Cancel(at=turn.at, reason=text, status=RunStatus.FAILED))
    elif allocation.kind is AllocationKind.BASE and vanished and allocation.asked_at is None:
        # The job waited and disappeared without a final state, so somebody has cancelled it.
        _handle_base_cancellation(turn, run, allocation)
    elif (
        not (allocation.agents or allocation.told_to_end)
        and allocation.asked_at is None
        and allocation.reason in SCRIPT_END_STATES
    ):
        _note_launch_failure(turn, run, allocation)
    turn.registry.end_allocation(run, allocation, reason)


def _end_processes(turn: Turn, run: Run, allocation: Allocation) -> None:
    """Note that the processes of a given-up allocation have ended, because its jobs are over."""
    for host in allocation.agents:
        for node in run.roster.at_place(host, allocation.token):
            if not node.exited:
                turn.apply(run, ev.NodeEnded(at=turn.at, node=node.id, reason=f"job {allocation.job_id} has ended"))


def _note_launch_failure(turn: Turn, run: Run, allocation: Allocation) -> None:
    """Handle a job that ended before an agent came: the script failed, or its node cannot reach the head."""
    end_text = f"job {allocation.job_id} ended ({allocation.reason})"
    text = f"{end_text} before its agent reached the head; see {turn.registry.output_of(run, allocation)}"
    turn.record(run, "failed", text)
    node = allocation.nodes[0] if allocation.kind is AllocationKind.HARVEST and len(allocation.nodes) == 1 else ""
    text_on_node = f"{text} (on {node}, in {allocation.partition})" if node else text
    is_suspect = node in run.roster.failures.bars
    bar_reason = launch_failures.note_launch_failure(
        run.record.fruitless, node, text_on_node, trains=bool(run.roster.present()), suspect=is_suspect
    )
    if bar_reason and node not in run.barred:
        turn.apply(run, ev.Bar(at=turn.at, host=node, reason=bar_reason))
    if allocation.kind is AllocationKind.BASE and is_new(run):
        turn.apply(run, ev.Cancel(at=turn.at, reason=text, status=RunStatus.FAILED))


def is_new(run: Run) -> bool:
    """True if no node has ever come to the run."""
    return run.root.generation == 0 and run.root.next_id == 1


# -- cancellations by others --------------------------------------------------------------------------------------


def _handle_cancellation(turn: Turn, run: Run, allocation: Allocation, backoff: Backoff) -> None:
    """Handle a cancellation by somebody else.

    For a base job, the run ends. For a harvest job, all runs avoid its node for a while; after several, the run's
    harvesting pauses.
    """
    if allocation.kind is AllocationKind.BASE:
        _handle_base_cancellation(turn, run, allocation)
        return
    has_started = allocation.start_at is not None or bool(allocation.spans)
    node = allocation.nodes[0] if has_started and allocation.nodes else ""
    job_text = f"job {allocation.job_id}" + (f" on {node}" if node else f", a request in {allocation.partition}")
    text = f"somebody cancelled {job_text}"
    turn.record(run, "cancelled", text, job=allocation.job_id, node=node)
    if node:
        # No run requests this node for a while, and for longer each time.
        for other in turn.registry.on_slurm:
            if not other.ended and node not in other.barred:
                turn.apply(other, ev.Bar(at=turn.at, host=node, reason=text))
    else:
        backoff.strike(text, run.asker_of(allocation), allocation.partition, None, turn.now)
    is_enough = cancelled.note(run.record.cancelled, turn.now, node)
    if is_enough and not run.record.harvest_paused and not run.ended:
        turn.pause_requests(
            run,
            f"{cancelled.CANCELS} of its harvest jobs were cancelled by somebody within a day, the last: {job_text}; "
            f"if it may go on: fallow resume {run.id}",
        )
        for request in run.live_allocations():
            if request.kind is AllocationKind.HARVEST and request.start_at is None and not request.agents:
                turn.cancel(run, request, "harvest jobs of the run were cancelled by somebody")


def _handle_base_cancellation(turn: Turn, run: Run, allocation: Allocation) -> None:
    """End the run whose base job was cancelled, unless the user wants it to go on without one."""
    run.record.base_wanted = False
    turn.dirty.add(run.id)
    if run.ended:
        return
    text = f"job {allocation.job_id}, its base job, was cancelled"
    if run.spec.outlives_base:
        turn.record(run, "cancelled", f"{text}; the run outlives it", job=allocation.job_id)
    else:
        turn.apply(run, ev.Cancel(at=turn.at, reason=text))


# -- orphans ------------------------------------------------------------------------------------------------------


def sweep(turn: Turn, cluster: ClusterState, urgent_tokens: Collection[str] = ()) -> None:
    """Cancel the jobs of allocations that have ended, base jobs included (I9, I15).

    A job is ours if it carries the allocation's token and, once known, its job id (`PolledJobs`). A job that was asked
    to end gets time to end by itself, and less time if somebody waits for its nodes. Slurm ends or requeues the jobs
    that it preempts. The elected allocation runs the lines after `fallow run`.

    Args:
        turn: takes the effects.
        cluster: the poll.
        urgent_tokens: tokens of allocations for whose nodes somebody waits.
    """
    polled_jobs = PolledJobs(cluster.jobs)
    for run in turn.registry.on_slurm:
        for allocation in run.allocations.values():
            if allocation.is_live or _ends_by_itself(turn, allocation, allocation.token in urgent_tokens):
                continue
            orphans = (job for job in polled_jobs.jobs_of(allocation) if _is_orphan(job, cluster.at))
            for job_id in dict.fromkeys(job.het_job_id or job.job_id for job in orphans):
                turn.record(run, "orphan", f"job {job_id} of the ended {allocation.token} is cancelled")
                turn.cancels.append((run.id, allocation.token, job_id))
                # `cancelled.by_others` asks later whether the head has cancelled the job.
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


# -- submissions ------------------------------------------------------------------------------------------------------


def job_request(config: Config, paths: Paths, run: Run, allocation: Allocation, nice: int) -> JobRequest:
    """The request for sbatch of an allocation. `nice`: value of `--nice` for harvest jobs."""
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
            # A job of normal priority uses the account and QOS of the user's own job.
            qos="" if allocation.has_normal_priority else run.asker.qos,
            account="" if allocation.has_normal_priority else run.asker.account,
            barred=[*run.avoided_nodes, *filter(None, [allocation.exclude])],
            part=allocation.part,
            has_normal_priority=allocation.has_normal_priority,
        )
        script = harvest_script(spec.script)
    else:
        later = script_options(spec, run.avoided_nodes)
        options = base_options(
            spec.sbatch_options, token=allocation.token, exported=exported, barred=run.avoided_nodes, by_script=later
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
    """Give up all unsent submissions. The next plan requests what is useful then."""
    turn.for_each(turn.registry.current.values(), "withdraw", lambda run: withdraw_queued(turn, run, why))


def withdraw_queued(turn: Turn, run: Run, why: str) -> None:
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
    # The partition of a base job is known from the next poll.
    where = f" in {allocation.partition}" if allocation.partition else ""
    limit = "" if allocation.minutes is None else f" for {allocation.minutes} min"
    turn.record(run, "submit", f"{token}: job {job_id}{where}{limit}")


def _is_reading_job_id(turn: Turn, run: Run, allocation: Allocation) -> bool:
    """Look for the id of a base job in the file that `fallow submit` leaves when it cannot reach a head.

    A thread reads the file. Return True while no look has ended: the job may exist.
    """
    if allocation.kind is not AllocationKind.BASE or allocation.was_renewed or allocation.job_id is not None:
        return False
    look = run.left_job_id
    if look is not None and not look.done():
        return True
    file = turn.registry.paths.run(run.id).base_job(allocation.token)
    run.left_job_id = in_thread(partial(read_struct, file, BaseJob), "base-job")
    if look is None:
        return True
    try:
        submitted(turn, run, allocation.token, look.result().job_id)
    except FileNotFoundError:
        return False
    except (FallowError, OSError) as error:
        # Polls find the job by its comment, too.
        log.warning("base_job.unreadable", run=run.id, error=str(error))
    return False
