"""A run whose record in the store cannot be read: as much of it as ending its jobs takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fallow.core import records
from fallow.core.allocations import Allocation
from fallow.core.membership.messages import Unreadable
from fallow.core.membership.records import Root
from fallow.core.membership.roster import Roster
from fallow.files import Paths, read_struct
from fallow.head.state.book import Run, RunRecord, StoredRun
from fallow.model import AllocationKind, AllocationState, Exit, FallowError, KeyFile, RunSpec, RunStatus


def salvage(paths: Paths, run_id: str, stored: Mapping[str, bytes], now: float) -> StoredRun:
    """What can still be read, in a run that waits to be ended.

    Args:
        paths: where the head's files are.
        run_id: of the run.
        stored: its values in the store, by key.
        now: Unix time.
    """
    try:
        found = records.decode(stored.get("spec", b""), RunSpec)
    except Unreadable:
        found = RunSpec(run=run_id, name=run_id.rpartition("-")[0] or run_id, min_nodes=1, max_nodes=1, created_at=now)
    allocations = _of_records(stored)
    known = {allocation.token for allocation in allocations}
    # Each live allocation has a key file.
    allocations += [a for a in _of_key_files(paths, run_id, now) if a.token not in known]
    for number, allocation in enumerate(allocations):
        # Nothing is known of its workers any more; and one whose job shows is cancelled then.
        allocation.agents = {}
        allocation.sent_by = allocation.sent_by or now + number
    numbers = [allocation.number + 1 for allocation in allocations]
    try:
        record = records.decode(stored.get("record", b""), RunRecord)
    except Unreadable:
        record = RunRecord()
    record.base_wanted, record.next_allocation = False, max([record.next_allocation, *numbers])
    root = Root(run=run_id, minimum=found.min_nodes, maximum=found.max_nodes, limit=found.max_nodes)
    return StoredRun(found, record, Roster(root), {a.token: a for a in allocations})


def end_now(run: Run, why: str, now: float) -> None:
    """The last resort, where the membership machine itself fails: the run is over, whatever its roster says."""
    root = run.root
    root.status, root.message, root.change, run.record.ended_at = RunStatus.FAILED, why, None, now
    run.roster.mark("root")
    for allocation in run.live_allocations():
        # Its agents are told so at their next beats.
        allocation.state, allocation.asked_at = AllocationState.RELEASING, now
        allocation.end_code, allocation.reason = int(Exit.NO_RESTART), why


def _of_records(stored: Mapping[str, bytes]) -> list[Allocation]:
    found: list[Allocation] = []
    for key, value in stored.items():
        if key.startswith("allocation/"):
            try:
                # As much of it as is understood, whatever wrote it.
                raw: Any = msgspec.msgpack.decode(value)
                allocation = msgspec.convert(raw[1], Allocation)
            except (msgspec.MsgspecError, ValueError, RecursionError, TypeError, LookupError):
                continue
            if allocation.token == key.removeprefix("allocation/"):
                found.append(allocation)
    return sorted(found, key=lambda allocation: allocation.number)


def _of_key_files(paths: Paths, run_id: str, now: float) -> list[Allocation]:
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
