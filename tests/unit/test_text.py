"""Whatever is shown passes `fallow.text`."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.text import clean, clean_output, harmless_json, tail


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]52;c;ZXZpbA==\x07job", r"\x1b]52;c;ZXZpbA==\x07job"),
        ("\x9b2Jgone", r"\x9b2Jgone"),
        ("a\x00b\x7fc\x85d", r"a\x00b\x7fc\x85d"),
        ("user\u202etxt.exe", r"user\u202etxt.exe"),
        ("tag\U000e0041", r"tag\U000e0041"),
        ("name\udcff.sh", r"name\xff.sh"),
        ("one\ntwo\tthree\r\nfour", "one two three four"),
        ("[bold]markup stays text[/]", "[bold]markup stays text[/]"),
        ("größe 模型 🚀", "größe 模型 🚀"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert clean(text) == shown


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("\x1b[1;31merror\x1b[0m: no\n", "error: no\n"),
        ("10%\r20%\r100%\ndone\n", "100%\ndone\n"),
        ("\r10%\x1b[K\r20%\x1b[K\r\nend", "20%\nend"),
        ("\x1b]0;title\x07text", r"\x1b]0;title\x07text"),
    ],
)
def test_a_programs_output_loses_colours_and_all_but_the_end_of_a_progress_bar(output: str, shown: str) -> None:
    assert clean_output(output) == shown


@pytest.mark.parametrize("text", ["\u202e\x9b\x7f\u2028", "größe 🚀", "lone \udcff", "plain"])
def test_json_keeps_its_value_on_every_terminal(text: str) -> None:
    for encoding in ("utf-8", "latin-1", "ascii"):
        printed = harmless_json(json.dumps({"name": text}, ensure_ascii=False), encoding)
        printed.encode(encoding)
        assert json.loads(printed) == {"name": text}
        assert clean(printed) == printed


def test_long_text_is_cut_and_says_so() -> None:
    assert clean("x" * 100, limit=10) == "x" * 9 + "…"


def test_the_end_of_a_log_is_kept() -> None:
    assert tail([f"line {n}\x1b[0m" for n in range(10)], 2) == "line 8\nline 9"
    assert tail(["a" * 50, "b" * 50], 2, limit=20) == "…" + "b" * 19


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = clean(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs")]
    shown.encode()
    assert clean(shown) == shown


@pytest.mark.timeout(60)
def test_a_long_line_of_output_takes_no_longer_than_its_length() -> None:
    """A member may send a traceback of 200,000 characters, and the head does nothing else meanwhile."""
    line = "x" * 1_000_000
    assert clean_output(f"bar\r{line}", 1_000_000) == line
