"""L workers become one node: what they report, and their parts of gathers. Pure.

The head reads one report per node, and never sees a single worker. A node has done something once all its workers have.
What only one of them can know (a failure, a checkpoint) counts as soon as that one says it.

Their agent sends the parts of all of them to the head as one, and hands out the answer, in which are the parts of all
workers of all nodes, in the order of ranks. Gathers within the node the agent answers by itself.
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

T = TypeVar("T")
Dated = TypeVar("Dated", Checkpoint, Problem)

_PARTS: msgspec.msgpack.Decoder[tuple[bytes, ...]] = msgspec.msgpack.Decoder(tuple[bytes, ...])


@dataclass(frozen=True, slots=True)
class Facts:
    """What an agent knows of one worker."""

    status: Status
    "the newest; the last one of a worker that has ended"
    age_s: float = 0.0
    "since that status came"
    stopped_s: float = 0.0
    "for how long its process has been stopped (SIGSTOP)"
    mute_s: float = 0.0
    "for how long it has said nothing; 0: it has come to its end"
    pid: int = 0
    "0: it has no process"


def merge_report(workers: Sequence[Facts], *, node: int, boot: int, seq: int, highest: int) -> Report:
    """Where the node is.

    Args:
        workers: all of its workers, in the order of their slots.
        node: its number.
        boot: which start of its workers this is.
        seq: higher than that of any earlier report.
        highest: of all generations that orders for this node have named.
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
        refusal=_refusal(_known(status.refusal for status in all_of)),
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
        finish=_finish([status.finish for status in all_of]),
        fault=next(iter(_known(status.fault for status in all_of)), None),
        saved=_newest(_known(status.saved for status in all_of)),
        unsaved=_newest(_known(status.unsaved for status in all_of)),
        damaged=_newest(_known(status.damaged for status in all_of)),
        healed=max(status.healed for status in all_of),
        unrecorded=min(_known(status.unrecorded for status in all_of), default=None),
    )


def merge_progress(workers: Sequence[Facts]) -> Progress:
    """How the training gets on, on the node. What is the same on all members is taken from its first worker."""
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
        # So many shards a second all of them compute together.
        pace_s=1.0 / sum(1.0 / pace_s for pace_s in paces) if all(paces) else 0.0,
        busy_links=busy_links,
        pids=tuple(worker.pid for worker in workers if worker.pid),
    )


def needs_no_beat(beat: Beat) -> Beat:
    """The heartbeat without what the next one is soon enough for. Any other change is told at once."""
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


def _known(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]


def _contract(contracts: list[Contract | None]) -> Contract | None:
    """None until all are ready. If they differ, one that is unlike the first: the head refuses it on the next node."""
    ready = _known(contracts)
    if len(ready) < len(contracts):
        return None
    return next((contract for contract in ready if contract != ready[0]), ready[0])


def _refusal(refusals: list[Refusal]) -> Refusal | None:
    """Of the newest generation; several workers may each reach other nodes in vain."""
    newest = max((refusal.generation for refusal in refusals), default=0)
    said = [refusal for refusal in refusals if refusal.generation == newest]
    if len(said) < 2:
        return next(iter(said), None)
    tried: dict[int, str] = {}
    for refusal in said:
        for node, address in zip(refusal.unreachable, chain(refusal.tried, repeat("")), strict=False):
            tried[node] = tried.get(node) or address
    return msgspec.structs.replace(said[0], unreachable=tuple(tried), tried=tuple(tried.values()))


def _switch(switches: list[Switch | None], generation: int) -> Switch | None:
    """Of the worker that stood still the longest. None until all of them have gone over."""
    made = [switch for switch in _known(switches) if switch.generation == generation]
    if len(made) < len(switches):
        return None
    return msgspec.structs.replace(
        max(made, key=attrgetter("pause_s")),
        bytes_in_pause=sum(switch.bytes_in_pause for switch in made),
        bytes_behind=sum(switch.bytes_behind for switch in made),
        discarded=max(switch.discarded for switch in made),
    )


def _finish(finishes: list[Finish | None]) -> Finish | None:
    """None until all scripts have ended. Final states that differ make a digest that is unlike that of other nodes."""
    finished = _known(finishes)
    if len(finished) < len(finishes):
        return None
    return msgspec.structs.replace(finished[0], digest="/".join(dict.fromkeys(finish.digest for finish in finished)))


def _newest(found: list[Dated]) -> Dated | None:
    return max(found, key=attrgetter("generation", "step"), default=None)


class NodeGathers:
    """The gathers of one start of workers; of the newest `KEPT` generations. The agent repeats what is `unanswered`.

    Args:
        node: its number.
        slots: how many workers it has.
    """

    def __init__(self, node: int, slots: int) -> None:
        self._node, self._slots = node, range(slots)
        self._within_node, self._of_node = Gathers(), Gathers()
        "each brings the parts of this node's workers together, for themselves and for the head"
        self._asked: dict[tuple[int, str], Gather | Gathered] = {}
        "(generation, key) -> what the head was given, and once it has answered, the answer"

    def take(self, slot: int, part: Part) -> tuple[Gathered | Gather | None, Sequence[int]]:
        """Take a worker's part, or its question which nodes are missing: the head answers that at once.

        Returns:
            an answer and the slots to tell it to, or what to send to the head; None: others' parts, or the head's
            answer, are missing.
        """
        place = part.generation, part.key
        answer = None if part.within_node else self._asked.get(place)
        if isinstance(answer, Gathered):
            return answer, [slot]
        if not part.part:
            return Gather(node=self._node, generation=part.generation, key=part.key, part=b""), []
        gathers = self._within_node if part.within_node else self._of_node
        gathers.open(part.generation, self._slots)
        given = Gather(node=slot, generation=part.generation, key=part.key, part=part.part)
        found, slots = gathers.take(given)
        if found is None:
            return None, []
        if part.within_node:
            return found, slots
        whole = self._asked[place] = msgspec.structs.replace(
            given, node=self._node, part=msgspec.msgpack.encode(found.parts)
        )
        newest = sorted({generation for generation, _ in self._asked})[-MAX_GENERATIONS:]
        self._asked = {place: said for place, said in self._asked.items() if place[0] in newest}
        return whole, []

    def hear(self, gathered: Gathered) -> Gathered | None:
        """Take the head's answer, whose parts are of whole nodes, for all workers. None: nobody waits for it."""
        if gathered.missing:
            return gathered
        place = gathered.generation, gathered.key
        if not isinstance(self._asked.get(place), Gather):
            return None
        parts = tuple(part for of_node in gathered.parts for part in _PARTS.decode(of_node))
        answer = self._asked[place] = msgspec.structs.replace(gathered, parts=parts)
        return answer

    def unanswered(self) -> list[Gather]:
        """What waits for the head's answer, to be sent again."""
        return [said for said in self._asked.values() if isinstance(said, Gather)]
