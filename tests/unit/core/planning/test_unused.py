"""Every idle node that is not used has a reason."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from builders import NOW, allocation, node, preempting, request, waits
from fallow.core.allocations import Allocation
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.model import ClusterState
from planning import planned

ASKED = "asked for: a request waits for Slurm to start it"


def unused(
    state: ClusterState, demands: list[Demand], rules: HarvestRules = HarvestRules(), mine: tuple[Allocation, ...] = ()
) -> Mapping[str, str]:
    found = planned(state, demands, mine, rules)
    idle = {n.node for n in state.nodes if n.state == "IDLE" and not n.flags}
    assert found.unused.keys() == idle
    assert sum(1 for why in found.unused.values() if why.startswith("asked for:")) >= len(found.asks)
    return found.unused


def three_idle_nodes() -> ClusterState:
    """Of these somebody else has n2 in 50 s."""
    soon = waits("1", planned_nodes=["n2"], start_at=NOW + 50, reason="Priority", partition="urgent")
    return preempting([node("n1"), node("n2"), node("n3"), node("n4", "ALLOCATED")], [soon])


MOST = "limited: as many nodes are held as [harvest] max_nodes allows"
MOST_OF_P = "limited: as many nodes of p are held as [harvest] partition_nodes allows"
GREEDY = Demand("r", 3, barred=frozenset({"n3"}))


def test_every_idle_node_that_is_not_used_has_a_reason() -> None:
    state, barred = three_idle_nodes(), "barred: the run does without it"
    needless = "not needed: no run would gain from it, or may pay for it"
    assert unused(state, [Demand("r", 1, barred=GREEDY.barred)]) == {"n1": ASKED, "n2": needless, "n3": barred}
    too_short = "too short: somebody else has it in 50 s, and at least 2 min are asked for"
    assert unused(state, [GREEDY]) == {"n1": ASKED, "n2": too_short, "n3": barred}
    assert set(unused(state, []).values()) == {"not needed: there is no run"}
    assert set(unused(state, [Demand("r", 0)]).values()) == {"not needed: no run wants more nodes"}


@pytest.mark.parametrize(
    ("rules", "hurried", "why"),
    [
        (HarvestRules(max_pending=1), [], "too many requests: 1 wait already, as many as may at once"),
        (HarvestRules(max_nodes=1), [], MOST),
        # Of a cap of three, nodes of normal priority have two; those elsewhere are none of a partition's.
        (HarvestRules(max_nodes=3), ["p"] * 2, MOST),
        (HarvestRules(partition_nodes={"p": 3}), ["p"] * 2 + ["normal"] * 4, MOST_OF_P),
    ],
)
def test_a_node_that_a_limit_keeps_idle_names_it(rules: HarvestRules, hurried: list[str], why: str) -> None:
    normal = (allocation(f"t{i}", hurried=True, partition=name) for i, name in enumerate(hurried))
    found = unused(three_idle_nodes(), [GREEDY], rules, (request(), *normal))
    assert (found["n1"], found["n2"]) == (ASKED, why)


@pytest.mark.parametrize(
    ("mode", "rules", "why"),
    [
        ("REQUEUE", HarvestRules(partitions=("other",)), "the configuration does not name the partition"),
        ("OFF", HarvestRules(partitions=("p",), refused={"p": "others' jobs are hidden"}), "others' jobs are hidden"),
    ],
)
def test_idle_nodes_that_are_no_holes_to_us_have_a_reason_too(mode: str, rules: HarvestRules, why: str) -> None:
    state = preempting([node("n1"), node("n2")], preempt_mode=mode)
    assert set(unused(state, [Demand("r", 2)], rules).values()) == {f"not harvested: {why}"}


def test_a_node_that_is_kept_for_others_says_for_whom() -> None:
    state = preempting([node("n1"), node("n2")], [waits("7")], preempt_mode="OFF")
    assert unused(state, [Demand("r", 2)], HarvestRules(allow_without_preemption=True)) == {
        "n1": "kept for others: job 7 of alice can start there",
        "n2": "kept for others: a job that waits is about to start in the partition",
    }
