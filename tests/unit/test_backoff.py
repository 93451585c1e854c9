"""What is left alone, in whose name, and for how long."""

from __future__ import annotations

from fallow.core.backoff import Asker, Backoff
from fallow.core.experience import Experience
from fallow.core.planner import plan
from fallow.core.requests import Ask, Demand, HarvestRules, Known
from fallow.model import ClusterState, NodeInfo, PartitionInfo

NOW = 1_000_000.0
BIO, CHEM = Asker("bio"), Asker("chem")


def test_a_limit_of_one_account_shortens_nobody_elses_requests() -> None:
    backoff = Backoff()
    for reason in ("(QOSMaxWallDurationPerJobLimit)", "AssocMaxWallDurationPerJobLimit"):
        assert backoff.strike(reason, BIO, "p", 120, NOW)
    assert (backoff.longest(BIO, "p", NOW), backoff.longest(CHEM, "p", NOW)) == (60, None)
    state = ClusterState(
        at=NOW,
        nodes=[NodeInfo(node=name, state="IDLE", partitions=["p"]) for name in ("n1", "n2")],
        jobs=[],
        partitions=[PartitionInfo(partition="p", nodes=["n1", "n2"], preempt_mode="REQUEUE", max_time_s=7200.0)],
    )
    known = Known(Experience(kept_short=2), backoff=backoff)
    wishes = plan(state, [Demand("b", 1, asker=BIO), Demand("c", 1, asker=CHEM)], [], HarvestRules(), known)
    asked = {wish.run: wish.minutes for wish in wishes if isinstance(wish, Ask)}
    assert asked["b"] <= 60 < asked["c"]
    assert backoff.strike("PartitionTimeLimit", BIO, "p", 100, NOW)
    assert (backoff.longest(BIO, "p", NOW), backoff.longest(CHEM, "p", NOW)) == (50, 50)
    backoff.forget(BIO)
    assert backoff.longest(BIO, "p", NOW) == 50, "the partition's own limit stays"
