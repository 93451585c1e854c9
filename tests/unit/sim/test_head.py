"""The head in virtual time: how it paces what it asks of Slurm, and treats those who wait."""

from collections.abc import Mapping, Sequence

from fallow.config import Slurm
from fallow.core.neighbour.watch import WATCHFUL_S
from fallow.sim.head import VirtualHead
from fallow.sim.published import IN_PLACE
from fallow.sim.simulate import play
from fallow.sim.slurm import SlurmSim
from fallow.sim.slurm.engine import SimClient
from fallow.sim.types import Options, RunPlan, SimJob, Site
from fallow.slurm.cli import POLL_REQUESTS
from fallow.slurm.client import SubmitRejected
from sim_cases import MIN, job, linear, site, tiers

BEGIN = 1_000_000.0


class Refusing(SlurmSim):
    """Notes when it is asked for something, and refuses all of it until `refuses_until`."""

    def __init__(self, where: Site, jobs_of_others: Sequence[SimJob], refuses_until: float) -> None:
        super().__init__(where, 0, BEGIN, jobs_of_others)
        self.submit_times: list[float] = []
        self._refuses_until = refuses_until

    def submit(self, token: str, options: Mapping[str, str]) -> str:
        self.submit_times.append(round(self.now - BEGIN, 3))
        if self.now < self._refuses_until:
            raise SubmitRejected(token, "User's group not permitted to use this partition")
        return super().submit(token, options)


def cluster(
    nodes: int, jobs_of_others: Sequence[SimJob] = (), *, preempt: bool, refuses_until: float = 0.0
) -> Refusing:
    where = site(nodes, partitions=tiers(nodes) if preempt else tiers(nodes)[:1], preempt=preempt, bf_max_job_user=20)
    return Refusing(where, jobs_of_others, refuses_until)


def played(engine: SlurmSim, plans: Sequence[RunPlan], until_s: float, **asks: float) -> VirtualHead:
    head = VirtualHead(engine, plans, Options(costs=IN_PLACE, slurm=Slurm(**asks)))  # type: ignore[arg-type]
    play(head, BEGIN + until_s)
    return head


def test_polls_wait_for_tokens_and_are_counted() -> None:
    engine = cluster(2, preempt=True)
    played(engine, [], 600.0, queries_per_min=1.0)
    assert engine.requests == 1 + POLL_REQUESTS, "the tokens of the configuration and one poll take seven minutes"


def test_a_node_that_somebody_waits_for_is_given_back_in_time() -> None:
    engine = cluster(2, [job("theirs", BEGIN + 1001.5, 1, 10 * MIN, partition="normal")], preempt=False)
    head = played(engine, linear(most=2), 1100.0)
    assert engine.run_times["theirs"][0] - (BEGIN + 1001.5) < WATCHFUL_S + SimClient.answer_s + 2.0
    assert head.runs.members("r0") == 1 and head.meter.score().unannounced_per_day == 0
    assert head.harvest.neighbours.delays.report(engine.now).jobs == 1
    delayed = head.meter.score().others_delayed
    assert delayed.jobs == 1 and 0.0 < delayed.max_s < WATCHFUL_S + SimClient.answer_s + 1.0


def test_what_slurm_refuses_is_left_alone_for_longer_and_longer() -> None:
    engine = cluster(4, preempt=True, refuses_until=BEGIN + 200.0)
    head = played(engine, linear(most=4), 700.0)
    assert engine.submit_times[:3] == [0.3, 90.3, 240.3], "at the first poll, a minute later, and two minutes later"
    assert head.runs.members("r0") == 4
