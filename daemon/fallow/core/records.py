"""Stored records: a value in the store is (schema number, record), and is read strictly.

A field that is missing, unknown or of another type makes a record unreadable, also in whatever the record is made of.
Records hold no sets: these would be written in another order each time.
It never becomes a default without a word. So whoever renames, adds or removes a field of a kind raises its number in
`SCHEMAS` and adds a step to `MIGRATIONS`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from fallow.core.membership.messages import Unreadable

T = TypeVar("T", bound=msgspec.Struct)

Fields = dict[str, Any]

SCHEMAS: dict[type[msgspec.Struct], int] = {}
"""Kind -> number of the schema that is written. Whichever module has a kind that is stored adds it."""

MIGRATIONS: dict[tuple[type[msgspec.Struct], int], Callable[[Fields], Fields]] = {}
"""(kind, schema) -> makes fields of that schema fields of the next one."""

_ENVELOPE: msgspec.msgpack.Decoder[tuple[int, Fields]] = msgspec.msgpack.Decoder(tuple[int, Fields])
_DAMAGES = (msgspec.MsgspecError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Newer(Unreadable):
    """A newer Fallow has written a record. Nothing is wrong with it."""


def encode(record: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode((SCHEMAS[type(record)], record))


def decode(raw: bytes, kind: type[T]) -> T:
    """Read a record of this or an older schema.

    Raises:
        Unreadable: it is damaged, or of another Fallow (`Newer`: of a newer one).
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
        written: Fields = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    except _DAMAGES as error:
        raise Unreadable(f"it is damaged: {type(error).__name__}: {error}; restore the store from a backup") from error
    wrong = sorted(_differences(fields, written))
    if wrong:
        text = ", ".join(wrong)
        raise Unreadable(f"fields differ from those of schema {newest}: {text}; start the Fallow that wrote it")
    return record


def _differences(stored: Fields, written: Fields) -> list[str]:
    names = {*stored, *written}
    return [n for n in names if n not in stored or n not in written or not _is_same(stored[n], written[n])]


def _is_same(stored: Any, written: Any) -> bool:
    if isinstance(stored, dict) and isinstance(written, dict):
        return stored.keys() == written.keys() and all(_is_same(stored[key], written[key]) for key in stored)
    if isinstance(stored, list) and isinstance(written, list):
        return len(stored) == len(written) and all(map(_is_same, stored, written))
    is_nan = stored != stored and written != written
    return is_nan or bool(stored == written)
