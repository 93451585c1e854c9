"""Idle GPUs of nodes that run other jobs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from builders import NOW, gpu_node, preempting, request
from fallow.core.holes import Part
from fallow.core.kinds import Kind
from fallow.core.planning.rules import Demand, HarvestRules, Known
from fallow.core.planning.withdrawals import Withdraw
from planning import actions, asked, withdrawn

SHARED = HarvestRules(whole_nodes=False)
USED = {"gpus_used": 1, "gpu_types_used": {"": 1}}
MIXED = gpu_node("m", "MIXED", cpus_used=8, memory_used_mb=64_000, **USED)


def test_idle_gpus_of_nodes_that_run_other_jobs() -> None:
    full = gpu_node("f", "MIXED", gpus_used=4, gpu_types_used={"": 4})
    no_memory = gpu_node("o", "MIXED", memory_used_mb=256_000, **USED)
    state, wants = preempting([MIXED, full, no_memory]), Demand("r", 3, kind=Kind(gpus=4, part_gpus=1))
    (ask,) = asked(state, [wants], [], SHARED)
    assert ask.part == Part("m", 3, "", 48, 192_000) and ask.node == ""
    # The request waits; meanwhile somebody else has got the GPUs.
    pending = request(part=ask.part, minutes=10)
    assert actions(state, [wants], [pending], SHARED) == []
    taken = preempting([gpu_node("m", "MIXED", gpus_used=3, gpu_types_used={"": 3}, cpus_used=8)])
    assert withdrawn(actions(taken, [wants], [pending], SHARED)) == ["h"]


@pytest.mark.parametrize(
    ("kind", "rules", "exclusive"),
    [
        (Kind(gpus=4, part_gpus=1), HarvestRules(), False),
        (Kind(gpus=4), SHARED, False),
        (Kind(gpus=4, part_gpus=4), SHARED, False),
        (Kind(gpus=4, part_gpus=1), SHARED, True),
    ],
)
def test_no_part_where_the_site_the_partition_or_the_run_takes_whole_nodes(
    kind: Kind, rules: HarvestRules, exclusive: bool
) -> None:
    assert asked(preempting([MIXED], exclusive=exclusive), [Demand("r", 3, kind=kind)], [], rules) == []


BUSY = gpu_node("m", "MIXED", cpus_used=16, memory_used_mb=64_000, gpus_used=1)


def test_a_request_for_some_idle_gpus_of_a_node_that_never_starts_is_withdrawn() -> None:
    """Though more GPUs are idle there than it asks for."""
    state, known = preempting([BUSY]), Known()
    known.unstarted.look(replace(state, at=NOW - 900.0))
    pending = request(waited_s=500, part=Part("m", 1, "", 16, 64_000), minutes=10)
    wishes = actions(state, [Demand("r", 1, kind=Kind(gpus=1, part_gpus=1))], [pending], SHARED, known)
    assert [(wish.token, wish.declined) for wish in wishes if isinstance(wish, Withdraw)] == [("h", ("m",))]
