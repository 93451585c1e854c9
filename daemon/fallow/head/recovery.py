"""Recovery from unexpected errors: the head reloads the run from its records or, as the last resort, stops it."""

from collections.abc import Awaitable, Callable

from fallow.clock import steady
from fallow.core.membership import events as ev
from fallow.core.membership.messages import Unreadable
from fallow.head.loop.durable import Durable
from fallow.head.loop.faults import Faults
from fallow.head.loop.turn import Turn
from fallow.head.slurm.jobs import withdraw_queued
from fallow.head.state.registry import Registry, Run
from fallow.model import AllocationState, Exit, FallowError, RunStatus


class Recovery:
    """Repairs runs after errors, in turns of its own.

    Args:
        registry: all runs.
        durable: store of their records.
        faults: counts errors.
        persist: makes a turn durable.
        carry_out: carries out the effects of a durable turn.
    """

    def __init__(
        self,
        registry: Registry,
        durable: Durable,
        faults: Faults,
        persist: Callable[[Turn], Awaitable[None]],
        carry_out: Callable[[Turn], Awaitable[None]],
    ) -> None:
        self._registry, self._durable, self._faults = registry, durable, faults
        self._persist, self._carry_out = persist, carry_out

    async def settle(self, turn: Turn, *, ticked: bool) -> None:
        """Count a turn's errors, and reload the runs whose part of the turn was discarded.

        Args:
            turn: a turn whose parts without errors are durable.
            ticked: True if the turn was a tick. A run whose ticks fail several times in a row is stopped.
        """
        for unborn in [run for run in self._registry.runs.values() if run.revision == 0]:
            # A run without a revision is not durable: its creation has failed.
            self._registry.drop(unborn)
        reasons: dict[str, str] = {}
        for failure in turn.failures:
            words = self._faults.note(failure.source, failure.error, failure.run)
            if failure.run is not None:
                reasons[failure.run] = words
        for run_id, words in reasons.items():
            if run_id in self._registry.runs:
                await self._reload(self._registry.runs[run_id], words)
        for run in list(self._registry.current.values()) if ticked else ():
            if self._faults.note_tick(run.id, failed=run.id in reasons):
                await self.end(run, f"the head failed repeatedly on this run ({reasons[run.id]}); see the head's log")

    async def _reload(self, run: Run, why: str) -> None:
        try:
            new = await self._durable.reload(self._registry, run, steady())
        except Exception as error:
            if isinstance(error, FallowError) and not isinstance(error, Unreadable):
                raise  # the store is away
            words = self._faults.note("store", error, run.id)
            await self.end(run, f"the run could not be reloaded from its records ({words})")
            return
        turn = Turn.begin(self._registry)
        turn.record(new, "fault", f"internal error of the head, {why}: the run goes on from its records in the store")
        turn.for_each([new], "withdraw", lambda run: withdraw_queued(turn, run, "the head has reloaded the run"))
        await self._persist(turn)
        await self._carry_out(turn)

    async def end(self, run: Run, why: str) -> None:
        """Stop a run that the head cannot serve."""
        for how in () if run.ended else (_cancel, _end_by_force):
            turn = Turn.begin(self._registry)
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
        # The run stays as its records in the store say.
        self._registry.current.pop(run.id, None)


def _cancel(turn: Turn, run: Run, why: str) -> None:
    turn.apply(run, ev.Cancel(at=turn.at, reason=why, status=RunStatus.FAILED))


def _end_by_force(turn: Turn, run: Run, why: str) -> None:
    """End a run without its membership's state machine, as the last resort if the machine itself fails."""
    root = run.root
    root.status, root.message, root.change, run.record.ended_at = RunStatus.FAILED, why, None, turn.now
    run.roster.mark("root")
    for allocation in run.live_allocations():
        # The answers to its agents' next beats tell them to end.
        allocation.state, allocation.asked_at = AllocationState.RELEASING, turn.now
        allocation.end_code, allocation.reason = int(Exit.NO_RESTART), why
    turn.record(run, RunStatus.FAILED.value, f"run {run.id} is failed: {why}")
    turn.cancels += [(run.id, a.token, a.job_id) for a in run.live_allocations() if a.job_id is not None]
