"""Whatever the situation, a plan keeps to its limits, and is made again while nothing has changed."""

from collections import Counter
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from builders import NOW, allocation, gpu_node, preempting, request, waits
from fallow.core.allocations import Allocation
from fallow.core.holes import planned_ends
from fallow.core.kinds import Kind
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.model import AllocationState, ClusterState
from planning import planned

INSTEAD = "a request for an idle node replaces it"


class Drawn(NamedTuple):
    state: ClusterState
    demands: list[Demand]
    allocations: list[Allocation]
    rules: HarvestRules


@st.composite
def situations(draw: st.DrawFn) -> Drawn:
    states = draw(st.lists(st.sampled_from(["IDLE", "IDLE", "MIXED", "ALLOCATED"]), max_size=10))
    used = {"gpus_used": 2, "gpu_types_used": {"": 2}}
    nodes = [gpu_node(f"n{i}", s, **(used if s == "MIXED" else {})) for i, s in enumerate(states)]
    jobs = []
    for i in range(draw(st.integers(0, 4))):
        where = draw(st.sampled_from([*(n.node for n in nodes), ""]))
        more = {"planned_nodes": [where], "start_at": NOW + draw(st.integers(0, 9000))} if where else {}
        reason = draw(st.sampled_from(["Resources", "Priority", "BeginTime"]))
        jobs.append(waits(str(i), partition="urgent", exclusive=False, reason=reason, **more))
    allocations = []
    for i in range(draw(st.integers(0, 6))):
        run, end_at = draw(st.sampled_from("ab")), NOW + draw(st.integers(30, 7000))
        allocations.append(allocation(f"h{i}", run=run, nodes=[f"x{i}"], start_at=NOW - 3600.0, end_at=end_at))
    for i in range(draw(st.integers(0, 3))):
        reason = draw(st.sampled_from(["", "Resources", "QOSMaxJobsPerUserLimit"]))
        waited_s, ahead = draw(st.integers(0, 700)), draw(st.booleans())
        allocations.append(request(f"p{i}", waited_s, run="a", minutes=30, reason=reason, requested_ahead=ahead))
    rules = HarvestRules(
        allow_without_preemption=draw(st.booleans()),
        max_pending=draw(st.integers(1, 8)),
        max_waiting=draw(st.just(1 << 30) | st.integers(1, 8)),
        max_nodes=draw(st.none() | st.integers(0, 12)),
        partition_nodes=draw(st.just({}) | st.fixed_dictionaries({"p": st.integers(0, 10)})),
        lead_s=draw(st.sampled_from([0.0, 600.0])),
        max_ahead=draw(st.integers(0, 2)),
        whole_nodes=draw(st.booleans()),
    )
    budgets, kind = st.none() | st.integers(0, 30_000).map(float), Kind(gpus=1, part_gpus=1)
    demands = [Demand(run, draw(st.integers(-3, 6)), budget_node_s=draw(budgets), kind=kind) for run in "ab"]
    mode, max_time_s = draw(st.sampled_from(["OFF", "REQUEUE"])), draw(st.sampled_from([None, 3600.0]))
    return Drawn(preempting(nodes, jobs, preempt_mode=mode, max_time_s=max_time_s), demands, allocations, rules)


@settings(max_examples=300, deadline=None)
@given(situations())
def test_never_above_caps_budgets_or_deadlines_and_stable(drawn: Drawn) -> None:
    state, demands, allocations, rules = drawn
    found = planned(state, demands, allocations, rules)
    assert found == planned(state, demands, allocations, rules), "nothing has changed"
    new = found.asks
    assert sum(1 for ask in new if ask.requested_ahead) <= rules.max_ahead
    withdrawn = {wish.token for wish in found.withdrawals}
    pending = [a for a in allocations if a.state is AllocationState.PENDING and a.token not in withdrawn]
    running = [a for a in allocations if a.state is AllocationState.RUNNING]
    assert not new or len(pending) + len(new) <= rules.max_waiting
    # One that came too late waits for what others leave, and keeps nobody from asking.
    plain = [ask for ask in new if not ask.requested_ahead]
    young = [a for a in pending if not a.requested_ahead and NOW - a.requested_at <= rules.start_patience_s]
    assert not plain or len(young) + len(plain) <= rules.max_pending
    there = [ask for ask in new if ask.partition == "p"]
    for most, some in ((rules.max_nodes, new), (rules.partition_nodes.get("p"), there)):
        if most is not None and some:
            assert len(running) + len(pending) + len(some) <= most
    ends, partitions = planned_ends(state), {p.partition: p for p in state.partitions}
    assert all(count == 1 for count in Counter(ask.part.node for ask in new if ask.part).values())
    idle = [n.node for n in state.nodes if n.state == "IDLE"]
    lengths = sorted(((ends.get(name, 1e18) - NOW) / 60 for name in idle), reverse=True)
    # Slurm may put them anywhere: the longest fits somewhere, the second longest somewhere else, and so on.
    whole = sorted((ask.minutes for ask in new if ask.part is None and not ask.requested_ahead), reverse=True)
    assert all(minutes <= length for minutes, length in zip(whole, lengths, strict=False)) and len(whole) <= len(idle)
    for ask in new:
        assert rules.min_minutes <= ask.minutes <= rules.max_minutes
        assert ask.minutes * 60 <= (partitions[ask.partition].max_time_s or 1e18)
        if ask.part:
            assert ask.minutes * 60 <= ends.get(ask.part.node, 1e18) - NOW
    for demand in demands:
        mine = [ask for ask in new if ask.run == demand.run]
        instead = sum(1 for wish in found.withdrawals if wish.reason == INSTEAD and demand.run == "a")
        assert sum(1 for ask in mine if not ask.replaces) - instead <= max(0, demand.nodes)
        if demand.budget_node_s is not None:
            assert sum(60 * ask.minutes for ask in mine) <= demand.budget_node_s
        assert len({ask.replaces for ask in mine if ask.replaces}) == sum(1 for ask in mine if ask.replaces)
