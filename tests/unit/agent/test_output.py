"""Where a worker's output is cut: neither a line too many nor one too few where it becomes the main member."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fallow.agent.output import Marked
from fallow.model import HIDDEN, SHOWN

WRITTEN = b"before" + HIDDEN + b"of others" + SHOWN[:3] + SHOWN + b"of all\n" + SHOWN + HIDDEN + b"quiet" + HIDDEN[:5]


@given(st.sets(st.integers(1, len(WRITTEN) - 1)))
def test_marks_are_found_wherever_the_pipe_cuts_them(cuts: set[int]) -> None:
    marked = Marked()
    by_word: dict[bool | None, bytes] = {None: b"", True: b"", False: b""}
    for begin, end in pairwise([0, *sorted(cuts), len(WRITTEN)]):
        for speaks, piece in marked.cut(WRITTEN[begin:end]):
            by_word[speaks] += piece
    by_word[marked.speaks] += marked.end()
    assert by_word == {None: b"before", False: b"of others" + SHOWN[:3] + b"quiet" + HIDDEN[:5], True: b"of all\n"}
