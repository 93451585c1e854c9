"""Records of a run, plans as they are ordered, and the gather. What is stored and sent for good: `test_golden`."""

from typing import Any

import msgspec
import pytest

from fallow.core.membership.gather import MAX_KEYS, Gathers
from fallow.core.membership.messages import Gather, Gathered, Refusal, Unreadable
from fallow.core.membership.records import Root
from fallow.core.membership.roster import Roster
from fallow.wire.codec import encode
from world.rig import CONTRACT, notices, started


def root() -> Root:
    return Root(run="r", minimum=1, maximum=8, limit=8, contract=CONTRACT)


def stored(schema: int, changed: dict[str, Any], without: tuple[str, ...] = ()) -> bytes:
    fields = msgspec.to_builtins(root()) | changed
    return msgspec.msgpack.encode((schema, {name: value for name, value in fields.items() if name not in without}))


def test_records_come_back_as_they_were() -> None:
    rig = started(2)
    rig.join("c")
    loaded = Roster.load("r", rig.store)
    assert (loaded.root, loaded.nodes, loaded.history) == (rig.r.root, rig.r.nodes, rig.r.history)
    assert loaded.take_writes() == {}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (stored(1, {}, without=("highest",)), "fields differ from those of schema 1: highest"),
        (stored(2, {}), "its schema is 2, this Fallow reads 1 to 1"),
        (b"\xff\x00", "it is damaged"),
    ],
    ids=["missing", "newer", "damaged"],
)
def test_a_record_that_is_not_as_its_schema_says_stops_its_own_run_with_a_reason(raw: bytes, words: str) -> None:
    with pytest.raises(Unreadable) as error:
        Roster.load("r7", {"root": raw})
    assert error.value.message.startswith("run r7: record root cannot be read: ")
    assert words in error.value.message


def test_a_record_that_is_missing_is_no_new_run() -> None:
    with pytest.raises(Unreadable, match="run r7: record root is missing"):
        Roster.load("r7", {"node/1": b""})


def test_a_change_writes_the_root_and_the_nodes_that_it_changed() -> None:
    rig = started(6)
    rig.join("g")
    before = dict(rig.store)
    rig.vote()
    assert {key for key, raw in rig.store.items() if raw != before[key]} == {"root", "node/7"}


@notices("what a node held before it was away counts")
def test_plans_are_deltas_to_members_and_whole_lists_to_newcomers() -> None:
    rig = started(4)
    rig.join("e")
    plans = rig.ballot
    delta = plans.delta_plan
    assert (delta.base, delta.without, [peer.node for peer in delta.more]) == (1, (), [5])
    assert (plans.full_plan.base, [peer.node for peer in plans.full_plan.more]) == (0, [1, 2, 3, 4, 5])
    assert plans.delta_plan.check == plans.full_plan.check
    assert [rig.m.order(n).state_since for n in (1, 5)] == [1, 2], "what a newcomer holds does not count"
    assert len(encode(rig.m.order(1))) < 200


def test_after_a_member_counted_another_list_all_get_the_whole_one() -> None:
    """A store has lost a number that was used again since."""
    rig = started(2)
    rig.join("c")
    rig.say(1, refusal=Refusal(generation=2, reason="counts another list"))
    rig.tick(3, 1, 2, 3)
    assert (rig.ballot.change.generation, rig.ballot.delta_plan) == (3, rig.ballot.full_plan)


def part(node: int, generation: int = 4, said: bytes = b"x", key: str = "k") -> Gather:
    return Gather(node=node, generation=generation, key=key, part=said)


def test_a_gather_answers_all_at_once_in_rank_order_and_again_to_one_that_asks_again() -> None:
    gathers = Gathers()
    gathers.open(4, [3, 1])
    assert gathers.take(part(1, said=b"one")) == (None, [])
    assert gathers.take(part(2)) == (None, []), "no participant"
    gathers.open(4, [3, 1])
    answer, to = gathers.take(part(3, said=b"three"))
    assert to == [3, 1]
    assert answer == Gathered(generation=4, key="k", parts=(b"three", b"one"))
    again, to = gathers.take(part(1, said=b"one"))
    assert (again is answer, to) == (True, [1])


def test_a_gather_forgets_old_generations() -> None:
    gathers = Gathers()
    gathers.open(1, [1])
    assert gathers.take(part(1, 1))[1] == [1]
    for generation in range(2, 6):
        gathers.open(generation, [1])
    assert gathers.take(part(1, 1)) == (None, [])


def test_a_node_cannot_fill_the_memory_of_the_head_with_gathers() -> None:
    gathers = Gathers()
    gathers.open(1, [1, 2])
    for number in range(2 * MAX_KEYS):
        assert gathers.take(part(1, 1, key=f"k{number}")) == (None, [])
    answered = [number for number in range(2 * MAX_KEYS) if gathers.take(part(2, 1, key=f"k{number}"))[1]]
    assert answered == list(range(MAX_KEYS))
