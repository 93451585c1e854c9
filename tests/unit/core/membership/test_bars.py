"""Failures that age, hosts that are barred for a while, and a run all of whose nodes are."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fallow.config import Config, Membership
from fallow.core.membership.failures import BAR_S, COUNT_S, LONGEST_BAR_S, MENDED_S, bar, begin_clock, expire, note
from fallow.core.membership.messages import Fault
from fallow.core.membership.records import Failure, FailureKind, Root
from fallow.core.membership.roster import Roster
from fallow.head.api.views import run_view
from fallow.head.loop.turn import Turn
from fallow.model import RunStatus

from runs import Nodes, hold, new_book, new_run  # isort: skip

HOUR = 3600.0


def roster() -> Roster:
    return Roster(Root(run="r", minimum=1, maximum=4, limit=4))


def barred(r: Roster) -> dict[str, str]:
    return {host: known.reason for host, known in r.failures.bars.items() if known.reason}


def fail(r: Roster, at: float, host: str = "h1", bar_after: int = 3) -> bool:
    """True if that bars the host."""
    failure = Failure(
        node=1, host=host, token="t", kind=FailureKind.HANG, signature="hang", step=1, text="it hung", at=at
    )
    reason = note(r, failure, bar_after)
    if reason:
        bar(r, host, reason, at)
    return bool(reason)


def test_h7_a_barred_host_is_tried_again_ever_later() -> None:
    r, at, lengths = roster(), COUNT_S, []
    bars = r.failures.bars
    assert not fail(r, 0.0), "longer ago than counts"
    for _ in range(7):
        assert [fail(r, at), fail(r, at + 1), fail(r, at + 2)] == [False, False, True]
        assert not fail(r, at + 3), "it is barred already: a last word"
        began = at + 2
        assert expire(r, bars["h1"].until - 1) == []
        at = bars["h1"].until
        assert expire(r, at) == ["h1"]
        assert barred(r) == {}
        lengths.append(at - began)
    assert lengths == [HOUR, 2 * HOUR, 4 * HOUR, 8 * HOUR, 16 * HOUR, 24 * HOUR, 24 * HOUR]
    assert expire(r, at + MENDED_S) == []
    assert bars == {}
    at += MENDED_S
    fail(r, at, bar_after=1)
    assert bars["h1"].until == at + BAR_S, "it was all right for a day"


@given(
    failures=st.lists(st.tuples(st.floats(0, 1e6), st.sampled_from("abc")), max_size=30),
    began=st.floats(0, 1e6),
    bar_after=st.integers(1, 3),
)
def test_whatever_the_clock_of_the_next_head_no_host_is_barred_for_longer_than_a_day(
    failures: list[tuple[float, str]], began: float, bar_after: int
) -> None:
    r = roster()
    for at, host in sorted(failures):
        expire(r, at)
        fail(r, at, host, bar_after)
    begin_clock(r, began)
    assert all(failure.at <= began for failure in r.failures.failures)
    expire(r, began + LONGEST_BAR_S)
    assert barred(r) == {}


def test_h4_a_run_all_of_whose_nodes_are_barred_says_so_and_goes_on_when_one_is_free(tmp_path: Path) -> None:
    book = new_book(tmp_path, Config(membership=Membership(bar_after=1)))
    run = new_run(book, at=0.0, now=0.0, max_nodes=2)
    nodes = Nodes(run)

    def turn(at: float) -> Turn:
        return Turn(book, at, at)

    def come(host: str, at: float) -> int:
        now = turn(at)
        node = nodes.come(now, hold(now, run, host), host)
        nodes.ready(now, node)
        nodes.settle(now)
        return node

    first, second = come("h0", 1.0), come("h1", 1.0)
    assert run_view(run, 60.0, 60.0).message == ""
    now = turn(60.0)
    nodes.say(now, second, fault=Fault(code=1, message="no device", signature="error of n1"))
    nodes.settle(now)
    assert list(run.barred) == ["h1"]
    assert "barred" not in run_view(run, 61.0, 61.0).message, "it has a member"
    nodes.end(turn(120.0), first, None, signal=11, reason="killed by signal 11")
    assert run.root.status is RunStatus.SUSPENDED
    assert list(run.barred) == ["h1", "h0"]
    view = run_view(run, 120.0, 120.0)
    assert view.message == (
        "waits for nodes; 2 nodes are barred, the first: h1 for another 59 min: 1 failures on it (exception), the "
        "last: no device"
    )
    assert view.barred["h0"] == "for another 60 min: 1 failures on it (crash), the last: killed by signal 11"
    now = turn(60.0 + BAR_S - 1)
    nodes.pass_s(now, 1)
    assert [r.text for r in now.records if r.kind == "bar"] == ["h1 is barred no longer: it may be tried again"]
    come("h1", 60.0 + BAR_S)
    assert run.root.status is RunStatus.TRAINING
