"""Verdicts about a site, and about its nodes' GPUs and network."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fallow.agent.launch import slot_environment
from fallow.core.checks import site as checks
from fallow.core.checks.devices import Devices, visible
from fallow.core.checks.gpu_checks import AllocationFacts, AllReduceTiming, NodeFacts, verdicts
from fallow.core.checks.site import Check, Level
from fallow.model import ClusterConfig, ClusterState, PartitionInfo
from fallow.slurm.parse import folded


def config(**changes: object) -> ClusterConfig:
    values = {"cluster": "c", "slurm_version": "22.05.8", **changes}
    return ClusterConfig(**values)  # type: ignore[arg-type]


def cluster(*partitions: PartitionInfo) -> ClusterState:
    return ClusterState(at=0.0, nodes=[], jobs=[], partitions=list(partitions))


def multifactor(**weights: int) -> ClusterConfig:
    return config(priority_type="priority/multifactor", priority_weights=weights)


LOW = PartitionInfo(partition="low", nodes=["n1"], preempt_mode="REQUEUE", grace_s=30)
GPU = PartitionInfo(partition="gpu", nodes=["n1"])


@pytest.mark.parametrize(
    ("check", "level", "words"),
    [
        (checks.slurm_commands(["srun"]), Level.FAIL, "srun"),
        (checks.head_address("127.0.1.1", True, True), Level.FAIL, "127.0.1.1 is loopback"),
        (checks.head_address(None, True, False), Level.FAIL, "no network address"),
        (checks.slurm_version(config(slurm_version="20.11.9")), Level.WARN, "20.11.9"),
        (checks.scheduler(config(backfill_interval_s=120.0)), Level.WARN, "cycle 120 s"),
        (checks.scheduler(config(backfill_interval_s=-1.0)), Level.WARN, "off"),
        (checks.priority(multifactor(Age=1000, QOS=99_000), 100_000), Level.WARN, "nice 100001 (configured: 100000"),
        (checks.priority(multifactor(), 100_000), Level.WARN, "weights: none; no --nice is large enough"),
        (checks.private_data(config(private_data=["jobs"])), Level.WARN, "jobs"),
        (checks.private_data(config(private_data=["nodes"])), Level.FAIL, "nodes"),
        (checks.clock(None), Level.WARN, "not known"),
        (checks.state_folder("/s", None, True), Level.WARN, "local"),
        (checks.runtime_folder("/r", "nfs"), Level.FAIL, "nfs"),
        (checks.store(None, False), Level.FAIL, "no redis-server"),
    ],
)
def test_verdicts(check: Check, level: Level, words: str) -> None:
    assert check.level is level
    assert words in check.text
    assert check.fix or level is Level.OK


def test_what_may_be_harvested() -> None:
    for partitions, named, allowed, levels in (
        ([GPU], [], False, {"harvest": Level.WARN}),
        ([GPU], ["gpu"], False, {"harvest gpu": Level.WARN}),
        ([GPU], ["gone"], True, {"harvest": Level.FAIL}),
        ([PartitionInfo(partition="s", nodes=[], preempt_mode="SUSPEND")], ["s"], False, {"harvest s": Level.FAIL}),
        ([PartitionInfo(partition="d", nodes=[], up=False)], ["d"], False, {"harvest d": Level.WARN}),
    ):
        assert {c.name: c.level for c in checks.partitions(cluster(*partitions), named, allowed, {})} == levels


def test_a_qos_for_harvest_jobs_that_nobody_preempts_is_told() -> None:
    plain = ClusterConfig(cluster="c", slurm_version="25.11.1", preempt_type="preempt/partition_prio")
    by_qos = msgspec.structs.replace(
        plain, preempt_type="preempt/qos", qos_preempt_modes={"idle": "REQUEUE", "calm": "SUSPEND"}
    )
    assert checks.harvest_qos(plain, "idle") is None and checks.harvest_qos(by_qos, None) is None
    assert checks.harvest_qos(by_qos, "idle") == Check("harvest qos", Level.OK, "idle: others preempt its jobs")
    warned = checks.harvest_qos(by_qos, "calm")
    assert warned is not None and warned.level is Level.WARN and "idle" in warned.fix and "calm" not in warned.fix


def test_where_others_could_not_be_served_nothing_is_harvested() -> None:
    refused = {"gpu": "others' jobs cannot be seen"}
    (verdict,) = checks.partitions(cluster(GPU), ["gpu"], True, refused)
    assert (verdict.level, verdict.text) == (Level.FAIL, "not harvested: others' jobs cannot be seen")
    assert "[site]" in verdict.fix


def node(name: str, **changes: Any) -> NodeFacts:
    says = {"driver": "NVIDIA 580.1", "torch": "for CUDA 13.0"}
    one = NodeFacts(node=name, devices=["H100"] * 4, rate_gbit_s=800.0, findings=says, fixes={})
    return msgspec.structs.replace(one, **changes)


def judged(*nodes: NodeFacts, measured: AllReduceTiming | None = None) -> dict[str, Check]:
    return {check.name: check for check in verdicts(AllocationFacts([*nodes], measured), folded)}


def test_what_all_nodes_say_is_said_once_and_nodes_that_differ_are_named() -> None:
    found = judged(node("n1"), node("n2"))
    assert {(name, check.level, check.text) for name, check in found.items()} == {
        ("GPUs", Level.OK, "4 x H100"),
        ("driver", Level.OK, "NVIDIA 580.1"),
        ("torch", Level.OK, "for CUDA 13.0"),
    }
    other = node("n2", findings={"driver": "NVIDIA 570.9", "variables": "FI_X=1"}, devices=[])
    found = judged(node("n1"), other, node("n3"))
    assert (found["GPUs"].level, found["driver"].level) == (Level.WARN, Level.WARN)
    assert found["driver"].text == "n[1,3]: NVIDIA 580.1; n2: NVIDIA 570.9"
    assert found["variables"].text == "n[1,3]: none; n2: FI_X=1"


def test_what_is_missing_has_a_remedy() -> None:
    found = judged(node("n1", devices=[]), node("n2", devices=[], fixes={"torch": "install it"}))
    assert [(found[name].level, found[name].fix) for name in ("GPUs", "torch", "driver")] == [
        (Level.FAIL, "ask for GPUs: --gpus-per-node=N"),
        (Level.WARN, "install it"),
        (Level.OK, ""),
    ]


@pytest.mark.parametrize(("seconds", "level"), [(4.5e-3, Level.OK), (20e-3, Level.WARN)])
def test_the_bandwidth_is_compared_with_what_the_cards_allow(seconds: float, level: Level) -> None:
    measured = AllReduceTiming(ranks=8, size_bytes=256 << 20, seconds=seconds)
    check = judged(node("n1"), node("n2"), measured=measured)["all-reduce"]
    assert measured.bus_gb_s == pytest.approx(2 * 7 / 8 * (256 << 20) / seconds / 1e9)
    assert check.level is level
    assert "allow 100 GB/s" in check.text


def test_what_a_node_with_cards_and_gpus_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from fallow.nodecheck.facts import look_around

    files = {
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
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    monkeypatch.setenv("NOT_NCCL", "x")
    monkeypatch.setenv("CC", "cc")
    found = look_around("n1", [torch.device("cpu")], tmp_path)
    assert (found.findings["driver"], found.findings["GPUDirect"]) == ("NVIDIA 580.1", "kernel module nvidia_peermem")
    assert found.findings["network"] == "mlx5_0:1 200 Gbit/s infiniband, eth0 25 Gbit/s ethernet"
    assert (found.rate_gbit_s, found.devices) == (200.0, [])
    assert "NCCL_IB_HCA=mlx5_0" in found.findings["variables"].split() and "NOT_NCCL" not in found.findings["variables"]
    headers = "python3-dev" in found.fixes.get("torch.compile", "")
    assert headers and found.findings["torch.compile"].endswith("Python.h missing")


@pytest.mark.parametrize(
    ("slots", "shares"),
    [
        (2, ["0,1", "2,3"]),
        (3, ["0", "1", "2,3"]),
        (6, ["0", "1", "2", "3", "0", "1"]),
    ],
)
@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"])
def test_every_device_of_a_node_has_a_worker(name: str, slots: int, shares: list[str]) -> None:
    devices = visible({name: "0, 1,2,3"}, amd=False)
    assert devices.count == 4
    got = [slot_environment(devices, slot, slots) for slot in range(slots)]
    assert [each[name] for each in got] == shares
    assert {each["LOCAL_RANK"] for each in got} == {"0"}


def test_without_devices_a_worker_has_its_number() -> None:
    devices = visible({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, amd=True)
    assert devices == Devices({}, amd=True)
    assert slot_environment(devices, 1, 2) == {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_what_hip_reads_counts_within_what_rocr_lets_through() -> None:
    named = dict.fromkeys(["ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"], "4,5,6,7")
    on_amd, elsewhere = (visible(named, amd=amd).share(1, 2) for amd in (True, False))
    assert on_amd == {
        "ROCR_VISIBLE_DEVICES": "6,7", "CUDA_VISIBLE_DEVICES": "0,1", "GPU_DEVICE_ORDINAL": "0,1"
    }  # fmt: skip
    assert elsewhere == dict.fromkeys(named, "6,7")
    assert visible({"HIP_VISIBLE_DEVICES": "4,5"}, amd=True).share(1, 2) == {"HIP_VISIBLE_DEVICES": "5"}
