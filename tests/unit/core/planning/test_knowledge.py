"""What is learned: how nodes come, and what is left alone, in whose name, and for how long."""

import pytest

from builders import NOW, allocation, cluster, gpu_node, node, preempting, request
from fallow.config import Config
from fallow.core import records
from fallow.core.accounting.backoff import LONGEST_S, Asker, Backoff, Scope, base_job, harvest_jobs, scope_of
from fallow.core.planning.knowledge import Knowledge, Learner
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.head.slurm.harvest import BACKOFF, Harvest
from fallow.model import AllocationState
from fallow.slurm import parse
from planning import asked


def test_nodes_that_come_at_once_are_counted_and_count_less_with_time() -> None:
    learner = Learner()

    def at_once(at: float, *idle: str, ours: tuple[str, ...] = ()) -> float:
        mine = [(allocation(name, nodes=[name], start_at=at - 10.0), Asker()) for name in ours]
        nodes = [gpu_node(f"n{i}", "IDLE" if f"n{i}" in idle else "ALLOCATED") for i in range(9)]
        learner.take_in(preempting(nodes, at=at), mine, {"p"}, at)
        return learner.knowledge.experience.arrivals_per_poll(at)

    assert at_once(0.0, "n1", "n2") == 0.0, "nobody knows since when"
    assert at_once(30.0, "n1", "n2", "n3", "n4") == 2.0
    assert at_once(60.0, "n1", ours=("n2", "n5", "n6", "n7")) == 3.0, "those that a request waited for, too"
    assert at_once(90.0, "n1", "n8", ours=("n2", "n5", "n6", "n7")) == pytest.approx(3.0, rel=0.01)
    assert at_once(3660.0, "n1", "n8") == 1.5


def test_each_start_is_taken_note_of_once() -> None:
    learner, job = Learner(), allocation("t", start_at=NOW, active_at=NOW + 9.0)
    successor = allocation("s", start_at=NOW, active_at=NOW + 25.0, replaces="x")  # it waits for the node before it
    for at in (NOW - 5.0, NOW + 30.0, NOW + 60.0):
        mine = [(job, Asker()), (successor, Asker())] if at > NOW else []
        learner.take_in(cluster([], at=at), mine, [], at)
    assert len(learner.knowledge.experience.starts) == 1


# -- what Slurm refuses ------------------------------------------------------------------------------------------------

BIO, CHEM = Asker("bio"), Asker("chem")
DENIED = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


def test_a_limit_of_one_account_shortens_nobody_elses_requests() -> None:
    backoff = Backoff()
    for reason in ("(QOSMaxWallDurationPerJobLimit)", "AssocMaxWallDurationPerJobLimit"):
        assert backoff.strike(reason, BIO, "p", 120, NOW)
    assert (backoff.longest(BIO, "p", NOW), backoff.longest(CHEM, "p", NOW)) == (60, None)
    demands = [Demand("b", 1, asker=BIO), Demand("c", 1, asker=CHEM)]
    state = preempting([node("n1"), node("n2")])
    found = asked(state, demands, [], HarvestRules(), Knowledge(backoff=backoff))
    minutes = {ask.run: ask.minutes for ask in found}
    assert minutes["b"] <= 60 < minutes["c"]
    assert backoff.strike("PartitionTimeLimit", BIO, "p", 100, NOW)
    assert (backoff.longest(BIO, "p", NOW), backoff.longest(CHEM, "p", NOW)) == (50, 50)
    for asker in (BIO, CHEM):
        assert backoff.strike("QOSMaxJobsPerUserLimit", asker, "p", 30, NOW)
    backoff.forget(BIO)
    assert backoff.longest(BIO, "p", NOW) == 50, "the partition's own limit stays"
    assert (backoff.until(BIO, "p"), backoff.until(CHEM, "p") > NOW) == (0.0, True)
    assert [ask.run for ask in asked(state, demands, [], HarvestRules(), Knowledge(backoff=backoff))] == ["b"]
    assert backoff.strike("QOSNotAllowed", BIO, "p", 30, NOW)
    assert asked(state, demands, [], HarvestRules(), Knowledge(backoff=backoff)) == []


@pytest.mark.parametrize(
    ("said", "scope"),
    [
        ("QOSMaxJobsPerUserLimit", Scope.OWNER),
        ("MaxJobsPerAccount", Scope.OWNER),
        ("MaxMemPerLimit", Scope.PARTITION),
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{DENIED}", Scope.OWNER),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{DENIED}", Scope.LENGTH),  # a QOS with the flag DenyOnLimit
        ("sbatch: error: Batch job submission failed: Invalid qos specification", Scope.PARTITION),
    ],
)
def test_what_slurm_says_at_limits_of_qos_and_accounts(said: str, scope: Scope) -> None:
    """Reasons of pending jobs, and what sbatch printed where a job was refused."""
    assert not said.startswith("sbatch") or parse.is_refusal(said)
    assert scope_of(parse.complaint(said)) is scope


def test_a_job_of_ours_that_ends_leaves_room_under_the_accounts_limit() -> None:
    """At MaxSubmitJobs a node waited for the whole back-off, though the job before it had ended."""
    state, held, waits = cluster([]), allocation("t1", start_at=NOW - 100.0), request("t2")
    learner = Learner()
    learner.take_in(state, [(held, BIO), (waits, BIO)], [], NOW)
    backoff = learner.knowledge.backoff
    for _ in range(3):
        backoff.strike("AssocMaxSubmitJobLimit", BIO, "p", 30, backoff.owner_until(BIO) or NOW)
    assert backoff.owner_until(BIO) == NOW + 60.0 + 120.0 + 240.0
    # A request that is taken back while it waits leaves none: it is why we know of the limit.
    waits.state = AllocationState.ENDED
    learner.take_in(state, [(held, BIO), (waits, BIO)], [], NOW + 5.0)
    assert backoff.owner_until(BIO) > NOW + 5.0
    held.state = AllocationState.ENDED
    learner.take_in(state, [(held, BIO), (waits, BIO)], [], NOW + 10.0)
    assert backoff.owner_until(BIO) <= NOW + 10.0
    learner.take_in(state, [(held, BIO), (waits, BIO)], [], NOW + 15.0)
    backoff.strike("AssocMaxSubmitJobLimit", BIO, "p", 30, NOW + 15.0)
    assert backoff.owner_until(BIO) == NOW + 15.0 + 480.0, "what was counted before still counts"


def test_waits_double_up_to_an_hour_and_a_start_ends_them() -> None:
    backoff, now, waits = Backoff(), NOW, []
    for _ in range(8):
        assert backoff.strike("QOSMaxJobsPerUserLimit", BIO, "p", 30, now)
        waits.append(backoff.until(BIO, "q") - now)
        now = backoff.until(BIO, "q")
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert backoff.until(Asker(), "p") == 0.0
    backoff.note_started(BIO, "p", now)
    assert backoff.until(BIO, "q") <= now
    assert not backoff.strike("Resources", BIO, "p", 30, now)
    assert backoff.strike("(PartitionTimeLimit)", BIO, "p", 30, now) and backoff.longest(BIO, "p", now) == 15
    assert backoff.longest(BIO, "p", now + 601) is None and backoff.until(BIO, "p") <= now
    backoff.strike("QOSNotAllowed", BIO, "p", 30, now)
    assert backoff.until(BIO, "p") > now and backoff.until(BIO, "q") <= now


def test_what_one_run_puts_off_concerns_no_other_and_the_next_head_goes_on_with_it() -> None:
    before, harvest = Backoff(), Harvest(Config())
    for _ in range(2):
        before.put_off(harvest_jobs("r"), NOW)
    before.put_off(base_job("r"), NOW)
    harvest.recall({BACKOFF: records.encode(before)})
    backoff = harvest.knowledge.backoff
    backoff.forget(Asker())
    jobs = (harvest_jobs("r"), base_job("r"), harvest_jobs("s"))
    assert [backoff.put_off_until(what) - NOW for what in jobs] == [120.0, 60.0, -NOW]
    assert backoff.until(Asker(), "p") == 0.0
    backoff.expire(NOW + 2 * LONGEST_S)
    assert backoff.strikes == {}, "runs that are over leave nothing behind"
