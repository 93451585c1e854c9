"""All that the head says to Slurm: one poll at a time, one sbatch at a time, and what it cancels; and the stop file.

While a file of the administrators exists (`[site] stop_file`), nothing is harvested.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from fallow.core.allocations import Allocation, PolledJobs
from fallow.head.loop.faults import Faults
from fallow.head.loop.inbox import Inbox, Work
from fallow.head.loop.turn import Turn
from fallow.head.slurm import jobs
from fallow.head.slurm.harvest import Harvest
from fallow.head.state.book import Book, Run
from fallow.model import ClusterConfig, ClusterState, Exit, FallowError, OwnerView
from fallow.slurm.client import SubmitRejected, SubmitUnknown
from fallow.slurm.paced import PacedClient

log = structlog.get_logger("fallow.head")

OWNER_EVERY_S = 600.0
OWNER_PATIENCE_S = 5.0

LOOK_S = 5.0
"""From one look for the stop file to the next."""

TEST_EVERY_S = 10.0
"""A trial of a submission takes slurmctld's locks, so there is at most one in so long a time."""


class SlurmCalls:
    """Asks beside the loop, whose inbox the answers go to; they are taken in with the turn that they get.

    Args:
        slurm: the client, or None under `fallow local`.
        book: the runs for which Slurm is asked.
        harvest: who says what is submitted and looks at what the polls show.
        inbox: of the head's loop.
        faults: counts errors that nobody expected.
    """

    def __init__(
        self, slurm: PacedClient | None, book: Book, harvest: Harvest, inbox: Inbox, faults: Faults | None = None
    ) -> None:
        self.config: ClusterConfig | None = None
        self.error: str | None = None
        "why Slurm does not answer"
        self.polled_at: float | None = None
        "when the last good poll was taken in, on the head's clock"
        self.polls = 0
        self.backend = ""
        "what answers, and why that"
        self.interval_s = harvest.interval_s
        "from one poll to the next"
        self._sooner = asyncio.Event()
        "the next poll may be due sooner than it was"
        self._answers = asyncio.Event()
        "the last poll was answered, and every submission since; else nothing more is submitted"
        self._answers.set()
        self._slurm = slurm
        self._book = book
        self._harvest = harvest
        self._inbox = inbox
        self._faults = faults or Faults()
        self._tested_at = -TEST_EVERY_S
        self._is_stopped = False
        self._submissions: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._owner: OwnerView | None = None
        self._owner_at = 0.0
        self._owner_task: asyncio.Task[None] | None = None

    def sources(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """What runs beside the head's loop, until it is cancelled."""
        slurm, sources = self._slurm, dict[str, Callable[[], Awaitable[None]]]()
        if slurm is not None:
            sources |= {"polls": lambda: self._poll(slurm), "submissions": lambda: self._submit(slurm)}
        if self._book.config.site.stop_file is not None:
            sources["stop file"] = self._watch_stop_file
        return sources

    async def look_for_stop_file(self) -> None:
        """Tell the loop of a change since the last look."""
        path, before = self._book.config.site.stop_file, self._is_stopped
        if path is not None:
            self._is_stopped = await asyncio.to_thread(exists, path, before)
            why = f"the site's administrators have stopped it: {path} exists" if self._is_stopped else ""
            if self._is_stopped != before:
                self._inbox.put_nowait(Work("stop file", partial(self._harvest.switch, why=why)))

    async def _watch_stop_file(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look_for_stop_file()

    async def _poll(self, slurm: PacedClient) -> None:
        """One batch per interval, whatever the number of runs; slower while slurmctld is slow or does not answer."""
        failures = 0
        while True:
            began = _now()
            cluster: ClusterState | FallowError
            try:
                self.config = await slurm.config()
                if self.config.accounting:
                    self._owner_asked(slurm)
                self.polls += 1
                cluster = await slurm.poll()
                failures = 0
            except FallowError as error:
                cluster = error
                failures += 1
            except Exception as error:
                words = self._faults.note("Slurm poll", error)
                cluster = FallowError(f"its answer was not understood ({words})", Exit.SOFTWARE)
                failures += 1
            if slurm.backend != self.backend:
                self.backend = slurm.backend
                log.info("slurm.client", backend=self.backend)
            # What it showed decides when the next one is due: polls that are to come soon are counted there.
            with contextlib.suppress(FallowError):  # an error of the head's own at it, which is counted
                await self._inbox.ask("poll", partial(self.polled, cluster=cluster))
            await self._wait(slurm, began, failures)

    async def _wait(self, slurm: PacedClient, began: float, failures: int) -> None:
        """Until the next poll is due. What is submitted or taken in between may make that sooner."""
        while True:
            self.interval_s = self._harvest.neighbours.next_poll_s(self._book, slurm.least_interval_s, failures)
            left = began + self.interval_s - _now()
            if left <= 0:
                return
            self._sooner.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._sooner.wait()

    def carry_out(self, turn: Turn) -> None:
        """Submit and cancel what a turn asks for, beside the loop, and poll soon. The turn is durable."""
        if turn.poll_soon:
            self._harvest.neighbours.poll_soon(turn.now)
            self._sooner.set()
        for run_id, token in turn.submissions:
            self.submit(run_id, token)
        if jobs := [job_id for run, token, job_id in turn.cancels if not self._is_anothers(run, token, job_id)]:
            self.cancel(jobs)

    def _is_anothers(self, run: str, token: str, job_id: str) -> bool:
        """Return True if the last poll shows another job under this number: scancel would end that one."""
        allocation = self._book.runs[run].allocations.get(token) if run in self._book.runs else None
        cluster = self._harvest.cluster
        if allocation is None or cluster is None:
            return False
        shown = [job for job in cluster.jobs if job_id in (job.job_id, job.het_job_id)]
        is_anothers = bool(shown) and not PolledJobs(shown).jobs_of(allocation)
        if is_anothers:
            log.warning("cancel.skipped", job=job_id, token=token, shown=shown[0].name)
        return is_anothers

    def polled(self, turn: Turn, cluster: ClusterState | FallowError) -> None:
        """Take in a poll, or why there is none."""
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
        # Without an association of the user in it, the answer says nothing of limits.
        self._harvest.owner = self._owner if self._owner is not None and self._owner.shares else None
        self._harvest.polled(turn, cluster, self.config)
        self._sooner.set()

    def submit(self, run: str, token: str) -> None:
        """Submit an allocation as soon as those before it are, if it is still wanted then."""
        self._submissions.put_nowait((run, token))

    async def _submit(self, slurm: PacedClient) -> None:
        while True:
            await slurm.may_submit()
            run_id, token = await self._next_due()
            run = self._book.runs[run_id]
            outcome: str | SubmitRejected | SubmitUnknown
            try:
                request = self._harvest.request(self._book.paths, run, run.allocations[token])
                outcome = await slurm.submit(request)
            except (SubmitRejected, SubmitUnknown) as failure:
                outcome = failure
            except FallowError as error:
                outcome = SubmitRejected(token, error.message)
            except Exception as error:
                # Nobody knows how far it came: the next polls show whether there is such a job.
                outcome = SubmitUnknown(token, self._faults.note("Slurm submit", error, run_id))
            if isinstance(outcome, SubmitUnknown):
                # A slurmctld that hangs still carries out all that it was sent, when it wakes up.
                self._answers.clear()
            answered = partial(self.submitted, run_id=run_id, token=token, outcome=outcome)
            self._inbox.put_nowait(Work("submitted", answered, run_id))

    async def _next_due(self) -> tuple[str, str]:
        """The oldest that is still wanted, once Slurm answers. That it may exist from now on is durable when this
        returns."""
        while True:
            run_id, token = await self._submissions.get()
            await self._answers.wait()
            with contextlib.suppress(FallowError):  # an error of the head's own at it, which is counted
                if await self._inbox.ask("due", partial(self._send, run_id=run_id, token=token), run_id):
                    return run_id, token

    def _send(self, turn: Turn, run_id: str, token: str) -> bool:
        return self._harvest.send(turn, turn.book.runs[run_id], token)

    async def test(self, run: Run) -> str:
        """Why harvest jobs of this run would be refused; empty: nothing is known against them."""
        now = _now()
        if self._slurm is None or run.ended or now - self._tested_at < TEST_EVERY_S:
            return ""
        example = self._harvest.example(run)
        if not isinstance(example, Allocation):
            return example
        self._tested_at = now
        try:
            request = self._harvest.request(self._book.paths, run, example)
            await self._slurm.test_only(request)
        except SubmitRejected as refusal:
            partition, reason = example.partition, refusal.reason
            tested = partial(self._harvest.tested, run_id=run.id, partition=partition, reason=reason)
            self._inbox.put_nowait(Work("trial", tested, run.id))
            return f"{partition}: {reason}"
        except FallowError as error:
            log.warning("test.failed", run=run.id, error=error.message)
        return ""

    def submitted(self, turn: Turn, run_id: str, token: str, outcome: str | SubmitRejected | SubmitUnknown) -> None:
        """Take in what came of a submission: a job id, or why there is none."""
        run = turn.book.runs[run_id]
        self._sooner.set()
        match outcome:
            case str(job_id):
                self._harvest.submitted(turn, run, token, job_id)
                if run.allocations[token].asked_at is not None:
                    turn.cancels.append((run.id, token, job_id))
            case SubmitRejected(reason=reason):
                self._harvest.refused(turn, run, token, reason)
            case SubmitUnknown(reason=reason):
                self._harvest.unknown(turn, run, token, reason)

    async def owner(self) -> OwnerView | None:
        """What Slurm's accounting said last about the head's owner; asked at most once in a while, and not waited for
        for long: the next question finds the answer."""
        if self._slurm is None:
            return None
        await asyncio.wait([self._owner_asked(self._slurm)], timeout=OWNER_PATIENCE_S)
        return self._owner

    def _owner_asked(self, slurm: PacedClient) -> asyncio.Task[None]:
        """The question that is under way, or the last one where its answer is not old yet."""
        asked = self._owner_task
        if asked is None or (asked.done() and _now() - self._owner_at > OWNER_EVERY_S):
            self._owner_at = _now()
            asked = self._owner_task = self._faults.beside("Slurm owner", self._ask_owner(slurm))
        return asked

    async def _ask_owner(self, slurm: PacedClient) -> None:
        try:
            self._owner = await slurm.owner()
        except FallowError as error:
            log.warning("owner.failed", error=error.message)
            if self._owner is None:
                self._owner = OwnerView(user="", at=time.time(), notes=[f"Slurm did not say: {error.message}"])

    def cancel(self, jobs: list[str]) -> None:
        """Cancel jobs, beside the loop."""
        if self._slurm is not None:
            self._faults.beside("Slurm cancel", self._cancel(self._slurm, jobs))

    @staticmethod
    async def _cancel(slurm: PacedClient, jobs: list[str]) -> None:
        try:
            await slurm.cancel(jobs)
        except FallowError as error:
            # The next poll shows what is still there, and it is cancelled again.
            log.warning("cancel.failed", jobs=jobs, error=error.message)


def exists(path: str, before: bool) -> bool:
    """Is the file there? While nobody can tell, what was so `before` holds."""
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
