"""What is stored and what travels: strict records with a schema, messages with a version, and the gather."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fallow.core.nodes import messages, records
from fallow.core.nodes.gather import Gathers
from fallow.core.nodes.messages import Gather, Gathered, Order, Peer, Plan, Refusal, Report, Unreadable
from fallow.core.nodes.records import Node, Root
from fallow.core.nodes.roster import Roster
from world.rig import CONTRACT, started


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
        (stored(1, {}, without=("limit",)), "missing required field `limit`"),
        (stored(1, {}, without=("highest",)), "fields differ from those of schema 1: highest"),
        (stored(1, {"most": 4}), "fields differ from those of schema 1: most"),
        (stored(1, {"limit": "eight"}), "Expected `int`, got `str`"),
        (stored(2, {}), "schema 2 is newer than this Fallow knows (1)"),
        (b"\xff\x00", "it is damaged"),
    ],
    ids=["required", "missing", "unknown", "type", "newer", "damaged"],
)
def test_a_record_that_is_not_as_its_schema_says_stops_its_own_run_with_a_reason(raw: bytes, words: str) -> None:
    with pytest.raises(Unreadable) as error:
        Roster.load("r7", {"root": raw})
    assert error.value.message.startswith("run r7: record root cannot be read: ")
    assert words in error.value.message


def test_a_record_that_is_missing_is_no_new_run() -> None:
    with pytest.raises(Unreadable, match="run r7: record root is missing"):
        Roster.load("r7", {"node/1": b""})


def test_an_older_record_goes_through_every_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(records.SCHEMAS, Root, 3)
    monkeypatch.setitem(records.MIGRATIONS, (Root, 1), lambda fields: fields | {"limit": fields["limit"] * 10})
    monkeypatch.setitem(records.MIGRATIONS, (Root, 2), lambda fields: fields | {"limit": fields["limit"] + 1})
    assert records.decode(stored(1, {}), Root).limit == 81
    assert records.decode(stored(2, {}), Root).limit == 9


FIELDS = {
    Root: "run minimum maximum limit scripted status generation highest complete old_may_step entered change next_id "
    "next_seat contract rollback_below front discarded first first_before main final outcome unsaved unsaved_reason "
    "diverged start_failures message traceback",
    Node: "id host token boot slots entry phase seat joined accepted step ends_at leave_by leaving ended code "
    "traceback proved_gone exited finished deserted noted healed unrecorded",
    Report: "node boot seq term edition ready generation prepared refusal given_up left step has_state switch doing "
    "stalled_s stopped_s computes in_call deserted finish fault saved unsaved damaged healed unrecorded",
    Order: "term edition committed broken plan state_since accepted is_main noted unsaved finish end",
    Plan: "generation replaces base without more check leave interrupt timeout_s checkpoints outcome",
    Peer: "node slots entry",
}


@pytest.mark.parametrize("kind", FIELDS)
def test_who_changes_a_field_raises_its_schema_or_version(kind: type[msgspec.Struct]) -> None:
    """A record needs a new schema and a migration, a message a new version (but not for a new field with a default)."""
    assert list(kind.__struct_fields__) == FIELDS[kind].split()
    assert (set(records.SCHEMAS.values()), messages.VERSION) == ({1}, 1)


def test_a_message_comes_back_and_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    report = Report(node=1, boot=1, seq=2, term=3, edition=4, step=5)
    assert messages.decode(messages.encode(report)) == report
    raw = msgspec.msgpack.encode((1, msgspec.to_builtins(report) | {"type": "report", "colour": "red"}))
    assert messages.decode(raw) == report


def test_a_message_of_another_version_or_without_a_required_field_is_refused() -> None:
    body = {"type": "report", "node": 1, "boot": 1, "seq": 2, "term": 3}
    with pytest.raises(Unreadable, match="missing required field `edition`"):
        messages.decode(msgspec.msgpack.encode((1, body)))
    with pytest.raises(Unreadable, match="message of version 2 cannot be read: this Fallow knows 1"):
        messages.decode(msgspec.msgpack.encode((2, body | {"edition": 1})))
    with pytest.raises(Unreadable, match="message of 2 bytes"):
        messages.decode(b"\x92\x01")


def test_a_change_writes_the_root_and_the_nodes_that_it_changed() -> None:
    rig = started(6)
    rig.join("g")
    assert set(rig.vote().writes) == {"root", "node/7"}


def test_plans_are_deltas_to_members_and_whole_lists_to_newcomers() -> None:
    rig = started(4)
    rig.join("e")
    plans = rig.ballot.plans
    assert (plans.delta.base, plans.delta.without, [peer.node for peer in plans.delta.more]) == (1, (), [5])
    assert (plans.whole.base, [peer.node for peer in plans.whole.more]) == (0, [1, 2, 3, 4, 5])
    assert plans.delta.check == plans.whole.check
    assert [rig.m.order(n).state_since for n in (1, 5)] == [1, 2], "what a newcomer holds does not count"
    assert len(messages.encode(rig.m.order(1))) < 200


def test_after_a_member_counted_another_list_all_get_the_whole_one() -> None:
    """A store has lost a number that was used again since."""
    rig = started(2)
    rig.join("c")
    rig.say(1, refusal=Refusal(generation=2, reason="counts another list"))
    rig.tick(3, 1, 2, 3)
    assert (rig.ballot.change.generation, rig.ballot.plans.delta) == (3, rig.ballot.plans.whole)


def part(node: int, generation: int = 4, said: bytes = b"x") -> Gather:
    return Gather(node=node, generation=generation, key="k", part=said)


def test_a_gather_answers_all_at_once_in_rank_order_and_again_to_one_that_asks_again() -> None:
    gathers = Gathers()
    gathers.open(4, [3, 1])
    assert gathers.take(part(1, said=b"one")) == (b"", [])
    assert gathers.take(part(2)) == (b"", []), "no participant"
    answer, to = gathers.take(part(3, said=b"three"))
    assert to == [3, 1]
    assert messages.decode(answer) == Gathered(generation=4, key="k", parts=(b"three", b"one"))
    assert gathers.take(part(1, said=b"one")) == (answer, [1])


def test_a_gather_refuses_long_parts_and_forgets_old_generations() -> None:
    gathers = Gathers()
    gathers.open(1, [1])
    assert gathers.take(part(1, 1, b"x" * (1 << 16) + b"x")) == (b"", [])
    assert gathers.take(part(1, 1))[1] == [1]
    for generation in range(2, 6):
        gathers.open(generation, [1])
    assert gathers.take(part(1, 1)) == (b"", [])
