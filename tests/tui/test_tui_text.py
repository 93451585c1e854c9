"""Formats, and the gate for what comes from outside."""

from __future__ import annotations

import pytest
from tui_rig import event, snapshot

from fallow.model import EventRecord
from fallow_tui.text import clean_item, count, duration, figure, fit, sparkline
from fallow_tui.widgets.nodes import short_names


def test_clean_item_escapes_what_a_terminal_would_obey_and_keeps_the_rest() -> None:
    hostile = event(1, text="\x1b]52;c;AAAA\x07\x1b[2Jnode\u202e [red]x[/red]\nü\x9b1m", run=None)
    assert clean_item(hostile).text == r"\x1b]52;c;AAAA\x07\x1b[2Jnode\u202e [red]x[/red] ü\x9b1m"
    assert clean_item(snapshot()) == snapshot()
    dirty = EventRecord(seq=1, at=0.0, run=None, kind="k", text="t", data={"a\x1b[1m": ["\x07b", 3]})
    assert clean_item(dirty).data == {r"a\x1b[1m": [r"\x07b", 3]}


def test_durations_and_counts() -> None:
    spans = {None: "-", -3: "0s", 59.9: "59s", 60: "1:00", 245: "4:05", 3600: "1h00m", 7620: "2h07m", 86400: "1d00h"}
    assert {seconds: duration(seconds) for seconds in spans} == spans
    counts = {0: "0", 950: "950", 12_400: "12.4k", 310_000: "310k", 3_100_000: "3.1M"}
    assert {number: count(number) for number in counts} == counts


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (2.2481, "2.248"),
        (0.0012345, "0.0012"),
        (1.754e-05, "2e-05"),
        (-1.754e-05, "-2e-05"),
        (-1.754e-105, "-2e-105"),
        (123456.7, "1e+05"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_a_figure_that_does_not_fit_loses_digits_but_never_its_exponent(value: float | None, shown: str) -> None:
    assert figure(value) == shown


def test_fit_counts_cells() -> None:
    assert fit("ab", 4) == "ab  "
    assert fit("abcdef", 4) == "abc…"
    assert fit("日本語", 4) == "日 …"


def test_sparkline_is_scaled_from_zero_and_right_aligned() -> None:
    assert sparkline([0, 4, 8], 5) == "  ▁▄█"
    assert sparkline([0, 0], 2) == "▁▁"
    assert sparkline([], 3) == "   "


def test_short_names_drop_the_common_part_but_never_all() -> None:
    assert short_names(["gpu001", "gpu002", "gpu010"]) == ["001", "002", "010"]
    assert short_names(["n1", "n1x"]) == ["1", "1x"]
    assert short_names(["alone"]) == ["alone"]
    assert short_names(["a", "a"]) == ["a", "a"]
