"""Requests over the control socket that change something."""

from functools import partial
from pathlib import Path
from typing import Any

from fallow.control.protocol import LocalAllocation, NewRun
from fallow.core.accounting.backoff import base_job, harvest_jobs
from fallow.core.accounting.cancelled import Cancels
from fallow.core.accounting.launch_failures import MAX_LAUNCH_FAILURES, LaunchFailures
from fallow.core.allocations import SUBMIT_S, WAITING, Allocation
from fallow.core.membership import events as ev
from fallow.core.membership.names import member_name, member_number
from fallow.core.submission.sbatch_line import base_nodes
from fallow.files import private_dir, write_struct
from fallow.head.api.pruning import Pruning
from fallow.head.loop.inbox import FilesFirst
from fallow.head.loop.turn import Turn
from fallow.head.peers.checkpoints import remove
from fallow.head.slurm.harvest import Harvest, give_all_back
from fallow.head.state.registry import Registry, Run, write_run
from fallow.model import AllocationKind, AllocationState, Exit, FallowError, MemberPhase, RunSpec
from fallow.model.bounds import Code, Count, Few, Id, Many, Name, Prose
from fallow.text import counted, quote
from fallow.threads import FILES_S


class Operations:
    """One public method for each control method that changes something. Each request gets a turn of the main loop.

    The methods' signatures define which parameters a request may have (`head.api.handler`).
    """

    def __init__(self, registry: Registry, harvest: Harvest, pruning: Pruning | None = None) -> None:
        self._registry = registry
        self._harvest = harvest
        self._pruning = pruning

    def handle(self, turn: Turn, method: str, params: dict[str, Any]) -> Any:
        """Carry out one request with checked parameters.

        Raises:
            FallowError: the request cannot be carried out.
        """
        operation = getattr(self._pruning if method == "prune" else self, method)
        return operation(turn, **params)

    def create_run(self, turn: Turn, spec: RunSpec) -> FilesFirst:
        if not 1 <= spec.min_nodes <= spec.max_nodes:
            limits = f"{spec.min_nodes}:{spec.max_nodes}"
            raise FallowError(f"nodes {limits}: MIN must be at least 1 and at most MAX", Exit.USAGE)
        new, paths = self._registry.draft(spec, turn.now), self._registry.paths
        base = self._registry.new_allocation(new, AllocationKind.BASE, turn.now, nodes_wanted=base_nodes(spec))
        folder, checkpoints = paths.run(base.run), new.record.checkpoint_folder

        def add(_: None, turn: Turn) -> NewRun:
            # The client calls sbatch itself now, and may die before it reports the result.
            base.sent_by = turn.now + SUBMIT_S
            run = self._registry.add(new, 0, turn.at)
            turn.record(run, "run", f"run {run.id}: {spec.min_nodes} to {spec.max_nodes} nodes")
            return NewRun(run=run.id, token=base.token, folder=str(folder.root), key_file=str(folder.key(base.token)))

        write = partial(write_run, paths, new.spec, self._registry.unwritten_keys.pop(base.token))
        own_files = FilesFirst(str(paths.runs), write, add, FILES_S, partial(remove, [str(folder.root)]))
        if not checkpoints:
            return own_files
        place = f"[checkpoint] path {self._registry.config.checkpoint.path}"
        make_folder = partial(_make_checkpoint_folder, checkpoints)
        undo = partial(remove, [checkpoints])
        return FilesFirst(place, make_folder, lambda _, turn: own_files, FILES_S, undo)

    def local_allocation(self, turn: Turn, run: Name) -> LocalAllocation | FilesFirst:
        """Reserve a node of `fallow local`. Nodes are numbered in order of their requests, from n0."""
        target_run = self._active_run(run)
        if not target_run.spec.local:
            raise FallowError(f"run {quote(run)}: only `fallow local` starts agents by hand", Exit.USAGE)
        unused_allocations = [a for a in target_run.live_allocations() if not a.reserved and not a.agents]
        allocation = (
            unused_allocations[0]
            if unused_allocations
            else self._registry.new_allocation(target_run, AllocationKind.HARVEST, turn.now, sent_by=turn.now)
        )
        # Each allocation is one node.
        allocation.reserved = allocation.number + 1
        turn.dirty.add(target_run.id)
        paths, token = self._registry.paths, allocation.token
        file = paths.run(target_run.id).key(token)
        answer = LocalAllocation(member=member_name(allocation.reserved), token=token, key_file=str(file))
        keys = self._registry.unwritten_keys.pop(token, None)
        if keys is None:
            return answer
        return FilesFirst(str(paths.runs), partial(write_struct, file, keys), lambda _, turn: answer, FILES_S)

    def base_submitted(self, turn: Turn, run: Name, token: Id, job_id: Id) -> None:
        target_run = self._registry.get(run)
        self._harvest.note_submission(turn, target_run, self._allocation(target_run, token).token, job_id)

    def base_failed(self, turn: Turn, run: Name, token: Id, reason: Prose, unknown: bool) -> None:
        target_run = self._registry.get(run)
        allocation = self._allocation(target_run, token)
        if unknown:
            self._harvest.note_unknown_outcome(turn, target_run, token, reason)
            return
        self._registry.end_allocation(target_run, allocation, reason)
        turn.apply(target_run, ev.Cancel(at=turn.at, reason=f"sbatch refused the base job: {reason}"))

    def grow(self, turn: Turn, run: Name, by: Code = 1) -> int:
        """Raise the limit by `by` nodes. Return the new limit."""
        target_run = self._active_run(run)
        maximum = target_run.root.maximum
        if by < 1 or (target_run.root.limit + by > maximum and target_run.root.limit >= maximum):
            raise _refusal(target_run, f"has a limit of {target_run.root.limit} of at most {counted(maximum, 'node')}")
        limit = min(maximum, target_run.root.limit + by)
        turn.apply(target_run, ev.Release(at=turn.at, limit=limit, reason="grown by hand"))
        return limit

    def shrink(self, turn: Turn, run: Name, by: Code = 1) -> int:
        """Lower the limit by `by` nodes and release the youngest members. Return the new limit."""
        target_run = self._active_run(run)
        members = len(target_run.roster.present(MemberPhase.MEMBER))
        limit = min(target_run.root.limit, members or target_run.root.limit) - by
        if by < 1 or limit < 1:
            raise _refusal(target_run, f"has {counted(members, 'member')}; to end it: fallow cancel {target_run.id}")
        turn.apply(target_run, ev.Release(at=turn.at, limit=limit, reason="shrunk by hand"))
        return limit

    def release(self, turn: Turn, run: Name, members: Few[Name]) -> None:
        """Release these members and lower the limit, so that no node replaces them."""
        target_run = self._active_run(run)
        numbers = {member_number(member): member for member in members}
        unknown_members = [member for n, member in numbers.items() if not target_run.roster.alive(n)]
        if unknown_members:
            words = f"has no member {', '.join(unknown_members)}; `fallow status {target_run.id}` lists them"
            raise _refusal(target_run, words, Exit.NOINPUT)
        seated = [n for n in numbers if n in target_run.roster.members]
        limit = max(0, target_run.root.limit - len(seated)) if seated else None
        # One event: between two events a standby node would take the place of a released member.
        turn.apply(target_run, ev.Release(at=turn.at, nodes=tuple(numbers), reason="released by hand", limit=limit))

    def drain(self, turn: Turn, run: Name, nodes: Many[Name]) -> None:
        """Give these nodes back. The run avoids them until it is resumed."""
        target_run = self._active_run(run)
        holders = {
            node: [a for a in target_run.live_allocations() if node in a.agents or node in a.nodes] for node in nodes
        }
        for node, allocations in holders.items():
            if not allocations:
                words = f"holds no node {node}; `fallow status {target_run.id}` lists them"
                raise _refusal(target_run, words, Exit.NOINPUT)
        for allocations in holders.values():
            for allocation in allocations:
                turn.release_allocation(target_run, allocation, "drained by hand")
        if target_run.spec.local:
            return  # the schedule decides which nodes come
        target_run.record.drained = sorted({*target_run.record.drained, *nodes})
        turn.dirty.add(target_run.id)
        # Cancel requests that could still get one of these nodes. The next plan makes requests that exclude the nodes.
        requests = [
            a for a in target_run.live_allocations() if a.state in WAITING and not a.agents and a.asked_at is None
        ]
        for request in requests:
            anywhere = request.part is None or request.part.node in nodes
            if request.kind is AllocationKind.HARVEST and anywhere:
                turn.cancel(target_run, request, f"{', '.join(nodes)} drained by hand")

    def pause(self, turn: Turn, run: Name) -> None:
        """Give the harvest nodes back and request none until the run is resumed. The base job goes on."""
        target_run = self._active_run(run)
        if target_run.spec.local:
            raise _refusal(target_run, "is a `fallow local` run: its schedule decides which nodes come and go")
        if target_run.record.paused_by_hand:
            raise _refusal(target_run, f"is paused already; to go on: fallow resume {target_run.id}")
        target_run.record.paused_by_hand = True
        turn.record(target_run, "pause", "paused by hand: harvest nodes are given back, and none is requested")
        give_all_back(turn, target_run, "the run is paused")

    def resume(self, turn: Turn, run: Name) -> None:
        """Request nodes again after a pause by hand or by the head, and use drained nodes again."""
        target_run = self._active_run(run)
        record, backoff = target_run.record, self._harvest.knowledge.backoff
        put_off = {key: backoff.put_off_until(key) for key in (base_job(target_run.id), harvest_jobs(target_run.id))}
        is_waiting = target_run.failures >= MAX_LAUNCH_FAILURES or max(put_off.values()) > turn.now
        if not (record.paused or record.drained or is_waiting):
            raise _refusal(target_run, "is not paused and has no drained nodes; nothing to resume")
        record.paused_by_hand, record.harvest_paused, record.drained = False, "", []
        turn.apply(target_run, ev.Unbar(at=turn.at, hosts=(*record.fruitless.barred, *record.cancelled.barred)))
        record.refusals, record.fruitless, record.cancelled = {}, LaunchFailures(), Cancels()
        backoff.forget(target_run.asker)
        for key in put_off:
            backoff.resume(key)
        turn.record(target_run, "resume", "resumed by hand: nodes are requested again")
        # If this head is killed, the next head must not find a pause that the run's record does not have.
        self._harvest.note(turn)

    def cancel(self, turn: Turn, run: Name) -> None:
        target_run = self._registry.get(run)
        if target_run.ended:
            raise _refusal(target_run, f"is {target_run.root.status} already")
        target_run.record.base_wanted = False
        turn.apply(target_run, ev.Cancel(at=turn.at, reason="cancelled by hand"))

    def checkpoint(self, turn: Turn, run: Name) -> None:
        target_run = self._active_run(run)
        if not target_run.roster.present():
            raise _refusal(target_run, "has no member that could write a checkpoint", Exit.TEMPFAIL)
        if target_run.root.contract is not None and target_run.root.contract.restarts:
            raise _refusal(target_run, "writes checkpoints only when its script does")
        # The answers to the members' next beats carry this number.
        target_run.record.checkpoints_asked += 1
        turn.dirty.add(target_run.id)

    def rollback(self, turn: Turn, run: Name, step: Count) -> None:
        target_run = self._active_run(run)
        r = target_run.roster
        usable_steps = sorted({checkpoint.step for checkpoint in r.checkpoints.usable()})
        if step not in usable_steps:
            usable_text = ", ".join(map(str, usable_steps)) or "none"
            raise _refusal(target_run, f"has no usable checkpoint of step {step}; usable: {usable_text}", Exit.NOINPUT)
        if r.finishing:
            raise _refusal(target_run, "has just ended its script; it is too late to go back")
        if r.present() and not r.present(MemberPhase.MEMBER):
            raise _refusal(target_run, "has only members that are leaving; try again in a moment", Exit.TEMPFAIL)
        turn.apply(target_run, ev.Rollback(at=turn.at, step=step))

    def _active_run(self, run: str) -> Run:
        target_run = self._registry.get(run)
        if target_run.ended:
            raise _refusal(target_run, f"is {target_run.root.status}")
        return target_run

    @staticmethod
    def _allocation(run: Run, token: str) -> Allocation:
        allocation = run.allocations.get(token)
        if allocation is None or allocation.state is AllocationState.LOST:
            raise _refusal(run, f"has no allocation {token}", Exit.NOINPUT)
        return allocation


def _make_checkpoint_folder(folder: str) -> None:
    try:
        private_dir(Path(folder))
    except FallowError as error:
        raise FallowError(f"[checkpoint] path cannot be used: {error.message}", error.code) from error


def _refusal(run: Run, words: str, code: Exit = Exit.USAGE) -> FallowError:
    return FallowError(f"run {run.id} {words}", code)


CHANGING = [call for name, call in vars(Operations).items() if not name.startswith("_") and name != "handle"]
CHANGING.append(Pruning.prune)
"""The functions behind the control methods that change something; a function's name is its method's name."""
