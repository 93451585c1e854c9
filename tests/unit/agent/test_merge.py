"""How L workers stand becomes how their node stands; their parts become one, and the head's answer that of each."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.agent.merge import Facts, NodeGathers, merge_progress, merge_report, needs_no_beat
from fallow.core.membership.gather import MAX_GENERATIONS, Gathers
from fallow.core.membership.messages import (
    Checkpoint,
    Contract,
    Fault,
    Finish,
    Gather,
    Gathered,
    Problem,
    Refusal,
    Report,
    Switch,
)
from fallow.core.protocol import Beat, Part, Progress, Status
from fallow.model import Doing, Parts

COUNT = st.integers(0, 5)
SECONDS = st.floats(0, 100)
CONTRACT = st.builds(Contract, signature=st.sampled_from("ab"), shards=st.just(8), global_batch=st.just(64))
STATUS = st.builds(
    Status,
    term=COUNT,
    edition=COUNT,
    ready=st.none() | CONTRACT,
    generation=COUNT,
    prepared=COUNT,
    refusal=st.none()
    | st.builds(
        Refusal,
        generation=COUNT,
        reason=st.just("no"),
        unreachable=st.lists(COUNT, max_size=2, unique=True).map(tuple),
        tried=st.just(()),
    ),
    given_up=COUNT,
    break_reason=st.sampled_from(("", "reset")),
    passed_boundary=COUNT,
    step=COUNT,
    has_state=st.booleans(),
    switch=st.none()
    | st.builds(
        Switch, generation=COUNT, first_step=COUNT, pause_s=SECONDS, bytes_in_pause=COUNT, bytes_behind=COUNT,
        parts=st.just(Parts()), discarded=COUNT,
    ),
    doing=st.sampled_from(Doing),
    stalled_s=SECONDS,
    computes=st.booleans(),
    in_call=st.booleans(),
    deserted=st.booleans(),
    finish=st.none() | st.builds(Finish, generation=COUNT, steps=COUNT, digest=st.sampled_from("de")),
    fault=st.none() | st.builds(Fault, code=COUNT, message=st.just("m")),
    saved=st.none() | st.builds(Checkpoint, path=st.just("/c"), generation=COUNT, step=COUNT),
    unsaved=st.none() | st.builds(Problem, reason=st.just("r"), generation=COUNT, step=COUNT),
    damaged=st.none() | st.builds(Problem, reason=st.just("r"), generation=COUNT, step=COUNT),
    healed=COUNT,
    unrecorded=st.none() | COUNT,
)  # fmt: skip
FACTS = st.builds(
    Facts, status=STATUS, age_s=SECONDS, stopped_s=SECONDS, mute_s=SECONDS, fault_s=st.just(1.0), pid=COUNT
)
NODE = st.lists(FACTS, min_size=1, max_size=4)


def merged(workers: list[Facts], seq: int = 1) -> Report:
    return merge_report(workers, node=1, boot=1, seq=seq, highest=0)


def of(*statuses: dict[str, Any]) -> Report:
    return merged([Facts(Status(**status)) for status in statuses])


@given(FACTS)
def test_a_node_with_one_worker_stands_as_that_one_does(worker: Facts) -> None:
    report, status = merged([worker]), worker.status
    for name in set(Report.__struct_fields__) & set(Status.__struct_fields__) - {"switch", "stalled_s"}:
        assert getattr(report, name) == getattr(status, name), name
    is_current = status.switch is not None and status.switch.generation == status.generation
    assert report.switch == (status.switch if is_current else None)
    assert (report.stalled_s, report.stopped_s) == (status.stalled_s + worker.age_s, worker.stopped_s)


@given(NODE)
def test_a_node_has_done_what_all_of_its_workers_have(workers: list[Facts]) -> None:
    report, all_of = merged(workers), [worker.status for worker in workers]
    assert (report.term, report.edition) == min((status.term, status.edition) for status in all_of)
    for name in ("generation", "prepared", "given_up", "passed_boundary", "step"):
        assert getattr(report, name) == min(getattr(status, name) for status in all_of)
    assert (report.ready is not None) is all(status.ready is not None for status in all_of)
    if all(status.finish is not None for status in all_of):
        assert report.finish is not None
    for name in ("has_state", "in_call"):
        assert getattr(report, name) is all(getattr(status, name) for status in all_of)
    for doing in (Doing.WAITING, Doing.OUTSIDE):
        assert (report.doing is doing) is all(status.doing is doing for status in all_of)
    assert report.stalled_s == min(worker.status.stalled_s + worker.age_s for worker in workers)


@given(NODE)
def test_what_one_worker_alone_knows_is_told(workers: list[Facts]) -> None:
    report, all_of = merged(workers), [worker.status for worker in workers]
    for name in ("refusal", "fault", "saved", "unsaved", "damaged", "unrecorded"):
        assert (getattr(report, name) is not None) is any(getattr(status, name) is not None for status in all_of)
    for name in ("deserted", "computes"):
        assert getattr(report, name) is any(getattr(status, name) for status in all_of)
    assert report.healed == max(status.healed for status in all_of)
    assert report.stopped_s == max(worker.stopped_s for worker in workers)
    assert report.mute_s == max(worker.mute_s for worker in workers)
    for name in ("saved", "unsaved", "damaged"):
        known = [found for status in all_of if (found := getattr(status, name)) is not None]
        if known:
            newest = getattr(report, name)
            assert (newest.generation, newest.step) == max((found.generation, found.step) for found in known)


@pytest.mark.parametrize("slots", [(0, 1), (1, 0)])
def test_what_came_first_is_the_nodes_fault_and_not_what_follows_from_it(slots: tuple[int, int]) -> None:
    def first_of(*workers: Facts) -> Fault | None:
        return merged([workers[slot] for slot in slots]).fault

    first, second = Fault(code=1, message="no such file"), Fault(code=1, message="connection reset by peer")
    late = Facts(Status(fault=second), fault_s=1.0)
    assert first_of(Facts(Status(fault=first), fault_s=1.5), late) == first
    assert first_of(Facts(Status(fault=first), fault_s=1.5), Facts(Status(), cut_off_s=1.0)) == first
    assert first_of(Facts(Status(), cut_off_s=1.5), late) is None
    assert first_of(Facts(Status(), cut_off_s=0.99), late) is None, "the kernel closes one connection after the other"
    assert first_of(Facts(Status(), mute_s=7.0), late) == second
    new = Facts(Status(fault=second), fault_s=0.05)
    assert first_of(Facts(Status(), mute_s=7.0), new) is None, "it may be dying"
    assert first_of(Facts(Status()), new) == second, "it has ended"


def test_workers_that_differ_do_not_pass_for_alike() -> None:
    one, other = (Contract(signature=signature, shards=8, global_batch=8) for signature in "ab")
    assert of({"ready": one}, {"ready": other}, {"ready": one}).ready == other
    ends = [Finish(generation=1, steps=1, digest=digest) for digest in "xyx"]
    finish = of(*({"finish": end} for end in ends)).finish
    assert finish is not None
    assert finish.digest not in ("x", "y")


@pytest.mark.parametrize(
    ("other", "is_told"),
    [
        ({"in_call": True, "doing": Doing.WAITING, "stalled_s": 6.0}, True),
        ({"in_call": True, "doing": Doing.WAITING, "stalled_s": 1.0}, False),
        ({"in_call": True, "doing": Doing.WORKING, "stalled_s": 6.0}, False),
        ({"in_call": False, "doing": Doing.WAITING, "stalled_s": 6.0}, False),
    ],
)
def test_a_worker_that_waits_for_one_whose_script_has_ended_is_not_waited_for(
    other: dict[str, Any], is_told: bool
) -> None:
    """Both would wait for ever: the head tells it that the others' scripts have ended when it knows of one."""
    end = Finish(generation=1, steps=1, digest="x")
    assert of({"finish": end}, other).finish == (end if is_told else None)
    assert of(other).finish is None


def test_refusals_of_the_newest_generation_are_told_together() -> None:
    refusals = [
        Refusal(generation=3, reason="old", unreachable=(9,)),
        Refusal(generation=4, reason="first", unreachable=(1, 2), tried=("a:1", "")),
        Refusal(generation=4, reason="second", unreachable=(1, 2, 3), tried=("a:2", "b:2", "c:2")),
    ]
    refusal = of(*({"refusal": refusal} for refusal in refusals)).refusal
    assert refusal == Refusal(generation=4, reason="first", unreachable=(1, 2, 3), tried=("a:1", "b:2", "c:2"))


def test_a_switch_is_told_once_all_have_gone_over_and_as_long_as_the_longest_took() -> None:
    def switch(generation: int, pause_s: float) -> Switch:
        return Switch(generation=generation, first_step=5, pause_s=pause_s, bytes_in_pause=2, bytes_behind=3)

    first, second = switch(2, 0.1), switch(2, 0.3)
    told = of({"generation": 2, "switch": first}, {"generation": 2, "switch": second}).switch
    assert told == msgspec.structs.replace(second, bytes_in_pause=4, bytes_behind=6)
    assert of({"generation": 2, "switch": first}, {"generation": 1}).switch is None
    assert of({"generation": 2, "switch": first}, {"generation": 2, "switch": switch(1, 0.3)}).switch is None


PROGRESS = st.builds(
    Progress,
    epoch=COUNT,
    reached=st.tuples(COUNT, COUNT),
    loss=st.none() | SECONDS,
    samples_per_s=SECONDS,
    shards=COUNT,
    pace_s=st.just(0.0) | st.floats(0.001, 100),
    total_steps=st.none() | COUNT,
    scalars=st.dictionaries(st.sampled_from("ab"), SECONDS),
    busy_links=st.dictionaries(st.sampled_from(["10.0.0.1", "10.0.0.2"]), st.floats(0, 1)),
)


@given(st.lists(PROGRESS, min_size=1, max_size=4), st.lists(COUNT, min_size=4, max_size=4))
def test_progress_of_a_node(all_of: list[Progress], pids: list[int]) -> None:
    workers = [Facts(Status(progress=progress), pid=pid) for progress, pid in zip(all_of, pids, strict=False)]
    node = merge_progress(workers)
    for name in ("loss", "samples_per_s", "scalars", "total_steps"):
        assert getattr(node, name) == getattr(all_of[0], name), "the same everywhere"
    assert node.shards == sum(progress.shards for progress in all_of)
    assert node.epoch == max(progress.epoch for progress in all_of)
    assert node.reached == max(progress.reached for progress in all_of)
    assert node.pids == tuple(worker.pid for worker in workers if worker.pid)
    for address in {address for progress in all_of for address in progress.busy_links}:
        assert node.busy_links[address] == max(progress.busy_links.get(address, 0.0) for progress in all_of)
    if min(progress.pace_s for progress in all_of) > 0:
        assert math.isclose(1 / node.pace_s, sum(1 / progress.pace_s for progress in all_of))
        fastest_s = min(progress.pace_s for progress in all_of)
        assert node.pace_s <= fastest_s * (1 + 1e-9), "together they are faster"
    else:
        assert node.pace_s == 0, "not known yet"


PASSING = {"seq", "step", "doing", "stalled_s", "stopped_s", "mute_s", "computes", "in_call"}


@given(NODE, NODE, st.sampled_from(["", "age_s", "stopped_s", "mute_s", *Status.__struct_fields__]))
def test_only_a_step_and_time_that_passes_can_wait_for_the_next_beat(
    one: list[Facts], other: list[Facts], name: str
) -> None:
    """Of nodes that have nothing in common, or that differ in one thing that is known of one worker."""
    if name in Status.__struct_fields__:
        changed = msgspec.structs.replace(one[0].status, **{name: getattr(other[0].status, name)})
        other = [replace(one[0], status=changed), *one[1:]]
    elif name:
        other = [replace(one[0], **{name: getattr(other[0], name)}), *one[1:]]
    reports = merged(one), merged(other, seq=9)
    acted_on = [
        {name: getattr(report, name) for name in set(Report.__struct_fields__) - PASSING}
        | {"stops": report.stopped_s > 0}
        for report in reports
    ]
    first, second = (Beat(report=report, progress=Progress(shards=report.seq)) for report in reports)
    assert (needs_no_beat(first) == needs_no_beat(second)) is (acted_on[0] == acted_on[1])
    assert needs_no_beat(Beat()) != needs_no_beat(Beat(warned=15))


# -- gathers -----------------------------------------------------------------------------------------------------------


def part(generation: int = 1, key: str = "k", value: bytes = b"v", *, within_node: bool = False) -> Part:
    return Part(generation=generation, key=key, part=value, within_node=within_node)


@given(
    st.dictionaries(st.integers(1, 9), st.integers(1, 3), min_size=1, max_size=4),
    st.data(),
)
def test_all_workers_get_all_parts_in_rank_order_whoever_comes_first_or_asks_twice(
    nodes: dict[int, int], data: st.DataObject
) -> None:
    head, agents = Gathers(), {node: NodeGathers(node, slots) for node, slots in nodes.items()}
    ranks = data.draw(st.permutations(sorted(nodes)))
    head.open(1, ranks)
    workers = [(node, slot) for node, slots in nodes.items() for slot in range(slots)]
    said = data.draw(st.permutations(workers + data.draw(st.lists(st.sampled_from(workers), max_size=3))))
    heard: dict[tuple[int, int], tuple[bytes, ...]] = {}

    def answer(found: Gathered | None, node: int, slots: Iterable[int]) -> None:
        if found is not None:
            heard.update({(node, slot): found.parts for slot in slots})

    for node, slot in said:
        found, slots = agents[node].take(slot, part(value=f"{node}.{slot}".encode()))
        if isinstance(found, Gather):
            for again in [found] * data.draw(st.integers(1, 2)):
                gathered, nodes_to_tell = head.take(again)
                for other in nodes_to_tell:
                    assert gathered is not None
                    answer(agents[other].hear(gathered), other, range(nodes[other]))
        else:
            answer(found, node, slots)
    everything = tuple(f"{node}.{slot}".encode() for node in ranks for slot in range(nodes[node]))
    assert heard == dict.fromkeys(workers, everything)
    assert not any(agent.unanswered() for agent in agents.values())
    for node, slot in workers:
        assert agents[node].take(slot, part()) == (Gathered(generation=1, key="k", parts=everything), [slot])


def test_a_gather_within_the_node_is_one_of_its_own() -> None:
    gathers = NodeGathers(1, 2)
    assert gathers.take(1, part(value=b"b", within_node=True)) == (None, [])
    assert gathers.take(0, part(value=b"x")) == (None, []), "another gather, of all nodes"
    answer = gathers.take(0, part(value=b"a", within_node=True))
    assert answer == (Gathered(generation=1, key="k", parts=(b"a", b"b")), [0, 1])
    assert gathers.unanswered() == []


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_the_newest_generations_are_remembered_and_no_others(generations: list[int]) -> None:
    gathers = NodeGathers(1, 1)
    newest: list[int] = []
    for generation in generations:
        newest = sorted({*newest, generation})[-MAX_GENERATIONS:]
        found, _ = gathers.take(0, part(generation))
        assert found is None or generation in newest
        assert sorted(gather.generation for gather in gathers.unanswered()) == newest


def test_a_question_goes_to_the_head_at_once_and_its_answer_to_all_workers() -> None:
    """Also while a sibling has not given its part: then this node is among those that are missing."""
    head, agents = Gathers(), {node: NodeGathers(node, 2) for node in (1, 2)}
    head.open(1, [1, 2])
    assert agents[1].take(0, part()) == (None, [])
    for missing in ((1, 2), (2,)):
        asked, _ = agents[1].take(0, part(value=b""))
        assert asked == Gather(node=1, generation=1, key="k", part=b"")
        gathered, nodes = head.take(asked)
        assert gathered is not None
        assert nodes == [1]
        assert agents[1].hear(gathered) == Gathered(generation=1, key="k", missing=missing)
        whole, _ = agents[1].take(1, part())
        if whole is not None:
            assert isinstance(whole, Gather)
            assert head.take(whole) == (None, [])
    assert agents[1].unanswered() == [Gather(node=1, generation=1, key="k", part=msgspec.msgpack.encode([b"v", b"v"]))]
