"""Which node's link holds a run up: never a wrong one, never too early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fallow.core.training.slow_links import Finding, Member, SlowLinks

SHARDS = 32
PACE_S = 0.02


def ring(
    nodes: int, slow: str = "", *, busy: float = 0.9, idle: float = 0.05, paces: Sequence[float] = ()
) -> list[Member]:
    """Members n0, n1, ... that reduce in a ring; the connections of `slow` are `busy`, the others `idle`."""
    names = [f"n{number}" for number in range(nodes)]
    return [
        Member(
            node=name,
            index=number,
            harvested=number > 0,
            pace_s=paces[number] if paces else PACE_S,
            busy_links={
                names[(number + 1) % nodes]: busy if slow in (name, names[(number + 1) % nodes]) else idle,
            },
        )
        for number, name in enumerate(names)
    ]


def observe_for(
    links: SlowLinks, members: list[Member], step_s: float, seconds: float, generation: int = 1
) -> Finding | None:
    """Stretches of 15 s; the last answer."""
    found = None
    for _ in range(int(seconds / 15)):
        found = links.observe(members, generation=generation, shards=SHARDS, step_s=step_s, lasted_s=15.0)
    return found


def test_a_change_of_the_membership_and_one_quiet_stretch_begin_the_minute_anew() -> None:
    links = SlowLinks()
    assert observe_for(links, ring(4, "n3"), 0.7, 45) is None
    assert observe_for(links, ring(4, "n3"), 0.7, 45, generation=2) is None
    observe_for(links, ring(4), 0.2, 15, generation=2)
    assert observe_for(links, ring(4, "n3"), 0.7, 45, generation=2) is None
    assert observe_for(links, ring(4, "n3"), 0.7, 15, generation=2) is not None


def test_of_two_members_the_younger_harvested_one_goes_if_the_other_alone_was_measured_faster() -> None:
    pair = ring(2, "n1")
    assert observe_for(SlowLinks(), pair, 2.0, 300) is None
    turned = [replace(member, harvested=not member.harvested) for member in pair]  # the base job was renewed
    for members, alone_s, node in ((pair, 0.64, "n1"), (pair, 1.9, None), (turned, 0.64, "n0")):
        links = SlowLinks()
        observe_for(links, [member for member in members if not member.harvested], alone_s, 15)
        found = observe_for(links, members, 2.0, 60, generation=2)
        assert (found and found.node) == node


@pytest.mark.parametrize(
    ("members", "step_s"),
    [
        (ring(5, busy=0.9, idle=0.9), 2.0),
        (ring(4, paces=[0.02, 0.02, 0.02, 0.4]), 0.4),
        (ring(4, "n3"), 8 * PACE_S),  # the reduction overlaps with backward: the step takes no longer
        (ring(4, "n3", paces=[0.0] * 4), 2.0),
    ],
    ids=["slow for all", "computes slowly", "costs nothing", "no paces known"],
)
def test_no_link_is_suspected_where_another_reason_explains_the_step(members: list[Member], step_s: float) -> None:
    assert observe_for(SlowLinks(), members, step_s, 300) is None
