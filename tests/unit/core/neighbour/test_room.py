"""Which nodes a job that waits could be given."""

from __future__ import annotations

from typing import Any

import pytest

from builders import NOW, node, runs, waits
from fallow.core.neighbour.constraint import alternatives
from fallow.core.neighbour.waiting import array_elements
from fallow.model import ReservationInfo
from neighbours import FOUR, THREE, given_back, held, standing


def test_a_job_array_counts_as_many_elements_as_it_may_start() -> None:
    jobs = [waits("1", array_job_id="1", array_tasks="2-9%3"), runs("5", ["n9"], array_job_id="1")]
    assert given_back(standing(FOUR, jobs, THREE)) == ["n3"], "two elements, one of them on the idle node"
    two = standing(FOUR, [waits("1", array_job_id="1", array_tasks="2-4")], THREE)
    assert two.delayed_jobs == {"1": {"ours-n3", "ours-n2"}}
    assert array_elements("1-9:2,12%3") == (6, 3)
    assert array_elements("7") == (1, None)


def test_a_heterogeneous_job_starts_as_a_whole_or_not_at_all() -> None:
    parts = [waits("10", 1, het_job_id="10", required_nodes=["n3"]), waits("11", 2, het_job_id="10", reason="None")]
    assert given_back(standing(FOUR, parts, THREE)) == ["n3", "n2"]
    parts[1] = waits("11", 4, het_job_id="10")
    assert given_back(standing(FOUR, parts, THREE)) == []


def test_reservations() -> None:
    soon = [ReservationInfo(reservation="maint", nodes=["n2", "n3"], start_at=NOW + 600, end_at=NOW + 9000)]
    long, short = waits("1", 2, time_limit_s=601.0), waits("1", 2, time_limit_s=600.0)
    assert given_back(standing(FOUR, [long], THREE, reservations=soon)) == ["n1"]
    assert given_back(standing(FOUR, [short], THREE, reservations=soon)) == ["n3"]
    inside = [ReservationInfo(reservation="exam", nodes=["n2"], start_at=NOW - 1, end_at=NOW + 9000)]
    member = waits("1", 1, time_limit_s=60.0, reservation="exam")
    assert given_back(standing(FOUR, [member], THREE, reservations=inside)) == ["n2"]
    flagged = [FOUR[0], node("n2", "ALLOCATED", "RESERVED"), *FOUR[2:]]
    assert given_back(standing(flagged, [member], THREE, reservations=inside)) == ["n2"]
    assert given_back(standing(flagged, [waits("1", 3)], THREE)) == ["n3", "n1"], "of one that is not listed"


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ({"memory_mb_per_node": 2000}, {"memory_mb_per_node": 2001}, False),
        ({"gpus_per_node": 1, "gpu_type": "a"}, {"gpus_per_node": 1, "gpu_type": "a"}, False),
        ({"gpus_per_node": 1, "gpu_type": "a"}, {"gpus_per_node": 1, "gpu_type": "b"}, True),
        ({}, {"exclusive": True}, False),
        ({"user": "bob"}, {"exclusive_user": True}, False),
        ({"user": "bob", "exclusive_user": True}, {}, False),
    ],
)
def test_two_jobs_on_one_node(one: dict[str, Any], other: dict[str, Any], together: bool) -> None:
    nodes = [node("n1", gpu_types={"a": 1, "b": 1}, gpus=2), node("n2", gpu_types={"a": 2, "b": 2}, gpus=4)]
    jobs = [waits("1", **{"exclusive": False, **one}), waits("2", **{"exclusive": False, **other})]
    assert standing(nodes, jobs).kept_nodes == {"p": {"n1"} if together else {"n1", "n2"}}


@pytest.mark.parametrize(
    ("text", "features", "fits"),
    [
        ("a,b", "a", [False]),
        ("a|b&c", "a", [True]),
        ("(a|b)&c", "a", [False]),
        ("(a|b)&c", "bc", [True]),
        ("[a|b]", "b", [False, True]),
        ("[a|b]&c", "bc", [False, True]),
        ("[a*2&b*1]", "c", [False]),
        ("a&&b", "", [True]),
    ],
)
def test_constraints(text: str, features: str, fits: list[bool]) -> None:
    assert [wanted(frozenset(features)) for wanted in alternatives(text)] == fits


def test_a_job_that_shares_nodes_with_its_own_user_alone_does_not_start_beside_others() -> None:
    nodes = [node("n1", "MIXED", cpus_used=1), node("n2", "ALLOCATED")]
    for user, given in (("alice", ["n2"]), ("bob", [])):
        shy = waits("1", user=user, exclusive=False, exclusive_user=True)
        assert given_back(standing(nodes, [runs("5", ["n1"], exclusive=False), shy], [held("n2")])) == given
