"""What the planner would do for a run that does not exist yet."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from fallow.core.accounting.backoff import Asker
from fallow.core.allocations import Allocation
from fallow.core.kinds import within
from fallow.core.neighbour.needs import assess
from fallow.core.planning.known import Known
from fallow.core.planning.plan import plan
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.core.planning.situation import Situation
from fallow.head.slurm.demands import kind_of
from fallow.model import ClusterState, Prospect, RunSpec, WouldAsk

UNBOUNDED = 1_000_000


def estimate(
    cluster: ClusterState,
    spec: RunSpec,
    rules: HarvestRules,
    live: Sequence[Allocation],
    known: Known,
    ordered: Asker | None = None,
) -> Prospect:
    """Plan for this run as if its base job had begun; what other runs want besides is left out.

    Args:
        cluster: one poll.
        spec: what would be submitted.
        rules: what is allowed.
        live: allocations of all runs.
        known: what was learned.
        ordered: account and QOS of harvest jobs, where the configuration says so.
    """
    cluster = within(cluster, [spec.harvest_given.get("reservation", "")])
    budget_s = None if spec.budget_node_hours is None else spec.budget_node_hours * 3600.0
    demand = Demand(
        run="",
        nodes=spec.max_nodes - spec.min_nodes,
        partitions=tuple(spec.harvest_partitions),
        min_minutes=spec.min_harvest_minutes,
        budget_node_s=budget_s,
        kind=kind_of(spec, []),
        asker=Asker.of(spec, ordered),
    )
    situation = Situation(cluster, [demand], live, replace(rules, ahead=0), known, assess(cluster, live))
    unbounded = replace(situation.rules, max_pending=UNBOUNDED, max_waiting=UNBOUNDED)
    asks, all_asks = (plan(some).asks for some in (situation, dataclasses.replace(situation, rules=unbounded)))
    return Prospect(
        polled_at=cluster.at,
        idle_nodes=len({hole.node for hole in situation.holes if hole.part is None}),
        asks=[
            WouldAsk(partition=partition, minutes=minutes, nodes=nodes)
            for (partition, minutes), nodes in sorted(Counter((ask.partition, ask.minutes) for ask in asks).items())
        ],
        nodes=spec.min_nodes + len(all_asks),
        notes=_notes(spec, rules, list(situation.partitions), cluster),
    )


def _notes(spec: RunSpec, rules: HarvestRules, allowed: Sequence[str], cluster: ClusterState) -> list[str]:
    notes: list[str] = []
    if spec.max_nodes == spec.min_nodes:
        return notes
    unknown = sorted(set(spec.harvest_partitions) - {p.partition for p in cluster.partitions})
    if unknown:
        notes.append(f"there is no partition {', '.join(unknown)}")
    named = set(spec.harvest_partitions or rules.partitions)
    if not allowed or (named and not named & set(allowed)):
        where = f"partition {', '.join(sorted(named))}" if named else "any partition"
        notes.append(
            f"nothing may be harvested in {where}: it is down, not open to your groups, or nobody would preempt "
            "harvest jobs there and [harvest] allow_without_preemption is off"
        )
    return notes
