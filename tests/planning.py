"""What tests of the planner share."""

from collections.abc import Sequence
from typing import Any

from fallow.core.allocations import Allocation
from fallow.core.neighbour.needs import ExternalDemand, assess
from fallow.core.planning.knowledge import Knowledge
from fallow.core.planning.plan import Action, Plan, plan
from fallow.core.planning.requests import Ask
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.core.planning.situation import Situation
from fallow.core.planning.withdrawals import Withdraw
from fallow.model import ClusterState


def planned(
    cluster: ClusterState,
    demands: Sequence[Demand],
    allocations: Sequence[Allocation],
    rules: HarvestRules,
    known: Knowledge | None = None,
    external: ExternalDemand | None = None,
) -> Plan:
    """The plan of such a situation; where nothing is said of others' needs, they are worked out."""
    external = assess(cluster, allocations) if external is None else external
    return plan(Situation(cluster, demands, allocations, rules, known or Knowledge(), external))


def actions(*situation: Any, **more: Any) -> list[Action]:
    """Of that plan, in the order in which they are carried out. Args: as for `planned`."""
    return list(planned(*situation, **more).actions)


def asks(wishes: list[Action]) -> list[Ask]:
    return [wish for wish in wishes if isinstance(wish, Ask)]


def asked(*situation: Any, **more: Any) -> list[Ask]:
    """The requests of that plan alone. Args: as for `planned`."""
    return list(planned(*situation, **more).asks)


def withdrawn(wishes: Sequence[Action]) -> list[str]:
    """Tokens of the requests that are taken back."""
    return [wish.token for wish in wishes if isinstance(wish, Withdraw)]
