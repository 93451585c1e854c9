"""The head's Slurm side on a made-up cluster: from polls to submissions and back, without processes."""

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from unittest.mock import AsyncMock

import msgspec
import pytest

from builders import cluster, job, waits
from fallow.config import Config
from fallow.config import Harvest as HarvestSection
from fallow.core.accounting.backoff import FIRST_S, Asker, Backoff
from fallow.core.allocations import SUBMIT_S, Allocation
from fallow.core.planning.rules import MIN_AHEAD, HarvestRules
from fallow.head.api.views import node_views
from fallow.head.loop.inbox import Inbox, Item, Work, resolve
from fallow.head.loop.turn import Turn
from fallow.head.slurm.calls import SlurmCalls
from fallow.head.slurm.harvest import EXPERIENCE, Harvest
from fallow.head.slurm.jobs import take_in
from fallow.head.state.registry import ordered
from fallow.model import (
    AllocationKind,
    AllocationState,
    ClusterConfig,
    ClusterState,
    FallowError,
    JobInfo,
    LimitView,
    NodeOwner,
    OwnerView,
    PartitionInfo,
    ShareView,
)
from fallow.slurm.paced import PacedClient
from fallow.threads import FileCalls

from runs import Nodes  # isort: skip
from scripted_slurm import ScriptedSlurm

from slurm_side import POLL_S, Site, config  # isort: skip


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, ScriptedSlurm(4, config=config()))


async def test_a_node_that_was_just_given_back_is_none_of_others_until_slurm_shows_it_idle(site: Site) -> None:
    run = site.run(nodes=1)
    await site.poll(times=2)
    (allocation,) = run.live_allocations()
    (held,) = allocation.nodes

    def owners() -> dict[str, tuple[NodeOwner, str | None, bool]]:
        views = node_views(site.harvest.cluster, [run], site.slurm.now, {})
        return {view.node: (view.owner, view.run, view.ending) for view in views}

    assert owners()[held] == (NodeOwner.OURS, run.id, False)
    site.book.end_allocation(run, allocation, "given back as planned")
    assert owners()[held] == (NodeOwner.OURS, run.id, True), "what Slurm said last"
    assert NodeOwner.OTHERS not in {owner for owner, *_ in owners().values()}
    run.record.paused_by_hand = True
    await site.slurm.cancel([allocation.job_id or ""])
    await site.poll()
    assert owners()[held] == (NodeOwner.IDLE, None, False)


async def test_a_run_that_begins_to_train_has_slurm_polled_soon(tmp_path: Path) -> None:
    site = Site(tmp_path, ScriptedSlurm(2, config=config()))
    run = site.run(nodes=4)
    run.record.base_wanted, run.record.slots = True, None
    await site.poll()
    assert not run.live_allocations(), "nobody knows yet whether its script works"
    base = site.book.new_allocation(run, AllocationKind.BASE, site.slurm.now)
    base.state = AllocationState.RUNNING
    turn, nodes = site.turn(), Nodes(run)
    nodes.ready(turn, nodes.come(turn, base, "n1"))
    assert not turn.poll_soon
    nodes.settle(turn)
    assert turn.poll_soon


@pytest.mark.parametrize("seed", range(2))
async def test_where_jobs_wait_at_a_limit_hardly_more_are_submitted_than_start(tmp_path: Path, seed: int) -> None:
    """With 40 idle nodes, each end of a lease led to 40 submissions, of which 39 were cancelled again."""
    draw, slurm = Random(seed), ScriptedSlurm(48, config=msgspec.structs.replace(config(), scheduler_parameters=""))
    slurm.most = 8
    site = Site(tmp_path, slurm)
    run = site.run(nodes=48)
    await site.poll(times=3)
    assert len(slurm.running()) == 8
    first, ends, tries = len(site.kinds("withdraw")), 0, len(site.kinds("backoff"))
    for _ in range(240):
        for job_id in draw.sample(slurm.running(), draw.choice((0, 0, 1, 1, 2)) if seed else draw.choice((0, 1))):
            slurm.engine.note_exit(job_id, "PREEMPTED")
            ends += 1
        await site.poll()
    cancelled, tries = len(site.kinds("withdraw")) - first, len(site.kinds("backoff")) - tries
    assert ends > 80 and cancelled <= ends + tries, "of those that never started"
    assert run.record.next_allocation <= 48 + 2 * ends + tries
    await site.poll(times=4)
    assert len(slurm.running()) == 8, "what ends is replaced"
    slurm.most = 100
    await site.poll(times=130)
    assert len(slurm.running()) == 48, "the limit is lifted: nodes are asked for again, within one back-off"


async def test_a_refusal_for_a_limit_is_no_reason_to_give_the_run_up(site: Site) -> None:
    site.slurm.refusal = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    run = site.run()
    await site.poll(times=12)
    assert run.record.harvest_paused == "" and 2 <= len(site.kinds("refused")) <= 8


async def test_a_run_pauses_only_when_it_is_refused_wherever_it_may_go(tmp_path: Path) -> None:
    partitions = [
        PartitionInfo(partition=name, nodes=nodes, preempt_mode=mode, priority_tier=tier)
        for name, nodes, mode, tier in (
            ("physics", ["n1", "n2"], "REQUEUE", 1),
            ("open", ["n3", "n4"], "REQUEUE", 1),
            ("normal", ["n1", "n2", "n3", "n4"], "OFF", 10),
        )
    ]
    site = Site(tmp_path, ScriptedSlurm(4, partitions=partitions, config=config()), HarvestSection())
    run = site.run(nodes=4)
    await site.poll()
    for each, name in enumerate(["physics"] * 4 + ["open"]):
        assert run.record.harvest_paused == ""
        request = site.book.new_allocation(run, AllocationKind.HARVEST, site.slurm.now, partition=name)
        site.harvest.note_refusal(site.turn(), run, request.token, "User's group not permitted to use this partition")
        site.slurm.advance(FIRST_S * 2**each)
    assert "refused 3 submissions in a row: User's group" in run.record.harvest_paused


async def test_a_replacement_is_not_one_too_many_while_it_starts(site: Site) -> None:
    run = site.run(nodes=1)
    await site.poll()
    await site.poll(1.0)
    (first,) = run.live_allocations()
    site.slurm.most, site.slurm.reason = 1, "Priority"
    await site.poll((first.end_at or 0.0) - site.slurm.now - 100.0)
    await site.poll(1.0, times=3)
    _, second = run.live_allocations()
    assert (second.replaces, site.kinds("withdraw")) == (first.token, [])
    site.slurm.most = 2
    await site.poll(10.0)
    assert [a.state for a in run.live_allocations()] == [AllocationState.RUNNING] * 2, (
        "the new one is there before the old goes"
    )
    await site.poll(200.0)
    second.active_at = site.slurm.now
    await site.poll(1.0)
    assert site.harvest.knowledge.experience.starts == [], "it waited for the old one; that is no start"
    assert run.live_allocations() == [second] and run.record.next_allocation == 2


def test_a_note_that_cannot_be_read_is_forgotten(site: Site) -> None:
    site.harvest.recall({EXPERIENCE: b"\xc1 nonsense"})
    assert site.harvest.knowledge.experience.starts == []


def shared(tier: int = 1, **more: object) -> PartitionInfo:
    """The only partition of a site; the cluster's PreemptMode shows as its own."""
    nodes = [f"n{i}" for i in range(1, 5)]
    return PartitionInfo(partition="batch", nodes=nodes, preempt_mode="REQUEUE", priority_tier=tier, **more)  # type: ignore[arg-type]


BY_QOS = ClusterConfig(
    cluster="fake",
    slurm_version="22.05.8",
    preempt_type="preempt/qos",
    preempt_mode="REQUEUE",
    qos_preempt_modes={"idle": "REQUEUE"},
    qos_preempted_by={"idle": ["high"]},
)


async def test_where_qos_decides_nothing_is_harvested_in_a_qos_that_nobody_preempts(tmp_path: Path) -> None:
    site = Site(tmp_path, ScriptedSlurm(4, partitions=[shared()], config=BY_QOS), HarvestSection())
    run = site.run("--qos=normal")
    await site.poll(times=2)
    assert run.live_allocations() == []
    assert site.harvest.example(run) == (
        "no partition lets others' jobs preempt ours; see allow_without_preemption under [harvest]"
    )


async def test_harvest_jobs_run_under_the_qos_and_account_that_the_configuration_orders(tmp_path: Path) -> None:
    section = HarvestSection(qos="idle", account="spare")
    site = Site(tmp_path, ScriptedSlurm(4, partitions=[shared(deny_qos=["normal"])], config=BY_QOS), section)
    run = site.run("--qos=normal", "--account=physics")
    await site.poll(times=2)
    assert {a.partition for a in run.live_allocations()} == {"batch"}
    assert site.harvest.neighbours.interval_s(site.book) == POLL_S, "Slurm gives these back"
    one = run.live_allocations()[0]
    options = site.harvest.request(site.book.paths, run, one).options
    assert {word for word in options if word[:5] in ("--qos", "--acc")} == {"--qos=idle", "--account=spare"}
    assert Asker.of(msgspec.structs.replace(run.spec, harvest_account="mine"), ordered(site.config)) == Asker(
        account="mine", qos="idle"
    )
    shouted = msgspec.structs.replace(run.spec, harvest_options=["--account=PHYSICS", "--qos=Normal"])
    assert Asker.of(shouted) == Asker("physics", "normal"), "as Slurm shows them, and partitions name them"
    one.has_normal_priority = True
    options = site.harvest.request(site.book.paths, run, one).options
    assert {word for word in options if word[:5] in ("--qos", "--acc")} == {"--qos=normal", "--account=physics"}


class Loop:
    """What the head's loop does with what it gets from Slurm's side."""

    def __init__(self, site: Site, *, queries_per_min: float, submits_per_min: float) -> None:
        self.site, self.inbox = site, Inbox()
        client = PacedClient(site.slurm, queries_per_min=queries_per_min, submits_per_min=submits_per_min)
        self.calls = SlurmCalls(client, site.book, site.harvest, self.inbox, FileCalls())

    def take(self, item: Item) -> Turn:
        """One turn; what it asks for waits in our own queue."""
        turn = Turn(self.site.book, self.site.slurm.now, self.site.slurm.now)
        assert isinstance(item, Work)
        outcome = item.act(turn)
        if item.answer is not None:
            resolve(item.answer, outcome)
        for run, token in turn.submissions:
            self.calls.submit(run, token)
        return turn

    def poll(self, cluster: ClusterState | FallowError) -> Turn:
        """The turn for a poll."""
        return self.take(Work("poll", partial(self.calls.polled, cluster=cluster)))

    async def next(self) -> Turn:
        """The turn for what comes next."""
        return self.take(await asyncio.wait_for(self.inbox.get(), 60))

    @contextlib.contextmanager
    def submitting(self) -> Iterator[None]:
        """Inside, what waits in the queue is submitted; nothing is polled."""
        polling, submitting = (serve() for serve in self.calls.sources().values())
        polling.close()
        task = asyncio.create_task(submitting)
        try:
            yield
        finally:
            task.cancel()


def asked_for(turn: Turn) -> list[str]:
    return [token for _, token in turn.submissions]


def test_a_base_job_that_is_submitted_again_does_not_wait_as_the_first_one_was_told_to(site: Site) -> None:
    run = site.run()
    run.spec = msgspec.structs.replace(run.spec, script="#!/bin/sh\n#SBATCH --hold --begin=22:00\nfallow run -- x\n")
    base = site.book.new_allocation(run, AllocationKind.BASE, site.slurm.now, was_renewed=True)
    assert site.harvest.request(site.book.paths, run, base).script == "#!/bin/sh\n#\nfallow run -- x\n"


async def test_a_job_that_was_given_the_number_of_ours_is_not_cancelled(site: Site) -> None:
    """A slurmctld that crashes forgets the last submissions, and gives their numbers away again."""
    run, slurm = site.run(nodes=1), site.slurm
    loop = Loop(site, queries_per_min=60_000, submits_per_min=60_000)
    loop.calls.config = await slurm.config()
    cancelled, empty = list[str](), cluster([])
    loop.calls.cancel = cancelled.extend  # type: ignore[method-assign]
    (token,) = asked_for(loop.poll(await slurm.poll()))
    loop.take(Work("submitted", partial(loop.calls.submitted, run_id=run.id, token=token, outcome="41")))
    allocation = run.allocations[token]

    def poll(*jobs: JobInfo) -> None:
        loop.poll(msgspec.structs.replace(empty, jobs=list(jobs)))

    def cancel() -> list[str]:
        turn = site.turn()
        turn.cancel(run, allocation, "drained by hand")
        cancelled.clear()
        loop.calls.carry_out(turn)
        return list(cancelled)

    assert cancel() == ["41"], "no poll has shown the number"
    poll(job("41", "RUNNING", name="the owner's own", user="me"))
    assert cancel() == []
    poll(job("41", "PENDING", name=token, comment=token, user="me"))
    assert cancel() == ["41"]


@pytest.mark.parametrize("how", ["a submission", "a poll"])
async def test_nothing_is_submitted_to_a_slurm_that_does_not_answer_and_the_next_poll_plans_anew(
    site: Site, how: str
) -> None:
    slurm = site.slurm
    run = site.run(nodes=2)
    loop = Loop(site, queries_per_min=60_000, submits_per_min=60_000)
    loop.calls.config = await slurm.config()
    first, second = asked_for(loop.poll(await slurm.poll()))
    unknown = run.allocations[first]
    if how == "a poll":
        loop.poll(FallowError("Slurm does not answer"))
        slurm.advance(2 * SUBMIT_S)
        now = Turn(site.book, slurm.now, slurm.now)
        take_in(now, await slurm.poll(), Backoff())
        assert unknown.is_live and unknown.is_queued, "what waits in our own queue is not lost"
    slurm.lost_submits = int(how == "a submission")
    with loop.submitting():
        if how == "a submission":
            await loop.next()
            await loop.next()
            assert unknown.sent_by == slurm.now and unknown.is_live
        for _ in range(100):
            await asyncio.sleep(0)
        assert loop.inbox.empty(), "nobody's turn comes"
        assert run.allocations[second].is_queued
        # Meanwhile somebody has drained all nodes but one.
        slurm.engine.drain(["n2", "n3", "n4"])
        slurm.advance(POLL_S)
        asked = asked_for(loop.poll(await slurm.poll()))
        assert not run.allocations[second].is_live
        assert (len(asked), slurm.engine.poll().jobs) == (0 if unknown.is_live else 1, [])
        while any(run.allocations[token].job_id is None for token in asked):
            await loop.next()
        assert [job.name for job in slurm.engine.poll().jobs] == asked


@pytest.mark.parametrize("answers", [True, False])
async def test_no_poll_is_asked_for_before_the_one_before_it_was_taken_in(
    site: Site, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be late already: a poll that waited for its turn, while Slurm takes nodes from us."""
    loop = Loop(site, queries_per_min=60_000, submits_per_min=60_000)
    monkeypatch.setattr(site.harvest.neighbours, "next_poll_s", lambda *_: 0.0)
    if not answers:
        monkeypatch.setattr(site.slurm, "poll", AsyncMock(side_effect=FallowError("Slurm does not answer")))
    polling, submitting = (serve() for serve in loop.calls.sources().values())
    submitting.close()
    task = asyncio.create_task(polling)
    try:
        for number in (1, 2):
            item = await asyncio.wait_for(loop.inbox.get(), 60)
            for _ in range(100):
                await asyncio.sleep(0)
            assert (loop.calls.polls, loop.inbox.empty()) == (number, True)
            loop.take(item)
    finally:
        task.cancel()


async def test_trials_are_for_a_partition_that_the_run_may_use(site: Site) -> None:
    run = site.run()
    assert site.harvest.example(run) == "", "no poll yet"
    await site.poll()
    example = site.harvest.example(run)
    assert isinstance(example, Allocation) and (example.partition, example.minutes) == ("scavenge", 2)
    run.spec.harvest_partitions.append("elsewhere")
    assert site.harvest.example(run) == "the run may use none of the harvested partitions: scavenge"


async def test_a_trial_asks_slurm_once_and_is_remembered(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    run, inbox = site.run(), Inbox()
    await site.poll()
    client = PacedClient(site.slurm, queries_per_min=60, submits_per_min=60)
    calls = SlurmCalls(client, site.book, site.harvest, inbox, FileCalls())
    site.slurm.refusal = "Invalid account or account/partition combination specified"
    assert await calls.test(run) == f"scavenge: {site.slurm.refusal}"
    assert await calls.test(run) == "", "not so soon again"
    tested = inbox.get_nowait()
    assert isinstance(tested, Work)
    turn = site.turn()
    tested.act(turn)
    assert [record.kind for record in turn.records] == ["refused", "backoff"]
    before = run.record.next_allocation
    await site.poll(1.0)
    assert run.record.next_allocation == before


# -- how fast -------------------------------------------------------------------------------------------------------


def rules(
    site: ClusterConfig | None = None,
    every_s: float = 30.0,
    fallen_idle: int = 0,
    at: float = 0.0,
    **limits: object,
) -> HarvestRules:
    """Args: every_s: from one poll to the next; fallen_idle: nodes that came at once at time 0."""
    harvest = Harvest(Config(harvest=HarvestSection(**limits)))  # type: ignore[arg-type]
    harvest.interval_s = every_s
    if fallen_idle:
        harvest.knowledge.experience.note_idle_nodes(fallen_idle, 0.0)
    return harvest.rules(at, site)


def limited(parameters: str) -> ClusterConfig:
    return msgspec.structs.replace(config(), scheduler_parameters=parameters)


def test_as_many_requests_may_wait_as_can_be_submitted_until_one_is_seen_to_start() -> None:
    """Backfill has to look, and then a poll; where polls are frequent, backfill is what takes time."""

    def looks(every_s: float) -> ClusterConfig:
        return msgspec.structs.replace(config(), backfill_interval_s=every_s, scheduler_parameters="")

    assert rules().max_pending == 120, "Slurm's own default, until it has told"
    assert rules(looks(30.0), every_s=5.0).max_pending == 70
    assert rules(looks(1.0), every_s=5.0).max_pending == 12
    assert rules(looks(1.0), every_s=1.0).max_pending == 4
    assert rules(max_pending=2).max_pending == 2
    # Half of those that Slurm looks at.
    few = rules(limited("bf_max_job_user=20,bf_max_job_assoc=12,bf_max_job_user_part=4"))
    assert (few.max_pending, few.max_waiting) == (2, 6)
    assert rules(limited("bf_max_job_user_part=4")).max_waiting >= 1 << 30, "of one partition only"


def test_requests_ahead_leave_room_for_what_is_idle() -> None:
    assert [rules(max_pending=most).max_ahead for most in (1, 2, 3, 4, 8)] == [0, 1, 1, 2, 2]
    waits = [rules(fallen_idle=20, at=at).max_ahead for at in (0.0, 3600.0, 7 * 3600.0)]
    assert waits == [20, 10, MIN_AHEAD], "as many as came at once of late"
    assert rules(limited("bf_max_job_test=60,bf_max_job_part=30"), fallen_idle=20).max_ahead == 15, (
        "half of those looked at"
    )


# -- limits of accounts and QOS -------------------------------------------------------------------------------------


async def test_a_job_that_waits_for_a_limit_of_the_account_gets_a_node_of_ours(site: Site) -> None:
    run = site.run("--account=lab")
    await site.poll(times=2)
    assert len(run.live_allocations()) == 2
    site.slurm.others = [waits("9", user="bob", partition="normal", account="lab", reason="AssocGrpNodeLimit")]
    await site.poll()
    (text,) = site.kinds("release")
    assert text.endswith("job 9 of bob waits for AssocGrpNodeLimit")
    await site.poll(1.0, times=3)
    assert len(run.live_allocations()) == 1, "one node is enough, and none is asked for in its place"
    assert site.kinds("limit") == ["no nodes are requested: job 9 of bob waits for AssocGrpNodeLimit"]
    site.slurm.others = []
    await site.poll(times=2)
    assert len(run.live_allocations()) == 2


async def test_a_quarter_of_a_limit_that_slurm_tells_is_never_used(site: Site) -> None:
    share = ShareView(account="lab", partition="", shares=1.0, usage=0.0, factor=1.0)
    limit = LimitView(of="account lab", name="GrpTRES node", limit=5.0, used=0.0)
    site.harvest.owner = OwnerView(user="me", at=0.0, limits=[limit], shares=[share])
    run = site.run("--account=lab", nodes=8)
    await site.poll(times=4)
    assert len(run.live_allocations()) == 3


@pytest.mark.parametrize("accounting", [True, False])
async def test_the_limits_are_asked_for_where_jobs_are_accounted_for(tmp_path: Path, accounting: bool) -> None:
    share = ShareView(account="lab", partition="", shares=1.0, usage=0.0, factor=1.0)
    view = OwnerView(user="me", at=0.0, shares=[share])
    site = Site(tmp_path, ScriptedSlurm(4, config=msgspec.structs.replace(config(), accounting=accounting)))
    asked = AsyncMock(return_value=view)
    site.slurm.owner = asked  # type: ignore[method-assign]
    loop = Loop(site, queries_per_min=1e6, submits_per_min=1e6)
    polls = loop.calls.sources()["polls"]
    task = asyncio.ensure_future(polls())
    polled = await asyncio.wait_for(loop.inbox.get(), 60)
    if accounting:
        await loop.calls.owner()
    loop.take(polled)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert site.harvest.owner == (view if accounting else None)
    assert asked.await_count == accounting
