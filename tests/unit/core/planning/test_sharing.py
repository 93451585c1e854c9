"""The whole plan with several runs: who is asked for what, limits, and that a plan that was carried out is the last."""

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from builders import NOW, allocation, node, partition, preempting, request, waits
from builders import cluster as poll_of
from fallow.core.accounting.backoff import Asker
from fallow.core.allocations import Allocation
from fallow.core.holes import Part
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning.gain import MEMORY_S, SIZES, Curve, pool_curves, speeds
from fallow.core.planning.knowledge import Knowledge
from fallow.core.planning.plan import Action
from fallow.core.planning.requests import Ask
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.core.planning.share import Worth, linear, values
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


MANY = HarvestRules(max_pending=100)


def rich_and_poor() -> tuple[Site, list[Demand]]:
    """The first run has 32 nodes, of which eight were harvested in p; the second one has none, and may use q."""
    site = Site(0, 0, both=8)
    for _ in range(8):
        site.give("rich", "p")
    rich = demand(site, "rich", 8, Worth(curve(64), base=24))
    return site, [rich, demand(site, "poor", 8, Worth(curve(64)), "q")]


def test_a_held_node_goes_to_a_run_that_has_it_through_another_partition() -> None:
    site, demands = rich_and_poor()
    wishes = actions(site.cluster(), demands, site.mine, MANY)
    assert wishes and all(isinstance(w, GiveBack) for w in wishes)
    idle = [*site.cluster().nodes, node("b9", partitions=["p", "q"])]
    names = [each.node for each in idle]
    both = poll_of(idle, partitions=[partition(name, names, preempt_mode="REQUEUE") for name in "pq"])
    assert [type(wish) for wish in actions(both, demands, site.mine, RULES)] == [Ask], "what is idle comes first"
    # What the first run waits for goes, too: it would take the node back.
    waits, steady = request("w", run="rich", minutes=120, requested_ahead=True), Worth(linear(64), base=24)
    eager = [replace(demands[0], worth=steady), demands[1]]
    wishes = actions(site.cluster(), eager, [*site.mine, waits], replace(MANY, max_ahead=1))
    assert Withdraw("w", "another run gains more from it") in wishes


def test_a_held_node_stays_where_the_other_run_could_not_have_it_for_long_or_ask_for_it() -> None:
    site, demands = rich_and_poor()
    assert actions(site.cluster(), demands, site.mine, replace(MANY, partition_nodes={"q": 0})) == []
    for fixed in ({"end_at": NOW + 599.0}, {"part": Part("b0", 1, "", 1, 0)}):
        assert actions(site.cluster(), demands, [replace(a, **fixed) for a in site.mine], MANY) == []
    # After a limit of its account one request is tried: the other nodes would go back to the first run, after stalls.
    known, tight = Knowledge(), Asker("tight")
    known.backoff.strike("AssocMaxJobsLimit", tight, "q", 30, NOW - 600.0)
    limited = [demands[0], replace(demands[1], asker=tight)]
    assert len(actions(site.cluster(), limited, site.mine, MANY, known)) == 1


def test_a_run_keeps_no_node_from_which_it_gains_nothing() -> None:
    """Requests go first, then the newest nodes; as many stay as its user wants at least."""
    nodes, why = [node(f"n{i}", "ALLOCATED") for i in range(6)], "the run gains nothing from it"
    mine = [
        allocation(f"a{i}", run="a", nodes=[f"n{i}"], start_at=NOW - 100.0 * (i + 1), end_at=NOW + 3600.0)
        for i in range(6)
    ]
    gone = [GiveBack("a0", why), GiveBack("a1", why), Withdraw("w", why)]
    for least, found in ((1, gone), (6, gone[2:]), (7, [])):
        flat = Worth(values(((1, 1.0), (4, 4.0)), 9), least=least)
        waits = request("w", run="a", minutes=10)
        assert actions(preempting(nodes), [Demand("a", 2, worth=flat)], [*mine, waits], RULES) == found


def test_of_nodes_that_help_only_together_none_is_asked_for_where_a_cap_is_below_that() -> None:
    site = Site(10, 0)
    together = demand(site, "a", 8, Worth(curve(64, least=4)))
    found = [planned(site.cluster(), [together], [], HarvestRules(partition_nodes={"p": cap})) for cap in (3, 4)]
    assert [(len(each.asks), each.targets["a"]) for each in found] == [(0, 0), (4, 4)]


def test_while_requests_for_nodes_that_help_only_together_may_not_all_be_made_none_is_taken_back() -> None:
    """Two were asked for and withdrawn as of no use, in turns, for ever."""
    site, waiting, rules = Site(8, 0), list[Allocation](), HarvestRules(max_pending=2)
    for at in (0.0, 30.0):
        wanted = Demand("a", 8 - len(waiting), worth=Worth(curve(64, least=4)))
        state = replace(site.cluster(), at=NOW + at)
        wishes = actions(state, [wanted], waiting, rules)
        assert [type(wish) for wish in wishes] == [Ask, Ask][: 2 - len(waiting)]
        waiting += [request(f"h{i}", 0.0, run="a", minutes=120) for i, _ in enumerate(wishes)]


def test_a_request_leaves_nodes_of_several_partitions_to_those_that_have_to_follow_it() -> None:
    """Under a cap of p, one in p and one in q were asked for and given up as of no use, in turns, for ever."""
    site, rules = Site(1, 0, both=3), HarvestRules(max_pending=1, partition_nodes={"p": 1})
    together = Worth(curve(64, least=4))
    assert places(site, rules, Demand("a", 8, worth=together)) == [("a", "p")]
    site.give("a", "q")
    waiting = [*site.mine, request("w", run="a", partition="p", minutes=120)]
    assert actions(site.cluster(), [Demand("a", 6, worth=together)], waiting, rules) == []


def test_of_nodes_that_help_only_together_none_is_asked_for_where_not_all_can_be_had() -> None:
    """Three were asked for, and given back as of no use once there was no fourth."""
    nodes, soon = [node(f"n{i}") for i in range(4)], waits("9", planned_nodes=["n3"], start_at=NOW + 90.0)
    state, together = preempting(nodes, [replace(soon, partition="urgent")]), Worth(curve(64, least=4))
    assert asked(state, [Demand("a", 8, worth=together)], [], RULES) == []
    assert len(asked(preempting(nodes), [Demand("a", 8, worth=together)], [], RULES)) == 4
    # A budget of so many node-hours pays for two requests of two hours each, or for four.
    for hours, number in ((4, 0), (8, 4)):
        wanted = Demand("a", 8, worth=together, budget_node_s=3600.0 * hours)
        assert len(asked(preempting(nodes), [wanted], [], RULES)) == number
    # What fewer nodes are worth is had.
    stairs = Worth((0.0, 1.0, 1.0, 1.0, 9.0), least=1)
    assert len(asked(state, [Demand("a", 8, worth=stairs)], [], RULES)) == 1


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
    # A run that could not ask for a node, since its shortest request is longer than any may be, takes none from others.
    limits = {
        run: {
            "min_minutes": data.draw(st.sampled_from([2, 2, 180])),
            "budget_node_s": data.draw(st.sampled_from([None, None, 0.0, 600.0])),
            "excluded_nodes": frozenset(data.draw(st.sampled_from([[], ["p0", "b0"]]))),
        }
        for run in most
    }
    begin = len(site.mine)
    for _ in range(60):
        demands = [replace(demand(site, run, most[run], worths[run], where[run]), **limits[run]) for run in most]
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


# -- throughput: prior, fit, stairs, memory, pooling ------------------------------------------------------------------


def learned(shards: int, times: dict[int, float], shard_s: float | None = None) -> Curve:
    curve = Curve(shard_s=shard_s)
    for members, step_s in times.items():
        for _ in range(10):
            curve.observe(members, step_s, 60.0, NOW)
    return curve


def test_measured_sizes_are_met_and_the_others_follow_the_shape_between_them() -> None:
    times = {1: 33.0, 4: 9.0, 16: 3.0}
    found = dict(speeds(learned(32, times), 32, 1, 32))
    assert [found[workers] for workers in times] == pytest.approx([1.0 / step_s for step_s in times.values()])
    assert found[4] < found[8] < found[16] < found[32] < 2 * found[16]


@settings(max_examples=100, deadline=None)
@given(
    times=st.dictionaries(st.integers(1, 64), st.floats(0.01, 100), max_size=8),
    shards=st.integers(1, 200),
    slots=st.integers(1, 8),
    pace=st.none() | st.floats(0.001, 10),
)
def test_speeds_rise_with_the_nodes_whatever_was_measured(
    times: dict[int, float], shards: int, slots: int, pace: float | None
) -> None:
    found = speeds(learned(shards, times, pace), shards, slots, 300)
    assert found[0][0] == 1
    for (fewer, slower), (more, faster) in pairwise(found):
        assert fewer < more
        assert 0 < slower < faster < math.inf
    assert found[-1][0] <= max(1, -(-shards // slots))


def test_newer_measurements_replace_older_ones_and_memory_is_bounded() -> None:
    curve = learned(8, {2: 10.0})
    for _ in range(40):
        curve.observe(2, 1.0, 60.0, NOW)
    assert curve.measurements[2].step_s == pytest.approx(1.0, rel=0.2)
    assert curve.measurements[2].weight_s == MEMORY_S
    for m in range(1, 200):
        curve.observe(m, 1.0, 15.0 if m != 2 else 600.0, NOW + m)
    assert len(curve.measurements) == SIZES
    assert 2 in curve.measurements, "the least certain goes first"
    assert len(msgspec.msgpack.encode(curve)) < 2500


def test_earlier_runs_of_the_same_script_tell_what_to_expect() -> None:
    before = learned(8, {1: 8.0, 4: 2.4}, 1.0)
    merged = pool_curves(Curve(), [before], NOW)
    assert set(merged.measurements) == {1, 4}
    assert merged.shard_s == 1.0
    own = Curve()
    own.observe(4, 4.8, MEMORY_S, NOW)
    both = pool_curves(own, [before], NOW)
    assert 3.6 < both.measurements[4].step_s < 4.8, "own measurements count more"
    later = NOW + 60 * 86400.0
    own.observe(4, 4.8, 60.0, later)
    assert pool_curves(own, [before], later).measurements[4].step_s > 4.7, "old ones fade"
