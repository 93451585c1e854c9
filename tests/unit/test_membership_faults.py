"""What the machine does about members that hang, stop, fail or are cut off, and about nodes that keep failing."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core import events as ev
from fallow.core.apart import STRANGER
from fallow.core.nodes.links import to_drop
from fallow.core.membership import Membership
from fallow.core.roster import Roster
from fallow.core.timing import Timing
from fallow.model import (
    PROTOCOL,
    Abort,
    Active,
    Aligned,
    Beat,
    Commit,
    Deserted,
    Doing,
    Failed,
    Finished,
    Held,
    Interrupt,
    Message,
    OthersFinished,
    Outcome,
    Parts,
    Prepare,
    RunStatus,
    Vote,
    WorkerHello,
    WorkerPhase,
    WorkerReady,
)

TIMING = Timing(prepare_s=30, rebuild_s=8, start_s=60, lease_s=10, progress_s=40, probe_s=5, stopped_s=1, bar_after=3)


def tells(out: list[ev.Instruction], kind: type[Message]) -> list[str]:
    return [i.worker for i in out if isinstance(i, ev.Tell) and isinstance(i.message, kind)]


def kills(out: list[ev.Instruction]) -> list[ev.Kill]:
    return [i for i in out if isinstance(i, ev.Kill)]


def records(out: list[ev.Instruction], kind: str) -> list[ev.Record]:
    return [i for i in out if isinstance(i, ev.Record) and i.kind == kind]


def join(m: Membership, worker: str, at: float = 0.0, node: str = "") -> list[ev.Instruction]:
    node = node or "n-" + worker
    m.handle(ev.WorkerExpected(at=at, worker=worker, token="t-" + node, node=node))
    m.handle(
        ev.Said(
            at=at,
            message=WorkerHello(worker=worker, pid=1, address="127.0.0.1", version="0", torch="0"),
        )
    )
    return m.handle(
        ev.Said(
            at=at,
            message=WorkerReady(worker=worker, signature="s", layout=["w"], shards=8, global_batch=16, total_steps=100),
        )
    )


def finish_change(m: Membership, at: float = 0.0, first_step: int = 0) -> None:
    change = m.roster.change
    assert change is not None
    for worker in change.participants:
        m.handle(ev.Said(at=at, message=Vote(worker=worker, generation=change.generation, ok=True)))
    for worker in change.members:
        m.handle(
            ev.Said(
                at=at,
                message=Active(
                    worker=worker, generation=change.generation, first_step=first_step, pause_s=0.1, parts=Parts()
                ),
            )
        )


def started(*workers: str, nodes: dict[str, str] | None = None, timing: Timing = TIMING) -> Membership:
    roster = Roster(run="r", min_members=len(workers), max_members=8, limit=8)
    m = Membership(roster, term=1, timing=timing, at=0.0, validate=True)
    for worker in workers:
        join(m, worker, node=(nodes or {}).get(worker, ""))
    finish_change(m)
    assert m.roster.status is RunStatus.TRAINING
    return m


def beats(
    m: Membership,
    at: float,
    step: int = 3,
    active: int | None = None,
    computing: Collection[str] = (),
    **doing: tuple[Doing, float],
) -> list[ev.Instruction]:
    """`active`: the generation in which they compute; by default the newest one. `computing`: on their devices."""
    out: list[ev.Instruction] = []
    for worker, (what, stalled) in doing.items():
        generation = m.roster.generation if active is None else active
        out += m.handle(
            ev.Said(
                at=at,
                message=Beat(
                    worker=worker,
                    generation=generation,
                    prepared=m.roster.generation,
                    step=step,
                    held=False,
                    doing=what,
                    stalled_s=stalled,
                    computes=worker in computing,
                ),
            )
        )
    return out + m.handle(ev.Ticked(at=at))


WAITING, WORKING, OUTSIDE = Doing.WAITING, Doing.WORKING, Doing.OUTSIDE


# ------------------------------------------------------------------------------------------------------------- hangs


@pytest.mark.parametrize("doing", [WORKING, OUTSIDE])
def test_a_member_that_keeps_the_others_waiting_is_ejected_at_the_progress_deadline(doing: Doing) -> None:
    m = started("w0", "w1", "w2")
    for at in range(1, 40):
        others = {"w0": (WAITING, at - 0.1), "w2": (WAITING, at - 0.1)}
        assert not kills(beats(m, at, w1=(doing, at), **others)), at
    out = beats(m, 41, w1=(doing, 41), w0=(WAITING, 40.9), w2=(WAITING, 40.9))
    assert [(k.worker, k.stack) for k in kills(out)] == [("w1", True)]
    assert tells(out, Interrupt) == ["w0", "w2"]
    assert m.roster.change is not None
    assert m.roster.change.members == ["w0", "w2"]


def test_of_members_that_are_all_stuck_the_one_whose_device_computes_is_to_blame() -> None:
    m = started("w0", "w1", "w2")
    for at in range(1, 41):
        stuck = dict.fromkeys(m.roster.members, (WORKING, float(at)))
        assert not kills(beats(m, at, computing=["w1"], **stuck)), at
    out = beats(m, 41, computing=["w1"], **dict.fromkeys(m.roster.members, (WORKING, 41.0)))
    assert [(k.worker, k.stack) for k in kills(out)] == [("w1", True)]
    assert tells(out, Interrupt) == ["w0", "w2"]
    for worker in ("w0", "w2"):
        m.handle(ev.Said(at=41, message=Vote(worker=worker, generation=m.roster.high, ok=True)))
    for at in range(42, 82):
        assert not kills(beats(m, at, active=1, w0=(WORKING, at), w2=(WORKING, at))), "they have the deadline once more"
    out = beats(m, 82, active=1, w0=(WORKING, 82), w2=(WORKING, 82))
    assert sorted(k.worker for k in kills(out)) == ["w0", "w2"], "it was not for that one alone"


@pytest.mark.parametrize("computing", [[], ["w0", "w1"]])
def test_where_all_are_stuck_alike_nobody_is_spared(computing: list[str]) -> None:
    m = started("w0", "w1")
    out = beats(m, 41, computing=computing, w0=(WORKING, 41), w1=(WORKING, 41))
    assert sorted(k.worker for k in kills(out)) == ["w0", "w1"]


def test_a_newcomer_whose_rehearsal_takes_long_spares_no_member() -> None:
    m = started("w0", "w1")
    m.handle(ev.WorkerExpected(at=0.0, worker="w2", token="t", node="n2"))
    out = beats(m, 41, active=1, computing=["w2"], w0=(WORKING, 41), w1=(WAITING, 40.9), w2=(WORKING, 41))
    assert [k.worker for k in kills(out)] == ["w0"]


def test_a_long_body_that_gets_on_and_code_after_the_loop_are_no_hangs() -> None:
    m = started("w0", "w1")
    for at in range(1, 100):
        assert not kills(beats(m, at, w0=(WORKING, at % 39), w1=(WAITING, 1.0)))
    for at in range(100, 300):
        assert not kills(beats(m, at, w0=(OUTSIDE, at), w1=(OUTSIDE, at))), "both are past their loop"


def test_a_hanging_member_is_ejected_from_a_generation_that_nobody_is_active_in_yet() -> None:
    m = started("w0", "w1")
    join(m, "w2")
    number = m.roster.high
    for worker in ("w0", "w1", "w2"):
        m.handle(ev.Said(at=1, message=Vote(worker=worker, generation=number, ok=True)))
    out = beats(m, 42, w0=(WAITING, 41), w1=(WORKING, 41), w2=(WAITING, 41))
    assert [k.worker for k in kills(out)] == ["w1"]
    assert m.roster.change is not None
    assert m.roster.change.members == ["w0", "w2"]


def test_a_stopped_process_is_ejected_long_before_its_lease() -> None:
    m = started("w0", "w1")
    assert not m.handle(ev.WorkerStopped(at=1.0, worker="w1"))
    beats(m, 1.2, w1=(WORKING, 0.1))
    assert not m.handle(ev.WorkerStopped(at=1.5, worker="w1")), "its own beat has proved the contrary"
    assert not m.handle(ev.Ticked(at=2.4))
    out = m.handle(ev.Ticked(at=2.6))
    assert [k.worker for k in kills(out)] == ["w1"]
    assert tells(out, Interrupt) == ["w0"]


# ------------------------------------------------------------------------------------------------------------- links


def all_wait(m: Membership, at: float, seconds: float) -> list[ev.Instruction]:
    return beats(m, at, **dict.fromkeys(m.roster.members, (WAITING, seconds)))


def test_a_slow_link_is_looked_at_and_ejects_nobody() -> None:
    m = started("w0", "w1", "w2")
    assert not tells(all_wait(m, 4, 4), Prepare)
    out = all_wait(m, 6, 6)
    assert tells(out, Prepare) == ["w0", "w1", "w2"]
    assert not tells(out, Interrupt), "the old generation goes on while its links are looked at"
    looked = m.roster.high
    votes: list[ev.Instruction] = []
    for worker in ("w0", "w1", "w2"):
        votes += m.handle(ev.Said(at=6.5, message=Vote(worker=worker, generation=looked, ok=True)))
    assert sorted(tells(votes, Abort)) == ["w0", "w1", "w2"]
    assert not tells(votes, Commit)
    assert m.roster.generation == 1
    assert not tells(all_wait(m, 9, 9), Prepare), "not again at once"
    assert tells(all_wait(m, 11, 11), Prepare)
    assert not kills(votes)


@pytest.mark.parametrize("gets_on", [False, True])
def test_a_step_that_comes_to_nothing_in_one_generation_after_the_other_ends_the_run(gets_on: bool) -> None:
    """The links are good whenever they are looked at, so nobody is to blame; the group was rebuilt for ever."""
    m = started("w0", "w1")
    at = 0.0
    for number in range(4):
        if m.roster.status.ended:
            break
        generation, began = m.roster.generation, at
        while m.roster.generation == generation and not m.roster.status.ended:
            at += 1
            beats(m, at, step=3 + number * gets_on, **dict.fromkeys(m.roster.members, (WAITING, at - began)))
            if m.roster.change is not None:
                finish_change(m, at=at)
    assert m.roster.status is (RunStatus.TRAINING if gets_on else RunStatus.FAILED)
    if not gets_on:
        told = "step 3: in 3 generations one after the other all members have waited for each other, for 41 s in the "
        assert m.roster.message.startswith(told + "last, and no step was finished: w0 (n-w0), w1 (n-w1). They reach")
        assert len(m.roster.history) == 3


def votes(m: Membership, at: float = 1) -> None:
    change = m.roster.change
    assert change is not None
    for worker in change.participants:
        m.handle(ev.Said(at=at, message=Vote(worker=worker, generation=change.generation, ok=True)))
    assert change.committed


def first_exchange() -> Membership:
    """w0 and w1 go over to a committed generation with w2."""
    m = started("w0", "w1")
    join(m, "w2", at=1)
    votes(m)
    return m


def test_a_first_exchange_that_does_not_end_is_done_again_long_before_the_progress_deadline() -> None:
    m = first_exchange()
    broken = m.roster.generation
    beats(m, 4, active=1, w0=(WAITING, 3), w1=(WAITING, 3), w2=(WAITING, 3))
    out = beats(m, 7, active=1, w2=(WAITING, 0.5), w0=(WAITING, 6), w1=(WAITING, 6))
    assert not tells(out, Interrupt), "w2 still receives something"
    out = beats(m, 12, active=1, w2=(WAITING, 5.5), w0=(WAITING, 11), w1=(WAITING, 11))
    assert set(tells(out, Interrupt)) == {"w0", "w1", "w2"}
    change = m.roster.change
    assert change is not None
    assert (change.members, change.interrupt) == (["w0", "w1"], True), "who has the state goes on"
    assert f"the first exchange of generation {broken} does not end" in change.reason
    finish_change(m, at=12.5)
    change = m.roster.change
    assert change is not None
    assert (change.members, change.interrupt) == (["w0", "w1", "w2"], False), "and w2 is taken in again"
    for worker, other in (("w1", "w2"), ("w2", "w1")):
        m.handle(
            ev.Said(
                at=13,
                message=Vote(worker=worker, generation=change.generation, ok=False, reason="", unreachable=[other]),
            )
        )
    out = m.handle(ev.Said(at=13, message=Vote(worker="w0", generation=change.generation, ok=True)))
    assert [kill.worker for kill in kills(out)] == ["w2"], "the others have the state"


def test_one_that_seems_to_end_never_is_left_more_time_with_each_try() -> None:
    m = first_exchange()
    at, tried = 1.0, []
    while at < 60:
        at += 0.5
        if tells(beats(m, at, active=1, **dict.fromkeys(m.roster.members, (WAITING, at - 1))), Interrupt):
            tried.append(at)
            votes(m, at)
    assert tried == [6.5, 17.0, 37.5]


def test_a_leaver_in_a_long_body_breaks_nothing() -> None:
    m = started("w0", "w1", "w2")
    m.handle(ev.ReleaseWanted(at=1, workers=["w2"], reason="asked"))
    votes(m)
    for at in range(2, 40):
        waits = {"w0": (WAITING, at - 1.0), "w1": (WAITING, at - 1.0)}
        assert not tells(beats(m, at, active=1, w2=(WORKING, at - 1.0), **waits), Interrupt)


def test_a_member_that_was_healed_is_told_of() -> None:
    m = first_exchange()
    out = m.handle(
        ev.Said(
            at=2,
            message=Active(
                worker="w1", generation=m.roster.generation, first_step=7, pause_s=0.1, healed=True, parts=Parts()
            ),
        )
    )
    again = m.handle(ev.Said(at=3, message=Aligned(worker="w1", generation=m.roster.generation, step=90)))
    assert [told.data["step"] for told in records(again, "healed")] == [90]
    (told,) = records(out, "healed")
    assert "w1 on n-w1: its weights were not those of most members at step 7; it has received theirs" in told.text
    assert told.data == {"worker": "w1", "node": "n-w1", "step": 7}


def test_the_wait_for_one_that_was_ejected_is_not_held_against_those_who_are_left() -> None:
    m = started("w0", "w1", "w2")
    others = {"w0": (WAITING, 40.9), "w2": (WAITING, 40.9)}
    beats(m, 41, w1=(WORKING, 41), **others)
    number = m.roster.high
    finish_change(m, at=41.1, first_step=3)
    out = m.handle(ev.Ticked(at=41.2))
    assert not tells(out, Interrupt)
    assert not tells(out, Prepare)
    assert m.roster.generation == m.roster.high == number


def test_a_joiner_is_not_kept_out_by_a_look_at_the_links() -> None:
    m = started("w0", "w1")
    all_wait(m, 6, 6)
    join(m, "w2", at=6.1)
    looked = m.roster.high
    out: list[ev.Instruction] = []
    for worker in ("w0", "w1"):
        out += m.handle(ev.Said(at=6.5, message=Vote(worker=worker, generation=looked, ok=True)))
    assert tells(out, Prepare) == ["w0", "w1", "w2"]


def test_a_cut_link_drops_the_younger_of_the_two() -> None:
    m = started("w0", "w1", "w2")
    all_wait(m, 6, 6)
    looked = m.roster.high
    cut = {"w0": ["w2"], "w1": [], "w2": ["w0"]}
    out: list[ev.Instruction] = []
    for worker, names in cut.items():
        vote = ev.Said(
            at=9, message=Vote(worker=worker, generation=looked, ok=not names, reason="cut", unreachable=names)
        )
        out += m.handle(vote)
    assert [k.worker for k in kills(out)] == ["w2"]
    assert sorted(set(tells(out, Interrupt))) == ["w0", "w1"]
    assert m.roster.change is not None
    assert (m.roster.change.members, m.roster.change.interrupt) == (["w0", "w1"], True)


def test_a_member_that_is_not_heard_is_not_taken_for_one_that_waits() -> None:
    """Its node stands still, in a moment in which it waited: the links to it would be found cut, and others blamed."""
    m = started("w0", "w1")
    beats(m, 1, w0=(WAITING, 0.0), w1=(WAITING, 0.0))
    for at in range(2, 11):
        out = beats(m, at, w1=(WAITING, at - 1.0))
        assert not records(out, "probe"), at
        assert m.roster.change is None
    beats(m, 12, w1=(WAITING, 11.0))
    assert m.roster.workers["w0"].phase is WorkerPhase.GONE


def test_a_rebuild_waits_a_moment_for_the_votes_that_tell_who_is_cut_off() -> None:
    m = started("w0", "w1", "w2", "w3")
    m.handle(ev.WorkerGone(at=1, worker="w3", reason="killed", signal=9))
    number = m.roster.high
    # w1 is stopped: it never votes, and the first to notice is younger than it.
    first = m.handle(
        ev.Said(at=5, message=Vote(worker="w2", generation=number, ok=False, reason="", unreachable=["w1"]))
    )
    assert not kills(first)
    out = m.handle(
        ev.Said(at=5.2, message=Vote(worker="w0", generation=number, ok=False, reason="", unreachable=["w1"]))
    )
    assert [k.worker for k in kills(out)] == ["w1"]
    assert m.roster.change is not None
    assert m.roster.change.members == ["w0", "w2"]


def test_who_is_cut_off_is_told_with_the_node_the_address_and_the_port_that_were_tried() -> None:
    m = started("w0", "w1", "w2")
    m.handle(ev.WorkerGone(at=1, worker="w2", reason="killed", signal=9))
    vote = Vote(worker="w1", generation=m.roster.high, ok=False, unreachable=["w0"], tried=["10.77.1.2:40123"])
    (kill,) = kills(m.handle(ev.Said(at=5, message=vote)))
    node = m.roster.workers["w0"].node
    assert kill.reason == f"no connection between it and w0 ({node}; tried 10.77.1.2:40123)"


def test_without_further_votes_it_is_decided_after_a_second() -> None:
    m = started("w0", "w1", "w2", "w3")
    m.handle(ev.WorkerGone(at=1, worker="w3", reason="killed", signal=9))
    m.handle(
        ev.Said(at=5, message=Vote(worker="w2", generation=m.roster.high, ok=False, reason="", unreachable=["w1"]))
    )
    assert not kills(m.handle(ev.Ticked(at=5.9)))
    assert kills(m.handle(ev.Ticked(at=6.1)))


def test_a_rebuild_has_a_deadline_of_its_own() -> None:
    m = started("w0", "w1", "w2")
    m.handle(ev.WorkerGone(at=1, worker="w2", reason="killed", signal=9))
    m.handle(ev.Said(at=1, message=Vote(worker="w0", generation=m.roster.high, ok=True)))
    beats(m, 8, w1=(WORKING, 7))
    assert not kills(m.handle(ev.Ticked(at=8.9)))
    assert [k.worker for k in kills(m.handle(ev.Ticked(at=9.1)))] == ["w1"]


def test_a_newcomer_that_is_cut_off_from_a_member_is_left_out_and_the_members_train_on() -> None:
    m = started("w0", "w1")
    join(m, "w2", at=1)
    number = m.roster.high
    out = m.handle(ev.Said(at=5, message=Vote(worker="w0", generation=number, ok=False, reason="", unreachable=["w2"])))
    out += m.handle(ev.Said(at=5, message=Vote(worker="w1", generation=number, ok=True)))
    assert [k.worker for k in kills(out)] == ["w2"]
    assert sorted(set(tells(out, Abort))) == ["w0", "w1", "w2"]
    assert not tells(out, Interrupt)
    assert m.roster.members == ["w0", "w1"]


def test_members_that_do_not_reach_each_other_in_a_planned_change_train_on_as_they_are() -> None:
    m = started("w0", "w1")
    join(m, "w2", at=1)
    number = m.roster.high
    out = m.handle(ev.Said(at=5, message=Vote(worker="w0", generation=number, ok=False, reason="", unreachable=["w1"])))
    out += m.handle(
        ev.Said(at=5, message=Vote(worker="w1", generation=number, ok=False, reason="", unreachable=["w0"]))
    )
    out += m.handle(ev.Said(at=5, message=Vote(worker="w2", generation=number, ok=True)))
    assert not kills(out)
    assert not tells(out, Interrupt)
    assert m.roster.members == ["w0", "w1"]
    assert m.roster.workers["w2"].phase is WorkerPhase.READY
    everybody = dict.fromkeys(("w0", "w1", "w2"), (WORKING, 0.1))
    tried = {at: bool(tells(beats(m, at, **everybody), Prepare)) for at in range(6, 40)}
    assert next(at for at, again in tried.items() if again) == 35, "tried again only after a while"


NAMES = [f"w{i}" for i in range(6)]
PAIRS = list(itertools.combinations(NAMES, 2))


@given(st.sets(st.sampled_from(PAIRS)), st.sets(st.sampled_from(NAMES), min_size=1))
def test_those_left_reach_each_other_and_one_of_them_has_the_state(
    cut: set[tuple[str, str]], holders: set[str]
) -> None:
    told: dict[str, list[str]] = {}
    for a, b in cut:
        told.setdefault(a, []).append(b)
    dropped = to_drop(told, NAMES, sorted(holders))
    left = set(NAMES) - set(dropped)
    assert not [pair for pair in cut if left.issuperset(pair)]
    assert left & holders
    assert len(dropped) <= len(cut)


def test_one_bad_node_is_found_whoever_it_is() -> None:
    for bad in NAMES:
        told = {w: [bad] for w in NAMES if w != bad}
        assert to_drop(told, NAMES, NAMES) == [bad]
        assert to_drop({bad: [w for w in NAMES if w != bad]}, NAMES, NAMES) == [bad]


# ---------------------------------------------------------------------------------------------------------- failures


def fail(
    m: Membership,
    worker: str,
    at: float,
    step: int = 5,
    signature: str = "ValueError at t.py:7",
    outcome: Outcome | None = None,
) -> list:
    return m.handle(
        ev.Said(
            at=at,
            message=Failed(
                worker=worker,
                code=1,
                message="ValueError: bad",
                signature=signature,
                step=step,
                traceback="Traceback: here",
                outcome=outcome,
            ),
        )
    )


def test_the_same_exception_on_two_nodes_in_one_step_ends_the_run_with_its_traceback() -> None:
    m = started("w0", "w1", "w2")
    out = fail(m, "w1", 1)
    assert m.roster.status is RunStatus.TRAINING
    assert tells(out, Interrupt) == ["w0", "w2"], "nobody waits for the process to end"
    assert records(out, "failed")[0].data["traceback"] == "Traceback: here"
    out = fail(m, "w0", 1.1)
    assert any(isinstance(i, ev.RunEnded) and i.status is RunStatus.FAILED for i in out)
    assert "ValueError: bad (step 5, on w1, node n-w1 and again on w0, node n-w0)" in m.roster.message
    assert m.roster.traceback == "Traceback: here"


@pytest.mark.parametrize("other", [{"step": 6}, {"signature": "KeyError at t.py:9"}])
def test_another_exception_or_another_step_is_the_nodes_own(other: dict) -> None:
    m = started("w0", "w1", "w2")
    fail(m, "w1", 1)
    finish_change(m, at=1, first_step=5)
    fail(m, "w2", 2, **other)
    assert not m.roster.status.ended
    finish_change(m, at=2, first_step=5)
    assert m.roster.members == ["w0"]


def test_the_same_exception_twice_on_one_node_does_not_end_the_run_but_on_the_only_member_it_does() -> None:
    m = started("w0", "w1", "w2", nodes={"w1": "a", "w2": "a", "w0": "b"})
    fail(m, "w1", 1)
    finish_change(m, at=1)
    fail(m, "w2", 2)
    assert not m.roster.status.ended
    finish_change(m, at=2)
    fail(m, "w0", 3, step=9)
    assert m.roster.status is RunStatus.FAILED
    assert "the only member" in m.roster.message


def test_the_same_exception_twice_on_the_only_node_ends_the_run() -> None:
    """Before so many have raised that the node would be barred for it."""
    m = started("w0", "w1", "w2", "w3", nodes=dict.fromkeys(("w0", "w1", "w2", "w3"), "a"))
    fail(m, "w1", 1)
    assert not m.roster.status.ended
    out = fail(m, "w3", 1.1)
    assert m.roster.status is RunStatus.FAILED
    assert "ValueError: bad (step 5, on w1, node a and again on w3, node a)" in m.roster.message
    assert m.roster.traceback == "Traceback: here"
    assert not records(out, "bar")


def test_an_exception_of_all_workers_of_two_nodes_ends_the_run_and_bars_neither() -> None:
    """Before the first of the other node has raised, more of this one's have than bar a node."""
    names = [f"w{number}" for number in range(8)]
    m = started(*names, nodes={name: "ab"[number // 4] for number, name in enumerate(names)})
    out: list[ev.Instruction] = []
    for name in names[:4]:
        out += fail(m, name, 1)
        assert not m.roster.status.ended, "the other node may come past it"
    out += fail(m, "w4", 1.1)
    assert m.roster.status is RunStatus.FAILED
    assert "ValueError: bad (step 5, on w0, node a and again on w4, node b)" in m.roster.message
    assert not records(out, "bar")


def test_a_node_whose_workers_fail_alike_again_and_again_is_barred_for_it() -> None:
    """Once for all of them each time, whoever comes in their place."""
    m = started("w0", nodes={"w0": "a"})
    out: list[ev.Instruction] = []
    for number in range(3):
        assert not records(out, "bar")
        assert not m.roster.barred
        names = [f"w{1 + 2 * number}", f"w{2 + 2 * number}"]
        for name in names:
            join(m, name, at=number, node="bad")
        while m.roster.change is not None:
            finish_change(m, at=number)
        beats(m, number, step=7, w0=(WORKING, 0.0))
        for name in names:
            out += fail(m, name, number, step=0)
            finish_change(m, at=number)
    assert list(m.roster.barred) == ["bad"]
    assert m.roster.status is RunStatus.TRAINING


@pytest.mark.parametrize("nodes", ["aa", "bc"])
def test_newcomers_that_raise_do_not_end_the_run_of_those_who_compute(nodes: str) -> None:
    """On the only node there is, or on one after the other: their files may have changed since the others began."""
    m = started("w0", nodes={"w0": "a"})
    for number, node in enumerate(nodes, 1):
        beats(m, number, step=7, w0=(WORKING, 0.0))
        join(m, f"w{number}", at=number, node=node)
        for worker in ("w0", f"w{number}"):
            m.handle(ev.Said(at=number, message=Vote(worker=worker, generation=m.roster.high, ok=True)))
        fail(m, f"w{number}", number, step=0)  # it loads the state
        assert not m.roster.status.ended
        finish_change(m, at=number, first_step=7)
    assert m.roster.members == ["w0"]


def test_newcomers_that_do_not_follow_the_members_do_not_end_the_run() -> None:
    """Two at once, on two nodes, in a step that is the members' next one, too."""
    m = started("w0", "w1", "w2")
    for worker in ("w1", "w2"):
        fail(m, worker, 1, signature=f"{STRANGER}rank 1 cuts a step into 4 shards")
    assert not m.roster.status.ended
    finish_change(m, at=1, first_step=5)
    assert m.roster.members == ["w0"]


def test_who_goes_before_the_generation_without_another_is_complete_is_told_of_with_it() -> None:
    m = started("w0", "w1", "w2")
    fail(m, "w1", 1)
    m.handle(ev.WorkerGone(at=1.1, worker="w2", reason="killed by signal 9", signal=9))
    finish_change(m, at=1.2, first_step=5)
    reason = m.roster.history[-1].reason
    assert reason == "w1 on n-w1 is gone: ValueError: bad; w2 on n-w2 is gone: killed by signal 9"


def test_a_crash_of_the_only_member_is_tried_again_and_ends_the_run_when_it_comes_again_at_the_same_step() -> None:
    m = started("w0")
    beats(m, 0.5, step=7, w0=(WORKING, 0.0))
    m.handle(ev.WorkerGone(at=1, worker="w0", reason="killed by signal 11", signal=11, tail="Fatal Python error"))
    assert m.roster.status is RunStatus.SUSPENDED
    join(m, "w1", at=2)
    finish_change(m, at=2)
    beats(m, 2.5, step=7, w1=(WORKING, 0.0))
    m.handle(ev.WorkerGone(at=3, worker="w1", reason="killed by signal 11", signal=11, tail="Fatal Python error"))
    assert m.roster.status is RunStatus.FAILED
    assert m.roster.traceback == "Fatal Python error"


def test_kills_from_outside_count_for_nothing() -> None:
    m = started("w0", "w1", "w2", "w3")
    for number, worker in enumerate(("w1", "w2", "w3")):
        m.handle(ev.WorkerGone(at=number + 1, worker=worker, reason="killed by signal 9", signal=9))
        finish_change(m, at=number + 1)
    assert m.roster.failures == []
    assert m.roster.barred == {}
    assert m.roster.status is RunStatus.TRAINING


@pytest.mark.parametrize("scripted", [False, True])
def test_a_node_with_three_failures_is_barred_except_where_a_schedule_decides(scripted: bool) -> None:
    m = started("w0", "w1", nodes={"w1": "bad"})
    m.roster.scripted = scripted
    out = fail(m, "w1", 1, step=1)
    for number in (2, 3):
        assert not records(out, "bar")
        finish_change(m, at=number)
        m.roster.limit = 8
        join(m, f"w{number}", at=number, node="bad")
        finish_change(m, at=number)
        out = fail(m, f"w{number}", number, step=number)
    assert bool(records(out, "bar")) is not scripted
    assert list(m.roster.barred) == ([] if scripted else ["bad"])
    assert [i.node for i in out if isinstance(i, ev.NodeBarred)] == ([] if scripted else ["bad"])
    if not scripted:
        assert "3 failures on it (exception)" in m.roster.barred["bad"]


def finish(m: Membership, worker: str, at: float, agreed: int = 3) -> list[ev.Instruction]:
    said = Finished(worker=worker, generation=1, steps=9, digest="d", loss=1.0, samples=9, agreed=agreed, answer=0.5)
    return m.handle(ev.Said(at=at, message=said))


@pytest.mark.parametrize("first", [True, False])
def test_a_failure_after_the_end_of_the_loop_does_not_undo_what_the_others_have_finished(first: bool) -> None:
    m = started("w0", "w1")
    if first:
        fail(m, "w1", 1, step=9)
    finish(m, "w0", 1.1)
    if not first:
        fail(m, "w1", 1.2, step=9)
    exits(m, "w0", 1.3, 0)
    assert m.roster.status is RunStatus.FINISHED


def exits(m: Membership, worker: str, at: float, code: int | None) -> None:
    reason = "agent silent" if code is None else f"exited with {code}"
    m.handle(ev.WorkerGone(at=at, worker=worker, reason=reason, code=code))


@pytest.mark.parametrize("before", [True, False])
def test_the_main_members_exit_code_decides_and_nobody_elses(before: bool) -> None:
    """Whether it ends before the others have finished or after them."""
    m = started("w0", "w1")
    finish(m, "w0", 1)
    if before:
        exits(m, "w0", 1.1, 0)
    finish(m, "w1", 1.2)
    exits(m, "w1", 1.3, 3)
    assert before or not m.roster.status.ended
    exits(m, "w0", 1.4, 0)
    assert (m.roster.status, m.roster.message) == (RunStatus.FINISHED, "")
    m = started("w0", "w1")
    finish(m, "w0", 1)
    if not before:
        finish(m, "w1", 1.1)
    exits(m, "w0", 1.2, 3)
    assert m.roster.status is RunStatus.FAILED
    assert m.roster.message == "the main member w0 (node n-w0) failed after the training: exited with 3"


@pytest.mark.parametrize("how", ["signal", "lost", "hangs", "hangs, and another head"])
def test_an_exit_code_that_nobody_can_tell_does_not_undo_the_training(how: str) -> None:
    m = started("w0", "w1")
    finish(m, "w0", 1)
    finish(m, "w1", 1)
    m.handle(ev.Ticked(at=1 + TIMING.lease_s))
    assert not m.roster.status.ended
    began = 1.0
    if how == "signal":
        m.handle(ev.WorkerGone(at=2, worker="w0", reason="killed by signal 9", signal=9))
    elif how == "lost":
        exits(m, "w0", 2, None)
    else:
        if "head" in how:
            began = 50.0
            roster = msgspec.msgpack.decode(msgspec.msgpack.encode(m.roster), type=Roster)
            m = Membership(roster, term=2, timing=TIMING, at=began, validate=True)
            m.handle(ev.Ticked(at=began + TIMING.lease_s))
            assert not m.roster.status.ended, "its agent may be about to say"
        m.handle(ev.Ticked(at=began + TIMING.lease_s + 0.1))
    why = {
        "signal": "killed by signal 9",
        "lost": "agent silent",
    }.get(how, f"its process was still there {TIMING.lease_s:g} s after its script had ended")
    assert m.roster.status is RunStatus.FINISHED
    assert m.roster.message == f"the exit code of the main member w0 (node n-w0) is not known: {why}"


def test_a_script_whose_init_process_group_finds_no_fixed_world_is_told_what_to_write() -> None:
    """Before its fallow.init, where nothing of ours is in the process to say so."""
    m = Membership(Roster(run="r", min_members=1, max_members=8, limit=8), term=1, timing=TIMING, at=0.0)
    m.handle(ev.WorkerExpected(at=0, worker="w0", token="t", node="a"))
    last = (
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected"
    )
    m.handle(ev.WorkerGone(at=1, worker="w0", reason=f"exited with 1 ({last})", code=1))
    assert m.roster.status is RunStatus.FAILED
    assert f"{last}); write fallow.init() in the place of torch.distributed's init_process_group" in m.roster.message


def test_a_script_that_ends_in_order_inside_of_the_loop_while_others_go_on_is_refused() -> None:
    m = started("w0", "w1", "w2")
    exits(m, "w2", 1, 5)
    assert m.roster.status is not RunStatus.FAILED, "one node's failure"
    finish_change(m, at=1)
    exits(m, "w1", 2, 0)
    assert m.roster.status is RunStatus.FAILED
    assert "its script ended (exit code 0) inside of the run.updates loop while the others go on" in m.roster.message


@pytest.mark.parametrize("rebuilding", [False, True])
@pytest.mark.parametrize("code", [0, 3, None])
def test_a_deserter_is_waited_for_however_long_its_process_takes_to_end(rebuilding: bool, code: int | None) -> None:
    """Its exit code says whether it is to blame; a group without it must not be built before that is known."""
    m = started("w0", "w1", "w2")
    deserted = ev.Said(at=1.0, message=Deserted(worker="w1", generation=1, step=3))
    held = ev.Said(at=1.0, message=Held(worker="w0", generation=1, step=3, reason="the script of a member has ended"))
    for event in (held,) if rebuilding else (deserted, held):
        m.handle(event)
    if rebuilding:
        assert tells(m.handle(ev.Ticked(at=1.9)), Prepare) == ["w0", "w1", "w2"]
        aborted = tells(m.handle(deserted), Abort)
        assert aborted == ["w0", "w1", "w2"]
    for at in range(2, 10):
        for worker in ("w0", "w2"):
            m.handle(ev.Said(at=at, message=Beat(worker=worker, generation=1, prepared=1, step=3, held=True)))
        assert not tells(m.handle(ev.Ticked(at=at)), Prepare)
    assert m.roster.members == ["w0", "w1", "w2"]
    if code is None:  # it does not end within its lease
        m.handle(ev.Ticked(at=11.5))
    else:
        exits(m, "w1", 10, code)
    if code == 3:
        assert m.roster.status is not RunStatus.FAILED, "one node's failure"
        assert m.roster.change is not None
        assert m.roster.change.members == ["w0", "w2"]
    else:
        assert m.roster.status is RunStatus.FAILED
        assert "inside of the run.updates loop while the others go on" in m.roster.message


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_but_what_the_main_member_had_to_do_after_the_loop_is_done_by_nobody_else(first: bool, killed: bool) -> None:
    m = started("w0", "w1", "w2")
    if not first:
        finish(m, "w1", 1)
    if killed:
        m.handle(ev.WorkerGone(at=1.1, worker="w0", reason="killed by signal 9", signal=9))
    else:
        fail(m, "w0", 1.1, step=9)
    if first:
        assert not m.roster.status.ended, "it might be between two loops"
        finish(m, "w1", 1.2)
    assert m.roster.status is RunStatus.FAILED
    why = "killed by signal 9" if killed else "ValueError: bad"
    assert m.roster.message == (
        f"the main member w0 (node n-w0) ended after the training, before its script had: {why}"
    )
    assert m.roster.traceback == ("" if killed else "Traceback: here")


def test_those_who_go_on_without_a_member_that_failed_hear_what_it_had_gone_through_with_them() -> None:
    """Whatever breaks before they do: what an earlier one knew is not forgotten, nor replaced by less."""
    m = started("w0", "w1", "w2")
    known = Outcome(generation=1, agreed=3, answer=0.5)
    out = fail(m, "w0", 1, step=9, outcome=known)
    out += fail(m, "w2", 2, step=9, signature="other", outcome=Outcome(generation=1, agreed=2, answer=0.0))
    prepares = [i.message for i in out if isinstance(i, ev.Tell) and isinstance(i.message, Prepare)]
    assert [(prepare.generation, prepare.outcome) for prepare in prepares] == [(2, known), (2, known), (3, known)]


@pytest.mark.parametrize("news_first", [True, False])
def test_who_is_held_when_another_has_finished_hears_what_that_one_knows(news_first: bool) -> None:
    """w2 was killed when the last thing that all did together was complete on w0, but not on w1."""
    m = started("w0", "w1", "w2")
    if news_first:
        m.handle(ev.WorkerGone(at=1, worker="w2", reason="killed by signal 9", signal=9))
    finish(m, "w0", 1.1)
    if not news_first:
        m.handle(ev.WorkerGone(at=1.2, worker="w2", reason="killed by signal 9", signal=9))

    def beat(at: float, *, held: bool, stalled: float) -> list[OthersFinished]:
        said = Beat(worker="w1", generation=1, prepared=1, step=9, held=held, doing=WAITING, stalled_s=stalled)
        out = m.handle(ev.Said(at=at, message=said))
        return [i.message for i in out if isinstance(i, ev.Tell) and isinstance(i.message, OthersFinished)]

    assert not beat(1.3, held=False, stalled=2.0), "what it waits for may be on its way"
    assert not beat(1.4, held=True, stalled=0.1)
    assert beat(1.7, held=True, stalled=0.4) == [OthersFinished(term=1, steps=9, agreed=3, answer=0.5)]
    assert not beat(1.8, held=True, stalled=0.5), "not with every beat"
    assert beat(6.0, held=False, stalled=5.1)
    finish(m, "w1", 7)
    exits(m, "w0", 7, 0)
    assert m.roster.status is RunStatus.FINISHED


def test_a_member_that_waits_in_the_loop_when_another_has_finished_is_told_as_well() -> None:
    m = started("w0", "w1")
    finish(m, "w0", 1)
    assert not tells(beats(m, 2, w1=(WORKING, 300.0)), OthersFinished)
    assert not tells(beats(m, 3, w1=(OUTSIDE, 300.0)), OthersFinished)
    assert not tells(beats(m, 4, w1=(WAITING, 4.9)), OthersFinished)
    assert tells(beats(m, 5, w1=(WAITING, 5.9)), OthersFinished) == ["w1"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.sampled_from(["x", "y"])), max_size=12))
def test_only_what_happened_alike_on_two_nodes_or_to_the_last_member_fails_a_run(
    history: list[tuple[str, int, str]],
) -> None:
    m = started(*NAMES)
    seen: dict[tuple[int, str], set[str]] = {}
    for at, (worker, step, signature) in enumerate(history, start=1):
        if not m.roster.alive(worker):
            continue
        step = max(step, m.roster.workers[worker].step)
        last = m.roster.staying() == [worker]
        fail(m, worker, at, step, signature)
        expected = last or bool(seen.get((step, signature)))
        assert (m.roster.status is RunStatus.FAILED) is expected
        if expected:
            return
        seen.setdefault((step, signature), set()).add(worker)
        finish_change(m, at=at, first_step=0)
