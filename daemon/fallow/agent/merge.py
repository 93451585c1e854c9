"""Merge the reports of a node's workers into one report, and their parts of a gather into one part. Pure.

The head reads one report per node and never sees a single worker. A node has reached a state once all its workers have
reached it. What one worker alone can know (a failure, a checkpoint) counts as soon as that worker reports it.

For a gather among all nodes, the agent sends the parts of its workers to the head as one message. The head's answer has
the parts of all workers in rank order, and the agent passes it on. The agent itself answers gathers within the node.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from typing import TypeVar

import msgspec

from fallow.core.membership.gather import MAX_GENERATIONS, Gathers
from fallow.core.membership.messages import (
    Checkpoint,
    Contract,
    Fault,
    Finish,
    Gather,
    Gathered,
    Problem,
    Refusal,
    Report,
    Switch,
)
from fallow.core.protocol import Beat, Part, Progress, Status
from fallow.model import Doing

AT_ONCE_S = 0.1
"""The kernel may close a dying worker's connections to other workers a moment before the one to the agent."""

IN_VAIN_S = 5.0
"""A worker that has waited so long in a joint call has not merely been told late what another worker knows."""

T = TypeVar("T")
Dated = TypeVar("Dated", Checkpoint, Problem)

_PARTS: msgspec.msgpack.Decoder[tuple[bytes, ...]] = msgspec.msgpack.Decoder(tuple[bytes, ...])


@dataclass(frozen=True, slots=True)
class Facts:
    """An agent's knowledge of one worker."""

    status: Status
    "newest status; after the worker's end its last one"
    age_s: float = 0.0
    "seconds since that status arrived"
    stopped_s: float = 0.0
    "seconds for which its process has been stopped (SIGSTOP)"
    mute_s: float = 0.0
    "seconds without a message from the worker; 0 once it has closed its channel"
    fault_s: float = 0.0
    "seconds since its first status with a fault arrived"
    cut_off_s: float = 0.0
    "seconds since it ended without a finish or a fault; 0: it did not, or this agent has killed it"
    pid: int = 0
    "process id; 0: no process"


def merge_report(workers: Sequence[Facts], *, node: int, boot: int, seq: int, highest: int) -> Report:
    """Merge the states of a node's workers into the node's report.

    Args:
        workers: all workers of the node, by slot.
        node: node number.
        boot: number of this start of the workers.
        seq: sequence number, higher than in any earlier report.
        highest: highest generation in any order for this node.
    """
    all_of = [worker.status for worker in workers]
    generation = min(status.generation for status in all_of)
    doing = {status.doing for status in all_of}
    term, edition = min((status.term, status.edition) for status in all_of)
    return Report(
        node=node,
        boot=boot,
        seq=seq,
        term=term,
        edition=edition,
        ready=_contract([status.ready for status in all_of]),
        generation=generation,
        highest=highest,
        prepared=min(status.prepared for status in all_of),
        refusal=_refusal(_without_none(status.refusal for status in all_of)),
        # The node's promise: a worker that has given up still takes a sibling's answer, and so finishes that step.
        given_up=min(status.given_up for status in all_of),
        break_reason=max(all_of, key=attrgetter("given_up")).break_reason,
        passed_boundary=min(status.passed_boundary for status in all_of),
        step=min(status.step for status in all_of),
        has_state=all(status.has_state for status in all_of),
        switch=_switch([status.switch for status in all_of], generation),
        doing=doing.pop() if len(doing) == 1 else Doing.WORKING,
        stalled_s=min(worker.status.stalled_s + worker.age_s for worker in workers),
        stopped_s=max(worker.stopped_s for worker in workers),
        mute_s=max(worker.mute_s for worker in workers),
        computes=any(status.computes for status in all_of),
        in_call=all(status.in_call for status in all_of),
        deserted=any(status.deserted for status in all_of),
        finish=_finish(workers),
        fault=_fault(workers),
        saved=_newest(_without_none(status.saved for status in all_of)),
        unsaved=_newest(_without_none(status.unsaved for status in all_of)),
        damaged=_newest(_without_none(status.damaged for status in all_of)),
        healed=max(status.healed for status in all_of),
        unrecorded=min(_without_none(status.unrecorded for status in all_of), default=None),
    )


def merge_progress(workers: Sequence[Facts]) -> Progress:
    """Merge the progress of a node's workers. Values that all members share come from the first worker."""
    first, all_of = workers[0].status.progress, [worker.status.progress for worker in workers]
    busy_links: dict[str, float] = {}
    for progress in all_of:
        for address, busy in progress.busy_links.items():
            busy_links[address] = max(busy, busy_links.get(address, 0.0))
    paces = [progress.pace_s for progress in all_of]
    return msgspec.structs.replace(
        first,
        epoch=max(progress.epoch for progress in all_of),
        reached=max(progress.reached for progress in all_of),
        shards=sum(progress.shards for progress in all_of),
        # The workers compute in parallel: their rates (shards per second) add up.
        pace_s=1.0 / sum(1.0 / pace_s for pace_s in paces) if all(paces) else 0.0,
        busy_links=busy_links,
        pids=tuple(worker.pid for worker in workers if worker.pid),
    )


def needs_no_beat(beat: Beat) -> Beat:
    """Return the heartbeat without the fields that can wait. A change in what remains is sent at once."""
    report = beat.report
    if report is not None:
        report = msgspec.structs.replace(
            report,
            seq=0,
            step=0,
            doing=Doing.WORKING,
            stalled_s=0.0,
            stopped_s=float(report.stopped_s > 0.0),
            mute_s=0.0,
            computes=False,
            in_call=False,
        )
    return msgspec.structs.replace(beat, report=report, progress=Progress(), brief=False)


def _without_none(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]


def _contract(contracts: list[Contract | None]) -> Contract | None:
    """None until all workers are ready. If they differ, return one unlike the first, so that the head refuses it."""
    ready = _without_none(contracts)
    if len(ready) < len(contracts):
        return None
    return next((contract for contract in ready if contract != ready[0]), ready[0])


def _refusal(refusals: list[Refusal]) -> Refusal | None:
    """Merge the refusals of the newest generation: each worker may have failed to reach other nodes."""
    newest = max((refusal.generation for refusal in refusals), default=0)
    candidates = [refusal for refusal in refusals if refusal.generation == newest]
    if len(candidates) < 2:
        return next(iter(candidates), None)
    tried: dict[int, str] = {}
    for refusal in candidates:
        for node, address in zip(refusal.unreachable, chain(refusal.tried, repeat("")), strict=False):
            tried[node] = tried.get(node) or address
    return msgspec.structs.replace(candidates[0], unreachable=tuple(tried), tried=tuple(tried.values()))


def _switch(switches: list[Switch | None], generation: int) -> Switch | None:
    """Switch of the worker with the longest pause. None until all workers have switched."""
    matches = [switch for switch in _without_none(switches) if switch.generation == generation]
    if len(matches) < len(switches):
        return None
    return msgspec.structs.replace(
        max(matches, key=attrgetter("pause_s")),
        bytes_in_pause=sum(switch.bytes_in_pause for switch in matches),
        bytes_behind=sum(switch.bytes_behind for switch in matches),
        discarded=max(switch.discarded for switch in matches),
    )


def _finish(workers: Sequence[Facts]) -> Finish | None:
    """None until all scripts have ended, or wait for those that have ended: the head then tells them so.

    Different final states give a digest that differs from other nodes' digest.
    """
    finished = _without_none(worker.status.finish for worker in workers)
    if not finished or not all(worker.status.finish is not None or _waits_in_vain(worker) for worker in workers):
        return None
    return msgspec.structs.replace(finished[0], digest="/".join(dict.fromkeys(finish.digest for finish in finished)))


def _fault(workers: Sequence[Facts]) -> Fault | None:
    """First fault; None if a worker was cut off before, since the joint calls of the others fail because of that.

    A new fault waits for `AT_ONCE_S` seconds, or for the end of the other workers: one of them may be dying.
    """
    faulty = [worker for worker in workers if worker.status.fault is not None]
    first = max(faulty, key=attrgetter("fault_s"), default=None)
    if first is None or any(worker.cut_off_s > max(0.0, first.fault_s - AT_ONCE_S) for worker in workers):
        return None
    others_live = any(worker.mute_s > 0.0 and worker.status.fault is None for worker in workers)
    return None if others_live and first.fault_s < AT_ONCE_S else first.status.fault


def _waits_in_vain(worker: Facts) -> bool:
    """Return True if a worker waits in a joint call, which cannot end once another worker's script has ended."""
    status = worker.status
    return status.in_call and status.doing is Doing.WAITING and status.stalled_s + worker.age_s > IN_VAIN_S


def _newest(reports: list[Dated]) -> Dated | None:
    return max(reports, key=attrgetter("generation", "step"), default=None)


class NodeGathers:
    """Gathers of one start of workers, for the newest `MAX_GENERATIONS` generations.

    Args:
        node: node number.
        slots: number of workers on the node.
    """

    def __init__(self, node: int, slots: int) -> None:
        self._node, self._slots = node, range(slots)
        self._within_node, self._of_node = Gathers(), Gathers()
        "gathers of this node's workers: answered by the agent, and to be sent to the head"
        self._exchanges: dict[tuple[int, str], Gather | Gathered] = {}
        "(generation, key) -> the gather sent to the head, replaced by the head's answer"

    def take(self, slot: int, part: Part) -> tuple[Gathered | Gather | None, Sequence[int]]:
        """Take a worker's part, or its question which nodes are missing.

        Returns:
            an answer and the slots that receive it, or a gather for the head and no slots; None while other workers'
            parts or the head's answer are missing.
        """
        place = part.generation, part.key
        answer = None if part.within_node else self._exchanges.get(place)
        if isinstance(answer, Gathered):
            return answer, [slot]
        if not part.part:
            return Gather(node=self._node, generation=part.generation, key=part.key, part=b""), []
        gathers = self._within_node if part.within_node else self._of_node
        gathers.open(part.generation, self._slots)
        own_part = Gather(node=slot, generation=part.generation, key=part.key, part=part.part)
        gathered, slots = gathers.take(own_part)
        if gathered is None:
            return None, []
        if part.within_node:
            return gathered, slots
        request = self._exchanges[place] = msgspec.structs.replace(
            own_part, node=self._node, part=msgspec.msgpack.encode(gathered.parts)
        )
        newest = sorted({generation for generation, _ in self._exchanges})[-MAX_GENERATIONS:]
        self._exchanges = {place: exchange for place, exchange in self._exchanges.items() if place[0] in newest}
        return request, []

    def hear(self, gathered: Gathered) -> Gathered | None:
        """Split the head's answer, with one part per node, into parts of workers. None: no worker waits for it."""
        if gathered.missing:
            return gathered
        place = gathered.generation, gathered.key
        if not isinstance(self._exchanges.get(place), Gather):
            return None
        parts = tuple(part for of_node in gathered.parts for part in _PARTS.decode(of_node))
        answer = self._exchanges[place] = msgspec.structs.replace(gathered, parts=parts)
        return answer

    def unanswered(self) -> list[Gather]:
        """Gathers without an answer from the head, to be sent again."""
        return [exchange for exchange in self._exchanges.values() if isinstance(exchange, Gather)]
