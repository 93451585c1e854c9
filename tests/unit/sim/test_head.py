"""The simulated head: what the real one asks for and cancels, and how it treats those who wait."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from pathlib import Path

import pytest

from fallow.config import Config, Harvest, Slurm
from fallow.core.neighbour.watch import WATCHFUL_S
from fallow.sim.costs import IN_PLACE
from fallow.sim.head import ANSWER_S, VirtualHead
from fallow.sim.meter import Tally
from fallow.sim.play import play
from fallow.sim.requests_queue import RequestsQueue
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import POLL_REQUESTS, Options, RunPlan, SimJob, Site, Wanted
from fallow.sim.work import Work
from fallow.slurm.client import SubmitRejected
from sim_cases import MIN, job, linear, load, site, tiers
from sim_client import play_real

BEGIN = 1_000_000.0
NODES = 16
QUERIES = 75.0
"A minute: hardly enough where polls come every 5 s."


class Noted(SlurmSim):
    """Notes what is asked of it; refuses everything until `refuses_until`."""

    def __init__(self, where: Site, others: Sequence[SimJob] = (), refuses_until: float = 0.0) -> None:
        super().__init__(where, 0, BEGIN, others)
        self.submitted: list[tuple[float, str, int, str]] = []
        self.cancelled: list[tuple[float, str]] = []
        self._refuses_until = refuses_until

    def submit(self, request: Wanted) -> str:
        self.submitted.append((round(self.now - BEGIN, 3), request.partition, request.minutes, request.node))
        if self.now < self._refuses_until:
            raise SubmitRejected(request.token, "User's group not permitted to use this partition")
        return super().submit(request)

    def cancel(self, job_id: str) -> None:
        self.cancelled.append((round(self.now - BEGIN, 3), job_id))
        super().cancel(job_id)


def cluster(nodes: int, others: Sequence[SimJob] = (), *, preempt: bool, refuses_until: float = 0.0) -> Noted:
    where = site(nodes, partitions=tiers(nodes) if preempt else tiers(nodes)[:1], preempt=preempt, bf_max_job_user=20)
    return Noted(where, others, refuses_until)


def played(
    engine: SlurmSim, plans: Sequence[RunPlan], until_s: float, options: Options | None = None
) -> tuple[VirtualHead, Work, Tally]:
    options = options or Options(poll_s=30.0, costs=IN_PLACE)
    meter = Tally(plans, len(engine.site.nodes), BEGIN)
    runs = Work(plans, IN_PLACE, 0, meter, BEGIN)
    head = VirtualHead(engine, runs, plans, options)
    play(engine, head, runs, meter, BEGIN + until_s)
    return head, runs, meter


def runs(*most: int) -> list[RunPlan]:
    rates = [tuple((n, n**0.9) for n in range(1, nodes + 1)) for nodes in most]
    return [
        RunPlan(run=f"r{n}", min_nodes=1, max_nodes=nodes, rate=rates[n], shards=nodes, weight=1.0 + n // 2)
        for n, nodes in enumerate(most)
    ]


@pytest.mark.parametrize("preempt", [True, False], ids=["preempt", "plain"])
@pytest.mark.parametrize("hours", [1, pytest.param(6, marks=pytest.mark.soak)])
def test_it_asks_for_and_cancels_what_the_real_head_does(preempt: bool, hours: int, tmp_path: Path) -> None:
    lasts_s, plans = 3600.0 * hours, runs(8, 8, 6)
    others = load(7, BEGIN, lasts_s, NODES, 100.0, ("normal", "scavenge") if preempt else ("normal",))
    ours, theirs = (cluster(NODES, others, preempt=preempt) for _ in range(2))
    options = Options(poll_s=30.0, costs=IN_PLACE, queries_per_min=QUERIES)
    played(ours, plans, lasts_s, options)
    work = Work(plans, IN_PLACE, 0, Tally(plans, NODES, BEGIN), BEGIN)
    config = Config(harvest=Harvest(allow_without_preemption=not preempt), slurm=Slurm(queries_per_min=QUERIES))
    play_real(theirs, work, plans, options, config, tmp_path, BEGIN + lasts_s)
    assert ours.submitted == theirs.submitted
    assert sorted(ours.cancelled) == sorted(theirs.cancelled), "those of one moment in any order"
    assert len(ours.submitted) > 20 and (ours.cancelled or not preempt)


def test_polls_wait_for_tokens_and_are_counted() -> None:
    engine = cluster(2, preempt=True)
    options = Options(poll_s=30.0, costs=IN_PLACE, queries_per_min=1.0)
    head, _, _ = played(engine, [], 600.0, options)
    assert head.calls == 1 + POLL_REQUESTS, "the tokens of the configuration and one poll take seven minutes"


def test_a_node_that_somebody_waits_for_is_given_back_in_time() -> None:
    engine = cluster(2, [job("theirs", BEGIN + 1001.5, 1, 10 * MIN, partition="normal")], preempt=False)
    head, work, meter = played(engine, linear(most=2), 1100.0)
    assert engine.ran["theirs"][0] - (BEGIN + 1001.5) < WATCHFUL_S + ANSWER_S + 2.0
    assert work.members("r0") == 1 and meter.score().unannounced_per_day == 0
    assert head.watch.delays.report(engine.now).jobs == 1
    delayed = meter.score().others_delayed
    assert delayed.jobs == 1 and 0.0 < delayed.max_s < WATCHFUL_S + ANSWER_S + 1.0


def test_what_slurm_refuses_is_left_alone_for_longer_and_longer() -> None:
    engine = cluster(4, preempt=True, refuses_until=BEGIN + 300.0)
    _, work, _ = played(engine, linear(most=4), 700.0)
    refused = [at for at, *_ in engine.submitted if at < 300.0]
    assert refused == [0.3, 90.3, 240.3], "with the first poll a minute later, and two minutes after that"
    assert work.members("r0") == 4


def sent(queue: RequestsQueue, number: int, unwanted: Collection[str] = ()) -> list[float]:
    """When so many that come at once are submitted."""
    found: list[float] = []
    for index in range(number):
        queue.put(f"t{index}", BEGIN)
    while (at := queue.next_at()) < inf:
        queue.play(at, lambda token, _: token not in unwanted, lambda _, done: found.append(round(done - BEGIN, 3)))
    return found


def test_submissions_go_one_after_the_other_as_long_as_there_are_tokens() -> None:
    times = sent(RequestsQueue(60.0, BEGIN), 26)
    assert times[:22] == [round(0.1 * n, 3) for n in range(1, 23)], "the bucket holds twenty, and one comes each second"
    assert times[22:] == [pytest.approx(3.1 + n) for n in range(4)]


def test_what_nobody_wants_any_more_takes_no_token() -> None:
    unwanted = [f"t{index}" for index in range(40)]
    assert sent(RequestsQueue(60.0, BEGIN), 42, unwanted) == [0.1, 0.2]
