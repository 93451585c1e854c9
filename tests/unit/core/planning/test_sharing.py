"""The whole plan with several runs: who is asked for what, limits, and that a plan that was carried out is the last."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from builders import NOW, allocation, node, partition, preempting, waits
from builders import cluster as poll_of
from fallow.core.allocations import Allocation
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning.asking import Ask
from fallow.core.planning.gain import Curve, speeds
from fallow.core.planning.plan import Action
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.core.planning.share import Worth, values
from fallow.core.planning.withdrawals import Withdraw
from fallow.model import ClusterState
from planning import actions, asked, planned

RULES = HarvestRules()


class Site:
    """Idle and held nodes of two partitions, and of both at once; wishes are carried out at once."""

    def __init__(self, p: int, q: int, both: int = 0) -> None:
        self.names = {
            "p": [f"p{i}" for i in range(p)] + [f"b{i}" for i in range(both)],
            "q": [f"q{i}" for i in range(q)] + [f"b{i}" for i in range(both)],
        }
        self.idle = {*self.names["p"], *self.names["q"]}
        self.mine: list[Allocation] = []

    def give(self, run: str, partition: str) -> None:
        name = next((name for name in self.names[partition] if name in self.idle), "")
        if not name:
            name = f"{partition}x{len(self.mine)}"
            self.names[partition].append(name)
        self.idle.discard(name)
        fields = {"nodes": [name], "start_at": NOW - 3600.0, "end_at": NOW + 3600.0}
        self.mine.append(allocation(f"{run}-{name}-{len(self.mine)}", run=run, partition=partition, **fields))

    def held(self, run: str) -> int:
        return sum(a.run == run for a in self.mine)

    def cluster(self) -> ClusterState:
        where: dict[str, list[str]] = {}
        for p, names in self.names.items():
            for n in names:
                where.setdefault(n, []).append(p)
        nodes = [node(n, "IDLE" if n in self.idle else "ALLOCATED", partitions=there) for n, there in where.items()]
        return poll_of(nodes, partitions=[partition(p, n, preempt_mode="REQUEUE") for p, n in self.names.items()])

    def carry_out(self, wishes: list[Action]) -> None:
        for wish in wishes:
            match wish:
                case Ask(run=run, partition=partition):
                    self.give(run, partition)
                case GiveBack(token=token) | Withdraw(token=token):
                    (gone,) = [a for a in self.mine if a.token == token]
                    self.mine.remove(gone)
                    self.idle.add(gone.nodes[0])


def demand(site: Site, run: str, most: int, worth: Worth, partitions: str = "") -> Demand:
    return Demand(run=run, nodes=most - site.held(run), partitions=tuple(partitions), worth=worth)


def curve(shards: int, weight: float = 1.0, least: int = 1) -> tuple[float, ...]:
    """What nodes are worth to a run of which nothing was measured."""
    return values(speeds(Curve(), shards, 1, 64), 64, weight, least=least)


def places(site: Site, rules: HarvestRules, *demands: Demand) -> list[tuple[str, str]]:
    """(run, partition) of all that is asked for."""
    return sorted((ask.run, ask.partition) for ask in asked(site.cluster(), demands, site.mine, rules))


def test_a_node_of_several_partitions_is_offered_in_each_of_them() -> None:
    site = Site(0, 0, both=4)
    only_q = Demand("q", 2, partitions=("q",))
    assert places(site, HarvestRules(), only_q) == [("q", "q")] * 2
    assert places(site, HarvestRules(), Demand("any", 2)) == [("any", "p")] * 2, "the first will do"
    assert places(site, HarvestRules(), Demand("any", 9), only_q) == [*[("any", "p")] * 2, *[("q", "q")] * 2]
    apart = Demand("p", 3, partitions=("p",)), Demand("q", 3, partitions=("q",))
    assert places(Site(3, 3), HarvestRules(max_pending=6), *apart) == [*[("p", "p")] * 3, *[("q", "q")] * 3]
    # Of two caps a node takes room under one, so that all are used; a run that can use one partition only has its part.
    both_capped = HarvestRules(partition_nodes={"p": 2, "q": 3})
    assert places(site, both_capped, Demand("any", 9)) == [*[("any", "p")] * 2, *[("any", "q")] * 2]
    assert places(site, both_capped, Demand("p", 4, partitions=("p",))) == [("p", "p")] * 2
    assert places(site, both_capped, Demand("q", 9, partitions=("q",))) == [("q", "q")] * 3
    assert places(site, both_capped, Demand("any", 9), only_q) == [*[("any", "p")] * 2, *[("q", "q")] * 2]


def test_holes_that_end_together_go_to_one_run_which_stalls_once() -> None:
    names = ["n1", "n2", "n3", "n4"]
    starts = [
        waits(at, partition="urgent", planned_nodes=[at], start_at=NOW + (1260 if at < "n3" else 3060)) for at in names
    ]
    site = preempting([node(name) for name in names], starts)
    wanted = [Demand("a", 2), Demand("b", 2)]
    together = [*[("a", 51)] * 2, *[("b", 21)] * 2]
    assert sorted((ask.run, ask.minutes) for ask in asked(site, wanted, [], RULES)) == together
    # A run that does without the first nodes is asked for others, whatever ends when.
    barred = replace(wanted[0], barred=frozenset({"n3", "n4"}))
    assert {ask.minutes for ask in asked(site, [barred, wanted[1]], [], RULES) if ask.run == "a"} == {21}


def test_a_held_node_goes_to_a_run_that_has_it_through_another_partition() -> None:
    site = Site(0, 0, both=8)
    for _ in range(8):
        site.give("rich", "p")
    demands = [
        demand(site, "rich", 8, Worth(curve(64), base=24)),
        demand(site, "poor", 8, Worth(curve(64)), "q"),
    ]
    wishes = actions(site.cluster(), demands, site.mine, HarvestRules(max_pending=100))
    assert wishes and all(isinstance(w, GiveBack) for w in wishes)
    full = HarvestRules(max_pending=100, partition_nodes={"q": 0})
    assert actions(site.cluster(), demands, site.mine, full) == []


def test_what_runs_may_not_ask_for_yet_is_no_more_than_there_is() -> None:
    site = Site(20, 0)
    demands = [demand(site, run, 20, Worth(curve(64))) for run in ("a", "b", "c")]
    found = planned(site.cluster(), demands, [], HarvestRules(max_pending=2))
    assert len(found.asks) == 2 and sum(found.targets.values()) == 20


def test_of_nodes_that_help_only_together_none_is_asked_for_where_a_cap_is_below_that() -> None:
    site = Site(10, 0)
    together = demand(site, "a", 8, Worth(curve(64, least=4)))
    found = [planned(site.cluster(), [together], [], HarvestRules(partition_nodes={"p": cap})) for cap in (3, 4)]
    assert [(len(each.asks), each.targets["a"]) for each in found] == [(0, 0), (4, 4)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_plans_keep_limits_and_come_to_rest(data: st.DataObject) -> None:
    site = Site(data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6)), data.draw(st.integers(0, 4)))
    most, worths, where = {}, {}, {}
    for i in range(data.draw(st.integers(1, 4))):
        run = f"r{i}"
        most[run] = data.draw(st.integers(0, 10))
        where[run] = data.draw(st.sampled_from(["p", "q", "pq"]))
        for _ in range(data.draw(st.integers(0, min(3, most[run])))):
            site.give(run, where[run][0])
        shards, weight = data.draw(st.sampled_from([1, 4, 6, 16])), data.draw(st.sampled_from([0.5, 1.0, 1.1, 3.0]))
        least = data.draw(st.integers(1, 3))
        worths[run] = Worth(
            curve(shards, weight, least if data.draw(st.booleans()) else 1),
            base=data.draw(st.integers(0, 2)),
            least=least,
            start_s=data.draw(st.sampled_from([0.0, 30.0, 600.0])),
            pause_s=data.draw(st.sampled_from([0.1, 2.0, 30.0])),
        )
    before = {run: site.held(run) for run in most}
    there = {p: sum(a.partition == p for a in site.mine) for p in "pq"}
    rules = HarvestRules(
        max_nodes=data.draw(st.none() | st.integers(0, 12)),
        max_pending=data.draw(st.sampled_from([1, 4, 100])),
        partition_nodes=data.draw(st.sampled_from([{}, {"p": 2}, {"p": 2, "q": 3}])),
    )
    begin = len(site.mine)
    for _ in range(60):
        demands = [demand(site, run, most[run], worths[run], where[run]) for run in most]
        wishes = actions(site.cluster(), demands, site.mine, rules)
        assert wishes == actions(site.cluster(), demands, site.mine, rules)
        asked = [w for w in wishes if isinstance(w, Ask)]
        assert len(asked) <= rules.max_pending
        for w in asked:
            assert w.partition in where[w.run]
        if not wishes:
            break
        site.carry_out(wishes)
        if rules.max_nodes is not None and asked:
            assert len(site.mine) <= max(rules.max_nodes, begin)
        for p, cap in rules.partition_nodes.items():
            assert sum(a.partition == p for a in site.mine) <= max(cap, there[p])
        for run in most:
            assert site.held(run) <= max(most[run], before[run])
            least = worths[run].least - worths[run].base
            assert site.held(run) >= min(before[run], least)
    else:
        pytest.fail("plans go on and on")
