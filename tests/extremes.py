"""Values at and beyond the ends of a type, derived from the type itself."""

import enum
import itertools
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as mi
from hypothesis import strategies as st

LONG = "x" * 300_000
WRONG: tuple[Any, ...] = (None, True, -1, 0, 2**31, 2**53, 2**63, 2**64, -(2**63), 0.5, 1e300, "", "\0", "../x", LONG,
                          "\u202e\x1b]52;c;x\x07", [], [[]], ["x"], [None], {}, {"x": 1})  # fmt: skip
"""What anybody may put in the place of anything."""
ON_THE_WIRE: tuple[Any, ...] = (*WRONG, float("nan"), float("inf"), -float("inf"), b"", b"\xff" * 9)
"""What MessagePack has besides."""


def deep(levels: int = 200) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def full(kind: Any, text: str = "") -> Any:
    """An instance of which no field has its default, and hardly any two the same value; but all texts may be one."""
    return _Made(text).value(mi.type_info(kind))


def least(kind: type[Any]) -> Any:
    """An instance with those fields only that must be there."""
    return kind(**{f.name: _Made().value(f.type) for f in struct_info(kind).fields if f.required})


def example(kind: mi.Type) -> Any:
    """A value of that type, somewhere in the middle."""
    return msgspec.to_builtins(_Made().value(kind), builtin_types=(bytes,))


class _Made:
    """Values, each with a number of its own."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.numbers = itertools.count(1)

    def value(self, info: mi.Type) -> Any:
        match info:
            case mi.StructType() | mi.DataclassType() | mi.NamedTupleType():
                return info.cls(**{field.name: self.other(field) for field in info.fields})
            case mi.Metadata():
                return self.value(info.type)
            case mi.UnionType():
                return self.value(next(one for one in info.types if not isinstance(one, mi.NoneType)))
            case mi.IntType():
                return max(next(self.numbers), info.ge or 0)
            case mi.FloatType():
                return next(self.numbers) / (8 if info.le is None or info.le > 1 else 1024)
            case mi.StrType():
                return self.text or f"text{next(self.numbers):0{info.min_length or 1}}"[: info.max_length]
            case mi.BytesType():
                return b"%d" % next(self.numbers)
            case mi.BoolType():
                return True
            case mi.EnumType():
                return list(info.cls)[-1]
            case mi.ListType():
                return [self.value(info.item_type) for _ in range(2)]
            case mi.VarTupleType():
                return tuple(self.value(info.item_type) for _ in range(2))
            case mi.TupleType():
                return tuple(self.value(one) for one in info.item_types)
            case mi.DictType():
                return {self.value(info.key_type): self.value(info.value_type)}
            case mi.AnyType():
                return self.text or f"any{next(self.numbers)}"
        raise AssertionError(f"no example of {info}")  # a set is written in another order each time

    def other(self, field: mi.Field) -> Any:
        value = self.value(field.type)
        if value != field.default:
            return value
        return not value if isinstance(value, bool) else next(iter(type(value)))


def ends(kind: mi.Type) -> Iterator[Any]:
    """The least and the greatest values that are still allowed, and the ones next to them that are not."""
    match kind:
        case mi.IntType() | mi.FloatType():
            for end in (kind.ge, kind.le):
                if end is not None:
                    yield from (type(end)(end), end - 1, end + 1)
        case mi.StrType():
            for length in (kind.min_length, kind.max_length):
                if length is not None and length < 1 << 20:
                    yield from ("x" * length, "x" * (length + 1))
        case mi.EnumType():
            yield from (member.value for member in kind.cls)
        case mi.UnionType():
            for one in kind.types:
                yield from ends(one)
        case mi.ListType() | mi.VarTupleType():
            yield from ([value] for value in ends(kind.item_type))
        case mi.DictType():
            yield from ({key: example(kind.value_type)} for key in ends(kind.key_type))
            yield from ({example(kind.key_type): value} for value in ends(kind.value_type))


def cases(type_: Any, usual: dict[str, Any], others: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Objects of a struct type, each with one thing wrong or at its end: fields missing, unknown or extreme."""
    yield {**usual, "unknown": 1}
    for field in struct_info(type_).fields:
        name = field.encode_name
        yield {known: value for known, value in usual.items() if known != name}
        for value in (*ends(field.type), *others, deep()):
            yield {**usual, name: value}
        for inner in _structs_in(field.type):
            there = usual[name] if isinstance(usual.get(name), dict) else example(inner)
            yield from ({**usual, name: value} for value in cases(inner.cls, there, others))


def _structs_in(kind: mi.Type) -> list[mi.StructType]:
    kinds = kind.types if isinstance(kind, mi.UnionType) else (kind,)
    return [one for one in kinds if isinstance(one, mi.StructType) and not one.array_like]


def within(kind: mi.Type, words: typing.Sequence[str]) -> st.SearchStrategy[Any]:
    """Any allowed value of a type; `words`: texts that mean something."""
    match kind:
        case mi.BoolType():
            return st.booleans()
        case mi.IntType():
            least, most = kind.ge or 0, kind.le if kind.le is not None else 2**53
            return st.one_of(
                st.integers(least, most), st.integers(max(least, 0), min(most, 5)), st.sampled_from([least, most])
            )
        case mi.FloatType():
            if kind.le is None:
                return st.floats()
            return st.floats(kind.ge, kind.le)
        case mi.StrType():
            return (
                st.sampled_from([*words, "x" * max(1, kind.min_length or 0)])
                if not kind.min_length
                else st.just("k" * 40)
            )
        case mi.BytesType():
            return st.binary(max_size=8)
        case mi.EnumType():
            return st.sampled_from([member.value if isinstance(member, enum.Enum) else member for member in kind.cls])
        case mi.ListType() | mi.VarTupleType():
            return st.lists(within(kind.item_type, words), max_size=3)
        case mi.TupleType():
            return st.tuples(*(within(item, words) for item in kind.item_types)).map(list)
        case mi.DictType():
            return st.dictionaries(within(kind.key_type, words), within(kind.value_type, words), max_size=3)
        case mi.UnionType():
            return st.one_of(*(within(one, words) for one in kind.types))
        case mi.StructType():
            fixed = {kind.tag_field: st.just(kind.tag)} if kind.tag_field else {}
            return st.fixed_dictionaries({**fixed, **{f.encode_name: within(f.type, words) for f in kind.fields}})
        case mi.NoneType():
            return st.none()
    return st.none()


def struct_info(type_: type[msgspec.Struct]) -> mi.StructType:
    info = mi.type_info(type_)
    assert isinstance(info, mi.StructType)
    return info
