"""What is concluded from what an allocation's nodes say of their GPUs and their network."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fallow.core.checks.gpu_checks import Found, Link, Measured, NodeFacts, verdicts
from fallow.core.checks.site import Check, Level
from fallow.slurm.parse import folded

CARDS = [Link(f"mlx5_{n}:1", "infiniband", 200.0) for n in range(4)]


def node(name: str, **changes: Any) -> NodeFacts:
    one = NodeFacts(
        node=name,
        devices=["H100"] * 4,
        driver="NVIDIA 580.1",
        runtime="CUDA 13.0",
        library="NCCL 2.29.3",
        communicator="nccl, torch's choice for devices of type cuda",
        links=[*CARDS, Link("eth0", "ethernet", 25.0)],
        peer_memory="kernel module nvidia_peermem",
        variables={},
        compiling=[],
    )
    return msgspec.structs.replace(one, **changes)


def judged(*nodes: NodeFacts, measured: Measured | None = None) -> dict[str, Check]:
    return {check.name: check for check in verdicts(Found([*nodes], measured), folded)}


def test_what_all_nodes_say_is_said_once() -> None:
    found = judged(node("n1"), node("n2"))
    assert {check.level for check in found.values()} == {Level.OK}
    assert found["GPUs"].found == "4 x H100"
    assert found["network"].found.endswith("eth0 25 Gbit/s ethernet")
    assert "variables" not in found


def test_nodes_that_differ_are_named() -> None:
    found = judged(node("n1"), node("n2", driver="NVIDIA 570.9", devices=[]), node("n3"))
    assert (found["driver"].level, found["GPUs"].level) == (Level.WARN, Level.WARN)
    assert found["driver"].found == "n[1,3]: NVIDIA 580.1; n2: NVIDIA 570.9"


@pytest.mark.parametrize(
    ("changes", "name", "level", "words"),
    [
        ({"devices": []}, "GPUs", Level.FAIL, "--gpus-per-node"),
        ({"runtime": ""}, "torch", Level.WARN, "pytorch.org"),
        ({"compiling": ["/usr/include/python3.12/Python.h"]}, "torch.compile", Level.WARN, "python3-dev"),
        ({"variables": {"NCCL_IB_HCA": "mlx5_0"}}, "variables", Level.OK, ""),
    ],
)
def test_what_is_missing_has_a_remedy(changes: dict[str, Any], name: str, level: Level, words: str) -> None:
    check = judged(node("n1", **changes))[name]
    assert check.level is level
    assert words in check.fix


@pytest.mark.parametrize(("seconds", "level"), [(4.5e-3, Level.OK), (20e-3, Level.WARN)])
def test_the_bandwidth_is_compared_with_what_the_cards_allow(seconds: float, level: Level) -> None:
    measured = Measured(ranks=8, size_bytes=256 << 20, seconds=seconds)
    check = judged(node("n1"), node("n2"), measured=measured)["all-reduce"]
    assert measured.bus_gb_s == pytest.approx(2 * 7 / 8 * (256 << 20) / seconds / 1e9)
    assert check.level is level
    assert "allow 100 GB/s" in check.found
