"""Formats, and the gate for what comes from outside."""

from __future__ import annotations

from tui_rig import event, snapshot

from fallow.model import EventRecord
from fallow_tui.text import clean_item, figure


def test_clean_item_escapes_what_a_terminal_would_obey_and_keeps_the_rest() -> None:
    hostile = event(1, text="\x1b]52;c;AAAA\x07\x1b[2Jnode\u202e [red]x[/red]\nü\x9b1m", run=None)
    assert clean_item(hostile).text == r"\x1b]52;c;AAAA\x07\x1b[2Jnode\u202e [red]x[/red] ü\x9b1m"
    assert clean_item(snapshot()) == snapshot()
    dirty = EventRecord(seq=1, at=0.0, run=None, kind="k", text="t", data={"a\x1b[1m": ["\x07b", 3]})
    assert clean_item(dirty).data == {r"a\x1b[1m": [r"\x07b", 3]}


def test_a_figure_that_does_not_fit_loses_digits_but_never_its_exponent() -> None:
    figures = {2.2481: "2.248", 0.0012345: "0.0012", -1.754e-05: "-2e-05", 123456.7: "1e+05", float("-inf"): "-inf"}
    assert {value: figure(value) for value in figures} == figures
    assert figure(None) == "-"
