"""The head beside others: polls, give-backs with a deadline, refusals, and what is kept of the delays."""

from concurrent.futures import wait
from pathlib import Path
from typing import Any

import msgspec
import pytest

from builders import cluster as poll_of
from builders import job, node, partition, runs, waits
from fallow.config import Config, Site, Slurm
from fallow.config import Harvest as HarvestSection
from fallow.core import records
from fallow.core.accounting.backoff import Backoff
from fallow.core.allocations import CANCEL_AGAIN_S, Agent, Allocation
from fallow.core.membership import events as ev
from fallow.core.neighbour.waiting import UNKNOWN, site_rules
from fallow.core.neighbour.watch import Delays
from fallow.core.protocol import EndAgent
from fallow.files import write_private
from fallow.head import deadlines
from fallow.head.loop.turn import Turn
from fallow.head.slurm import jobs
from fallow.head.slurm.harvest import Harvest
from fallow.head.slurm.jobs import sweep, take_in
from fallow.head.slurm.neighbours import DELAYS, END_S, LEAVE_S, Neighbours, enforce_departure, give_back
from fallow.head.state.registry import Registry, Run
from fallow.model import AllocationKind, AllocationState, ClusterConfig, ClusterState, DelayReport, RunStatus

from head_in_process import HungFiles  # isort: skip
from runs import NOW, new_book, new_run  # isort: skip

CONFIG = Config(slurm=Slurm(poll_interval_s=30.0), harvest=HarvestSection(allow_without_preemption=True))
SITE = ClusterConfig(cluster="c", slurm_version="22.05.8", priority_type="priority/basic")


@pytest.fixture
def book(tmp_path: Path) -> Registry:
    return new_book(tmp_path)


@pytest.fixture
def run(book: Registry) -> Run:
    return new_run(book, max_nodes=4)


def held(book: Registry, run: Run, *, agents: bool = True) -> Allocation:
    found = book.new_allocation(run, AllocationKind.HARVEST, NOW - 60, partition="p")
    found.state, found.job_id, found.nodes, found.start_at = AllocationState.RUNNING, "7", ["n1"], NOW - 50
    found.agents = {"n1": Agent()} if agents else {}
    return found


def turn(book: Registry, now: float = NOW) -> Turn:
    return Turn(book, now - NOW, now)


def cluster(run: Run, waiting: bool, at: float = NOW) -> ClusterState:
    jobs = [runs("7", ["n1"], name=a.token, user="me", exclusive=False) for a in run.live_allocations()]
    others = [waits(exclusive=False, submit_at=at)] if waiting else []
    return poll_of([node("n1", "ALLOCATED")], [*jobs, *others], at=at)


def test_polls_come_soon_once_slurm_has_taken_a_node_from_us(book: Registry, run: Run) -> None:
    """Who came at the same time may have counted on it, too, and preempts nobody else for a while."""
    harvest = Harvest(CONFIG)
    harvest.neighbours.polled(turn(book), cluster(run, False), SITE)
    harvest.neighbours.poll_soon(NOW + 7)
    found = []
    for at in (NOW + 6.9, NOW + 7, NOW + 12, NOW + 42):
        harvest.neighbours.polled(turn(book), cluster(run, False, at), SITE)
        found.append(harvest.neighbours.next_poll_s(book))
    assert found == [5.0, 5.0, 30.0, 30.0], "one poll was under way"
    assert harvest.neighbours.interval_s(book) == 30.0, "what is asked for does not change by that"


@pytest.mark.parametrize(
    ("node_name", "allow", "interval_s"),
    [("n1", False, 30.0), ("n2", False, 5.0), ("", False, 30.0), ("", True, 5.0)],
)
def test_we_watch_over_nodes_that_nobody_takes_back_in_a_partition_that_preempts(
    book: Registry, run: Run, node_name: str, allow: bool, interval_s: float
) -> None:
    low = partition("p", ["n1", "n2"], preempt_mode="CANCEL", unpreempted=frozenset(["n2"]))
    held(book, run).nodes = [node_name] if node_name else []
    known = Neighbours(msgspec.structs.replace(CONFIG, harvest=HarvestSection(allow_without_preemption=allow)))
    known.polled(turn(book), poll_of([node("n1"), node("n2")], partitions=[low]), None)
    assert known.interval_s(book) == interval_s


def test_after_an_outage_polls_come_soon_while_we_hold_what_nobody_takes_from_us(book: Registry, run: Run) -> None:
    harvest = Harvest(CONFIG)
    harvest.neighbours.polled(turn(book), cluster(run, False), SITE)

    def after(failures: int, least_s: float = 0.0) -> float:
        return harvest.neighbours.next_poll_s(book, least_s, failures)

    assert [after(n) for n in range(6)] == [30.0, 60.0, 120.0, 240.0, 300.0, 300.0]
    held(book, run)
    assert [after(n) for n in range(6)] == [5.0, 10.0, 15.0, 15.0, 15.0, 15.0]
    assert [after(n, 40.0) for n in range(3)] == [40.0] * 3, "a slow slurmctld is spared"
    assert after(0, 400.0) == 50.0


def test_a_node_that_was_being_left_anyway_has_to_hurry_once_somebody_waits(book: Registry, run: Run) -> None:
    """At 60 s a step, members that leave at the boundary would keep a node for a minute."""
    allocation, neighbours = held(book, run), Neighbours(CONFIG)
    turn(book, NOW - 20).release_allocation(run, allocation, "the run gains nothing from it")
    for later in (0.0, 2.0):
        (wish,) = neighbours.polled(turn(book, NOW + later), cluster(run, True, NOW + later), SITE).give_backs
        give_back(turn(book, NOW + later), run, allocation, wish.reason)
    assert (allocation.wanted_at, allocation.kill_at) == (NOW, NOW + LEAVE_S), "from when somebody was first seen"
    early, ended, last = (turn(book, NOW + s) for s in (LEAVE_S - 0.1, LEAVE_S, LEAVE_S + END_S))
    enforce_departure(early, run, allocation)
    assert not early.messages
    enforce_departure(ended, run, allocation)
    assert [message.kill_after_s for _, message in ended.messages if isinstance(message, EndAgent)] == [0.0]
    assert not ended.cancels
    enforce_departure(last, run, allocation)
    assert last.cancels == [(run.id, allocation.token, "7")]
    again, later = (turn(book, last.now + s) for s in (CANCEL_AGAIN_S - 0.1, CANCEL_AGAIN_S))
    enforce_departure(again, run, allocation)
    enforce_departure(later, run, allocation)
    assert (again.cancels, later.cancels) == ([], last.cancels), "a scancel may fail"
    idle = held(book, run, agents=False)
    give_back(last, run, idle, "somebody waits")
    assert last.cancels[1:] == [(run.id, idle.token, "7")], "its script has not come far: at once"


def test_a_clock_that_is_set_back_holds_up_no_end_of_a_job(book: Registry, run: Run) -> None:
    """What was cancelled, and is still there, was left alone until the clock had caught up."""
    back_s = 7200.0
    allocation = held(book, run)
    give_back(turn(book), run, allocation, "somebody waits")
    for after_s, ends in ((0.0, True), (LEAVE_S, False), (LEAVE_S + END_S, False)):
        now = turn(book, NOW - back_s + after_s)
        enforce_departure(now, run, allocation)
        assert any(isinstance(message, EndAgent) for _, message in now.messages) is ends
    assert now.cancels == [(run.id, allocation.token, "7")]
    over = held(book, run)
    book.end_allocation(run, over, "its agents are gone")
    over.asked_at = over.left_at = NOW
    shown = poll_of([], [job("7", "RUNNING", name=over.token, user="me")])
    now = turn(book, NOW - back_s)
    sweep(now, shown)
    assert now.cancels == [(run.id, over.token, "7")]
    waiting = held(book, run, agents=False)
    waiting.asked_at = NOW
    now = turn(book, NOW - back_s)
    take_in(now, poll_of([], [job("7", "RUNNING", name=waiting.token, user="me")], at=now.now), Backoff())
    assert (run.id, waiting.token, "7") in now.cancels


def test_the_nodes_of_a_run_that_is_over_have_to_hurry_too(book: Registry, run: Run) -> None:
    allocation = held(book, run)
    over = turn(book, NOW + 1)
    over.apply(run, ev.Cancel(at=over.at, reason="by hand"))
    assert (run.root.status, allocation.state) == (RunStatus.CANCELLED, AllocationState.RELEASING)
    give_back(turn(book, NOW + 2), run, allocation, "somebody waits")
    early, last = turn(book, NOW + 2), turn(book, NOW + 2 + LEAVE_S + END_S)
    for each in (early, last):
        deadlines.tick(each)
    assert (early.cancels, last.cancels) == ([], [(run.id, allocation.token, "7")])


def test_what_is_over_for_us_and_not_for_slurm_is_cancelled_soon_if_somebody_waits(book: Registry, run: Run) -> None:
    allocation, neighbours = held(book, run), Neighbours(CONFIG)
    shown = cluster(run, True)
    turn(book, NOW - 6).release_allocation(run, allocation, "the run gains nothing from it")
    book.end_allocation(run, allocation, "its agents are gone")
    assert neighbours.interval_s(book) == 30.0
    standing = neighbours.polled(turn(book), shown, SITE)
    assert standing.delayed_jobs == {"9": {allocation.token}}
    assert neighbours.interval_s(book) == 5.0, "its end is watched closely"
    wanted = standing.delayed_jobs["9"]
    patient, prompt, early = turn(book), turn(book), turn(book, NOW - 6 + LEAVE_S)
    sweep(patient, shown)
    sweep(prompt, shown, wanted)
    sweep(early, shown, wanted)
    assert (patient.cancels, early.cancels) == ([], [])
    assert prompt.cancels == [(run.id, allocation.token, "7")]


def test_an_orphan_is_cancelled_in_whatever_state_it_lives(book: Registry, run: Run) -> None:
    allocation = held(book, run)
    book.end_allocation(run, allocation, "its agents are gone")
    living = "PENDING RUNNING SUSPENDED CONFIGURING STOPPED RESIZING REQUEUED REQUEUE_HOLD SPECIAL_EXIT SIGNALING"
    over = "COMPLETING STAGE_OUT COMPLETED CANCELLED TIMEOUT REVOKED"
    for state in f"{living} RESV_DEL_HOLD {over}".split():
        allocation.asked_at, now = None, turn(book)
        sweep(now, poll_of([], [job("7", state, name=allocation.token, user="me")]))
        assert now.cancels == ([] if state in over.split() else [(run.id, allocation.token, "7")]), state


def test_a_base_job_is_not_given_up_while_the_file_with_its_number_cannot_be_read(book: Registry, run: Run) -> None:
    base = book.new_allocation(run, AllocationKind.BASE, NOW, sent_by=NOW + 90.0)
    shown = job("8", "PENDING", name="mine", user="me", submit_at=NOW + 1.0, comment="project=x")
    write_private(book.paths.run(run.id).base_job(base.token), b'{"job_id": "8"}')

    def poll(at: float) -> None:
        take_in(turn(book, NOW + at), poll_of([], [shown], at=NOW + at), Backoff())

    with HungFiles(book.paths.runs) as hung:
        for at in (170.0, 175.0, 180.0):
            poll(at)
        assert base.state is AllocationState.UNKNOWN and not hung.used_by_loop
    assert run.left_job_id is not None
    wait([run.left_job_id])
    poll(185.0)
    assert (base.job_id, base.state, run.ended) == ("8", AllocationState.PENDING, False)


def test_a_head_that_starts_reads_the_number_of_a_base_job_before_it_gives_the_job_up(book: Registry, run: Run) -> None:
    base = book.new_allocation(run, AllocationKind.BASE, NOW, sent_by=NOW + 90.0)
    base.missing, base.unseen_at = 1, NOW + 1.0  # as a poll of the former head left it
    shown = job("8", "PENDING", name="mine", user="me", submit_at=NOW + 1.0, comment="project=x")
    write_private(book.paths.run(run.id).base_job(base.token), b'{"job_id": "8"}')
    for at in (170.0, 175.0):
        take_in(turn(book, NOW + at), poll_of([], [shown], at=NOW + at), Backoff())
        assert run.left_job_id is not None and not run.ended
        wait([run.left_job_id])
    assert (base.job_id, base.state) == ("8", AllocationState.PENDING)


@pytest.mark.parametrize("known", ["to the head", "in a file", "by its comment", "to nobody"])
def test_a_base_job_is_found_by_its_number_or_its_comment(book: Registry, run: Run, known: str) -> None:
    """A site's job_submit plugin writes comments of its own. The head may have been away while it was submitted."""
    base = book.new_allocation(run, AllocationKind.BASE, NOW, sent_by=NOW + 90.0)
    comment = f"note {base.token}" if known == "by its comment" else f"{base.token};project=x"

    def poll(at: float, state: str, submit_at: float = NOW + 1.0, **more: Any) -> None:
        shown = job("8", state, **{"name": "mine", "user": "me", "submit_at": submit_at, "comment": comment, **more})
        take_in(turn(book, at), poll_of([], [shown], at=at), Backoff())
        if run.left_job_id is not None:
            wait([run.left_job_id])

    if known == "to the head":
        jobs.submitted(turn(book, NOW + 1.5), run, base.token, "8")
        for _ in range(3):
            # A number that was given away again, and one whose comment says whose it is.
            poll(NOW + 5.0, "PENDING", NOW + 30.0)
            poll(NOW + 5.0, "PENDING", comment="fallow-s-b1-0a1b2c")
        assert base.submit_at is None
    elif known != "by its comment":
        word = b'{"job_id": "8"}' if known == "in a file" else b""
        write_private(book.paths.run(run.id).base_job(base.token), word)
    for at in (170.0, 175.0, 180.0):
        poll(NOW + at, "PENDING", reason="Resources")
    if known == "to nobody":
        assert (base.job_id, base.state, run.ended) == (None, AllocationState.LOST, True), "it may be any other job"
        return
    assert (base.job_id, base.state, base.submit_at) == ("8", AllocationState.PENDING, NOW + 1.0)
    for at in (210.0, 215.0, 220.0):
        poll(NOW + at, "RUNNING", nodes=["n1"], start_at=NOW + 200.0)
    assert (base.state, base.nodes, base.spans["8"].start_at) == (AllocationState.RUNNING, ["n1"], NOW + 200.0)
    assert not run.ended


def test_delays_are_told_and_kept(book: Registry, run: Run) -> None:
    neighbours, allocation = Neighbours(CONFIG), held(book, run)
    seen = turn(book)
    neighbours.polled(seen, cluster(run, True), SITE)
    assert DELAYS in seen.notes
    allocation.state = AllocationState.ENDED
    after = turn(book, NOW + 5)
    neighbours.polled(after, cluster(run, False, NOW + 5), SITE)
    assert [(r.kind, r.data["waited_s"]) for r in after.records] == [("delayed", 5.0)]
    assert DELAYS in after.notes
    quiet = turn(book, NOW + 10)
    neighbours.polled(quiet, cluster(run, False, NOW + 10), SITE)
    assert quiet.notes == {}, "nothing new to write down"
    restored = Neighbours(CONFIG)
    restored.delays = records.decode(after.notes[DELAYS], Delays)
    assert restored.delays.report(NOW + 9).max_s == 5.0


def test_delays_of_an_older_head_are_read() -> None:
    """It kept a histogram of the jobs that it remembered no more."""
    job = {"job_id": "1", "user": "al", "since": NOW, "seen_at": NOW, "waited_s": 2.0, "tokens": []}
    past = {"max_s": 9.0, "classes": {3: 4, 7: 2}}
    note = msgspec.msgpack.encode((1, {"jobs": {"1": job}, "past": past, "polled_at": None}))
    assert records.decode(note, Delays).report(NOW) == DelayReport(jobs=7, p95_s=2.0, max_s=9.0)


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("whose", ["theirs", "theirs, given up", "the head's"])
def test_a_base_job_that_slurm_shows_after_it_was_lost_is_cancelled(
    book: Registry, run: Run, whose: str, marked: bool
) -> None:
    """Slurm had not shown it for so long that it was lost. Args: marked: its comment is as it was."""
    base = book.new_allocation(run, AllocationKind.BASE, NOW, sent_by=NOW, was_renewed=whose == "the head's")
    jobs.submitted(turn(book), run, base.token, "8")
    for at in (80.0, 85.0):
        take_in(turn(book, NOW + at), cluster(run, True, NOW + at), Backoff())
    assert base.state is AllocationState.LOST
    if whose == "theirs, given up":
        run.root.status = RunStatus.CANCELLED
    own = {"name": base.token} if base.was_renewed else {"name": "mine", "comment": base.token if marked else "x"}
    lost = job("8", "RUNNING", nodes=["n1"], submit_at=NOW, **{"user": "me", **own})
    seen = []
    for at in (95.0, 100.0, 126.0):
        shown = cluster(run, True, NOW + at)
        shown.jobs.append(lost)
        found = Neighbours(CONFIG).polled(turn(book), shown, SITE)
        assert (found.delayed_jobs != {}) == base.was_renewed, "its owner may hold nodes for as long as they like"
        seen.append(turn(book, NOW + at))
        sweep(seen[-1], shown)
    told = [(record.kind, record.text.partition(",")[0]) for each in seen for record in each.records]
    cancels = [each.cancels for each in seen]
    assert cancels == [[(run.id, base.token, "8")], [], [(run.id, base.token, "8")]]
    assert {kind for kind, _ in told} == {"orphan"}


def test_nodes_are_shared_or_not_for_us_as_for_others() -> None:
    for select_type, whole in (("select/linear", True), ("select/cons_tres", False), ("", True)):
        assert site_rules(msgspec.structs.replace(SITE, select_type=select_type)).whole_nodes is whole
    assert site_rules(UNKNOWN).whole_nodes


def test_refusals_are_told_once(book: Registry, run: Run) -> None:
    neighbours = Neighbours(CONFIG)
    held(book, run)
    secretive = ClusterConfig(cluster="c", slurm_version="22.05.8", private_data=["jobs"])
    told = [turn(book) for _ in range(3)]
    for each, site in zip(told, (secretive, secretive, SITE), strict=True):
        neighbours.polled(each, cluster(run, False), site)
    assert [[r.text for r in each.records] for each in told] == [
        ["partition p is not harvested: others' jobs cannot be seen, and Slurm would not preempt ours for them"],
        [],
        ["partition p may be harvested again"],
    ]
    wanted_elsewhere = Neighbours(Config())
    wanted_elsewhere.polled(turn(book), cluster(run, False), secretive)
    assert wanted_elsewhere.refused_partitions == {}
    allowed = Neighbours(msgspec.structs.replace(CONFIG, site=Site(harvest_unseen=True)))
    allowed.polled(turn(book), cluster(run, False), secretive)
    assert allowed.refused_partitions == {}
