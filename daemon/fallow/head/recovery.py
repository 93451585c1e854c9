"""What errors that nobody expected cost: their run is made anew from its records, or, as the last resort, stopped."""

from collections.abc import Awaitable, Callable

from fallow.clock import steady
from fallow.core.membership import events as ev
from fallow.core.membership.messages import Unreadable
from fallow.head.loop.durable import Durable
from fallow.head.loop.faults import Faults
from fallow.head.loop.turn import Turn
from fallow.head.slurm.jobs import withdraw_queued
from fallow.head.state.book import Book, Run
from fallow.model import AllocationState, Exit, FallowError, RunStatus


class Recovery:
    """Puts runs right after errors, in turns of its own.

    Args:
        book: all runs.
        durable: where their records are.
        faults: counts errors.
        persist: makes a turn durable.
        carry_out: does what a durable turn asks for.
    """

    def __init__(
        self,
        book: Book,
        durable: Durable,
        faults: Faults,
        persist: Callable[[Turn], Awaitable[None]],
        carry_out: Callable[[Turn], Awaitable[None]],
    ) -> None:
        self._book, self._durable, self._faults = book, durable, faults
        self._persist, self._carry_out = persist, carry_out

    async def settle(self, turn: Turn, *, ticked: bool) -> None:
        """Count what went wrong in a turn, and make the runs anew that it cost their part.

        Args:
            turn: that is durable by now, as far as it did not fail.
            ticked: it was a tick. A run whose ticks fail again and again is stopped.
        """
        for unborn in [run for run in self._book.runs.values() if run.revision == 0]:
            # What is durable has a revision: this one's creation has failed.
            self._book.drop(unborn)
        reasons: dict[str, str] = {}
        for failure in turn.failures:
            words = self._faults.note(failure.source, failure.error, failure.run)
            if failure.run is not None:
                reasons[failure.run] = words
        for run_id, words in reasons.items():
            if run_id in self._book.runs:
                await self._make_anew(self._book.runs[run_id], words)
        for run in list(self._book.current.values()) if ticked else ():
            if self._faults.ticked(run.id, failed=run.id in reasons):
                await self.end(run, f"the head failed at it again and again ({reasons[run.id]}); its log says more")

    async def _make_anew(self, run: Run, why: str) -> None:
        try:
            new = await self._durable.make_anew(self._book, run, steady())
        except Exception as error:
            if isinstance(error, FallowError) and not isinstance(error, Unreadable):
                raise  # the store is away
            words = self._faults.note("store", error, run.id)
            await self.end(run, f"it could not be made anew from its record ({words})")
            return
        turn = Turn.begin(self._book)
        turn.record(new, "fault", f"an error of the head's own, {why}: the run goes on from what was written down")
        turn.for_each([new], "withdraw", lambda run: withdraw_queued(turn, run, "the head has begun anew with the run"))
        await self._persist(turn)
        await self._carry_out(turn)

    async def end(self, run: Run, why: str) -> None:
        """Stop a run that the head cannot look after."""
        for how in () if run.ended else (_cancel, _end_by_force):
            turn = Turn.begin(self._book)
            try:
                how(turn, run, why)
            except Exception as error:
                turn.fail("end", error, run.id)
            await self._persist(turn)
            if not turn.failures:
                await self._carry_out(turn)
                return
            for failure in turn.failures:
                self._faults.note(failure.source, failure.error, failure.run)
        # It stays as it was written down last.
        self._book.current.pop(run.id, None)


def _cancel(turn: Turn, run: Run, why: str) -> None:
    turn.apply(run, ev.Cancel(at=turn.at, reason=why, status=RunStatus.FAILED))


def _end_by_force(turn: Turn, run: Run, why: str) -> None:
    """The last resort, where the membership machine itself fails: the run is over, whatever its roster says."""
    root = run.root
    root.status, root.message, root.change, run.record.ended_at = RunStatus.FAILED, why, None, turn.now
    run.roster.mark("root")
    for allocation in run.live_allocations():
        # Its agents are told so at their next beats.
        allocation.state, allocation.asked_at = AllocationState.RELEASING, turn.now
        allocation.end_code, allocation.reason = int(Exit.NO_RESTART), why
    turn.record(run, RunStatus.FAILED.value, f"run {run.id} is failed: {why}")
    turn.cancels += [(run.id, a.token, a.job_id) for a in run.live_allocations() if a.job_id is not None]
