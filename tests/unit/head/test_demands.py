"""What a run asks for follows from its options, also before it exists."""

from msgspec.structs import replace

from builders import NOW, allocation, cluster, node, partition, request
from fallow.core.kinds import Kind, with_reservations
from fallow.core.planning.knowledge import Knowledge
from fallow.core.planning.requests import Ask
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.head.slurm.demands import estimate, kind_of
from fallow.model import ClusterState, ReservationInfo, RunSpec
from planning import actions, planned


def spec(*options: str) -> RunSpec:
    return RunSpec(run="r", name="r", min_nodes=1, max_nodes=4, harvest_options=list(options))


def test_the_options_of_the_submission_say_which_nodes_are_of_use() -> None:
    assert kind_of(spec(), []) == Kind()
    wanted = kind_of(spec("--constraint=ib&v100", "--gres=gpu:v100:2", "--account=a"), [])
    assert wanted == Kind(gpus=2, part_gpus=1, gpu_type="v100", constraint="ib&v100")
    home = node("n1", "ALLOCATED", arch="aarch64")
    assert kind_of(spec("--gpus-per-node=4"), [home]) == Kind(arch="aarch64", gpus=4, part_gpus=1)


def test_what_a_script_asks_for_on_a_node_bounds_what_is_asked_for_of_shared_nodes() -> None:
    wanted = kind_of(spec("--gres=gpu:2", "--cpus-per-task=4", "--ntasks-per-node=2", "--mem-per-cpu=1G"), [])
    assert wanted == Kind(gpus=2, part_gpus=1, cpus=8, memory_mb=8192)
    wanted = kind_of(spec("--gpus-per-node=2", "--cpus-per-gpu=6", "--mem=10G"), [])
    assert wanted == Kind(gpus=2, part_gpus=1, cpus=12, memory_mb=10_240)
    assert kind_of(spec("--gres=gpu:2", "--mem-per-gpu=1G"), []).memory_mb == 2048
    assert kind_of(spec("--gres=gpu:2", "--exclusive"), []) == Kind(gpus=2), "whole nodes only"


def test_the_nodes_of_a_reservation_are_for_runs_that_name_it() -> None:
    mine = ReservationInfo(reservation="mine", nodes=["n1"], start_at=NOW - 60.0, end_at=NOW + 3600.0)
    open_to_all = partition("p", ["n1", "n2"], preempt_mode="REQUEUE")
    state = cluster([node("n1", "IDLE", "RESERVED"), node("n2")], partitions=[open_to_all], reservations=[mine])
    inside, outside = kind_of(spec("--reservation=mine"), []), kind_of(spec(), [])
    demands = [Demand("in", 3, kind=inside), Demand("out", 3, kind=outside)]
    asked = actions(with_reservations(state, ["mine"]), demands, [], HarvestRules(max_pending=8))
    # The hole in the reservation ends with it.
    found = [(wish.run, wish.minutes) for wish in asked if isinstance(wish, Ask)]
    assert found == [("in", 60), ("out", 120)]
    (first, _) = (wish for wish in asked if isinstance(wish, Ask))
    assert "n1" not in first.exclude
    # Nobody has to leave it because it has begun.
    held = allocation("h", run="in", partition="", nodes=["n1"])
    assert planned(with_reservations(state, ["mine"]), demands, [held], HarvestRules()).give_backs == ()
    assert [each.token for each in planned(state, demands, [held], HarvestRules()).give_backs] == ["h"]
    later = replace(state, reservations=[replace(mine, start_at=NOW + 3600.0, end_at=NOW + 7200.0)])
    assert with_reservations(later, ["mine"]) is later and with_reservations(state, ["other"]) is state


def idle(nodes: int, mode: str = "REQUEUE") -> ClusterState:
    names = [f"n{i}" for i in range(1, nodes + 1)]
    partitions = [partition("p", names, preempt_mode=mode, max_time_s=7200.0)]
    return cluster([node(name) for name in names], partitions=partitions)


def new_run(**more: object) -> RunSpec:
    return RunSpec(**{"run": "", "name": "r", "min_nodes": 1, "max_nodes": 8, **more})  # type: ignore[arg-type]


def test_a_run_that_does_not_exist_yet_is_planned_for() -> None:
    found = estimate(idle(6), new_run(), HarvestRules(max_pending=4), [], Knowledge())
    assert (found.idle_nodes, found.nodes, found.notes) == (6, 7, [])
    assert sum(one.nodes for one in found.asks) == 4
    assert {one.partition for one in found.asks} == {"p"}
    assert all(60 < one.minutes <= 120 for one in found.asks)
    # What is asked for already takes its part.
    others = [request("t", run="other")]
    assert estimate(idle(6), new_run(), HarvestRules(max_pending=4), others, Knowledge()).nodes == 6
    poor = estimate(idle(6), new_run(budget_node_hours=3.0), HarvestRules(), [], Knowledge())
    assert 0 < sum(one.nodes * one.minutes for one in poor.asks) <= 180


def test_why_nothing_would_be_harvested_is_said() -> None:
    state = idle(1, "OFF")
    found = estimate(state, new_run(), HarvestRules(), [], Knowledge())
    assert found.asks == []
    (note,) = found.notes
    assert note.startswith("nothing may be harvested in any partition: it is down, not open to your groups, or ")
    named = estimate(state, new_run(harvest_partitions=["gone"]), HarvestRules(), [], Knowledge())
    assert named.notes[0] == "there is no partition gone"
    assert estimate(state, new_run(max_nodes=1), HarvestRules(), [], Knowledge()).notes == []
