"""Whatever is shown passes `fallow.text`."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.text import clean, clean_block, tail


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain name", "plain name"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]52;c;ZXZpbA==\x07job", "job"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPq#0;2;0;0;0\x1b\\after", "after"),
        ("\x9b2Jgone", "gone"),
        ("\x1b_apc\x1b\\x", "x"),
        ("a\x00b\x7fc\x85d", "abcd"),
        ("user\u202etxt.exe", "usertxt.exe"),
        ("one\ntwo\tthree", "one two three"),
        ("\x1b", ""),
        ("\x1b]52;never closed", ""),
        ("[bold]markup stays text[/]", "[bold]markup stays text[/]"),
        ("größe 模型 🚀", "größe 模型 🚀"),
    ],
)
def test_what_is_left(text: str, shown: str) -> None:
    assert clean(text) == shown


def test_blocks_keep_their_lines() -> None:
    assert clean_block("a\r\nb\x1b[2K\nc\td") == "a\nb\nc\td"


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


@given(st.text(alphabet=st.sampled_from("\x1b[]P_\\\x07\x9b\x9d;0mA\x9c"), max_size=40))
def test_no_escape_can_be_hidden_in_another(text: str) -> None:
    assert not set(clean(text)) & set("\x1b\x07\x9b\x9c\x9d")
