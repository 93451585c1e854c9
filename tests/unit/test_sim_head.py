"""The simulated head: what the real one asks for and cancels; and nothing follows from the polls that it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf
from pathlib import Path

import pytest
from msgspec.structs import replace

from fallow.config import Config, Harvest, Slurm
from fallow.core.allocations import Allocation
from fallow.core.allowance import Limits
from fallow.core.experience import FRESH_S
from fallow.core.neighbour.needs import Standing
from fallow.core.neighbour.polling import WATCHFUL_S
from fallow.core.neighbour.watch import LEAVE_S
from fallow.core.planner import Rest
from fallow.core.rules import HarvestRules, Known
from fallow.model import (
    AllocationKind,
    AllocationState,
    ClusterConfig,
    ClusterState,
    JobInfo,
    NodeInfo,
    PartitionInfo,
    ReservationInfo,
)
from fallow.sim.head import ANSWER_S, VirtualHead
from fallow.sim.quiet import Shown, renewable, same, wake_at
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
        given = (request.partition, request.minutes, request.least_minutes, request.node)
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
    """Renewals, ends of holes and others' jobs are seen in time, and most polls are left out."""
    until_s, nodes = 4 * 3600.0, 12
    plans = [run_plan("r0", 12)]
    others = arrivals(3, until_s, nodes, 900.0)
    all_of_them, every, _ = played(plans, others, nodes, until_s, elide=False)
    some, head, _ = played(plans, others, nodes, until_s)
    assert some.submitted == all_of_them.submitted
    assert some.cancelled == all_of_them.cancelled
    assert len(some.submitted) > 30
    polls = until_s / 30.0
    assert every.elided == 0 and head.elided > 0.3 * polls
    assert head.calls == every.calls, "Slurm is asked all the same"
    spells = [each.learner.known.experience.spells for each in (head, every)]
    assert spells[0] == spells[1]
    polls_at = [each.cluster.at for each in (head, every) if each.cluster is not None]
    assert polls_at[0] == polls_at[1], "a run that begins to train is planned for by the last poll, left out or not"


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
    assert head.neighbourhood.delays.report(cluster.now).jobs == 1


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


# -- quiet polls ----------------------------------------------------------------------------------------------------


RULES = HarvestRules(lead_s=125.0)


def wake(
    allocations: Sequence[Allocation] = (),
    unused: str = "",
    known: Known | None = None,
    rest: Rest | None = None,
    **more: object,
) -> float:
    cluster = ClusterState(at=BEGIN, nodes=[], jobs=[], partitions=[], **more)  # type: ignore[arg-type]
    reasons = {"n1": unused} if unused else {}
    return wake_at(cluster, allocations, RULES, known or Known(), Standing(), reasons, rest or Rest()) - BEGIN


def ours(state: AllocationState = AllocationState.RUNNING, **more: object) -> Allocation:
    given = {"start_at": BEGIN - 3600.0, "end_at": BEGIN + 300.0, "job_id": "1", "sent_by": BEGIN - 10.0} | more
    return Allocation(token="t", run="r", kind=AllocationKind.HARVEST, public_key="", state=state, **given)  # type: ignore[arg-type]


def test_polls_are_taken_in_again_when_the_planner_would_decide_otherwise() -> None:
    assert wake() == 600.0
    assert wake(unused="not needed: no run wants more nodes") == 600.0
    assert wake(unused="too short: somebody else has it in 50 s") == 60.0
    assert wake([ours()]) == 175.0, "it is asked for again"
    assert wake([ours(start_at=BEGIN - 60.0)]) == 180.0, "never for more than a third of its time"
    assert wake([ours(asked_at=BEGIN)]) == 0.0, "it is on its way out"
    late = ours(end_at=BEGIN + 50.0)
    assert wake([late]) <= 0.0, "it is to be asked for again"
    assert wake([late, replace(ours(), token="s", replaces="t")]) == 175.0, "it has been"
    pending = ours(AllocationState.PENDING, start_at=None, end_at=None)
    assert wake([pending]) == 80.0, "start_patience_s"
    assert wake([pending], unused="asked for: a request waits for Slurm to start it") == 0.0
    soon = ReservationInfo(reservation="m", nodes=["n1"], start_at=BEGIN + 200.0, end_at=BEGIN + 500.0)
    assert wake(reservations=[soon]) == 120.0, "nodes are left a minute and a margin before"


def test_polls_are_taken_in_again_when_what_was_learned_changes_with_time() -> None:
    known = Known()
    known.experience.starts["p"] = [(BEGIN - 1000.0, 10.0), (BEGIN - 400.0, 10.0)]
    known.experience.waits["p"] = [(BEGIN - FRESH_S + 300.0, 10.0)]
    # From one node to the next it takes 1000 s, in half octaves 1024; from 2 ** 10.25 on more.
    changes_s = 2.0**10.25 - 1000.0
    assert changes_s - 1.0 <= wake(known=known) <= changes_s
    del known.experience.starts["p"][1:]
    assert wake(known=known) == 300.0, "a wait is fresh no more"


def test_at_rest_polls_are_looked_at_for_what_slurm_plans_after_our_nodes_alone() -> None:
    at_rest = Rest(steady=True, lasting={"t"})
    assert wake([ours()], rest=at_rest) == 600.0
    pending = ours(AllocationState.PENDING, start_at=None, end_at=None)
    assert wake([pending], rest=at_rest) == 600.0
    assert wake([replace(pending, token="s")], rest=at_rest) == 590.0, "pending_patience_s"

    def again(planned_s: float | None, *more: Allocation, **mine: object) -> bool:
        """Planned for so long after the end of ours."""
        start_at = None if planned_s is None else BEGIN + 50.0 + planned_s
        job = JobInfo(job_id="2", name="s", user="me", state="PENDING", partition="p", planned_nodes=["n1"])
        cluster = ClusterState(at=BEGIN, nodes=[], jobs=[replace(job, start_at=start_at)], partitions=[])
        late = ours(**{"nodes": ["n1"], "end_at": BEGIN + 50.0} | mine)
        return renewable(cluster, [late, *more], replace(RULES, resolution_s=60.0))

    assert again(None) and again(180.0)
    assert not again(179.0) and not again(-30.0), "two minutes are the least, and one is lost to rounding"
    assert not again(None, replace(ours(), token="s", replaces="t")), "it has been asked for"
    assert not again(None, end_at=BEGIN + 200.0)


def test_polls_show_the_same_if_idle_nodes_and_our_jobs_are_the_same_and_nobody_waits() -> None:
    def state(*jobs: JobInfo, **nodes: NodeInfo) -> Shown:
        return Shown(ClusterState(at=0.0, nodes=list(nodes.values()), jobs=list(jobs), partitions=[]))

    idle, used = NodeInfo(node="n1", state="IDLE"), NodeInfo(node="n2", state="MIXED", cpus_used=1)
    mine = JobInfo(job_id="1", name="fallow-r-h0", user="me", state="RUNNING", partition="p")
    theirs = JobInfo(job_id="2", name="x", user="al", state="RUNNING", partition="p")
    waits = replace(theirs, state="PENDING", reason="Resources")
    more = replace(used, cpus_used=2)
    assert same(state(mine, n1=idle, n2=used), state(mine, theirs, n1=idle, n2=more))
    assert not same(state(mine, n1=idle, n2=used), state(mine, n1=idle, n2=replace(used, flags=["DRAIN"])))
    assert not same(state(mine, n1=idle), state(replace(mine, state="COMPLETED"), n1=idle))
    assert not same(state(n1=idle), state(n1=replace(idle, state="ALLOCATED")))
    asks = replace(mine, state="PENDING", reason="Resources")
    assert same(state(asks, n2=used), state(replace(asks, planned_nodes=["n2"], start_at=9.0), n2=used))
    assert not same(state(asks, n2=used), state(replace(asks, reason="QOSMaxJobsPerUserLimit"), n2=used))
    assert same(state(replace(mine, state="COMPLETED"), n1=idle), state(n1=idle)), "Slurm has forgotten it"
    assert not same(state(waits, n2=used), state(waits, n2=more)), "it might start there"
    assert not same(state(n1=idle), state(waits, n1=idle))


def test_at_rest_only_what_is_near_those_who_wait_matters() -> None:
    def seen(*jobs: JobInfo, **nodes: NodeInfo) -> Shown:
        there = [PartitionInfo(partition=name, nodes=[node]) for name, node in (("p", "n1"), ("q", "n2"))]
        return Shown(ClusterState(at=0.0, nodes=list(nodes.values()), jobs=list(jobs), partitions=there))

    waits = JobInfo(job_id="1", name="x", user="al", state="PENDING", partition="p", reason="Resources")
    near = JobInfo(job_id="2", name="y", user="al", state="RUNNING", partition="p", nodes=["n1"])
    far = replace(near, job_id="3", partition="q", nodes=["n2"])
    n1, n2 = (NodeInfo(node=name, state="MIXED", cpus_used=1) for name in ("n1", "n2"))
    one = seen(waits, near, far, n1=n1, n2=n2)
    other = seen(waits, near, n1=n1, n2=replace(n2, cpus_used=2))
    assert same(one, other, steady=True) and not same(one, other)
    assert not same(one, seen(waits, near, far, n1=n1, n2=replace(n2, state="IDLE")), steady=True)
    assert not same(one, seen(waits, near, far, n1=replace(n1, cpus_used=2), n2=n2), steady=True)
    assert not same(one, seen(waits, replace(near, end_at=9.0), far, n1=n1, n2=n2), steady=True)
    assert not same(one, seen(near, far, n1=n1, n2=n2), steady=True)
    array = replace(far, array_job_id="3")
    assert not same(seen(waits, near, array, n1=n1, n2=n2), seen(waits, near, n1=n1, n2=n2), steady=True)
