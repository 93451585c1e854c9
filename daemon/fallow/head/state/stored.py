"""What the store holds of runs: records, also damaged ones, and sums over runs whose records are gone.

A run that has ended, and whose jobs are in its sums, *rests*: ticks and what is asked of Slurm pass it by. When it is
pruned, its record goes, and what it used moves to `PrunedRuns` in the same write. So `fallow usage` is the same before
and after. These sums grow with days, accounts and partitions (`core.accounting.usage.by_month`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fallow.core import records
from fallow.core.accounting.cancelled import Cancels
from fallow.core.accounting.fairshare import PastUse
from fallow.core.accounting.launch_failures import LaunchFailures
from fallow.core.accounting.usage import Tallies, Tally, by_month, merge
from fallow.core.allocations import Allocation
from fallow.core.membership.messages import Unreadable
from fallow.core.membership.records import Root
from fallow.core.membership.roster import Roster
from fallow.core.planning.gain import Curve
from fallow.core.training.saving import Saving
from fallow.files import Paths, read_struct
from fallow.model import AllocationKind, FallowError, GenerationReport, KeyFile, RunSpec

PRUNED = "pruned"
"""Key of `PrunedRuns` among the notes of the store."""

NO_ACCOUNT = "-"
"""Stands for the owner's default account."""


class RunRecord(msgspec.Struct, kw_only=True):
    """What Redis holds of a run besides its spec, its membership and its allocations."""

    slots: int | None = None
    "workers per node, as the first agent said"
    next_allocation: int = 0
    base_wanted: bool = True
    "False once the user cancelled the base job: it is not submitted again"
    refusals: dict[str, int] = {}
    "partition -> spells of refused submissions since one was taken there; empty: of the base job"
    fruitless: LaunchFailures = msgspec.field(default_factory=LaunchFailures)
    "jobs that ended before an agent came"
    cancelled: Cancels = msgspec.field(default_factory=Cancels)
    "harvest jobs that somebody else cancelled"
    harvest_paused: str = ""
    "why nothing is asked for: Slurm refused too often, everywhere, or too many jobs came to nothing or were cancelled"
    paused_by_hand: bool = False
    drained: list[str] = []
    "nodes that somebody drained: the run does without them until it is resumed"
    spent_node_s: float = 0.0
    "of the budget, by allocations that are no longer kept"
    curve: Curve = msgspec.field(default_factory=Curve)
    "how fast it was with how many workers"
    usage: dict[str, Tally] = {}
    "sums over its jobs that are over (`core.accounting.usage`)"
    harvested: PastUse = msgspec.field(default_factory=PastUse)
    "by those of them that were harvested, for its project's fair share"
    accounted_generation: int = 0
    "the newest whose pause is in the allocations' uses"
    accounted_discarded: int = 0
    "steps of `Root.discarded` that are"
    saving: Saving = msgspec.field(default_factory=Saving)
    checkpoints_asked: int = 0
    "how many somebody has asked for by hand"
    pruned: bool = False
    "its logs and ledgers are removed; its report is in its folder"
    checkpoint_folder: str = ""
    "where its checkpoints are; empty: in its own folder"
    ended_at: float | None = None

    @property
    def paused(self) -> str:
        """Why nothing is asked for; empty: it is."""
        return "paused by hand" if self.paused_by_hand else self.harvest_paused


class PrunedRuns(msgspec.Struct, kw_only=True):
    """Sums over all runs that were pruned."""

    usage: dict[str, Tallies] = {}
    "account -> sums"

    def add(self, account: str, used: Tallies, now: float) -> None:
        """Take in what a run has used; `now`: Unix time."""
        sums = self.usage.get(account, {})
        merge(sums, used)
        if sums:
            self.usage[account] = by_month(sums, now)


def account_of(spec: RunSpec) -> str:
    """The Slurm account on which the run's jobs run."""
    given = [word.partition("=")[2] for word in spec.sbatch_options if word.startswith("--account=")]
    return given[-1] if given else NO_ACCOUNT


def _without_pinned(fields: records.Fields) -> records.Fields:
    del fields["pinned"]
    return fields


records.SCHEMAS |= {RunSpec: 1, RunRecord: 1, Allocation: 2, GenerationReport: 1, PrunedRuns: 2}
records.MIGRATIONS |= {
    (Allocation, 1): _without_pinned,
    (PrunedRuns, 1): lambda fields: {"usage": fields["usage"]},
}


class StoredRun(NamedTuple):
    """All records of a run."""

    spec: RunSpec
    record: RunRecord
    roster: Roster
    allocations: dict[str, Allocation]
    "by token"
    generations: Sequence[GenerationReport] = ()
    "those that became complete, the oldest first"


def read_run(run_id: str, stored: dict[str, bytes]) -> StoredRun:
    """Decode a run's records.

    Args:
        run_id: of the run.
        stored: its values, by what comes behind `run/ID/` in their keys.

    Raises:
        Unreadable: one of them is.
        LookupError: one is missing.
    """
    roster = Roster.load(run_id, stored)
    allocations = [records.decode(value, Allocation) for key, value in stored.items() if key.startswith("allocation/")]
    generations = [
        records.decode(value, GenerationReport) for key, value in stored.items() if key.startswith("generation/")
    ]
    return StoredRun(
        records.decode(stored["spec"], RunSpec),
        records.decode(stored["record"], RunRecord),
        roster,
        {a.token: a for a in sorted(allocations, key=lambda a: a.number)},
        sorted(generations, key=lambda report: report.generation),
    )


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
