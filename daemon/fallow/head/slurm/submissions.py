"""What is handed to sbatch for an allocation, and what its answer means."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import structlog

from fallow.config import Config
from fallow.control.protocol import BaseJob
from fallow.core.allocations import Allocation, sent
from fallow.core.submission.sbatch import base_options, harvest_options, job_environment
from fallow.core.submission.script import harvest_script, without_directives
from fallow.files import Paths, read_struct
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
from fallow.model import AllocationKind, AllocationState, FallowError, JobRequest

log = structlog.get_logger("fallow.head")

REFUSALS = 3
"""Submissions that Slurm refuses in a row, with the pauses of `core.accounting.backoff` between them, before a run's
harvesting pauses (HyperQueue pauses after 10)."""


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
            nice=0 if allocation.hurried else nice,
            # Those are jobs of normal priority, in the user's own name.
            qos="" if allocation.hurried else run.asker.qos,
            account="" if allocation.hurried else run.asker.account,
            barred=[*run.shunned, *filter(None, [allocation.exclude])],
            part=allocation.part,
            hurried=allocation.hurried,
        )
        script = harvest_script(spec.script)
    else:
        options = base_options(spec.sbatch_options, token=allocation.token, exported=exported, barred=run.shunned)
        script = without_directives(spec.script)
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
        if allocation.queued:
            turn.record(run, "withdraw", f"{allocation.token}: {why}")
            turn.cancel(run, allocation, why)


def submitted(turn: Turn, run: Run, token: str, job_id: str) -> None:
    allocation = run.allocations[token]
    allocation.job_id = job_id
    sent(allocation, turn.now)
    if allocation.state is AllocationState.UNKNOWN:
        allocation.state = AllocationState.PENDING
    run.record.refusals.pop(place(allocation), None)
    # Of a base job the options say it, which are sbatch's to read; the next poll shows it.
    where = f" in {allocation.partition}" if allocation.partition else ""
    limit = "" if allocation.minutes is None else f" for {allocation.minutes} min"
    turn.record(run, "submit", f"{token}: job {job_id}{where}{limit}")


def left_word(turn: Turn, run: Run, allocation: Allocation) -> None:
    """Take in the number of a base job that `fallow submit` could not tell a head, which was away."""
    if allocation.kind is not AllocationKind.BASE or allocation.renewed or allocation.job_id is not None:
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


def place(allocation: Allocation) -> str:
    """Under which its refusals are counted."""
    return allocation.partition if allocation.kind is AllocationKind.HARVEST else ""


def everywhere(refusals: Mapping[str, int], usable: Collection[str]) -> bool:
    """Is there nowhere else to go?"""
    harvest = {partition: number for partition, number in refusals.items() if partition}
    nowhere = sum(harvest.values()) >= REFUSALS and harvest.keys() >= set(usable)
    return nowhere or refusals.get("", 0) >= REFUSALS
