"""From beats to curves to what nodes are worth: the head's parts without its processes."""

import socket
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec
import pytest

from builders import job, node, partition
from fallow.config import Config
from fallow.config import Harvest as HarvestSection
from fallow.core.accounting.backoff import Asker
from fallow.core.accounting.fairshare import HALF_LIFE_S
from fallow.core.accounting.spans import Span
from fallow.core.allocations import Agent, Allocation
from fallow.core.planning.gain import Gain, Measurement
from fallow.core.submission.script import deadline_at, parse_script
from fallow.core.tokens import names_harvest
from fallow.head.api.views import run_view
from fallow.head.loop.monitoring import Metrics
from fallow.head.loop.turn import Turn
from fallow.head.peers import throughput
from fallow.head.slurm import accounts, harvest
from fallow.head.slurm.gains import gains
from fallow.head.slurm.harvest import Harvest
from fallow.head.state.registry import Run
from fallow.head.state.stored import RunRecord
from fallow.model import (
    AllocationKind,
    AllocationState,
    ClusterConfig,
    ClusterState,
    Doing,
    EventRecord,
    FallowError,
    JobRequest,
    RunStatus,
)

from runs import CONTRACT, NOW, Nodes, arrived, new_book, new_run, settle  # isort: skip

SITE = ClusterConfig(cluster="c", slurm_version="25.11.1", preempt_type="preempt/partition_prio")
SCRIPT = "#!/bin/sh\nfallow run -- python train.py\n"


class Desk:
    """A book with runs that train by themselves."""

    def __init__(self, folder: Path) -> None:
        self.book = new_book(folder)
        self.at = 0.0
        self.nodes: dict[str, Nodes] = {}
        "run -> its nodes"

    def turn(self) -> Turn:
        return Turn(self.book, self.at, NOW + self.at)

    def run(self, name: str, members: int = 0, script: str = SCRIPT, shards: int = 8, **spec: object) -> Run:
        run = new_run(self.book, at=self.at, now=NOW + self.at, name=name, script=script, **spec)
        self.nodes[run.id] = Nodes(run, msgspec.structs.replace(CONTRACT, shards=shards))
        if members:
            base = self.book.new_allocation(run, AllocationKind.BASE, NOW)
            self.place(run, base, [f"n{number}" for number in range(members)])
        return run

    def place(self, run: Run, allocation: Allocation, hosts: Sequence[str], step: int = 0, entry: str = "") -> None:
        """Let the run train on these nodes of an allocation, besides those that it has; `entry` as in `Nodes.come`."""
        turn, nodes = self.turn(), self.nodes[run.id]
        nodes.ready(turn, *[nodes.come(turn, allocation, host, entry=entry) for host in hosts])
        nodes.settle(turn, step)

    def train(self, run: Run, seconds: float, step_s: float, begin: int = 0) -> tuple[int, bool]:
        """Reports twice a second; returns finished steps and whether the run was to be written down."""
        dirty = False
        members, contract = run.roster.members, run.root.contract
        assert contract is not None
        pace_s = step_s * len(members) / contract.shards
        for beat in range(int(2 * seconds)):
            self.at += 0.5
            turn = self.turn()
            step = begin + int((beat + 1) * 0.5 / step_s)
            self.nodes[run.id].step(turn, step, pace_s=pace_s)
            dirty = dirty or run.id in turn.dirty
            turn = self.turn()
            for member in members:
                throughput.observe(turn, run, member)
            dirty = dirty or run.id in turn.dirty
        return step, dirty


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_steady_training_is_measured_and_written_down_and_what_happens_around_a_change_is_not(desk: Desk) -> None:
    run = desk.run("a", members=2)
    step, dirty = desk.train(run, 80.0, 0.4)
    assert dirty
    seen = run.record.curve.measurements
    assert list(seen) == [2]
    assert seen[2].step_s == pytest.approx(0.4, rel=0.05)
    assert seen[2].weight_s > 45
    assert run.record.curve.shard_s == pytest.approx(0.1)  # eight of them
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(run.record), type=RunRecord)
    assert again.curve == run.record.curve
    desk.place(run, next(iter(run.allocations.values())), ["n2", "n3"], step)
    desk.at += 100.0  # a long pause
    desk.train(run, 40.0, 0.25, begin=step)
    assert list(seen) == [2, 4]
    assert (seen[2], seen[4].step_s) == (again.curve.measurements[2], pytest.approx(0.25, rel=0.05))


def test_nodes_that_share_a_machine_teach_nothing(desk: Desk) -> None:
    """A testbed's nodes are all one: more of them are no faster, which says nothing of a real cluster."""
    run = desk.run("a")
    base = desk.book.new_allocation(run, AllocationKind.BASE, NOW)
    desk.place(run, base, ["n0", "n1"], entry="10.0.0.1")
    desk.train(run, 60.0, 0.4)
    assert run.record.curve.measurements == {}


def weight_of(gain: Gain) -> float:
    """Of the run, as what its first node is worth shows it."""
    return gain.worth.values[1]


def test_projects_share_and_weights_count_within_them(desk: Desk) -> None:
    one = desk.run("one", members=1, harvest_options=["--account=physics"])
    two = desk.run("two", members=1, harvest_options=["--account=biology"], weight=3.0)
    three = desk.run("three", members=1, harvest_options=["--account=biology"])
    three.asker = Asker(account="idle")  # harvesting for one account of the site's leaves projects what they are
    weight = {run: weight_of(gain) for run, gain in gains(desk.book.runs.values(), NOW, 30.0).items()}
    assert weight[one.id] == pytest.approx(weight[two.id] + weight[three.id])
    assert weight[two.id] == pytest.approx(3 * weight[three.id])
    held = desk.book.new_allocation(two, AllocationKind.HARVEST, NOW)
    held.state, held.start_at = AllocationState.RUNNING, NOW - 50 * 3600.0
    later = {run: weight_of(gain) for run, gain in gains(desk.book.runs.values(), NOW, 30.0).items()}
    assert later[two.id] / later[one.id] < 0.7 * weight[two.id] / weight[one.id], "it has had more than its due"


def test_what_a_project_had_counts_for_days_and_after_its_runs_have_ended(desk: Desk) -> None:
    greedy = desk.run("greedy", members=1, harvest_options=["--account=greedy"])
    desk.run("modest", members=1, harvest_options=["--account=modest"])
    for number in range(50):
        held = desk.book.new_allocation(greedy, AllocationKind.HARVEST, NOW, partition="p")
        held.state, held.start_at, held.end_at, held.is_settled = AllocationState.ENDED, NOW, NOW + 3600.0, True
        held.spans = {"1": Span(nodes={f"n{number}": 0}, start_at=NOW, end_at=NOW + 3600.0, partition="p")}

    def ratio(at: float) -> float:
        weight = {run.spec.name: weight_of(gain) for run in desk.book.runs.values() for gain in found(at, run)}
        return weight["greedy"] / weight["modest"]

    def found(at: float, run: Run) -> list[Gain]:
        known = gains(desk.book.runs.values(), at, 30.0)
        return [known[run.id]] if run.id in known else []

    before = ratio(NOW + 3600.0)
    assert before < 0.5
    accounts.settle(desk.turn(), NOW + 3600.0)
    assert ratio(NOW + 3600.0) == pytest.approx(before), "what is settled counts no less, and not twice"
    accounts.settle(desk.turn(), NOW + 7300.0)
    assert len(greedy.allocations) == 1, "its jobs are forgotten one by one"
    assert ratio(NOW + 7300.0) == pytest.approx(before, rel=0.02)
    greedy.root.status = RunStatus.FINISHED
    again = desk.run("greedy", members=1, harvest_options=["--account=greedy"])
    assert ratio(NOW + 7300.0) == pytest.approx(before, rel=0.02), "another run of the project"
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(greedy.record), type=RunRecord)
    assert kept.harvested.faded(NOW + 7300.0 + HALF_LIFE_S) == pytest.approx(
        greedy.record.harvested.faded(NOW + 7300.0) / 2
    )
    assert again.record.harvested.faded(NOW + 7300.0) == 0.0


def test_a_run_learns_from_runs_of_its_script_that_have_ended(desk: Desk) -> None:
    ended = desk.run("ended", members=2)
    ended.record.curve.measurements[2] = Measurement(step_s=1.0, weight_s=60.0, at=NOW)
    ended.root.status = RunStatus.FINISHED
    ended.allocations.clear()
    desk.book.retire(ended)
    fresh, other = desk.run("fresh"), desk.run("other", script=f"{SCRIPT}# another\n")
    found = gains(desk.book.runs.values(), NOW, 30.0)
    assert found.keys() == {fresh.id, other.id}
    assert found[fresh.id].curve.is_measured and not found[other.id].curve.is_measured


def test_a_run_shows_its_curve_and_how_it_stands_to_its_deadline(desk: Desk) -> None:
    run = desk.run("a", members=2, deadline_at=NOW + 1000.0)
    step, _ = desk.train(run, 100.0, 0.4)  # a quarter of the steps in a tenth of the time
    run.gain = gains(desk.book.runs.values(), NOW + desk.at, 30.0)[run.id]
    view = run_view(run, desk.at, NOW + desk.at)
    assert view.ahead_s == pytest.approx(1000.0 * step / 1000 - 100.0, abs=1.0)
    assert [one.nodes for one in view.speeds] == [1, 2, 3, 4, 8]
    assert [one.nodes for one in view.speeds if one.measured] == [2]
    late = gains(desk.book.runs.values(), NOW + 900.0, 30.0)[run.id]
    assert late.schedule is not None
    assert late.schedule.behind
    assert late.worth.values[8] > 2 * run.gain.worth.values[8], "it is urgent"
    for member in list(run.roster.members):
        desk.nodes[run.id].end(desk.turn(), member, None)
    alone = gains(desk.book.runs.values(), NOW + desk.at, 30.0)[run.id].schedule
    assert alone is not None and not run.roster.present()
    assert (alone.ahead_s, alone.behind) == (view.ahead_s, False), "what is done is done: no nodes are bought for it"


def test_each_pause_is_counted_once(desk: Desk) -> None:
    run, metrics, turn = desk.run("a", members=1), Metrics(None), desk.turn()
    nodes = desk.nodes[run.id]
    nodes.ready(turn, nodes.come(turn, next(iter(run.allocations.values())), "n1"))

    def arrive(node: int, generation: int) -> None:
        told = arrived(generation, 0)
        told["switch"] = msgspec.structs.replace(told["switch"], pause_s=0.25 * node)
        nodes.say(turn, node, doing=Doing.WORKING, stalled_s=0.0, **told)

    settle(run, nodes.said.__getitem__, partial(nodes.say, turn), arrive)
    for record in turn.records:
        metrics.count_event(EventRecord(seq=1, **record._asdict()))
    samples = {one.name.rpartition("_")[2]: one for one in metrics._pause.collect()[0].samples}
    assert (samples["count"].value, samples["sum"].value) == (1, 0.5), "the longest of a generation's members"
    assert samples["sum"].labels == {"kind": "absorb"}


def test_a_port_that_another_head_has_costs_the_metrics_and_not_the_head(desk: Desk) -> None:
    """On a login node one setting of the site is for the heads of all users."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        Metrics(taken.getsockname()[1]).update(desk.book)


class Slurm:
    """The head's harvest of a desk, and a cluster of idle nodes that starts nothing by itself."""

    def __init__(self, desk: Desk, nodes: int, **limits: object) -> None:
        """Args: limits: settings under [harvest]."""
        self.desk = desk
        self.nodes = [f"n{i}" for i in range(nodes)]
        self.harvest = Harvest(Config(harvest=HarvestSection(**limits)))  # type: ignore[arg-type]
        self.jobs = 0
        self.max_time_s: float | None = None
        "of a job of normal priority"

    def poll(self) -> Turn:
        self.desk.at += 30.0
        turn = self.desk.turn()
        nodes = [node(n, partitions=["scavenge", "normal"]) for n in self.nodes]
        idle = partition("scavenge", self.nodes, preempt_mode="REQUEUE")
        normal = partition("normal", self.nodes, default=True, priority_tier=10, max_time_s=self.max_time_s)
        jobs = [
            job(
                a.job_id,
                a.state.name,
                name=a.token,
                user="me",
                partition=a.partition,
                nodes=a.nodes,
                start_at=a.start_at,
                end_at=a.end_at,
                time_limit_s=a.limit_s,
            )
            for run in self.desk.book.runs.values()
            for a in run.live_allocations()
            if a.job_id is not None
        ]
        state = ClusterState(at=turn.now, nodes=nodes, jobs=jobs, partitions=[idle, normal])
        self.harvest.polled(turn, state, SITE)
        for run_id, token in turn.submissions:
            self.jobs += 1
            self.harvest.note_submission(turn, self.desk.book.runs[run_id], token, str(100 + self.jobs))
        return turn

    def request(self, run: Run, allocation: Allocation) -> JobRequest:
        return self.harvest.request(self.desk.book.paths, run, allocation)


def base(desk: Desk, run: Run, job: str = "1") -> Allocation:
    """Its base allocation runs."""
    allocation = next(iter(run.allocations.values()))
    allocation.state, allocation.job_id, allocation.partition = AllocationState.RUNNING, job, "normal"
    allocation.start_at, allocation.end_at, allocation.nodes = NOW, NOW + 7200.0, [f"b{job}"]
    allocation.agents = {f"b{job}": agent for agent in allocation.agents.values()}
    return allocation


def test_a_run_behind_its_deadline_gets_nodes_of_normal_priority_and_returns_them_when_ahead(desk: Desk) -> None:
    slurm = Slurm(desk, 0)
    run = desk.run("a", members=1, deadline_at=NOW + 1000.0, harvest_options=["--qos=high"])
    base(desk, run)
    desk.train(run, 100.0, 4.0)
    turn = slurm.poll()
    asked = [run.allocations[token] for _, token in turn.submissions]
    assert len(asked) == 4, "eight nodes are needed; four requests may wait at once"
    assert all(a.has_normal_priority and a.partition == "normal" and a.minutes == 25 for a in asked), (
        "until after the deadline"
    )
    assert not any(names_harvest(a.token) for a in asked), "other heads give way to them as to any job"
    options = slurm.request(run, asked[0]).options
    assert {"--nice=0", "--qos=high", "--nodes=1", "--partition=normal"} <= set(options)
    assert slurm.poll().submissions == [], "they wait"
    for i, allocation in enumerate(asked):
        allocation.state, allocation.nodes = AllocationState.RUNNING, [f"x{i}"]
        allocation.start_at, allocation.end_at = NOW + desk.at, NOW + 3000.0
        allocation.agents = {f"x{i}": Agent()}
    assert len(slurm.poll().submissions) == 3, "up to the most that it may have"
    desk.nodes[run.id].step(desk.turn(), 990)
    turn = slurm.poll()
    released = [a for a in run.allocations.values() if a.asked_at is not None]
    assert len(released) == 7
    assert all(a.has_normal_priority for a in released)


@pytest.mark.parametrize(
    ("idle", "limits", "asked"),
    [
        (0, {"max_nodes": 3}, ["normal"] * 3),
        (0, {"partition_nodes": {"normal": 2}}, ["normal"] * 2),
        (0, {"partition_nodes": {"scavenge": 2}}, ["normal"] * 4),
        (2, {"max_nodes": 3}, ["scavenge"] * 2 + ["normal"]),
        (2, {"max_nodes": 2}, ["scavenge"] * 2),
    ],
)
def test_nodes_of_normal_priority_count_under_the_caps(
    desk: Desk, idle: int, limits: dict[str, object], asked: list[str]
) -> None:
    slurm = Slurm(desk, idle, **limits)
    run = desk.run("a", members=1, deadline_at=NOW + 1000.0)
    base(desk, run)
    desk.train(run, 100.0, 4.0)
    found = [run.allocations[token] for _, token in slurm.poll().submissions]
    assert [a.partition for a in found] == asked
    assert slurm.poll().submissions == []
    slurm.nodes.append("n9")
    # One of them leaves no room for an idle node either.
    more = len(slurm.poll().submissions)
    assert more == (0 if "max_nodes" in limits else 1)


@pytest.mark.parametrize("step", ["harvest_jobs", "demand", "keep_pace", "give_all_back"])
def test_an_error_in_the_plan_of_one_run_costs_no_other_run_its_turn(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    bad, good = desk.run("bad"), desk.run("good")
    for run in (bad, good):
        run.record.base_wanted, run.record.slots = False, 1
    works = getattr(harvest, step)

    def fails(*given: object, **more: object) -> object:
        assert bad not in given and bad.id not in given
        return works(*given, **more)

    monkeypatch.setattr(harvest, step, fails)
    slurm = Slurm(desk, 4)
    turn = slurm.poll()
    if step == "give_all_back":
        turn = desk.turn()
        slurm.harvest.set_stop_reason(turn, "stopped")
        assert {run for run, *_ in turn.cancels} == {good.id}
    else:
        assert good.id in {run for run, _ in turn.submissions}
    assert turn.failed == {bad.id}


def test_a_run_that_was_shrunk_by_hand_gets_no_more_nodes_of_normal_priority_than_that(desk: Desk) -> None:
    """For as long as the base job was granted, whose end may be nearer: it is preempted, or the budget is used up."""
    slurm = Slurm(desk, 0)
    run = desk.run("a", members=1, deadline_at=NOW + 20_000.0)
    assert run.root.contract is not None
    run.root.contract, held = msgspec.structs.replace(run.root.contract, total_steps=10_000), base(desk, run)
    held.limit_s, held.end_at = 7200.0, NOW + 600.0
    desk.train(run, 100.0, 4.0)
    run.root.limit = 3
    asked = [token for _, token in slurm.poll().submissions]
    assert [run.allocations[token].minutes for token in asked] == [120, 120]
    run.root.limit = 2
    assert len(slurm.poll().cancels) == 1, "that is one too many by now"
    assert [run.allocations[token].asked_at is None for token in asked].count(True) == 1
    assert slurm.poll().submissions == []


@pytest.mark.parametrize(("shown_min", "most_min", "least_refused"), [(60, 60, 0), (None, 150, 1)])
def test_nodes_of_normal_priority_are_asked_for_for_no_longer_than_slurm_takes_them(
    desk: Desk, shown_min: int | None, most_min: int, least_refused: int
) -> None:
    """An administrator may extend a base job beyond what the partition allows. Two were refused in every poll."""
    slurm = Slurm(desk, 0)
    slurm.max_time_s = None if shown_min is None else 60.0 * shown_min
    run = desk.run("a", members=1, deadline_at=NOW + 20_000.0)
    assert run.root.contract is not None
    run.root.contract = msgspec.structs.replace(run.root.contract, total_steps=10_000)
    base(desk, run).limit_s = 36_000.0
    desk.train(run, 100.0, 4.0)
    submitted, asked = slurm.harvest.note_submission, list[int]()

    def answer(turn: Turn, run: Run, token: str, job_id: str) -> None:
        asked.append(run.allocations[token].minutes or 0)
        if asked[-1] > most_min:
            slurm.harvest.note_refusal(
                turn, run, token, "Requested time limit is invalid (missing or exceeds some limit)"
            )
        else:
            submitted(turn, run, token, job_id)

    slurm.harvest.note_submission = answer  # type: ignore[method-assign]
    for _ in range(20):
        slurm.poll()
    refused = [minutes for minutes in asked if minutes > most_min]
    assert least_refused <= len(refused) <= 4 * least_refused and asked[len(refused) :], asked


def test_deadlines_are_days_times_and_weekdays_and_weights_positive_numbers() -> None:
    now = datetime(2026, 11, 25, 12, 0).timestamp()  # a Wednesday
    for text, end in [
        ("2026-11-27", datetime(2026, 11, 28)),
        ("2026-11-27T18:30", datetime(2026, 11, 27, 18, 30)),
        ("Friday", datetime(2026, 11, 28)),
        ("friday-18:00", datetime(2026, 11, 27, 18)),
        ("wednesday-13:00", datetime(2026, 11, 25, 13)),
        ("wednesday-11:00", datetime(2026, 12, 2, 11)),
    ]:
        assert deadline_at(text, now) == end.timestamp(), text
    for wrong in ("soon", "2026-13-01", "2026-11-27T25:00", "", "2026-11-24", "9999-12-31"):
        with pytest.raises(FallowError):
            deadline_at(wrong, now)
    script = "#!/bin/sh\n#FALLOW {}\nfallow run -- true\n"
    settings = {"weight": 2.5, "deadline": "friday-18:00"}
    assert parse_script(script.format("weight=2.5 deadline=friday-18:00"), "s.sh").settings == settings
    for wrong in ("weight=0", "weight=inf", "weight=x", "deadline=never"):
        with pytest.raises(FallowError, match=wrong.partition("=")[0]):
            parse_script(script.format(wrong), "s.sh")
