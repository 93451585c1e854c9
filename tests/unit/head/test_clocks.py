"""Slurm's clock and ours differ: everything that the head compares is on its own, so no deadline moves."""

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fallow.config import Membership
from fallow.core.accounting.backoff import Backoff
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.head.loop.turn import Turn
from fallow.head.slurm.jobs import take_in
from fallow.model import (
    AllocationKind,
    AllocationState,
    ChangeKind,
    ClusterConfig,
    ClusterState,
    GenerationReport,
    JobInfo,
    NodeInfo,
    Parts,
    ReservationInfo,
)
from fallow.slurm.cli import CliClient
from fallow.slurm.paced import PacedClient
from fallow.slurm.process import CommandResult
from fallow.slurm.pyslurm_client import PyslurmClient
from fallow.slurm.state import on_our_clock
from planning import planned
from runs import new_book, new_run
from scripted_slurm import ScriptedSlurm
from talk import Talk

NOW = 1_795_000_000.0
OFFSETS = st.floats(-120, 120) | st.sampled_from([-120.0, -40.0, 0.0, 40.0, 120.0])
LIMIT_S = 600.0


def by_slurm(offset_s: float, now: float, token: str, state: str) -> ClusterState:
    """One job of ours as slurmctld shows it when our clock says `now`; it was submitted and started at NOW."""
    there = NOW + offset_s
    times = {"start_at": there, "end_at": there + LIMIT_S} if state == "RUNNING" else {}
    job = JobInfo(job_id="7", name=token, user="me", state=state, partition="p", nodes=["n1"], submit_at=there, **times)
    nodes = [NodeInfo(node="n1", state="ALLOCATED"), NodeInfo(node="n2", state="IDLE")]
    maintenance = ReservationInfo(reservation="m", nodes=["n2"], start_at=there + 60.0, end_at=there + 120.0)
    raw = ClusterState(at=0.0, nodes=nodes, jobs=[job], partitions=[], reservations=[maintenance])
    return on_our_clock(raw, now, offset_s)


@given(offset_s=OFFSETS)
def test_every_time_of_a_poll_is_ours(offset_s: float) -> None:
    state = by_slurm(offset_s, NOW + 5.0, "t", "RUNNING")
    [job], [maintenance] = state.jobs, state.reservations
    times = (state.at, job.submit_at, job.start_at, job.end_at, maintenance.start_at)
    assert times == pytest.approx((NOW + 5.0, NOW, NOW, NOW + LIMIT_S, NOW + 60.0), abs=1e-3)
    assert maintenance.end_at == pytest.approx(NOW + 120.0, abs=1e-3)
    assert (job.preempt_at, job.eligible_at) == (None, None)
    assert state.clock_offset_s == offset_s


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset_s=OFFSETS)
def test_s5_no_node_is_held_into_the_margin_before_its_end_whatever_slurms_clock_says(
    tmp_path: Path, offset_s: float
) -> None:
    book, membership = new_book(tmp_path), Membership()
    run, talk = new_run(book, now=NOW), Talk(book)
    held = book.new_allocation(run, AllocationKind.HARVEST, NOW, sent_by=NOW)
    talk.pass_s(NOW - talk.now)
    talk.play(run, held, "n1").greet()
    for later_s, state in (
        (LIMIT_S - membership.release_margin_s - 1.0, AllocationState.RUNNING),
        (1.01, AllocationState.RELEASING),
    ):
        talk.pass_s(later_s)
        take_in(Turn(book, talk.at, talk.now), by_slurm(offset_s, talk.now, held.token, "RUNNING"), Backoff())
        talk.tick()
        assert held.state is state


@pytest.mark.parametrize(
    ("kind", "used_s"), [(ChangeKind.RELEASE, 2 / 3 * LIMIT_S), (ChangeKind.EJECT, LIMIT_S - 20.0)]
)
def test_a_short_job_is_used_for_most_of_its_time_however_long_a_pause_was(
    tmp_path: Path, kind: ChangeKind, used_s: float
) -> None:
    book = new_book(tmp_path)
    run, talk = new_run(book, now=NOW), Talk(book)
    run.generations.append(
        GenerationReport(generation=2, kind=kind, members=["n0"], first_step=7, pause_s=1000.0, parts=Parts())
    )
    held = book.new_allocation(run, AllocationKind.HARVEST, NOW, sent_by=NOW)
    talk.pass_s(NOW - talk.now)
    talk.play(run, held, "n1").greet()
    for later_s, state in ((used_s - 1.0, AllocationState.RUNNING), (1.01, AllocationState.RELEASING)):
        talk.pass_s(later_s)
        take_in(Turn(book, talk.at, talk.now), by_slurm(0.0, talk.now, held.token, "RUNNING"), Backoff())
        talk.tick()
        assert held.state is state


def test_s5_a_base_job_is_not_taken_for_requeued_because_a_clock_was_set_or_measured_anew(tmp_path: Path) -> None:
    book = new_book(tmp_path)
    run, talk = new_run(book, now=NOW), Talk(book)
    base = book.new_allocation(run, AllocationKind.BASE, NOW, sent_by=NOW)
    talk.play(run, base, "n1").greet()
    for offset_s in (0.0, 10.0, -10.0, 0.0):
        raw = by_slurm(0.0, talk.now, base.token, "RUNNING")
        seen = on_our_clock(raw, talk.now, offset_s)
        take_in(Turn(book, talk.at, talk.now), seen, Backoff())
        assert (base.state, list(base.agents), base.requeues) == (AllocationState.RUNNING, ["n1"], 0)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset_s=OFFSETS)
def test_s5_no_request_is_withdrawn_early_whatever_slurms_clock_says(tmp_path: Path, offset_s: float) -> None:
    book = new_book(tmp_path)
    run = new_run(book, now=NOW)
    asked = book.new_allocation(run, AllocationKind.HARVEST, NOW, sent_by=NOW, partition="p", minutes=10)
    rules = HarvestRules()
    for waited_s, reasons in (
        (rules.pending_patience_s - 1.0, []),
        (rules.pending_patience_s + 1.0, ["Slurm did not start it within 600 s"]),
    ):
        state = by_slurm(offset_s, NOW + waited_s, asked.token, "PENDING")
        take_in(Turn(book, waited_s, NOW + waited_s), state, Backoff())
        assert asked.state is AllocationState.PENDING
        assert [w.reason for w in planned(state, [Demand(run.id, 1)], [asked], rules).withdrawals] == reasons


async def test_both_clients_measure_the_offset_and_take_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    there = NOW + 120.0
    begin, end = (time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) for at in (there, there + 60.0))

    async def answer(self: CliClient, argv: list[str], stdin: str = "", **_: float) -> CommandResult:
        if "config" in argv:
            return CommandResult(0, f"Configuration data as of {begin}\nClusterName = c\nSLURM_VERSION = 25.11.2\n", "")
        reserved = f"ReservationName=m StartTime={begin} EndTime={end} Nodes=n1\n"
        return CommandResult(0, f"NodeName=n1 State=IDLE CPUTot=8\n{reserved}" if argv[0] == "scontrol" else "", "")

    async def asked(*_: object) -> ClusterState:
        reserved = ReservationInfo(reservation="m", nodes=["n1"], start_at=there, end_at=there + 60.0)
        return ClusterState(at=0.0, nodes=[], jobs=[], partitions=[], reservations=[reserved])

    monkeypatch.setattr(CliClient, "_start", answer)
    monkeypatch.setattr(PyslurmClient, "_ask", asked)
    for module in ("cli", "pyslurm_client"):
        monkeypatch.setattr(f"fallow.slurm.{module}.steady", lambda: NOW)
    for client in (CliClient(), PyslurmClient()):
        await CliClient.config(client)
        state = await client.poll()
        assert (state.clock_offset_s, state.at, state.reservations[0].start_at) == (120.0, NOW, NOW)


@pytest.mark.parametrize(("ahead_s", "measured_s"), [(0.0, 0.0), (120.0, 130.0), (-120.0, -110.0)])
async def test_s5_a_slow_answer_is_no_other_clock(
    monkeypatch: pytest.MonkeyPatch, ahead_s: float, measured_s: float
) -> None:
    """Half of the time that the answer took counted as an offset, for an hour."""
    now = [NOW]

    async def answer(self: CliClient, argv: list[str], stdin: str = "", **_: float) -> CommandResult:
        now[0] += 20.0
        there = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now[0] + ahead_s))
        return CommandResult(0, f"Configuration data as of {there}\nClusterName = c\nSLURM_VERSION = 25.11.2\n", "")

    monkeypatch.setattr(CliClient, "_start", answer)
    monkeypatch.setattr("fallow.slurm.cli.steady", lambda: now[0])
    cli = CliClient()
    await cli.config()
    assert cli.clock_offset_s == measured_s


async def test_s5_the_offset_is_measured_again_when_our_own_clock_steps() -> None:
    asked: list[float] = []
    wall, clock = NOW, 0.0

    class Counting(ScriptedSlurm):
        async def config(self) -> ClusterConfig:
            asked.append(wall)
            return await super().config()

    client = PacedClient(
        Counting(nodes=1), queries_per_min=60, submits_per_min=60, clock=lambda: clock, wall=lambda: wall
    )
    await client.config()
    wall, clock = wall + 30.0, clock + 30.0
    await client.config()
    assert asked == [NOW]
    wall -= 40.0
    await client.config()
    await client.config()
    assert asked == [NOW, NOW - 10.0]


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
async def test_no_step_of_the_system_clock_moves_the_end_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """Nodes were released as if their end had come, until the next poll, and runs had used an hour more."""
    true, book = time.time, new_book(tmp_path)

    async def answer(self: CliClient, argv: list[str], stdin: str = "", **_: float) -> CommandResult:
        there = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(true()))
        heading = f"Configuration data as of {there}\nClusterName = c\nSLURM_VERSION = 25.11.2\n"
        return CommandResult(0, heading if "config" in argv else "NodeName=n1 State=IDLE CPUTot=8\n", "")

    monkeypatch.setattr(CliClient, "_start", answer)
    before_s = Turn.begin(book).now - true()
    monkeypatch.setattr(time, "time", lambda: true() + step_s)
    client = CliClient()
    await client.config()
    for at in (Turn.begin(book).now, (await client.poll()).at - client.clock_offset_s):
        assert at - true() == pytest.approx(before_s, abs=60.0)
