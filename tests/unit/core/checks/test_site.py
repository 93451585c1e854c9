"""What `fallow doctor` concludes from what it has seen."""

from __future__ import annotations

import msgspec
import pytest

from fallow.core.checks import site as checks
from fallow.core.checks.site import Check, Level
from fallow.model import ClusterConfig, ClusterState, PartitionInfo


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
    assert words in check.found
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
    assert warned is not None and warned.level is Level.WARN and "others preempt are: idle" in warned.fix


def test_where_others_could_not_be_served_nothing_is_harvested() -> None:
    refused = {"gpu": "others' jobs cannot be seen"}
    (verdict,) = checks.partitions(cluster(GPU), ["gpu"], True, refused)
    assert (verdict.level, verdict.found) == (Level.FAIL, "not harvested: others' jobs cannot be seen")
    assert "[site]" in verdict.fix
