"""Idle GPUs of nodes that run other jobs."""

from __future__ import annotations

from builders import gpu_node, preempting, request
from fallow.core.holes import Part
from fallow.core.kinds import Kind
from fallow.core.planning.rules import Demand, HarvestRules
from planning import actions, asked, withdrawn

SHARED = HarvestRules(whole_nodes=False)
USED = {"gpus_used": 1, "gpu_types_used": {"": 1}}
MIXED = gpu_node("m", "MIXED", cpus_used=8, memory_used_mb=64_000, **USED)


def test_idle_gpus_of_nodes_that_run_other_jobs() -> None:
    full = gpu_node("f", "MIXED", gpus_used=4, gpu_types_used={"": 4})
    no_memory = gpu_node("o", "MIXED", memory_used_mb=256_000, **USED)
    state, wants = preempting([MIXED, full, no_memory]), Demand("r", 3, kind=Kind(gpus=4, part_gpus=1))
    (ask,) = asked(state, [wants], [], SHARED)
    assert ask.part == Part("m", 3, "", 48, 192_000)
    # The request waits; meanwhile somebody else has got the GPUs.
    pending = request(part=ask.part, minutes=10)
    assert actions(state, [wants], [pending], SHARED) == []
    taken = preempting([gpu_node("m", "MIXED", gpus_used=3, gpu_types_used={"": 3}, cpus_used=8)])
    assert withdrawn(actions(taken, [wants], [pending], SHARED)) == ["h"]


def test_no_part_where_the_site_the_partition_or_the_run_takes_whole_nodes() -> None:
    for kind, rules, exclusive in (
        (Kind(gpus=4, part_gpus=1), HarvestRules(), False),
        (Kind(gpus=4), SHARED, False),
        (Kind(gpus=4, part_gpus=4), SHARED, False),
        (Kind(gpus=4, part_gpus=1), SHARED, True),
    ):
        assert asked(preempting([MIXED], exclusive=exclusive), [Demand("r", 3, kind=kind)], [], rules) == []
