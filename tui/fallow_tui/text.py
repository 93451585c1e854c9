"""Formats of numbers and times, and `clean_item`, which makes everything from the head safe for a terminal.

Widgets draw with `rich.text.Text`, which does not read markup; `clean_item` makes control characters visible.
"""

import re
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from rich.cells import cell_len, set_cell_size

from fallow.model import EventRecord, Snapshot
from fallow.text import clean

Item = TypeVar("Item", Snapshot, EventRecord)

# JSON writes C0 characters as \u00XX (or \n, \t ...); everything else that `clean` may change is outside ASCII or DEL.
_SUSPECT = re.compile(rb"\\[bfnrtu]|[\x7f-\xff]")

SPARKS = "▁▂▃▄▅▆▇█"


def clean_item(item: Item) -> Item:
    """Return the item with all its strings made safe for a terminal."""
    raw = msgspec.json.encode(item)
    if not _SUSPECT.search(raw):
        return item
    return msgspec.convert(_walk(msgspec.json.decode(raw)), type(item))


def _walk(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_walk(item) for item in value]
    if isinstance(value, dict):
        return {clean(key): _walk(item) for key, item in value.items()}
    return value


def fit(text: str, width: int) -> str:
    """Pad a text to `width` cells, or cut it with an ellipsis."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, width - 1) + "…" if width > 1 else "…"[:width]


def duration(seconds: float | None) -> str:
    """At most six characters: `8s`, `4:05`, `2h07m`, `3d04h`; `-` where unknown."""
    if seconds is None:
        return "-"
    whole_s = max(0, int(seconds))
    if whole_s < 60:
        return f"{whole_s}s"
    if whole_s < 3600:
        return f"{whole_s // 60}:{whole_s % 60:02}"
    if whole_s < 86400:
        return f"{whole_s // 3600}h{whole_s % 3600 // 60:02}m"
    return f"{whole_s // 86400}d{whole_s % 86400 // 3600:02}h"


def count(number: float) -> str:
    """At most five characters: `950`, `12.4k`, `3.1M`."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{suffix}" if abs(number) < size * 100 else f"{number / size:.0f}{suffix}"
    return f"{number:.0f}"


def figure(value: float | None) -> str:
    """At most six characters of a number of any size: `2.248`, `0.0015`, `1.8e-05`, `-1e+20`; `-` where unknown.

    Cutting the digits would make another number: `1.754e-05` begins like `1.754`.
    """
    if value is None:
        return "-"
    for digits in (4, 3, 2, 1):
        text = f"{value:.{digits}g}"
        if len(text) <= 6:
            return text
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e+")


def clock(at: float) -> str:
    """Local time of day."""
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")


def sparkline(values: list[float], width: int) -> str:
    """The newest `width` values as bars from zero, right aligned."""
    newest = values[-width:]
    top = max(newest, default=0.0)
    if top <= 0:
        return (SPARKS[0] * len(newest)).rjust(width)
    return "".join(SPARKS[min(7, int(max(0.0, value) / top * 7.99))] for value in newest).rjust(width)
