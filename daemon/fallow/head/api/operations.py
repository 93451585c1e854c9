"""What people ask of the head over the control socket."""

from typing import Any

from fallow.control.protocol import LocalAllocation, NewRun
from fallow.core.accounting.backoff import base_job, harvest_jobs
from fallow.core.accounting.cancelled import Cancels
from fallow.core.accounting.duds import DUDS, Duds
from fallow.core.allocations import SUBMIT_S, WAITING, Allocation
from fallow.core.membership import events as ev
from fallow.core.membership.names import member_name, member_number
from fallow.core.submission.sbatch_line import base_nodes
from fallow.head.api.pruning import Pruning
from fallow.head.loop.turn import Turn
from fallow.head.slurm.harvest import Harvest, give_all_back
from fallow.head.state.book import Book, Run
from fallow.model import AllocationKind, AllocationState, Exit, FallowError, MemberPhase, RunSpec
from fallow.model.bounds import Code, Count, Few, Id, Many, Name, Prose
from fallow.text import counted, quote


class Operations:
    """One public method per control method that changes something; each gets its turn of the main loop.

    Requests are checked by their signatures (`head.api.handler`).
    """

    def __init__(self, book: Book, harvest: Harvest, pruning: Pruning | None = None) -> None:
        self._book = book
        self._harvest = harvest
        self._pruning = pruning

    def handle(self, turn: Turn, method: str, params: dict[str, Any]) -> Any:
        """Carry out one request, whose parameters are checked.

        Raises:
            FallowError: it cannot be done.
        """
        operation = getattr(self._pruning if method == "prune" else self, method)
        return operation(turn, **params)

    def create_run(self, turn: Turn, spec: RunSpec) -> NewRun:
        if not 1 <= spec.min_nodes <= spec.max_nodes:
            limits = f"{spec.min_nodes}:{spec.max_nodes}"
            raise FallowError(f"nodes {limits}: MIN must be at least 1 and at most MAX", Exit.USAGE)
        run = self._book.create(spec, turn.at, turn.now)
        try:
            # Whoever asks calls sbatch itself now, and may not live to tell what came of it.
            allocation = self._book.new_allocation(
                run, AllocationKind.BASE, turn.now, nodes_wanted=base_nodes(spec), sent_by=turn.now + SUBMIT_S
            )
        except FallowError:
            self._book.drop(run)
            raise
        turn.record(run, "run", f"run {run.id}: {spec.min_nodes} to {spec.max_nodes} nodes")
        folder = self._book.paths.run(run.id)
        return NewRun(
            run=run.id, token=allocation.token, folder=str(folder.root), key_file=str(folder.key(allocation.token))
        )

    def local_allocation(self, turn: Turn, run: Name) -> LocalAllocation:
        """A node of `fallow local`. Nodes get their numbers now: the first that is asked for is n0, the next n1."""
        found = self._active(run)
        if not found.spec.local:
            raise FallowError(f"run {quote(run)}: only `fallow local` starts agents by hand", Exit.USAGE)
        unused = [a for a in found.live_allocations() if not a.reserved and not a.agents]
        allocation = (
            unused[0]
            if unused
            else self._book.new_allocation(found, AllocationKind.HARVEST, turn.now, sent_by=turn.now)
        )
        # Each allocation is one node.
        allocation.reserved = allocation.number + 1
        turn.dirty.add(found.id)
        return LocalAllocation(
            member=member_name(allocation.reserved),
            token=allocation.token,
            key_file=str(self._book.paths.run(found.id).key(allocation.token)),
        )

    def base_submitted(self, turn: Turn, run: Name, token: Id, job_id: Id) -> None:
        found = self._book.get(run)
        self._harvest.submitted(turn, found, self._allocation(found, token).token, job_id)

    def base_failed(self, turn: Turn, run: Name, token: Id, reason: Prose, unknown: bool) -> None:
        found = self._book.get(run)
        allocation = self._allocation(found, token)
        if unknown:
            self._harvest.unknown(turn, found, token, reason)
            return
        self._book.end_allocation(found, allocation, reason)
        turn.apply(found, ev.Cancel(at=turn.at, reason=f"sbatch refused the base job: {reason}"))

    def grow(self, turn: Turn, run: Name, by: Code = 1) -> int:
        """Raise the limit by so many nodes; returns the new limit. Less than 1 is refused with the run's own limits."""
        found = self._active(run)
        most = found.root.maximum
        if by < 1 or (found.root.limit + by > most and found.root.limit >= most):
            raise _refusal(found, f"its limit is {found.root.limit} of at most {counted(most, 'node')}")
        limit = min(most, found.root.limit + by)
        turn.apply(found, ev.Release(at=turn.at, limit=limit, reason="grown by hand"))
        return limit

    def shrink(self, turn: Turn, run: Name, by: Code = 1) -> int:
        """Lower the limit by so many nodes, releasing the youngest; returns the new limit."""
        found = self._active(run)
        members = len(found.roster.present(MemberPhase.MEMBER))
        limit = min(found.root.limit, members or found.root.limit) - by
        if by < 1 or limit < 1:
            raise _refusal(found, f"has {counted(members, 'member')}; to end it: fallow cancel {found.id}")
        turn.apply(found, ev.Release(at=turn.at, limit=limit, reason="shrunk by hand"))
        return limit

    def release(self, turn: Turn, run: Name, members: Few[Name]) -> None:
        """Release these members and keep the limit as low, so that they are not replaced at once."""
        found = self._active(run)
        numbers = {member_number(member): member for member in members}
        unknown = [member for n, member in numbers.items() if not found.roster.alive(n)]
        if unknown:
            words = f"has no member {', '.join(unknown)}; `fallow status {found.id}` lists them"
            raise _refusal(found, words, Exit.NOINPUT)
        seated = [n for n in numbers if n in found.roster.members]
        limit = max(0, found.root.limit - len(seated)) if seated else None
        # One event: between two of them a standby would take the released one's place.
        turn.apply(found, ev.Release(at=turn.at, nodes=tuple(numbers), reason="released by hand", limit=limit))

    def drain(self, turn: Turn, run: Name, nodes: Many[Name]) -> None:
        """Give these nodes of the run back; it does without them until it is resumed."""
        found = self._active(run)
        held = {node: [a for a in found.live_allocations() if node in a.agents or node in a.nodes] for node in nodes}
        for node, there in held.items():
            if not there:
                words = f"holds no node {node}; `fallow status {found.id}` lists them"
                raise _refusal(found, words, Exit.NOINPUT)
        for there in held.values():
            for allocation in there:
                turn.release_allocation(found, allocation, "drained by hand")
        if found.spec.local:
            return  # the schedule says who comes
        found.record.drained = sorted({*found.record.drained, *nodes})
        turn.dirty.add(found.id)
        # Requests that could still get one of these nodes are made anew without.
        requests = [a for a in found.live_allocations() if a.state in WAITING and not a.agents and a.asked_at is None]
        for request in requests:
            anywhere = request.part is None or request.part.node in nodes
            if request.kind is AllocationKind.HARVEST and anywhere:
                turn.cancel(found, request, f"{', '.join(nodes)} drained by hand")

    def pause(self, turn: Turn, run: Name) -> None:
        """Give the harvest nodes back and ask for none until it is resumed; the base job goes on."""
        found = self._active(run)
        if found.spec.local:
            raise _refusal(found, "under `fallow local` the schedule says who comes and goes")
        if found.record.paused_by_hand:
            raise _refusal(found, f"it is paused already; to go on: fallow resume {found.id}")
        found.record.paused_by_hand = True
        turn.record(found, "pause", "paused by hand: harvest nodes are given back, and none is asked for")
        give_all_back(turn, found, "the run is paused")

    def resume(self, turn: Turn, run: Name) -> None:
        """Ask for nodes again, whether a hand or Slurm's refusals had paused it, and for drained ones too."""
        found = self._active(run)
        record, backoff = found.record, self._harvest.known.backoff
        put_off = {what: backoff.put_off_until(what) for what in (base_job(found.id), harvest_jobs(found.id))}
        waits = found.failures >= DUDS or max(put_off.values()) > turn.now
        if not (record.paused or record.drained or waits):
            raise _refusal(found, "it is not paused, and none of its nodes is drained")
        record.paused_by_hand, record.harvest_paused, record.drained = False, "", []
        turn.apply(found, ev.Unbar(at=turn.at, hosts=(*record.fruitless.barred, *record.cancelled.barred)))
        record.refusals, record.fruitless, record.cancelled = {}, Duds(), Cancels()
        backoff.forget(found.asker)
        for what in put_off:
            backoff.take_up(what)
        turn.record(found, "resume", "resumed by hand: nodes are asked for again")
        # A head that is killed now must not recall a pause that the run's record does not have.
        self._harvest.note(turn)

    def cancel(self, turn: Turn, run: Name) -> None:
        found = self._book.get(run)
        if found.ended:
            raise _refusal(found, f"it is {found.root.status} already")
        found.record.base_wanted = False
        turn.apply(found, ev.Cancel(at=turn.at, reason="cancelled by hand"))

    def checkpoint(self, turn: Turn, run: Name) -> None:
        found = self._active(run)
        if not found.roster.present():
            raise _refusal(found, "has no member that could write one", Exit.TEMPFAIL)
        if found.root.contract is not None and found.root.contract.restarts:
            raise _refusal(found, "what its script saves, and when, the script alone decides")
        # The answers to the members' next beats say so.
        found.record.checkpoints_asked += 1
        turn.dirty.add(found.id)

    def rollback(self, turn: Turn, run: Name, step: Count) -> None:
        """Go back to the checkpoint of that step."""
        found = self._active(run)
        r = found.roster
        there = sorted({checkpoint.step for checkpoint in r.checkpoints.usable()})
        if step not in there:
            have = f"there are those of {', '.join(map(str, there))}" if there else "there is none at all"
            raise _refusal(found, f"no usable checkpoint of step {step}; {have}", Exit.NOINPUT)
        if r.finishing:
            raise _refusal(found, "its script has just ended; there is nothing to go back for")
        if r.present() and not r.present(MemberPhase.MEMBER):
            raise _refusal(found, "its last members are leaving; ask again in a moment", Exit.TEMPFAIL)
        turn.apply(found, ev.Rollback(at=turn.at, step=step))

    def _active(self, run: str) -> Run:
        found = self._book.get(run)
        if found.ended:
            raise _refusal(found, f"it is {found.root.status}")
        return found

    @staticmethod
    def _allocation(run: Run, token: str) -> Allocation:
        allocation = run.allocations.get(token)
        if allocation is None or allocation.state is AllocationState.LOST:
            raise _refusal(run, f"no allocation {token}", Exit.NOINPUT)
        return allocation


def _refusal(run: Run, words: str, code: Exit = Exit.USAGE) -> FallowError:
    return FallowError(f"run {run.id}: {words}", code)


CHANGING = [call for name, call in vars(Operations).items() if not name.startswith("_") and name != "handle"]
CHANGING.append(Pruning.prune)
"""The functions behind methods that change something, each by its method's name."""
