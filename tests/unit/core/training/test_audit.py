"""The audit of samples, on hand-made records."""

from __future__ import annotations

import msgspec

from fallow.core.training.audit import Done, Fed, Record, Start, audit


def test_steps_of_a_generation_that_was_broken_off_early_count() -> None:
    """Generation 2 computed step 1, then a member died before the newcomer had said that it was there."""
    records: list[Record] = []
    for generation, steps in ((1, [0]), (2, [1]), (3, [2])):
        records.append(Start(generation=generation, first_step=steps[0]))
        for step in steps:
            records.append(Fed(generation=generation, epoch=0, step=step, shard=0, n=4, total=4, crc=step))
            records.append(Done(generation=generation, step=step))
    records.append(Fed(generation=2, epoch=0, step=2, shard=0, n=4, total=4, crc=2))  # done again by generation 3
    report = audit(records, {1: 0, 3: 2}, steps=3, per_step=4)
    assert msgspec.to_builtins(report) == {"consumed": 12, "lost": 0, "duplicated": 0}
