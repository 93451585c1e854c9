"""A run whose record in the store cannot be read: as much of it as ending its jobs takes."""

from __future__ import annotations

from typing import Any

import msgspec

from fallow.core.allocations import Allocation
from fallow.core.roster import Roster
from fallow.files import Paths, read_struct
from fallow.head.book import RunRecord
from fallow.model import AllocationKind, AllocationState, Exit, FallowError, KeyFile, RunSpec, RunStatus


def decode_spec(value: bytes) -> RunSpec:
    return msgspec.msgpack.decode(value, type=RunSpec)


def decode_record(value: bytes) -> RunRecord:
    return msgspec.msgpack.decode(value, type=RunRecord)


def salvage(paths: Paths, run_id: str, spec: bytes | None, record: bytes, now: float) -> tuple[RunSpec, RunRecord]:
    """What can still be read, in a run that waits to be ended.

    Args:
        paths: where the head's files are.
        run_id: of the run.
        spec, record: its values in the store; None: missing.
        now: Unix time.
    """
    try:
        found = decode_spec(spec or b"")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        found = RunSpec(run=run_id, name=run_id.rpartition("-")[0] or run_id, min_nodes=1, max_nodes=1, created_at=now)
    roster = Roster(run=run_id, min_members=found.min_nodes, max_members=found.max_nodes, limit=found.max_nodes)
    allocations = _of_record(record) or _of_key_files(paths, run_id, now)
    for number, allocation in enumerate(allocations):
        # Nothing is known of its workers any more; and one whose job shows is cancelled then.
        allocation.agents, allocation.agents_gone = {}, []
        allocation.sent_by = allocation.sent_by or now + number
    return found, RunRecord(roster=roster, allocations={a.token: a for a in allocations}, base_wanted=False)


def end_now(record: RunRecord, why: str, now: float) -> None:
    """The last resort, where the membership machine itself fails: the run is over, whatever its roster says."""
    record.roster.status, record.roster.message = RunStatus.FAILED, why
    record.roster.change, record.ended_at = None, now
    for allocation in record.allocations.values():
        if allocation.live:
            # Its agents are told so at their next beats.
            allocation.state, allocation.asked_at = AllocationState.RELEASING, now
            allocation.end_code, allocation.reason = int(Exit.NO_RESTART), why


def _of_record(value: bytes) -> list[Allocation]:
    try:
        raw: Any = msgspec.msgpack.decode(value)
        found: list[Allocation] = []
        for one in raw["allocations"].values():
            try:
                found.append(msgspec.convert(one, Allocation))
            except (msgspec.ValidationError, ValueError):
                continue
        return found
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return []


def _of_key_files(paths: Paths, run_id: str, now: float) -> list[Allocation]:
    """Live allocations have a key file each."""
    found: list[Allocation] = []
    for file in sorted(paths.run(run_id).keys.glob("*.json")):
        try:
            key = read_struct(file, KeyFile)
        except (FallowError, OSError):
            continue
        kind = AllocationKind(key.kind)
        found.append(
            Allocation(token=key.token, run=run_id, kind=kind, public_key=key.public_key, requested_at=now, sent_by=now)
        )
    return found
