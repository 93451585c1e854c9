"""Failures that age, nodes that are barred for a while, and a run all of whose nodes are."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fallow.core import events as ev
from fallow.core.failures import BAR_S, COUNT_S, LONGEST_BAR_S, MENDED_S, begin_clock, expire, note
from fallow.core.membership import Membership
from fallow.core.roster import Failure, FailureKind, Roster
from fallow.core.timing import Timing
from fallow.files import Paths
from fallow.head.book import Book
from fallow.head.views import run_view
from fallow.model import AllocationKind, Failed, RunSpec, RunStatus

from test_membership import finish_change, ready  # isort: skip

HOUR = 3600.0


def roster() -> Roster:
    return Roster(run="r", min_members=1, max_members=4, limit=4)


def fail(r: Roster, at: float, node: str = "n1", bar_after: int = 3) -> bool:
    """True if that bars the node."""
    failure = Failure(
        worker="w", node=node, token="t", kind=FailureKind.HANG, signature="hang", step=1, text="it hung", at=at
    )
    return note(r, failure, bar_after) is not None


def test_a_hiccup_now_and_then_bars_nobody() -> None:
    r = roster()
    week = 7 * 24 * HOUR
    assert not any(fail(r, at) for at in (1.0, week, 2 * week, 2 * week + COUNT_S / 2, 3 * week))
    assert r.barred == {}
    assert not fail(r, 3 * week + COUNT_S / 2)
    assert fail(r, 3 * week + COUNT_S - 1), "the third within an hour"
    assert list(r.barred) == ["n1"]
    assert r.barred["n1"] == "3 failures on it (hang), the last: it hung"


def test_h7_a_barred_node_is_tried_again_ever_later() -> None:
    r, at, lengths = roster(), 0.0, []
    for _ in range(7):
        assert [fail(r, at), fail(r, at + 1), fail(r, at + 2)] == [False, False, True]
        assert not fail(r, at + 3), "it is barred already: a last word"
        began = at + 2
        assert expire(r, r.bars["n1"].until - 1) == []
        at = r.bars["n1"].until
        assert expire(r, at) == ["n1"]
        assert r.barred == {}
        lengths.append(at - began)
    assert lengths == [HOUR, 2 * HOUR, 4 * HOUR, 8 * HOUR, 16 * HOUR, 24 * HOUR, 24 * HOUR]
    assert expire(r, at + MENDED_S) == []
    assert r.bars == {}
    at += MENDED_S
    fail(r, at, bar_after=1)
    assert r.bars["n1"].until == at + BAR_S, "it was all right for a day"


@given(
    failures=st.lists(st.tuples(st.floats(0, 1e6), st.sampled_from("abc")), max_size=30),
    began=st.floats(0, 1e6),
    bar_after=st.integers(1, 3),
)
def test_whatever_the_clock_of_the_next_head_no_node_is_barred_for_longer_than_a_day(
    failures: list[tuple[float, str]], began: float, bar_after: int
) -> None:
    r = roster()
    for at, node in sorted(failures):
        expire(r, at)
        fail(r, at, node, bar_after)
    begin_clock(r, began)
    assert all(failure.at <= began for failure in r.failures)
    expire(r, began + LONGEST_BAR_S)
    assert r.barred == {}


def test_h4_a_run_all_of_whose_nodes_are_barred_says_so_and_goes_on_when_one_is_free(tmp_path: Path) -> None:
    paths = Paths(state=tmp_path / "state", runtime=tmp_path / "runtime").create()
    book = Book(paths, timing=Timing(bar_after=1), public_key="k" * 40, new_id=lambda: "0123456789ab")
    run = book.create(RunSpec(run="", name="r", min_nodes=1, max_nodes=2), 0.0, 0.0)
    m: Membership = run.machine

    def come(worker: str, node: str, at: float) -> None:
        made = book.new_allocation(run, AllocationKind.HARVEST, at)
        m.handle(ev.WorkerExpected(at=at, worker=worker, token=made.token, node=node))
        m.handle(ready(worker, at))
        finish_change(m, at=at)

    def break_down(worker: str, at: float) -> list[ev.Instruction]:
        failed = Failed(worker=worker, code=1, message="no device", signature=f"error of {worker}")
        return m.handle(ev.Said(at=at, message=failed))

    come("w0", "n0", 1.0)
    come("w1", "n1", 1.0)
    assert run_view(run, 60.0, 60.0).message == ""
    (barred,) = [i for i in break_down("w1", 60.0) if isinstance(i, ev.NodeBarred)]
    assert barred.node == "n1"
    finish_change(m, at=60.0)
    assert "barred" not in run_view(run, 61.0, 61.0).message, "it has a member"
    m.handle(ev.WorkerGone(at=120.0, worker="w0", reason="killed by signal 11", signal=11))
    assert run.roster.status is RunStatus.SUSPENDED
    assert list(run.roster.barred) == ["n1", "n0"]
    view = run_view(run, 120.0, 120.0)
    assert view.message == (
        "waits for nodes; 2 nodes are barred, the first: n1 for another 59 min: 1 failures on it (exception), the "
        "last: no device"
    )
    assert view.barred["n0"] == "for another 60 min: 1 failures on it (crash), the last: killed by signal 11"
    out = m.handle(ev.Ticked(at=60.0 + BAR_S))
    assert [i.text for i in out if isinstance(i, ev.Record)] == ["node n1 is barred no longer: it may be tried again"]
    come("w2", "n1", 60.0 + BAR_S)
    assert run.roster.status is RunStatus.TRAINING
