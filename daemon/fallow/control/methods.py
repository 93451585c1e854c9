"""The parameters of the control socket's methods, with their bounds: as the signatures of the functions behind them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import msgspec

from fallow.model import Exit, FallowError, Struct

NOT_ASKED = ("self", "turn")
"""Parameters that the head itself gives."""


def parameters(call: Callable[..., Any]) -> type[msgspec.Struct]:
    """What a request for this function must hold."""
    kinds = get_type_hints(call, include_extras=True)
    fields: list[Any] = []
    for name, given in inspect.signature(call).parameters.items():
        if name not in NOT_ASKED:
            default = () if given.default is given.empty else (given.default,)
            fields.append((name, kinds[name], *default))
    return msgspec.defstruct(call.__name__, fields, bases=(Struct,), frozen=True, kw_only=True)


def check(methods: Mapping[str, type[msgspec.Struct]], method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of one request, each of its type and within its bounds; those left out have their defaults.

    Raises:
        FallowError: there is no such method; or a parameter is missing, unknown, of another type or out of bounds, and
            the message names it.
    """
    if method not in methods:
        text = f"this head knows no method {method[:64]!r}; its version may differ from ours"
        raise FallowError(text, Exit.DATA)
    try:
        given = msgspec.convert(params, methods[method])
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise FallowError(f"{method}: {_where(error)}", Exit.USAGE) from error
    return {name: getattr(given, name) for name in given.__struct_fields__}


def _where(error: Exception) -> str:
    """ "spec.min_nodes: expected `int` <= 1000000" of msgspec's "Expected `int` <= 1000000 - at `$.spec.min_nodes`"."""
    text, _, path = str(error)[:500].partition(" - at `$")
    text = text[:1].lower() + text[1:]
    name = path.removesuffix("`").lstrip(".")
    return f"{name}: {text}" if name else text
