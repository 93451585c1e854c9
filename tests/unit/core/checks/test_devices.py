"""Which GPUs the workers of a node get."""

from __future__ import annotations

import pytest

from fallow.agent.place import Place
from fallow.core.checks.devices import Devices, visible


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
    place = Place("n1", "1", slots, devices, "10.0.0.1", "10.0.0.1")
    assert devices.count == 4
    assert [place.environment(index)[name] for index in range(slots)] == shares
    assert {place.environment(index)["LOCAL_RANK"] for index in range(slots)} == {"0"}


def test_without_devices_a_worker_has_its_number() -> None:
    devices = visible({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, amd=True)
    place = Place("n1", "1", 2, devices, "10.0.0.1", "10.0.0.1")
    assert devices == Devices({}, amd=True)
    assert place.environment(1) == {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_what_hip_reads_counts_within_what_rocr_lets_through() -> None:
    named = dict.fromkeys(["ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"], "4,5,6,7")
    on_amd, elsewhere = (visible(named, amd=amd).share(1, 2) for amd in (True, False))
    assert on_amd == {
        "ROCR_VISIBLE_DEVICES": "6,7", "CUDA_VISIBLE_DEVICES": "0,1", "GPU_DEVICE_ORDINAL": "0,1"
    }  # fmt: skip
    assert elsewhere == dict.fromkeys(named, "6,7")
    assert visible({"HIP_VISIBLE_DEVICES": "4,5"}, amd=True).share(1, 2) == {"HIP_VISIBLE_DEVICES": "5"}
