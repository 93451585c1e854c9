"""Which devices the workers of a node get."""

from __future__ import annotations

import pytest

from fallow.agent.place import Place


@pytest.mark.parametrize(
    ("slots", "shares"),
    [
        (1, ["0,1,2,3"]),
        (2, ["0,1", "2,3"]),
        (3, ["0", "1", "2,3"]),
        (4, ["0", "1", "2", "3"]),
        (6, ["0", "1", "2", "3", "0", "1"]),
    ],
)
def test_every_device_of_a_node_has_a_worker(slots: int, shares: list[str]) -> None:
    place = Place(node="n1", job_id="1", slots=slots, devices=("0", "1", "2", "3"), address="10.0.0.1")
    assert [place.environment(index)["CUDA_VISIBLE_DEVICES"] for index in range(slots)] == shares
