"""Nodes that power saving has put to sleep are left asleep."""

from __future__ import annotations

from typing import Any

import pytest

from builders import cluster, gpu_node, partition, preempting, request, runs, waits
from fallow.core.kinds import Kind
from fallow.core.neighbour.needs import assess
from fallow.core.planning.plan import plan
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.core.planning.situation import Situation
from planning import asked

RULES = HarvestRules(max_pending=8, ahead=2)


@pytest.mark.parametrize("flag", ["POWERED_DOWN", "POWERING_UP"])
def test_no_request_can_be_given_a_node_that_sleeps(flag: str) -> None:
    asleep = [gpu_node("n2", "IDLE", flag), gpu_node("n3", "IDLE", "CLOUD", flag)]
    state = preempting([gpu_node("n1"), *asleep, gpu_node("n4", "IDLE", "CLOUD")])
    assert [ask.exclude for ask in asked(state, [Demand("r", 4)], [], RULES)] == [("n2", "n3")] * 2


def test_requests_that_wait_for_nodes_of_others_leave_sleeping_nodes_out_too() -> None:
    nodes = [gpu_node("n1", "ALLOCATED"), gpu_node("n2", "IDLE", "POWERED_DOWN")]
    found = asked(preempting(nodes, [runs("7", ["n1"])]), [Demand("r", 4)], [], RULES)
    assert [(ask.ahead, ask.exclude) for ask in found] == [(True, ("n2",))] * 2


ASLEEP = gpu_node("n2", "IDLE", "POWERING_DOWN")
X86 = gpu_node("n3", arch="x86_64")


@pytest.mark.parametrize(
    ("more", "excluded", "kind", "why"),
    [
        ({}, set(), Kind(), "Slurm might give it n2, or wake that node for it"),
        ({}, {"n2"}, Kind(), ""),
        ({}, {"n2", "n3"}, Kind(), "n3 is awake and idle, and it leaves out that node"),
        ({}, {"n2", "n3"}, Kind(arch="aarch64"), ""),  # n3 is left out for another reason
        ({"reason": "Booting"}, set(), Kind(), ""),  # it has its node
    ],
)
def test_a_request_that_could_wake_a_node_by_now_is_made_anew(
    more: dict[str, Any], excluded: set[str], kind: Kind, why: str
) -> None:
    state = preempting([gpu_node("n1", "ALLOCATED"), ASLEEP, X86])
    waiting, left_out = request(**more), {"h": frozenset(excluded)}
    found = plan(Situation(state, [Demand("r", 0, kind=kind)], [waiting], RULES, excluded=left_out))
    assert "".join(wish.reason for wish in found.withdrawals) == why


def test_a_node_that_boots_for_us_is_given_back_like_any_other() -> None:
    partitions = [partition("p", ["n1"]), partition("urgent", ["n1"], priority_tier=10)]
    boots = runs("12", ["n1"], state="CONFIGURING", name="h")
    state = cluster([gpu_node("n1", "ALLOCATED")], [boots, waits(partition="urgent")], partitions=partitions)
    mine = request(reason="Booting", nodes=["n1"], minutes=10, job_id="12")
    assert [wish.token for wish in assess(state, [mine]).give_backs] == ["h"]
