"""What a run asks for follows from the options it was submitted with."""

from __future__ import annotations

from fallow.core.kinds import Kind
from fallow.head.demands import kind_of
from fallow.model import NodeInfo, RunSpec


def spec(*options: str) -> RunSpec:
    return RunSpec(run="r", name="r", min_nodes=1, max_nodes=4, harvest_options=list(options))


def test_the_options_of_the_submission_say_which_nodes_are_of_use() -> None:
    assert kind_of(spec(), []) == Kind()
    wanted = kind_of(spec("--constraint=ib&v100", "--gres=gpu:v100:2", "--account=a"), [])
    assert wanted == Kind(gpus=2, part_gpus=1, gpu_type="v100", constraint="ib&v100")
    home = NodeInfo(node="n1", state="ALLOCATED", arch="aarch64")
    assert kind_of(spec("--gpus-per-node=4"), [home]) == Kind(arch="aarch64", gpus=4, part_gpus=1)


def test_what_a_script_asks_for_on_a_node_bounds_what_is_asked_for_of_shared_nodes() -> None:
    wanted = kind_of(spec("--gres=gpu:2", "--cpus-per-task=4", "--ntasks-per-node=2", "--mem-per-cpu=1G"), [])
    assert wanted == Kind(gpus=2, part_gpus=1, cpus=8, memory_mb=8192)
    wanted = kind_of(spec("--gpus-per-node=2", "--cpus-per-gpu=6", "--mem=10G"), [])
    assert wanted == Kind(gpus=2, part_gpus=1, cpus=12, memory_mb=10_240)
    assert kind_of(spec("--gres=gpu:2", "--mem-per-gpu=1G"), []).memory_mb == 2048
    assert kind_of(spec("--gres=gpu:2", "--exclusive"), []) == Kind(gpus=2), "whole nodes only"
