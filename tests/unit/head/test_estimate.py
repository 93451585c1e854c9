"""`fallow submit --dry-run`: the planner for a run that does not exist yet."""

from __future__ import annotations

from builders import cluster, node, partition, request
from fallow.core.planning.rules import HarvestRules, Known
from fallow.head.slurm.estimate import estimate
from fallow.model import ClusterState, RunSpec


def idle(nodes: int, mode: str = "REQUEUE") -> ClusterState:
    names = [f"n{i}" for i in range(1, nodes + 1)]
    partitions = [partition("p", names, preempt_mode=mode, max_time_s=7200.0)]
    return cluster([node(name) for name in names], partitions=partitions)


def spec(**more: object) -> RunSpec:
    return RunSpec(**{"run": "", "name": "r", "min_nodes": 1, "max_nodes": 8, **more})  # type: ignore[arg-type]


def test_a_run_that_does_not_exist_yet_is_planned_for() -> None:
    found = estimate(idle(6), spec(), HarvestRules(max_pending=4), [], Known())
    assert (found.idle_nodes, found.nodes, found.notes) == (6, 7, [])
    assert sum(one.nodes for one in found.asks) == 4
    assert {one.partition for one in found.asks} == {"p"}
    assert all(60 < one.minutes <= 120 for one in found.asks)
    # What is asked for already takes its part.
    others = [request("t", run="other")]
    assert estimate(idle(6), spec(), HarvestRules(max_pending=4), others, Known()).nodes == 6
    poor = estimate(idle(6), spec(budget_node_hours=3.0), HarvestRules(), [], Known())
    assert 0 < sum(one.nodes * one.minutes for one in poor.asks) <= 180


def test_why_nothing_would_be_harvested_is_said() -> None:
    state = idle(1, "OFF")
    found = estimate(state, spec(), HarvestRules(), [], Known())
    assert found.asks == []
    (note,) = found.notes
    assert note.startswith("nothing may be harvested in any partition: it is down, not open to your groups, or ")
    named = estimate(state, spec(harvest_partitions=["gone"]), HarvestRules(), [], Known())
    assert named.notes[0] == "there is no partition gone"
    assert estimate(state, spec(max_nodes=1), HarvestRules(), [], Known()).notes == []
