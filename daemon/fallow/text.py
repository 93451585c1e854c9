"""The one sanitizer for whatever is shown: names, comments, reasons and log lines may come from anybody.

A terminal obeys what it prints. Escape sequences could rewrite the screen, set the clipboard or make links;
bidi overrides could make one command look like another. All of them are dropped here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_SHOWN = 4096
"""Characters that are shown of one text."""

_SEQUENCES = re.compile(
    r"""
      (?:\x1b\]|\x9d) [^\x07\x1b\x9c]* (?:\x07|\x1b\\|\x9c)?      # OSC: title, clipboard, links
    | (?:\x1b[PX^_]|[\x90\x98\x9e\x9f]) [^\x1b\x9c]* (?:\x1b\\|\x9c)?  # DCS, SOS, PM, APC
    | (?:\x1b\[|\x9b) [\x30-\x3f]* [\x20-\x2f]* [\x40-\x7e]?         # CSI: colours, cursor, erase
    | \x1b [\x20-\x2f]* [\x30-\x7e]?                                # other escapes
    """,
    re.VERBOSE,
)

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 (not tab, not newline), DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidi marks, embeddings, overrides, isolates
    "\u200b\u2060\ufeff"  # invisible: two names that look alike are alike
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # lone surrogates of undecodable bytes: they cannot be encoded again
    "\U000e0000-\U000e007f"  # tags: invisible text
    "]"
)


def clean(text: str, limit: int = MAX_SHOWN) -> str:
    """One line that is safe to print: no control characters, no escapes, line ends become spaces."""
    return _cap(clean_block(text, limit * 2).replace("\n", " ").replace("\t", " "), limit)


def clean_block(text: str, limit: int = MAX_SHOWN) -> str:
    """Like `clean`, but line ends and tabs stay."""
    # Far more is read than can be shown, so that what is dropped does not count; still a bound on the work.
    text = text[: limit * 16].replace("\r\n", "\n").replace("\r", "\n")
    return _cap(_UNSAFE.sub("", _SEQUENCES.sub("", text)), limit)


def tail(lines: Iterable[str], count: int, limit: int = MAX_SHOWN) -> str:
    """The last `count` lines, each clean, together at most `limit` characters (the end is kept)."""
    kept = [clean(line) for line in lines][-count:]
    text = "\n".join(kept)
    return text if len(text) <= limit else "…" + text[-(limit - 1) :]


def shown(name: str) -> str:
    """A name that somebody typed, on one line: as it is, or escaped and quoted where not all of it can be seen."""
    return name if name.isprintable() else ascii(name)


def counted(number: int, what: str) -> str:
    """`1 member`, `2 members`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _cap(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
