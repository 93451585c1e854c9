"""How much may be asked for now: what the owner of the head allows, in the terms of what Slurm and time allow. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

from msgspec.structs import replace

from fallow.core.accounting.prices import WakePrice
from fallow.core.allocations import WAITING, Allocation
from fallow.core.neighbour.site import LOOKED_AT, site_rules
from fallow.core.parameters import numbers
from fallow.core.planning.experience import Experience
from fallow.core.planning.rules import HarvestRules
from fallow.model import AllocationKind, ClusterConfig

AHEAD = 2
"""So many requests at least wait for nodes which others still have, and as many as nodes came at once of late: what a
large job leaves is lost until the next poll but for these. No more than half of those that may wait at all: what is
idle comes first. And no more than half of all jobs that backfill looks at: they come last, but take their time."""

BACKFILL_S = 30.0
"""From one cycle of backfill to the next, unless Slurm has said: its own default."""

RESOLUTION_S = 60.0
"""Of backfill's plan, likewise."""

FEW = 4
"""As many requests may wait at once however often is polled, and no more of normal priority for one run."""

LIMITS_UNKNOWN = 8
"""As many requests wait at most where jobs are accounted for and Slurm has not told the limits: sites seldom let a user
submit fewer jobs than twice as many (MaxSubmitJobs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the configuration says about it; names and defaults as there."""

    partitions: tuple[str, ...] = ()
    allow_without_preemption: bool = False
    max_pending: int | None = None
    max_nodes: int | None = None
    partition_nodes: Mapping[str, int] = field(default_factory=dict)
    max_minutes: int = 120
    min_minutes: int = 2
    poll_interval_s: float = 30.0
    submits_per_min: float = 120.0
    release_margin_s: float = 20.0
    wake: WakePrice | None = None
    "which sleeping nodes may be woken; None: none"


def rules(
    limits: Limits,
    site: ClusterConfig | None,
    refused: Mapping[str, str],
    experience: Experience,
    now: float,
    interval_s: float,
    groups: frozenset[str] | None = None,
    limits_known: bool = True,
) -> HarvestRules:
    """What may be asked for now.

    Args:
        limits: of the configuration.
        site: None: Slurm has not told its configuration yet.
        refused: partitions in which nothing may be, and why.
        experience: says how long starts take.
        now: Unix time.
        interval_s: from one poll to the next, as things are.
        groups: of the owner; None: not known.
        limits_known: Slurm has told the limits of the owner's accounts and QOS.
    """
    poll_s, margin_s = limits.poll_interval_s, limits.release_margin_s
    most = _most(limits, site)
    at_once = _at_once(limits, site, interval_s, most)
    waiting = 1 << 30 if site is None else pending_allowed(site, in_all=True)
    if not limits_known and limits.max_pending is None and site is not None and site.accounting:
        waiting = min(waiting, LIMITS_UNKNOWN)
    ahead = min(max(AHEAD, round(experience.at_once(now))), _looked_at(site) // 2, most // 2)
    return HarvestRules(
        partitions=limits.partitions,
        allow_without_preemption=limits.allow_without_preemption,
        refused=refused,
        groups=groups,
        max_pending=at_once,
        max_waiting=waiting if limits.max_pending is None else min(waiting, limits.max_pending),
        max_nodes=limits.max_nodes,
        partition_nodes=limits.partition_nodes,
        max_minutes=limits.max_minutes,
        # A job that trains for less than it takes to begin is a burden to the site.
        min_minutes=max(limits.min_minutes, ceil(2.0 * experience.start_s(now) / 60.0)),
        start_patience_s=3 * poll_s + 2 * _backfill_s(site),
        margin_s=margin_s,
        slack_s=_resolution_s(site) + _backfill_s(site),
        # Two polls may pass before a wish is a job, and then it has to start.
        lead_s=margin_s + 2 * poll_s + experience.wait_s(now) + experience.start_s(now),
        whole_nodes=site_rules(site).whole_nodes,
        ahead=ahead,
        wake=limits.wake,
    )


def held_or_asked(allocations: Iterable[Allocation]) -> Counter[str]:
    """Nodes by partition that the head has, or has asked for; one that a successor waits for is the same one."""
    mine = (a for a in allocations if a.kind is AllocationKind.HARVEST and a.live)
    return Counter(a.partition for a in mine if not (a.pinned and a.state in WAITING))


def beside(rules: HarvestRules, nodes: Counter[str]) -> HarvestRules:
    """What is left under the caps beside so many nodes of normal priority, by partition."""
    most = None if rules.max_nodes is None else max(0, rules.max_nodes - nodes.total())
    each = {name: max(0, number - nodes[name]) for name, number in rules.partition_nodes.items()}
    return replace(rules, max_nodes=most, partition_nodes=each)


def _at_once(limits: Limits, site: ClusterConfig | None, interval_s: float, most: int) -> int:
    """Requests for idle nodes that may wait at once: however many fall idle, they are asked for as fast as may be.

    One waits until Slurm has looked, and then until a poll shows that it started; what counted polls alone let a sixth
    of the submissions through where polls come every 5 s.
    """
    if limits.max_pending is not None:
        return most
    waits_s = interval_s + _backfill_s(site)
    return min(most, max(FEW, round(limits.submits_per_min * waits_s / 60.0)))


def _most(limits: Limits, site: ClusterConfig | None) -> int:
    """Requests that may wait in a partition at once, whatever for."""
    configured = limits.max_pending or 1 << 30
    return configured if site is None else min(configured, pending_allowed(site))


def pending_allowed(site: ClusterConfig, *, in_all: bool = False) -> int:
    """Requests that may wait in a partition, or `in_all` of them: half of the jobs that backfill looks at for one user,
    since the user's own ones need the others."""
    pattern = r"bf_max_job_(?:user|assoc)=(\d+)" if in_all else r"bf_max_job_(?:user|assoc|user_part)=(\d+)"
    return max(1, _least(pattern, site.scheduler_parameters, 2 << 30) // 2)


def _looked_at(site: ClusterConfig | None) -> int:
    """Jobs of all users together that backfill looks at in a cycle, in a partition or in all."""
    if site is None:
        return LOOKED_AT
    return _least(r"bf_max_job_(?:test|part)=(\d+)", site.scheduler_parameters, LOOKED_AT)


def _backfill_s(site: ClusterConfig | None) -> float:
    return BACKFILL_S if site is None else site.backfill_interval_s


def _resolution_s(site: ClusterConfig | None) -> float:
    """Of the times in backfill's plan (`bf_resolution`, https://slurm.schedmd.com/slurm.conf.html)."""
    said = () if site is None else numbers(r"(?:^|,)bf_resolution=(\d+)", site.scheduler_parameters)
    return float(said[0]) if said else RESOLUTION_S


def _least(pattern: str, parameters: str, otherwise: int) -> int:
    """The lowest of them that is not 0, which means no limit."""
    return min(filter(None, numbers(pattern, parameters)), default=otherwise)


def horizon_s(poll_interval_s: float) -> float:
    """A submission that no poll has shown for so long after its sbatch ended is lost."""
    # MessageTimeout (10 s) + SAVE_MAX_WAIT (5 s) + margin, and never before two polls.
    return max(30.0, 2.5 * poll_interval_s)
