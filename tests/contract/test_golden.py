"""Messages and records in the bytes in which they were once written: they are read for good.

`tests/data/golden.json` has each message and each kind of record, once with all fields and once with as few as may be.
Run as a script, this module adds what is new of today's. Nothing there is ever changed or removed:

    PYTHONPATH=daemon:tests python tests/contract/test_golden.py
"""

import copy
import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect as types

from extremes import full, least, struct_info
from fallow.core import records
from fallow.core.membership.messages import VERSION, Finish, Unreadable, Wire
from fallow.core.membership.records import Root
from fallow.core.protocol import AgentRefused, FromAgent, FromWorker, Hello, ToAgent, ToWorker
from fallow.wire.codec import Decoder, encode

GOLDEN = Path(__file__).parents[1] / "data" / "golden.json"

for module in (
    "fallow.core.membership.records",
    "fallow.head.loop.durable",
    "fallow.head.slurm.harvest",
    "fallow.head.slurm.neighbours",
):
    importlib.import_module(module)  # each adds its kinds to `records.SCHEMAS`

DIRECTIONS: dict[str, Any] = {
    "agent to head": FromAgent,
    "head to agent": ToAgent,
    "worker to agent": FromWorker,
    "agent to worker": ToWorker,
}
FORMER_NAMES = {"AgentLeft": "Left", "AgentRefused": "Refused", "BeatReply": "News", "HeadSilence": "Heard"}
"""Class of a message -> the name that the file has for it."""
MESSAGES = [(way, kind) for way, union in DIRECTIONS.items() for kind in get_args(union)]


def fields_of(value: Any) -> Any:
    """All fields of a struct as JSON has them, those with their defaults, too."""
    if isinstance(value, msgspec.Struct):
        encoded = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        return {name: fields_of(getattr(value, field)) for name, field in encoded}
    if isinstance(value, dict):
        return {str(key): fields_of(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [fields_of(one) for one in value]
    return msgspec.to_builtins(value)


# -- the file --------------------------------------------------------------------------------------------------------


def of_today() -> Iterator[tuple[str, bytes, Any]]:
    """(name, bytes, object) of all that is written now."""
    for way, kind in MESSAGES:
        for shape in (full, least):
            message = shape(kind)
            name = FORMER_NAMES.get(kind.__name__, kind.__name__)
            yield f"{way}: {name} ({shape.__name__})", encode(message), message
    for kind in sorted(records.SCHEMAS, key=lambda kind: kind.__name__):
        for shape in (full, least):
            record = shape(kind)
            yield f"record: {kind.__name__} ({shape.__name__})", records.encode(record), record


def golden() -> dict[str, list[dict[str, Any]]]:
    """Name -> what was written since the first version, oldest first: `raw` (hex) and `fields`."""
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def add_what_is_new() -> None:
    known = golden()
    for name, raw, value in of_today():
        written = known.setdefault(name, [])
        if raw.hex() not in [one["raw"] for one in written]:
            written.append({"raw": raw.hex(), "fields": fields_of(value)})
    GOLDEN.write_text(json.dumps(known, indent=1) + "\n")


def contains(now: Any, before: Any) -> bool:
    """All that was known before is known now, and has the same value."""
    if isinstance(before, dict):
        return all(key in now and contains(now[key], before[key]) for key in before)
    if isinstance(before, list):
        return len(now) == len(before) and all(map(contains, now, before))
    return bool(now == before)


ENTRIES = [(name, one["raw"], one["fields"]) for name, several in golden().items() for one in several]


@pytest.mark.parametrize(("name", "raw", "fields"), ENTRIES, ids=[name for name, *_ in ENTRIES])
def test_what_was_written_once_is_read_for_good(name: str, raw: str, fields: Any) -> None:
    group, kind, _ = name.replace(": ", " (").split(" (")
    if group == "record":
        (stored,) = [one for one in records.SCHEMAS if one.__name__ == kind]
        schema, _ = msgspec.msgpack.decode(bytes.fromhex(raw))
        read = fields_of(records.decode(bytes.fromhex(raw), stored))
        assert read == fields or schema < records.SCHEMAS[stored], "it is what it was, or went through a migration"
    else:
        assert contains(fields_of(Decoder[Any](DIRECTIONS[group]).decode(bytes.fromhex(raw))), fields)


def test_all_that_is_written_today_is_in_the_file() -> None:
    """If this fails, you have changed what is written. See the top of this module and of `core.membership.messages`."""
    known = {name: [one["raw"] for one in several] for name, several in golden().items()}
    assert [name for name, raw, _ in of_today() if raw.hex() not in known.get(name, [])] == []


# -- what is refused, what is ignored --------------------------------------------------------------------------------


def field_paths(value: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    """The way to each field inside of an encoded object."""
    if isinstance(value, msgspec.Struct) and not value.__struct_config__.array_like:
        for name, field in zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True):
            yield (*above, name)
            yield from field_paths(getattr(value, field), *above, name)
    elif isinstance(value, dict | list | tuple):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from field_paths(one, *above, key)


def without(fields: Any, path: tuple[Any, ...], **beside: Any) -> Any:
    """A copy that lacks what is at the end of the path, and has others in its place."""
    copied = copy.deepcopy(fields)
    del _at(copied, path[:-1])[path[-1]]
    _at(copied, path[:-1]).update(beside)
    return copied


def _at(fields: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        fields = fields[key]
    return fields


KINDS = sorted(records.SCHEMAS, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [full, least])
def test_a_record_is_refused_if_a_field_is_missing_unknown_renamed_or_mistyped(
    kind: type[msgspec.Struct], shape: Callable[[type[Any]], Any]
) -> None:
    record = shape(kind)
    schema, fields = msgspec.msgpack.decode(records.encode(record))
    assert records.decode(records.encode(record), kind) == record
    wrong = [without(fields, path) for path in field_paths(record)]
    wrong += [without(fields, path, colour=1) for path in field_paths(record)]
    wrong += [fields | {name: msgspec.msgpack.Ext(1, b"")} for name in fields]
    wrong += [fields | {"colour": "red"}]
    for one in wrong:
        with pytest.raises(Unreadable):
            records.decode(msgspec.msgpack.encode((schema, one)), kind)


def test_a_number_that_is_none_is_read_back() -> None:
    """A loss may be NaN, which does not equal itself."""
    root = msgspec.structs.replace(full(Root), final=Finish(generation=1, steps=1, digest="", loss=math.nan))
    again = records.decode(records.encode(root), Root)
    assert again.final is not None
    assert again.final.loss is not None
    assert math.isnan(again.final.loss)


def test_older_schemas_go_through_every_migration_since(monkeypatch: pytest.MonkeyPatch) -> None:
    written = records.encode(full(Root))
    monkeypatch.setitem(records.SCHEMAS, Root, 3)
    monkeypatch.setitem(records.MIGRATIONS, (Root, 1), lambda fields: fields | {"first": fields["first"] * 10})
    monkeypatch.setitem(records.MIGRATIONS, (Root, 2), lambda fields: fields | {"first": fields["first"] + 1})
    assert records.decode(written, Root).first == 10 * full(Root).first + 1
    assert records.decode(records.encode(full(Root)), Root) == full(Root)
    monkeypatch.delitem(records.MIGRATIONS, (Root, 2))
    with pytest.raises(Unreadable):
        records.decode(written, Root)
    for schema in (-1, 0, 4):
        with pytest.raises(Unreadable, match=f"schema is {schema}, this Fallow reads 1 to 3"):
            records.decode(msgspec.msgpack.encode((schema, msgspec.to_builtins(full(Root)))), Root)


@pytest.mark.parametrize(("way", "kind"), MESSAGES)
def test_a_message_may_have_more_fields_and_may_not_lack_one(way: str, kind: type[Wire]) -> None:
    decoder, message = Decoder[Any](DIRECTIONS[way]), full(kind)
    _, fields = msgspec.msgpack.decode(msgspec.msgpack.encode((VERSION, message)))
    assert decoder.decode(encode(message)) == message
    more = copy.deepcopy(fields)
    for path in field_paths(message):
        _at(more, path[:-1])["colour"] = {"red": [1]}
    assert decoder.decode(msgspec.msgpack.encode((VERSION, more))) == message
    required = [field.name for field in struct_info(kind).fields if field.required]
    for wrong in (
        *[without(fields, (name,)) for name in required],
        *[fields | {name: msgspec.msgpack.Ext(1, b"")} for name in kind.__struct_encode_fields__],
        fields | {"type": "nonsense"},
        without(fields, ("type",)),
    ):
        with pytest.raises(Unreadable, match="Update the older side"):
            decoder.decode(msgspec.msgpack.encode((VERSION, wrong)))


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, 2**60])
def test_another_version_is_refused_in_words_except_for_what_all_versions_share(version: int) -> None:
    """An agent has to learn that it is refused, and the head whom it refuses."""
    refused, hello = (msgspec.msgpack.encode((version, full(kind))) for kind in (AgentRefused, Hello))
    assert Decoder[Any](ToAgent, always=AgentRefused).decode(refused) == full(AgentRefused)
    assert Decoder[Any](Hello, always=Hello).decode(hello) == full(Hello)
    for decoder in (Decoder[Any](FromAgent), Decoder[Any](ToAgent, always=AgentRefused)):
        with pytest.raises(Unreadable, match=f"version {version} cannot be read: this Fallow knows {VERSION}. Update"):
            decoder.decode(hello)


@pytest.mark.parametrize(("way", "kind"), MESSAGES)
def test_every_field_of_a_message_has_bounds(way: str, kind: type[Wire]) -> None:
    """What comes from the network goes to memory and the store."""
    unbounded = [path for path, info in _leaves(types.type_info(kind), kind.__name__) if not _is_bounded(info)]
    assert not unbounded, way


def _leaves(info: types.Type, path: str) -> Iterator[tuple[str, types.Type]]:
    match info:
        case types.StructType():
            for field in info.fields:
                yield from _leaves(field.type, f"{path}.{field.name}")
        case types.UnionType() | types.TupleType():
            for one in info.types if isinstance(info, types.UnionType) else info.item_types:
                yield from _leaves(one, path)
        case types.Metadata():
            yield from _leaves(info.type, path)
        case _:
            yield path, info
            for part in ("item_type", "key_type", "value_type"):
                if hasattr(info, part):
                    yield from _leaves(getattr(info, part), path)


def _is_bounded(info: types.Type) -> bool:
    if isinstance(info, types.IntType):
        return info.ge is not None and info.le is not None
    return not hasattr(info, "max_length") or info.max_length is not None


if __name__ == "__main__":
    add_what_is_new()
