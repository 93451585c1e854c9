"""The simulated head: what the real one asks for and cancels; and nothing follows from the polls that it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf
from pathlib import Path

import pytest

from fallow.config import Config, Harvest, Slurm
from fallow.core.neighbour.watch import LEAVE_S, WATCHFUL_S
from fallow.core.planning.allowance import Limits
from fallow.model import (
    AllocationState,
    ClusterConfig,
    ReservationInfo,
)
from fallow.sim.head import ANSWER_S, VirtualHead
from fallow.sim.requests_queue import RequestsQueue
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import POLL_REQUESTS, JobPart, RunPlan, Scheduler, SimJob, SimNode, Site, Wanted
from fallow.slurm.client import SubmitRejected
from fallow.slurm.fake import FakeSlurm
from sim_client import play_real
from sim_engine import BEGIN, Arrival, FakeEngine, ToyRuns, arrivals, options, partitions, run_plan


def engine(others: Sequence[Arrival], nodes: int, *, preempt: bool) -> FakeEngine:
    config = ClusterConfig(
        cluster="fake",
        slurm_version="22.05.8",
        preempt_type="preempt/partition_prio" if preempt else "",
        kill_wait_s=5.0,
        scheduler_parameters="bf_interval=30,bf_max_job_user=20",
    )
    slurm = FakeSlurm(nodes, partitions=partitions(nodes, preempt=preempt), now=BEGIN, config=config)
    return FakeEngine(slurm, others)


class Noted(SlurmSim):
    """Notes what is asked of it."""

    def __init__(self, site: Site, others: Sequence[Arrival]) -> None:
        jobs = [
            SimJob(
                job_id=str(number),
                user="alice",
                submit_at=job.at,
                runs_s=job.runs_s,
                limit_s=job.limit_s,
                parts=(JobPart(partition=job.partition, nodes=job.nodes),),
            )
            for number, job in enumerate(others, 1)
        ]
        super().__init__(site, jobs, 0, BEGIN)
        self.submitted: list[tuple[float, str, int, int | None, str]] = []
        self.cancelled: list[tuple[float, str]] = []

    def submit(self, request: Wanted) -> str:
        given = (request.partition, request.minutes, request.node)
        self.submitted.append((round(self.now, 3), *given))
        return super().submit(request)

    def cancel(self, job_id: str) -> None:
        self.cancelled.append((round(self.now, 3), job_id))
        super().cancel(job_id)


def scripted(others: Sequence[Arrival], *, preempt: bool) -> FakeEngine:
    """One that starts nothing for a while."""
    found = engine(others, NODES, preempt=preempt)
    found.hold(BEGIN + 2000.5, BEGIN + 3000.5)
    return found


def slurm(others: Sequence[Arrival], *, preempt: bool) -> Noted:
    """One that plans ahead and stretches time limits to their holes; in the end it is maintained."""
    there = tuple(partitions(NODES, preempt=preempt))
    nodes = tuple(SimNode(node=n, partitions=tuple(p.partition for p in there), cpus=8) for n in there[0].nodes)
    closed = ReservationInfo(
        reservation="m", nodes=list(there[0].nodes[:4]), start_at=BEGIN + 3000.0, end_at=BEGIN + 1e6, flags=["MAINT"]
    )
    site = Site(
        name="s",
        nodes=nodes,
        partitions=there,
        scheduler=Scheduler(version=(25, 11), bf_max_job_user=20),
        preempt_type="preempt/partition_prio" if preempt else "",
        reservations=(closed,),
    )
    return Noted(site, others)


def play(head: VirtualHead, cluster: FakeEngine | Noted, runs: ToyRuns, until: float) -> None:
    while (at := min(cluster.next_at(), runs.next_at(), head.next_at())) <= until:
        for happening in cluster.advance(at):
            head.told(happening)
        for each in runs.advance(at):
            head.told(each)
        if head.next_at() <= at:
            head.wake(at)


def played(
    plans: Sequence[RunPlan],
    others: Sequence[Arrival],
    nodes: int,
    until_s: float,
    *,
    preempt: bool = True,
    elide: bool = True,
    limits: Limits | None = None,
    **more: object,
) -> tuple[FakeEngine, VirtualHead, ToyRuns]:
    cluster, runs = engine(others, nodes, preempt=preempt), ToyRuns(plans)
    head = VirtualHead(cluster, runs, plans, options(**more), limits=limits, elide=elide)
    play(head, cluster, runs, BEGIN + until_s)
    return cluster, head, runs


PLANS = [run_plan("r0", 8), run_plan("r1", 8), run_plan("r2", 6, weight=2.0)]
NODES = 16
QUERIES = 75.0
"A minute: hardly enough where polls come every 5 s."


@pytest.mark.parametrize("preempt", [True, False], ids=["preempt", "plain"])
@pytest.mark.parametrize("cluster", [scripted, slurm])
@pytest.mark.parametrize("hours", [1, pytest.param(6, marks=pytest.mark.soak)])
def test_it_asks_for_and_cancels_what_the_real_head_does(
    cluster: Callable[..., FakeEngine | Noted], preempt: bool, hours: int, tmp_path: Path
) -> None:
    until_s = 3600.0 * hours
    others = arrivals(7, until_s, NODES, 100.0, "scavenge" if preempt else "normal")
    ours, theirs = (cluster(others, preempt=preempt) for _ in range(2))
    runs = ToyRuns(PLANS)
    head = VirtualHead(ours, runs, PLANS, options(queries_per_min=QUERIES), elide=False)
    play(head, ours, runs, BEGIN + until_s)
    runs = ToyRuns(PLANS)
    section = Harvest(allow_without_preemption=not preempt)
    config = Config(harvest=section, slurm=Slurm(queries_per_min=QUERIES))
    play_real(theirs, runs, PLANS, options(), config, tmp_path, BEGIN + until_s)
    assert ours.submitted == theirs.submitted
    assert ours.cancelled == theirs.cancelled
    assert len(ours.submitted) > 20 and ours.cancelled and head.elided == 0


def test_what_follows_from_every_poll_follows_from_those_that_are_taken_in() -> None:
    """Renewals, ends of holes and others' jobs are seen in time, and many polls are left out."""
    until_s, plans = 4 * 3600.0, [run_plan("r0", NODES)]
    others = arrivals(3, until_s, NODES, 900.0)
    found = []
    for elide in (False, True):
        cluster, runs = slurm(others, preempt=True), ToyRuns(plans)
        head = VirtualHead(cluster, runs, plans, options(), elide=elide)
        play(head, cluster, runs, BEGIN + until_s)
        found.append((cluster, head))
    (all_of_them, every), (some, head) = found
    assert some.submitted == all_of_them.submitted
    assert some.cancelled == all_of_them.cancelled
    assert len(some.submitted) > 30
    assert every.elided == 0
    assert head.elided > 0.2 * until_s / 30.0
    assert head.calls == every.calls, "Slurm is asked all the same"


def test_polls_wait_for_what_was_asked_before_and_cancellations_do_not() -> None:
    cluster = engine([], 2, preempt=True)
    head = VirtualHead(cluster, ToyRuns([]), [], options(queries_per_min=60.0))
    for _ in range(30):
        head._cancels()
    head.wake(BEGIN)
    assert head.next_at() == BEGIN + 1.0 + POLL_REQUESTS, "the configuration and a poll; the bucket is empty"
    assert head.calls == 30 + 1
    head.wake(head.next_at())
    assert head.calls == 30 + 1 + POLL_REQUESTS
    assert head.next_at() == BEGIN + 1.0 + POLL_REQUESTS + ANSWER_S


def test_without_latency_an_idle_node_is_ours_in_the_same_moment() -> None:
    others = [Arrival(BEGIN + 100.25, 4, 60.0, 600.0)]
    cluster, head, _ = played([run_plan("r0", 4)], others, 4, 400.0, latency="none")
    times = [round(at - BEGIN, 3) for at, *_ in cluster.submitted]
    assert times == [0.0] * 4 + [100.4] * 2 + [160.4] * 2, "two wait ahead as soon as others have the nodes"
    assert all(a.state is AllocationState.RUNNING for a in head.book.live())


def test_a_node_that_somebody_waits_for_is_given_back_in_time() -> None:
    others = [Arrival(BEGIN + 1001.5, 1, 600.0, 600.0)]
    cluster, head, runs = played([run_plan("r0", 2)], others, 2, 1100.0, preempt=False)
    (theirs,) = [job for job in cluster.slurm.jobs.values() if job.user == "alice"]
    assert theirs.start_at is not None
    assert theirs.start_at - (BEGIN + 1001.5) < WATCHFUL_S + ANSWER_S + 0.2
    assert runs.unannounced == 0 and runs.members("r0") == 1
    assert head.watch.delays.report(cluster.now).jobs == 1


class Stuck(ToyRuns):
    """Whose nodes take forever to leave."""

    def release(self, run: str, nodes: Collection[str], at: float) -> float:
        return at + 1000.0


def test_a_node_that_does_not_leave_is_ended() -> None:
    plans = [run_plan("r0", 2)]
    cluster = engine([Arrival(BEGIN + 1001.5, 1, 600.0, 600.0)], 2, preempt=False)
    runs = Stuck(plans)
    play(VirtualHead(cluster, runs, plans, options()), cluster, runs, BEGIN + 1100.0)
    (theirs,) = [job for job in cluster.slurm.jobs.values() if job.user == "alice"]
    assert theirs.start_at is not None
    waited_s = theirs.start_at - (BEGIN + 1001.5)
    assert LEAVE_S < waited_s < WATCHFUL_S + ANSWER_S + LEAVE_S + 0.1
    assert runs.unannounced == 1


class Picky(FakeEngine):
    """Refuses everything at first."""

    def submit(self, request: Wanted) -> str:
        if self.now < BEGIN + 300.0:
            self.submitted.append((round(self.now, 3), request.partition, 0, None, ""))
            raise SubmitRejected(request.token, "User's group not permitted to use this partition")
        return super().submit(request)


def test_what_slurm_refuses_is_left_alone_for_longer_and_longer() -> None:
    plans = [run_plan("r0", 4)]
    given = engine([], 4, preempt=True)
    cluster, runs = Picky(given.slurm), ToyRuns(plans)
    head = VirtualHead(cluster, runs, plans, options())
    play(head, cluster, runs, BEGIN + 700.0)
    refused = [round(at - BEGIN, 3) for at, _, minutes, *_ in cluster.submitted if not minutes]
    assert refused == [0.3, 90.3, 240.3], "with the first poll a minute later, and two minutes after that"
    assert runs.members("r0") == 4 and len(head.book.allocations) == 4


# -- the queue ------------------------------------------------------------------------------------------------------


def sent(queue: RequestsQueue, number: int, unwanted: Collection[str] = ()) -> list[float]:
    """When so many that come at once are submitted."""
    found: list[float] = []
    for index in range(number):
        queue.put(f"t{index}", BEGIN)
    while (at := queue.next_at()) < inf:
        queue.play(at, lambda token, _: token not in unwanted, lambda _, done: found.append(round(done - BEGIN, 3)))
    return found


def test_submissions_go_one_after_the_other_as_long_as_there_are_tokens() -> None:
    times = sent(RequestsQueue(60.0, 0.1, BEGIN), 26)
    assert times[:22] == [round(0.1 * n, 3) for n in range(1, 23)], "the bucket holds twenty, and one comes each second"
    assert times[22:] == [pytest.approx(3.1 + n) for n in range(4)]
    assert sent(RequestsQueue(inf, 0.0, BEGIN), 3) == [0.0] * 3


def test_what_nobody_wants_any_more_takes_no_token() -> None:
    unwanted = [f"t{index}" for index in range(40)]
    assert sent(RequestsQueue(60.0, 0.1, BEGIN), 42, unwanted) == [0.1, 0.2]
