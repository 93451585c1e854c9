"""The head's calls to Slurm: one poll at a time, one sbatch at a time, and scancel. Also the stop file.

While the administrators' stop file exists (`[site] stop_file`), the head harvests nothing.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from fallow.core.allocations import Allocation, PolledJobs
from fallow.files import write_struct
from fallow.head.loop.faults import Faults
from fallow.head.loop.inbox import Inbox, Work
from fallow.head.loop.turn import Turn
from fallow.head.slurm import jobs
from fallow.head.slurm.harvest import Harvest
from fallow.head.state.registry import Registry, Run
from fallow.model import ClusterConfig, ClusterState, Exit, FallowError, OwnerView
from fallow.slurm.client import SubmitRejected, SubmitUnknown
from fallow.slurm.paced import PacedClient
from fallow.threads import FILES_S, FileCalls

log = structlog.get_logger("fallow.head")

OWNER_EVERY_S = 600.0
OWNER_PATIENCE_S = 5.0

LOOK_S = 5.0
"""Interval between checks for the stop file."""

TEST_EVERY_S = 10.0
"""Shortest interval between two test submissions, which take slurmctld's locks."""


KEYS_RETRY_S = 60.0
"""Time without requests of a run whose key file could not be written."""


class SlurmCalls:
    """Calls Slurm in tasks beside the head's loop. The answers go to the loop's inbox and are handled in a turn.

    Args:
        slurm: the client, or None under `fallow local`.
        registry: all runs.
        harvest: makes requests for sbatch and takes in polls.
        inbox: queue of the head's loop.
        files: makes calls that use shared files.
        faults: counts unexpected errors.
    """

    def __init__(
        self,
        slurm: PacedClient | None,
        registry: Registry,
        harvest: Harvest,
        inbox: Inbox,
        files: FileCalls,
        faults: Faults | None = None,
    ) -> None:
        self.config: ClusterConfig | None = None
        self.error: str | None = None
        "reason why Slurm does not answer; None: it answers"
        self.polled_at: float | None = None
        "time of the last good poll, on the head's clock"
        self.polls = 0
        self.backend = ""
        "name of the client in use, and the reason for it"
        self.interval_s = harvest.interval_s
        "interval between polls"
        self._reschedule = asyncio.Event()
        "set when the next poll may be due sooner than before"
        self._answers = asyncio.Event()
        "set while Slurm has answered the last poll and every submission since; otherwise nothing is submitted"
        self._answers.set()
        self._slurm = slurm
        self._registry = registry
        self._harvest = harvest
        self._inbox = inbox
        self._files = files
        self._faults = faults or Faults()
        self._tested_at = -TEST_EVERY_S
        self._is_stopped = False
        self._submissions: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._owner: OwnerView | None = None
        self._owner_at = 0.0
        self._owner_task: asyncio.Task[None] | None = None

    def sources(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Tasks to run beside the head's loop, by name."""
        slurm, sources = self._slurm, dict[str, Callable[[], Awaitable[None]]]()
        if slurm is not None:
            sources |= {"polls": lambda: self._poll(slurm), "submissions": lambda: self._submit(slurm)}
        if self._registry.config.site.stop_file is not None:
            sources["stop file"] = self._watch_stop_file
        return sources

    async def look_for_stop_file(self) -> None:
        """Check for the stop file, and tell the loop about a change."""
        path, was_stopped = self._registry.config.site.stop_file, self._is_stopped
        if path is not None:
            with contextlib.suppress(FallowError):  # nobody can tell now
                self._is_stopped = await self._files.call(path, partial(exists, path, was_stopped), FILES_S)
            reason = f"the site's administrators have stopped it: {path} exists" if self._is_stopped else ""
            if self._is_stopped != was_stopped:
                self._inbox.put_nowait(Work("stop file", partial(self._harvest.set_stop_reason, why=reason)))

    async def _watch_stop_file(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look_for_stop_file()

    async def _poll(self, slurm: PacedClient) -> None:
        """Poll once per interval for all runs, and less often while slurmctld is slow or does not answer."""
        failures = 0
        while True:
            began = _now()
            cluster: ClusterState | FallowError
            try:
                self.config = await slurm.config()
                if self.config.accounting:
                    self._query_owner(slurm)
                self.polls += 1
                cluster = await slurm.poll()
                failures = 0
            except FallowError as error:
                cluster = error
                failures += 1
            except Exception as error:
                words = self._faults.note("Slurm poll", error)
                cluster = FallowError(f"its answer cannot be read ({words})", Exit.SOFTWARE)
                failures += 1
            if slurm.backend != self.backend:
                self.backend = slurm.backend
                log.info("slurm.client", backend=self.backend)
            # Wait for the turn: its result decides when the next poll is due.
            with contextlib.suppress(FallowError):  # an internal error, which is counted elsewhere
                await self._inbox.ask("poll", partial(self.polled, cluster=cluster))
            await self._wait(slurm, began, failures)

    async def _wait(self, slurm: PacedClient, began: float, failures: int) -> None:
        """Wait until the next poll is due. Submissions and polls in between may make it due sooner."""
        while True:
            self.interval_s = self._harvest.neighbours.next_poll_s(self._registry, slurm.least_interval_s, failures)
            remaining_s = began + self.interval_s - _now()
            if remaining_s <= 0:
                return
            self._reschedule.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining_s):
                    await self._reschedule.wait()

    def carry_out(self, turn: Turn) -> None:
        """Start the submissions, cancellations and polls that a durable turn asks for."""
        if turn.poll_soon:
            self._harvest.neighbours.poll_soon(turn.now)
            self._reschedule.set()
        for run_id, token in turn.submissions:
            self.submit(run_id, token)
        if jobs := [job_id for run, token, job_id in turn.cancels if not self._is_other_job(run, token, job_id)]:
            self.cancel(jobs)

    def _is_other_job(self, run: str, token: str, job_id: str) -> bool:
        """Return True if the last poll shows another job under this id, which scancel would end."""
        allocation = self._registry.runs[run].allocations.get(token) if run in self._registry.runs else None
        cluster = self._harvest.cluster
        if allocation is None or cluster is None:
            return False
        matches = [job for job in cluster.jobs if job_id in (job.job_id, job.het_job_id)]
        is_anothers = bool(matches) and not PolledJobs(matches).jobs_of(allocation)
        if is_anothers:
            log.warning("cancel.skipped", job=job_id, token=token, shown=matches[0].name)
        return is_anothers

    def polled(self, turn: Turn, cluster: ClusterState | FallowError) -> None:
        if isinstance(cluster, FallowError):
            if self.error is None:
                turn.record(None, "slurm", f"Slurm does not answer: {cluster.message}")
            self.error = cluster.message
            self._answers.clear()
            return
        if self.error is not None:
            turn.record(None, "slurm", "Slurm answers again")
        self.error, self.polled_at = None, turn.at
        if not self._answers.is_set():
            jobs.give_up_queued(turn, "Slurm did not answer before it was submitted")
            self._answers.set()
        # Without an association of the user, the answer holds no limits.
        self._harvest.owner = self._owner if self._owner is not None and self._owner.shares else None
        self._harvest.polled(turn, cluster, self.config)
        self._reschedule.set()

    def submit(self, run: str, token: str) -> None:
        """Queue an allocation for submission. It is dropped if it is no longer wanted when its turn comes."""
        self._submissions.put_nowait((run, token))

    async def _submit(self, slurm: PacedClient) -> None:
        while True:
            await slurm.may_submit()
            run_id, token = await self._next_due()
            run = self._registry.runs[run_id]
            outcome: str | SubmitRejected | SubmitUnknown
            try:
                request = self._harvest.request(self._registry.paths, run, run.allocations[token])
                outcome = await slurm.submit(request)
            except (SubmitRejected, SubmitUnknown) as failure:
                outcome = failure
            except FallowError as error:
                outcome = SubmitRejected(token, error.message)
            except Exception as error:
                # The job may have been submitted; the next polls show it.
                outcome = SubmitUnknown(token, self._faults.note("Slurm submit", error, run_id))
            if isinstance(outcome, SubmitUnknown):
                # A slurmctld that hangs may still carry out the submission later.
                self._answers.clear()
            act = partial(self.submitted, run_id=run_id, token=token, outcome=outcome)
            self._inbox.put_nowait(Work("submitted", act, run_id))

    async def _next_due(self) -> tuple[str, str]:
        """Return the oldest submission that is still wanted, once Slurm answers.

        When this returns, it is durable that the job may exist.
        """
        while True:
            run_id, token = await self._submissions.get()
            await self._answers.wait()
            act, paths = self._send, self._registry.paths
            if (keys := self._registry.unwritten_keys.pop(token, None)) is not None:
                try:
                    write = partial(write_struct, paths.run(run_id).key(token), keys)
                    await self._files.call(str(paths.runs), write, FILES_S)
                except FallowError as error:
                    act = partial(self._withdraw, why=error.message)
            with contextlib.suppress(FallowError):  # an internal error, which is counted elsewhere
                if await self._inbox.ask("due", partial(act, run_id=run_id, token=token), run_id):
                    return run_id, token

    def _send(self, turn: Turn, run_id: str, token: str) -> bool:
        return self._harvest.send(turn, turn.registry.runs[run_id], token)

    def _withdraw(self, turn: Turn, run_id: str, token: str, why: str) -> bool:
        """Give up what the run has queued: the key file of `token` could not be written. Plans request it again."""
        run = turn.registry.runs[run_id]
        run.keys_retry_at = turn.now + KEYS_RETRY_S
        jobs.withdraw_queued(turn, run, why)
        return False

    async def test(self, run: Run) -> str:
        """Reason why Slurm would refuse harvest jobs of this run; empty: none is known."""
        now = _now()
        if self._slurm is None or run.ended or now - self._tested_at < TEST_EVERY_S:
            return ""
        example = self._harvest.example(run)
        if not isinstance(example, Allocation):
            return example
        self._tested_at = now
        try:
            request = self._harvest.request(self._registry.paths, run, example)
            await self._slurm.test_only(request)
        except SubmitRejected as refusal:
            partition, reason = example.partition, refusal.reason
            tested = partial(self._harvest.note_trial, run_id=run.id, partition=partition, reason=reason)
            self._inbox.put_nowait(Work("trial", tested, run.id))
            return f"{partition}: {reason}"
        except FallowError as error:
            log.warning("test.failed", run=run.id, error=error.message)
        return ""

    def submitted(self, turn: Turn, run_id: str, token: str, outcome: str | SubmitRejected | SubmitUnknown) -> None:
        run = turn.registry.runs[run_id]
        self._reschedule.set()
        match outcome:
            case str(job_id):
                self._harvest.note_submission(turn, run, token, job_id)
                if run.allocations[token].asked_at is not None:
                    turn.cancels.append((run.id, token, job_id))
            case SubmitRejected(reason=reason):
                self._harvest.note_refusal(turn, run, token, reason)
            case SubmitUnknown(reason=reason):
                self._harvest.note_unknown_outcome(turn, run, token, reason)

    async def owner(self) -> OwnerView | None:
        """The last answer of Slurm's accounting about the head's owner. Slurm is asked at most every `OWNER_EVERY_S`,
        and the wait is at most `OWNER_PATIENCE_S`: the next call then gets the answer."""
        if self._slurm is None:
            return None
        await asyncio.wait([self._query_owner(self._slurm)], timeout=OWNER_PATIENCE_S)
        return self._owner

    def _query_owner(self, slurm: PacedClient) -> asyncio.Task[None]:
        """The task of the present query, or of the last one if its answer is recent."""
        task = self._owner_task
        if task is None or (task.done() and _now() - self._owner_at > OWNER_EVERY_S):
            self._owner_at = _now()
            task = self._owner_task = self._faults.run_in_background("Slurm owner", self._ask_owner(slurm))
        return task

    async def _ask_owner(self, slurm: PacedClient) -> None:
        try:
            self._owner = await slurm.owner()
        except FallowError as error:
            log.warning("owner.failed", error=error.message)
            if self._owner is None:
                self._owner = OwnerView(user="", at=time.time(), notes=[f"Slurm did not say: {error.message}"])

    def cancel(self, jobs: list[str]) -> None:
        if self._slurm is not None:
            self._faults.run_in_background("Slurm cancel", self._cancel(self._slurm, jobs))

    @staticmethod
    async def _cancel(slurm: PacedClient, jobs: list[str]) -> None:
        try:
            await slurm.cancel(jobs)
        except FallowError as error:
            # The next poll shows the jobs that remain, and they are cancelled again.
            log.warning("cancel.failed", jobs=jobs, error=error.message)


def exists(path: str, before: bool) -> bool:
    """True if the file exists; `before` if that cannot be told now."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return before
    return True


def _now() -> float:
    """Seconds, on the clock by which the loop waits."""
    return asyncio.get_running_loop().time()
