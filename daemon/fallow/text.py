"""Makes texts harmless for a terminal. Each text from outside passes here: names, comments, reasons, log lines.

A terminal obeys what it prints. Escape sequences can rewrite the screen, set the clipboard or make links. Bidirectional
overrides make one command look like another. Here each such character becomes visible text: `\\x1b`, `\\u202e`.

`clean` is for a name, a cell or a line. `clean_block` is for several lines. `clean_output` is for what a program wrote
to a terminal, with colours and progress bars. `harmless_json` is for JSON, and changes no value.
"""

import re
from collections.abc import Iterable

MAX_SHOWN = 4096
"""Most characters of one text that are shown."""

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 (not tab, not newline), DEL, C1
    "\xad\u200b-\u200f\u2060-\u2064\ufeff\u180e"  # invisible, and marks of direction
    "\u061c\u202a-\u202e\u2066-\u206f"  # bidirectional mark, embeddings, overrides, isolates
    "\u2028\u2029"  # line and paragraph separators
    "\ufff9-\ufffb"  # annotations
    "\ud800-\udfff"  # lone surrogates of undecodable bytes: they cannot be encoded again
    "\U000e0000-\U000e007f"  # tags: invisible text
    "]"
)

_CONTROL_SEQUENCE = re.compile("(?:\x1b\\[|\x9b)[\x30-\x3f]*[\x20-\x2f]*[\x40-\x7e]")
"""Sequences for colours, cursor movement and erasing (CSI). Those for titles and the clipboard (OSC) do not match."""

_OVERPRINTED = re.compile("^[^\n]*\r(?=[^\n])", re.MULTILINE)
"""The text of a line before its last carriage return: older states of a progress bar. Without `^` a long line takes
minutes."""


def clean(text: str, limit: int = MAX_SHOWN) -> str:
    """Return one line that is safe to print. Line ends and tabs become spaces, control characters become visible."""
    return _cap(clean_block(text, limit * 2).replace("\n", " ").replace("\t", " "), limit)


def clean_block(text: str, limit: int = MAX_SHOWN) -> str:
    """Return a text that is safe to print. Like `clean`, but line ends and tabs stay."""
    return _cap(_UNSAFE.sub(_visible, text[: limit * 16].replace("\r\n", "\n")), limit)


def clean_output(text: str, limit: int = MAX_SHOWN) -> str:
    """Return a program's output, safe to print, without colours and with only the last state of a progress bar."""
    # Dropped characters must not count against `limit`, and the work must be bounded: so 16 times as many are read.
    plain = _CONTROL_SEQUENCE.sub("", text[: limit * 16]).replace("\r\n", "\n")
    return clean_block(re.sub("\r+(?=\n|$)", "", _OVERPRINTED.sub("", plain)), limit)


def tail(lines: Iterable[str], count: int, limit: int = MAX_SHOWN) -> str:
    """Return the last `count` lines of a program's output, safe to print, and of those the last `limit` characters."""
    last_lines = [clean(clean_output(line)) for line in lines][-count:]
    text = "\n".join(last_lines)
    return text if len(text) <= limit else "…" + text[-(limit - 1) :]


def harmless_json(text: str, encoding: str = "utf-8") -> str:
    """Return the same JSON value as a text that is safe on a terminal with this encoding.

    Only strings of JSON hold characters outside of ASCII, and JSON has an escape for each character.
    """
    spelled = _UNSAFE.sub(_json_escape, text)
    try:
        spelled.encode(encoding)
    except UnicodeEncodeError:
        return re.sub("[^\x00-\x7f]", _json_escape, spelled)
    return spelled


def quote(name: str) -> str:
    """Return a name that somebody typed, for one line. A name with invisible characters is escaped and quoted."""
    return name if name.isprintable() else ascii(name)


def counted(number: int, what: str) -> str:
    """Return number and noun: `1 member`, `2 members`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        # Python keeps an undecodable byte of a file's name or an argument as such a surrogate.
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def _cap(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
