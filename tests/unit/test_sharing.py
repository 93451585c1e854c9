"""The whole plan with several runs: who is asked for what, limits, and that a plan that was carried out is the last."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.allocations import Allocation
from fallow.core.gain import Curve, fit
from fallow.core.neighbour import GiveBack
from fallow.core.planner import Wish, Withdraw, plan
from fallow.core.requests import Ask, Demand, HarvestRules
from fallow.core.worth import Worth
from fallow.model import AllocationKind, AllocationState, ClusterState, NodeInfo, PartitionInfo

NOW = 1_000_000.0


class Site:
    """Idle and held nodes of two partitions; wishes are carried out at once."""

    def __init__(self, p: int, q: int) -> None:
        self.idle = {"p": [f"p{i}" for i in range(p)], "q": [f"q{i}" for i in range(q)]}
        self.names = {name: list(nodes) for name, nodes in self.idle.items()}
        self.mine: list[Allocation] = []

    def give(self, run: str, partition: str) -> None:
        if not self.idle[partition]:
            self.names[partition].append(f"{partition}x{len(self.mine)}")
            self.idle[partition].append(self.names[partition][-1])
        node = self.idle[partition].pop(0)
        self.mine.append(
            Allocation(
                token=f"{run}-{node}-{len(self.mine)}",
                run=run,
                kind=AllocationKind.HARVEST,
                public_key="k",
                state=AllocationState.RUNNING,
                partition=partition,
                nodes=[node],
                start_at=NOW - 3600.0,
                end_at=NOW + 3600.0,
            )
        )

    def held(self, run: str) -> int:
        return sum(a.run == run for a in self.mine)

    def cluster(self) -> ClusterState:
        nodes = [
            NodeInfo(node=n, state="IDLE" if n in self.idle[p] else "ALLOCATED", partitions=[p])
            for p, names in self.names.items()
            for n in names
        ]
        parts = [PartitionInfo(partition=p, nodes=names, preempt_mode="REQUEUE") for p, names in self.names.items()]
        return ClusterState(at=NOW, nodes=nodes, jobs=[], partitions=parts)

    def carry_out(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            match wish:
                case Ask(run=run, partition=partition):
                    self.give(run, partition)
                case GiveBack(token=token) | Withdraw(token=token):
                    (gone,) = [a for a in self.mine if a.token == token]
                    self.mine.remove(gone)
                    self.idle[gone.partition].append(gone.nodes[0])


def demand(site: Site, run: str, most: int, worth: Worth, partitions: str = "") -> Demand:
    return Demand(run=run, nodes=most - site.held(run), partitions=tuple(partitions), worth=worth)


def curve(shards: int) -> tuple[tuple[int, float], ...]:
    return tuple(fit(Curve(), shards, NOW).speeds(1, 64))


def test_a_run_that_can_go_elsewhere_leaves_the_node_that_another_one_needs() -> None:
    site = Site(1, 1)
    one = Worth(curve(1))
    wishes = plan(site.cluster(), [demand(site, "both", 1, one), demand(site, "only", 1, one, "p")], [], HarvestRules())
    assert {(w.run, w.partition) for w in wishes if isinstance(w, Ask)} == {("both", "q"), ("only", "p")}


def test_no_node_is_taken_from_a_run_before_idle_ones_have_been_asked_for() -> None:
    site = Site(30, 0)
    for _ in range(20):
        site.give("rich", "p")
    demands = [
        demand(site, "rich", 20, Worth(curve(64), base=12)),
        demand(site, "poor", 40, Worth(curve(64)), "p"),
    ]
    wishes = plan(site.cluster(), demands, site.mine, HarvestRules(max_pending=4))
    assert [type(w) for w in wishes] == [Ask] * 4
    plenty = plan(site.cluster(), demands, site.mine, HarvestRules(max_pending=100))
    assert sum(isinstance(w, Ask) for w in plenty) == 10, "all that are idle"


def test_targets_are_told() -> None:
    site = Site(10, 0)
    aims: dict[str, int] = {}
    plan(
        site.cluster(),
        [demand(site, "a", 64, Worth(curve(4), base=1)), demand(site, "b", 64, Worth(curve(64), base=1))],
        [],
        HarvestRules(),
        aims=aims,
    )
    assert aims == {"a": 3, "b": 7}


def test_a_budget_for_one_node_is_no_reason_to_aim_at_eight() -> None:
    site = Site(10, 0)
    aims: dict[str, int] = {}
    poor = Demand(run="a", nodes=8, worth=Worth(curve(64)), budget_node_s=150.0)
    wishes = plan(site.cluster(), [poor], [], HarvestRules(min_minutes=2), aims=aims)
    assert aims == {"a": 1}
    assert [w.minutes for w in wishes if isinstance(w, Ask)] == [2]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_plans_keep_limits_and_come_to_rest(data: st.DataObject) -> None:
    site = Site(data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6)))
    most, worths, where = {}, {}, {}
    for i in range(data.draw(st.integers(1, 4))):
        run = f"r{i}"
        most[run] = data.draw(st.integers(0, 10))
        where[run] = data.draw(st.sampled_from(["p", "q", "pq"]))
        for _ in range(data.draw(st.integers(0, min(3, most[run])))):
            site.give(run, where[run][0])
        worths[run] = Worth(
            curve(data.draw(st.sampled_from([1, 4, 6, 16]))),
            weight=data.draw(st.sampled_from([0.5, 1.0, 1.1, 3.0])),
            base=data.draw(st.integers(0, 2)),
            least=data.draw(st.integers(1, 3)),
            going=data.draw(st.booleans()),
            start_s=data.draw(st.sampled_from([0.0, 30.0, 600.0])),
            pause_s=data.draw(st.sampled_from([0.1, 2.0, 30.0])),
        )
    before = {run: site.held(run) for run in most}
    rules = HarvestRules(
        max_nodes=data.draw(st.none() | st.integers(0, 12)),
        max_pending=data.draw(st.sampled_from([1, 4, 100])),
        partition_nodes=data.draw(st.sampled_from([{}, {"p": 2}])),
    )
    begin = len(site.mine)
    for _ in range(60):
        demands = [demand(site, run, most[run], worths[run], where[run]) for run in most]
        wishes = plan(site.cluster(), demands, site.mine, rules)
        assert wishes == plan(site.cluster(), demands, site.mine, rules)
        asked = [w for w in wishes if isinstance(w, Ask)]
        assert len(asked) <= rules.max_pending
        for w in asked:
            assert w.partition in where[w.run]
        if not wishes:
            break
        site.carry_out(wishes)
        if rules.max_nodes is not None and asked:
            assert len(site.mine) <= max(rules.max_nodes, begin)
        for run in most:
            assert site.held(run) <= max(most[run], before[run])
            least = worths[run].least - worths[run].base
            assert site.held(run) >= min(before[run], least)
    else:
        pytest.fail("plans go on and on")
