"""Stored records: a value in the store is (schema number, record), and is read strictly.

A missing or unknown field, or one of another type, makes a record unreadable, at any depth; it is never replaced by a
default. To rename, add or remove a field of a kind, raise its number in `SCHEMAS` and add a step to `MIGRATIONS`.
Records hold no sets, since a set is written in another order each time.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from fallow.core.membership.messages import Unreadable

T = TypeVar("T", bound=msgspec.Struct)

Fields = dict[str, Any]

SCHEMAS: dict[type[msgspec.Struct], int] = {}
"""Kind -> number of its present schema. The module that defines a stored kind adds it."""

MIGRATIONS: dict[tuple[type[msgspec.Struct], int], Callable[[Fields], Fields]] = {}
"""(kind, schema) -> function from the fields of that schema to those of the next one."""

_ENVELOPE: msgspec.msgpack.Decoder[tuple[int, Fields]] = msgspec.msgpack.Decoder(tuple[int, Fields])
_DAMAGES = (msgspec.MsgspecError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Newer(Unreadable):
    """A newer Fallow has written the record, which is not damaged."""


def encode(record: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode((SCHEMAS[type(record)], record))


def decode(raw: bytes, kind: type[T]) -> T:
    """Read a record of this or an older schema.

    Raises:
        Unreadable: the record is damaged, or written by another Fallow (`Newer`: by a newer one).
    """
    newest = SCHEMAS[kind]
    try:
        schema, fields = _ENVELOPE.decode(raw)
        if not 1 <= schema <= newest:
            text = f"its schema is {schema}, this Fallow reads 1 to {newest}; start the Fallow that wrote it"
            raise Newer(text) if schema > newest else Unreadable(text)
        for older in range(schema, newest):
            fields = MIGRATIONS[kind, older](fields)
        record = msgspec.convert(fields, kind)
        own_fields: Fields = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    except _DAMAGES as error:
        raise Unreadable(f"it is damaged: {type(error).__name__}: {error}; restore the store from a backup") from error
    wrong = sorted(_differences(fields, own_fields))
    if wrong:
        text = ", ".join(wrong)
        raise Unreadable(f"fields differ from those of schema {newest}: {text}; start the Fallow that wrote it")
    return record


def _differences(stored: Fields, own_fields: Fields) -> list[str]:
    names = {*stored, *own_fields}
    return [n for n in names if n not in stored or n not in own_fields or not _is_same(stored[n], own_fields[n])]


def _is_same(stored: Any, own_fields: Any) -> bool:
    if isinstance(stored, dict) and isinstance(own_fields, dict):
        return stored.keys() == own_fields.keys() and all(_is_same(stored[key], own_fields[key]) for key in stored)
    if isinstance(stored, list) and isinstance(own_fields, list):
        return len(stored) == len(own_fields) and all(map(_is_same, stored, own_fields))
    is_nan = stored != stored and own_fields != own_fields
    return is_nan or bool(stored == own_fields)
