"""The one gate to a terminal: names, comments, reasons and log lines may come from anybody.

A terminal obeys what it prints. Escape sequences can rewrite the screen, set the clipboard or make links. Bidirectional
overrides make one command look like another. Here each such character becomes visible text: `\\x1b`, `\\u202e`.

`clean` is for a name, a cell or a line; `clean_block` for text of several lines; `clean_output` for what a program
wrote to a terminal, with colours and progress bars. JSON goes through `harmless_json`, which changes no value.
"""

import re
from collections.abc import Iterable

MAX_SHOWN = 4096
"""Characters that are shown of one text."""

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
"""Colours, cursor movement and erasing (CSI), as programs write them. Titles and the clipboard (OSC) are others."""

_OVERPRINTED = re.compile("^[^\n]*\r(?=[^\n])", re.MULTILINE)
"""What a progress bar wrote on a line before its last carriage return. Without `^` a long line takes minutes."""


def clean(text: str, limit: int = MAX_SHOWN) -> str:
    """One line that is safe to print: line ends and tabs become spaces, control characters become visible."""
    return _cap(clean_block(text, limit * 2).replace("\n", " ").replace("\t", " "), limit)


def clean_block(text: str, limit: int = MAX_SHOWN) -> str:
    """Like `clean`, but line ends and tabs stay."""
    return _cap(_UNSAFE.sub(_visible, text[: limit * 16].replace("\r\n", "\n")), limit)


def clean_output(text: str, limit: int = MAX_SHOWN) -> str:
    """Like `clean_block`, for a program's output: without colours, and of a progress bar only what it showed last."""
    # Far more is read than can be shown, so that what is dropped does not count; still a bound on the work.
    plain = _CONTROL_SEQUENCE.sub("", text[: limit * 16]).replace("\r\n", "\n")
    return clean_block(re.sub("\r+(?=\n|$)", "", _OVERPRINTED.sub("", plain)), limit)


def tail(lines: Iterable[str], count: int, limit: int = MAX_SHOWN) -> str:
    """The last `count` lines of a program's output, each clean; of more than `limit` characters the end is kept."""
    last_lines = [clean(clean_output(line)) for line in lines][-count:]
    text = "\n".join(last_lines)
    return text if len(text) <= limit else "…" + text[-(limit - 1) :]


def harmless_json(text: str, encoding: str = "utf-8") -> str:
    """The same JSON value, fit for a terminal of that encoding.

    Only strings hold characters outside of ASCII, and JSON has an escape for each of them.
    """
    spelled = _UNSAFE.sub(_json_escape, text)
    try:
        spelled.encode(encoding)
    except UnicodeEncodeError:
        return re.sub("[^\x00-\x7f]", _json_escape, spelled)
    return spelled


def quote(name: str) -> str:
    """A name that somebody typed, on one line: as it is, or escaped and quoted where not all of it can be seen."""
    return name if name.isprintable() else ascii(name)


def counted(number: int, what: str) -> str:
    """`1 member`, `2 members`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        # An undecodable byte, as Python keeps it in names of files and arguments.
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def _cap(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
