"""Who is main, and how a worker's output is cut where that changes."""

import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.agent.output import MarkedStream
from fallow.model import HIDE_MARK, OUTPUT_PIPES, SHOW_MARK
from fallow.worker.session.status import IsMain, Voice


def test_is_main_is_looked_up_whenever_it_is_asked_for() -> None:
    now = [False]
    main = IsMain(lambda: now[0])
    for value in (False, True, False):
        now[0] = value
        assert bool(main) is value
        assert (not main) is (not value)
        assert main == value
        assert main != (not value)
        assert (main == IsMain(lambda: True)) is value
        assert f"{main} {main!r}" == f"{value} {value}"
        assert pickle.loads(pickle.dumps(main)) is value


PIECES = st.lists(
    st.one_of(st.sampled_from([SHOW_MARK, HIDE_MARK]), st.binary(max_size=6), st.just(b"\0"), st.just(SHOW_MARK[:9]))
)


@given(PIECES, st.data())
def test_output_is_cut_at_the_marks_however_it_comes(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    wanted: list[tuple[bool | None, int]] = []
    speaks, rest = None, whole
    while rest:
        if rest.startswith((SHOW_MARK, HIDE_MARK)):
            speaks, rest = rest.startswith(SHOW_MARK), rest[len(SHOW_MARK) :]
        else:
            wanted.append((speaks, rest[0]))
            rest = rest[1:]
    marked, found = MarkedStream(), list[tuple[bool | None, int]]()
    while whole:
        size = data.draw(st.integers(1, len(whole)))
        found += [(speaks, byte) for speaks, piece in marked.cut(whole[:size]) for byte in piece]
        whole = whole[size:]
    found += [(marked.speaks, byte) for byte in marked.end()]
    assert found == wanted


def test_a_worker_marks_its_own_pipes_and_no_file(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv(OUTPUT_PIPES, f"{os.fstat(1).st_ino} 0")
    voice = Voice()
    voice.speak(speaks=False)
    print("of others")
    voice.speak(speaks=True)
    voice.speak(speaks=True)
    print("of all")
    out, error = capfd.readouterr()
    assert out.encode() == HIDE_MARK + b"of others\n" + SHOW_MARK + b"of all\n"
    assert error == ""
