"""How L workers stand becomes how their node stands. Pure.

A node has done something once all its workers have. What only one of them can know (a failure, a checkpoint) counts as
soon as that one says it. The head reads one report per node, and never sees a single worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from typing import TypeVar

import msgspec

from fallow.core.membership.messages import Checkpoint, Contract, Finish, Problem, Refusal, Report, Switch
from fallow.core.protocol import Beat, Progress, Status
from fallow.model import Doing

T = TypeVar("T")
Dated = TypeVar("Dated", Checkpoint, Problem)


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
        left=min(status.left for status in all_of),
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
