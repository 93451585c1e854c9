"""Why an idle node is not used. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fallow.core.holes import idle_nodes
from fallow.core.planning.asking import Asking
from fallow.core.planning.offers import Eligibility, Offer
from fallow.core.planning.rules import NOT_TAKEN_BACK, Demand, not_harvested, off_limits
from fallow.core.planning.situation import Situation


def unused(situation: Situation, eligibility: Eligibility, offered: Sequence[Offer], asking: Asking) -> dict[str, str]:
    """Idle node -> why it is not used, in words: what it is, a colon, and the particulars.

    Args:
        situation: of the plan.
        eligibility: who can use which nodes.
        offered: idle nodes that could be asked for.
        asking: all that was asked for.
    """
    found, demands = _closed(situation), situation.demands
    # Of several partitions the first one counts in which a run can use the node.
    first = {offer.hole.node: offer for offer in reversed(offered)}
    first |= {offer.hole.node: offer for offer in reversed(offered) if offer.users}
    for hole, users in first.values():
        if hole.node in asking.taken:
            found[hole.node] = "asked for: a request waits for Slurm to start it"
        elif users or not demands:
            found[hole.node] = asking.reasons.get(hole.node) or asking.caps.full(hole.partition) or _not_needed(demands)
        else:
            found[hole.node] = eligibility.why_not(demands[0].run_class, hole.node, hole.partition, hole.part)
    return found


def _not_needed(demands: Sequence[Demand]) -> str:
    """Why nothing is asked for though it could be."""
    if not demands:
        return "not needed: there is no run"
    if all(demand.nodes <= 0 for demand in demands):
        return "not needed: no run wants more nodes"
    return "not needed: no run would gain from it, or may pay for it"


def _closed(situation: Situation) -> dict[str, str]:
    """Those of the idle nodes that are no holes to us."""
    cluster, rules, external = situation.cluster, situation.rules, situation.external
    idle = idle_nodes(cluster)
    if not idle:
        return {}
    starts = {node: job for job, nodes in external.offers for node in nodes}
    kept = {node for p in situation.partitions if p.partition in external.kept_nodes for node in p.nodes}
    closed = {p.partition: why for p in cluster.partitions if (why := not_harvested(p, rules))}
    unpreempted = {p.partition: off_limits(p, rules) for p in situation.partitions}
    found: dict[str, str] = {}
    for node in idle:
        job = starts.get(node.node)
        if node.node not in kept:
            alone = (name for name, nodes in unpreempted.items() if node.node in nodes)
            here = {name: rules.refused.get(name, NOT_TAKEN_BACK) for name in alone}
            found[node.node] = f"not harvested: {_none_of(node.partitions, closed | here)}"
        elif job is not None:
            found[node.node] = f"kept for others: job {job.job_id} of {job.user} can start there"
        else:
            found[node.node] = "kept for others: a job that waits is about to start in the partition"
    return found


def _none_of(partitions: Sequence[str], closed: Mapping[str, str]) -> str:
    """Why none of a node's partitions is harvested; `closed`: partition -> why it is not."""
    reasons: dict[str, list[str]] = {}
    for name in partitions:
        if name in closed:
            reasons.setdefault(closed[name], []).append(name)
    if len(reasons) > 1:
        return "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
    return next(iter(reasons), "it is in no partition that Slurm shows")
