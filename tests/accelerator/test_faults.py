"""A toy training without a fault raises no alarm; with any of 16 faults it is found, whatever the timing."""

from __future__ import annotations

import re

import pytest

import accelerator
from accelerator import toy_training
from accelerator.crew import Member, on_both
from accelerator.toy_training import FAULTS, Training


@on_both
def test_a_training_without_a_fault_raises_no_alarm_and_keeps_the_members_alike(member: Member) -> None:
    *losses, weights = Training(member).run()
    assert losses[-1] < losses[0]
    member.store.set(f"weights/{member.rank}", str(weights))
    assert {float(member.store.get(f"weights/{rank}")) for rank in range(member.size)} == {weights}


@on_both
@pytest.mark.parametrize("fault", [fault.__name__ for fault in FAULTS])
def test_a_fault_is_found(member: Member, fault: str) -> None:
    broken: type[Training] = getattr(toy_training, fault)
    training = broken(member)
    found = ""
    try:
        training.run()
    except Exception as error:
        found = str(error)
    member.store.set(f"found/{member.rank}", found)
    texts = [member.store.get(f"found/{rank}").decode() for rank in range(member.size)]
    training.group.abort()  # not earlier: the other would see a lost peer instead of its fault
    assert re.search(FAULTS[broken], texts[0]), texts
    accelerator.reset()
