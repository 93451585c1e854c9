"""Reads what workers wrote about the samples they used, and has it audited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from fallow.core.audit import Record, audit
from fallow.core.roster import Roster
from fallow.model import SampleReport


def read_ledgers(folder: Path) -> Iterator[Record]:
    """All whole records of all workers' ledgers; a torn last one (the worker was killed writing it) is left out."""
    decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
    for path in sorted(folder.glob("*.ledger")):
        with path.open("rb") as file:
            while len(head := file.read(2)) == 2:
                data = file.read(int.from_bytes(head, "big"))
                if len(data) < int.from_bytes(head, "big"):
                    break
                yield decoder.decode(data)


def count_samples(folder: Path, roster: Roster) -> SampleReport:
    """Audit one run: consumed, lost and duplicated samples of its finished steps."""
    first_steps = {g.generation: g.first_step for g in roster.history if g.first_step is not None}
    finished = max((w.step for w in roster.workers.values()), default=0)
    steps = roster.final.steps if roster.final is not None else finished
    return audit(read_ledgers(folder), first_steps, steps, roster.global_batch or 0)
