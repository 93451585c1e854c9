"""Records of runs in the store: their schema, reading, salvage of damaged ones, and sums over pruned runs.

When an ended run is pruned, one write removes its record and adds its usage to `PrunedRuns`. So `fallow usage` shows
the same totals before and after. These sums grow with days, accounts and partitions
(`core.accounting.usage.by_month`).
"""

import sys
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
"""Key of the owner's default account."""


class RunRecord(msgspec.Struct, kw_only=True):
    """Record of a run besides its spec, its membership and its allocations."""

    slots: int | None = None
    "workers per node, as reported by the first agent; None: no agent has come yet"
    next_allocation: int = 0
    base_wanted: bool = True
    "False once the user cancelled the base job; the head does not submit it again"
    refusals: dict[str, int] = {}
    "partition -> number of refusals since the last accepted submission; key '': the base job"
    fruitless: LaunchFailures = msgspec.field(default_factory=LaunchFailures)
    "jobs that ended before an agent came"
    cancelled: Cancels = msgspec.field(default_factory=Cancels)
    "harvest jobs that somebody else cancelled"
    harvest_paused: str = ""
    "reason of an automatic pause: too many jobs were refused, failed or were cancelled; empty: not paused"
    paused_by_hand: bool = False
    drained: list[str] = []
    "nodes that somebody drained; the run avoids them until it is resumed"
    spent_node_s: float = 0.0
    "node-seconds of the budget that dropped allocations have spent"
    curve: Curve = msgspec.field(default_factory=Curve)
    "measured speed by number of workers"
    usage: dict[str, Tally] = {}
    "sums over its finished jobs (`core.accounting.usage`)"
    harvested: PastUse = msgspec.field(default_factory=PastUse)
    "use by its finished harvest jobs, for its project's fair share"
    accounted_generation: int = 0
    "newest generation whose pause is part of the allocations' uses"
    accounted_discarded: int = 0
    "steps of `Root.discarded` that are part of the allocations' uses"
    saving: Saving = msgspec.field(default_factory=Saving)
    checkpoints_asked: int = 0
    "number of checkpoints requested by hand"
    pruned: bool = False
    "True once its logs and ledgers are removed; its report is in its folder"
    checkpoint_folder: str = ""
    "folder of its checkpoints; empty: in the run's own folder"
    ended_at: float | None = None

    @property
    def paused(self) -> str:
        """Reason why the run requests no nodes; empty: it requests nodes."""
        return "paused by hand" if self.paused_by_hand else self.harvest_paused


class PrunedRuns(msgspec.Struct, kw_only=True):
    """Sums over all runs that were pruned."""

    usage: dict[str, Tallies] = {}
    "account -> its sums"

    def add(self, account: str, tallies: Tallies, now: float) -> None:
        """Add the usage of a run; `now`: Unix time."""
        sums = self.usage.get(account, {})
        merge(sums, tallies)
        if sums:
            self.usage[account] = by_month(sums, now)


def account_of(spec: RunSpec) -> str:
    """The Slurm account on which the run's jobs run."""
    accounts = [word.partition("=")[2] for word in spec.sbatch_options if word.startswith("--account=")]
    return accounts[-1] if accounts else NO_ACCOUNT


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
    "complete generations, oldest first"


def read_run(run_id: str, stored: dict[str, bytes]) -> StoredRun:
    """Decode a run's records.

    Args:
        run_id: id of the run.
        stored: its values by key, without the prefix `run/ID/`.

    Raises:
        Unreadable: a record cannot be decoded.
        LookupError: a record is missing.
    """
    roster = Roster.load(run_id, stored)
    allocations = [records.decode(value, Allocation) for key, value in stored.items() if key.startswith("allocation/")]
    generations = [
        records.decode(value, GenerationReport) for key, value in stored.items() if key.startswith("generation/")
    ]
    for report in generations:
        report.members[:] = map(sys.intern, report.members)  # a thousand reports may have a thousand names each
    return StoredRun(
        records.decode(stored["spec"], RunSpec),
        records.decode(stored["record"], RunRecord),
        roster,
        {a.token: a for a in sorted(allocations, key=lambda a: a.number)},
        sorted(generations, key=lambda report: report.generation),
    )


def salvage(paths: Paths, run_id: str, stored: Mapping[str, bytes], now: float) -> StoredRun:
    """Build a run from its readable records, so that the head can end it.

    Args:
        paths: files of the head.
        run_id: id of the run.
        stored: its values in the store, by key.
        now: Unix time.
    """
    try:
        spec = records.decode(stored.get("spec", b""), RunSpec)
    except Unreadable:
        spec = RunSpec(run=run_id, name=run_id.rpartition("-")[0] or run_id, min_nodes=1, max_nodes=1, created_at=now)
    allocations = _of_records(stored)
    tokens = {allocation.token for allocation in allocations}
    # Each live allocation has a key file.
    allocations += [a for a in _of_key_files(paths, run_id, now) if a.token not in tokens]
    for number, allocation in enumerate(allocations):
        # Its workers are unknown. Once a poll shows its job, the head cancels the job.
        allocation.agents = {}
        allocation.sent_by = allocation.sent_by or now + number
    numbers = [allocation.number + 1 for allocation in allocations]
    try:
        record = records.decode(stored.get("record", b""), RunRecord)
    except Unreadable:
        record = RunRecord()
    record.base_wanted, record.next_allocation = False, max([record.next_allocation, *numbers])
    root = Root(run=run_id, minimum=spec.min_nodes, maximum=spec.max_nodes, limit=spec.max_nodes)
    return StoredRun(spec, record, Roster(root), {a.token: a for a in allocations})


def _of_records(stored: Mapping[str, bytes]) -> list[Allocation]:
    allocations: list[Allocation] = []
    for key, value in stored.items():
        if key.startswith("allocation/"):
            try:
                # Whatever version wrote the record: use the fields that this version understands.
                raw: Any = msgspec.msgpack.decode(value)
                allocation = msgspec.convert(raw[1], Allocation)
            except (msgspec.MsgspecError, ValueError, RecursionError, TypeError, LookupError):
                continue
            if allocation.token == key.removeprefix("allocation/"):
                allocations.append(allocation)
    return sorted(allocations, key=lambda allocation: allocation.number)


def _of_key_files(paths: Paths, run_id: str, now: float) -> list[Allocation]:
    allocations: list[Allocation] = []
    for file in sorted(paths.run(run_id).keys.glob("*.json")):
        try:
            key = read_struct(file, KeyFile)
        except (FallowError, OSError):
            continue
        kind = AllocationKind(key.kind)
        allocations.append(
            Allocation(token=key.token, run=run_id, kind=kind, public_key=key.public_key, requested_at=now, sent_by=now)
        )
    return allocations
