"""What a node says of its GPUs and its network, read from a file system made for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from fallow.nodecheck.__main__ import FolderGathers
from fallow.nodecheck.facts import look_around

HOST = torch.device("cpu")


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_of_a_node_with_cards_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        {
            "sys/module/nvidia/version": "580.1",
            "sys/module/nvidia_peermem/refcnt": "1",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
            "sys/class/infiniband/mlx5_1/ports/1/rate": "10 Gb/sec",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
            "sys/class/net/eth0/speed": "25000",
            "sys/class/net/eth0/operstate": "up",
            "sys/class/net/eth0/device/vendor": "0x15b3",
            "sys/class/net/docker0/speed": "10000",
            "sys/class/net/docker0/operstate": "up",
        },
    )
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    monkeypatch.setenv("NOT_NCCL", "x")
    monkeypatch.setenv("CC", "cc")
    found = look_around("n1", [HOST], tmp_path)
    assert (found.says["driver"], found.says["GPUDirect"]) == ("NVIDIA 580.1", "kernel module nvidia_peermem")
    assert found.says["network"] == "mlx5_0:1 200 Gbit/s infiniband, eth0 25 Gbit/s ethernet"
    assert (found.rate_gbit_s, found.devices) == (200.0, [])
    assert "NCCL_IB_HCA=mlx5_0" in found.says["variables"].split() and "NOT_NCCL" not in found.says["variables"]
    headers = "python3-dev" in found.fixes.get("torch.compile", "")
    assert headers and found.says["torch.compile"].endswith("Python.h missing")


def test_workers_meet_in_a_folder(tmp_path: Path) -> None:
    one, other = FolderGathers(tmp_path, 0, 2), FolderGathers(tmp_path, 1, 2)
    one.give("a", b"one")
    assert other.missing("a") == [1]
    assert one.parts("a", 0.01) is None
    other.give("a", b"two")
    assert other.missing("a") == []
    assert one.parts("a", 1.0) == other.parts("a", 1.0) == [b"one", b"two"]
    assert one.missing("b") == [0, 1]
