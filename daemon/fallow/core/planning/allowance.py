"""How much may be asked for now: what the owner of the head allows, in the terms of what Slurm and time allow. Pure."""

from __future__ import annotations

from math import ceil

from msgspec.structs import replace

from fallow.core.neighbour.site import LOOKED_AT, UNKNOWN, site_rules
from fallow.core.parameters import numbers
from fallow.core.planning.experience import Experience
from fallow.core.planning.rules import HarvestRules
from fallow.model import ClusterConfig

AHEAD = 2
"""So many requests at least wait for nodes which others still have, and as many as nodes came at once of late: what a
large job leaves is lost until the next poll but for these. No more than half of those that may wait at all: what is
idle comes first. And no more than half of all jobs that backfill looks at: they come last, but take their time."""

RESOLUTION_S = 60.0
"""Of the times in backfill's plan, unless bf_resolution says otherwise (slurm.conf(5))."""

FEW = 4
"""As many requests may wait at once however often is polled, and no more of normal priority for one run."""

LIMITS_UNKNOWN = 8
"""As many requests wait at most where jobs are accounted for and Slurm has not told the limits: sites seldom let a user
submit fewer jobs than twice as many (MaxSubmitJobs)."""


def rules(
    configured: HarvestRules,
    site: ClusterConfig | None,
    experience: Experience,
    now: float,
    interval_s: float,
    *,
    max_pending: int | None = None,
    poll_interval_s: float = 30.0,
    submits_per_min: float = 120.0,
    limits_known: bool = True,
) -> HarvestRules:
    """What may be asked for now.

    Args:
        configured: what the configuration says, and what others' jobs forbid; all else is worked out here.
        site: None: Slurm has not told its configuration yet.
        experience: says how long starts take.
        now: Unix time.
        interval_s: from one poll to the next, as things are.
        max_pending, poll_interval_s, submits_per_min: as configured.
        limits_known: Slurm has told the limits of the owner's accounts and QOS.
    """
    site, usual = site or UNKNOWN, 1 << 30 if max_pending is None else max_pending
    most = at_once = min(usual, pending_allowed(site))
    waiting = min(usual, pending_allowed(site, in_all=True))
    backfill_s, parameters = site.backfill_interval_s, site.scheduler_parameters
    if max_pending is None:
        waiting = min(waiting, LIMITS_UNKNOWN) if site.accounting and not limits_known else waiting
        # However many fall idle, they are asked for as fast as may be. One waits until Slurm has looked, and then until
        # a poll shows that it started; what counted polls alone let a sixth through where polls come every 5 s.
        at_once = min(most, max(FEW, round(submits_per_min * (interval_s + backfill_s) / 60.0)))
    # Jobs of all users together that backfill looks at in a cycle, in a partition or in all.
    looked_at = _least(r"bf_max_job_(?:test|part)=(\d+)", parameters, LOOKED_AT)
    resolution_s = next(iter(numbers(r"(?:^|,)bf_resolution=(\d+)", parameters)), RESOLUTION_S)
    start_s = experience.start_s(now)
    return replace(
        configured,
        max_pending=at_once,
        max_waiting=waiting,
        # A job that trains for less than it takes to begin is a burden to the site. Where nodes take longer to begin
        # than any job may last, the longest are asked for: were there none, nobody would see that it is over.
        min_minutes=max(configured.min_minutes, min(configured.max_minutes, ceil(2.0 * start_s / 60.0))),
        start_patience_s=3 * poll_interval_s + 2 * backfill_s,
        slack_s=resolution_s + backfill_s,
        # Two polls may pass before a wish is a job, and then it has to start.
        lead_s=configured.margin_s + 2 * poll_interval_s + experience.wait_s(now) + start_s,
        whole_nodes=site_rules(site).whole_nodes,
        ahead=min(max(AHEAD, round(experience.at_once(now))), looked_at // 2, most // 2),
    )


def pending_allowed(site: ClusterConfig, *, in_all: bool = False) -> int:
    """Requests that may wait in a partition, or `in_all` of them: half of the jobs that backfill looks at for one user,
    since the user's own ones need the others."""
    pattern = r"bf_max_job_(?:user|assoc)=(\d+)" if in_all else r"bf_max_job_(?:user|assoc|user_part)=(\d+)"
    return max(1, _least(pattern, site.scheduler_parameters, 2 << 30) // 2)


def _least(pattern: str, parameters: str, otherwise: int) -> int:
    """The lowest of them that is not 0, which means no limit."""
    return min(filter(None, numbers(pattern, parameters)), default=otherwise)


def horizon_s(poll_interval_s: float) -> float:
    """A submission that no poll has shown for so long after its sbatch ended is lost."""
    # MessageTimeout (10 s) + SAVE_MAX_WAIT (5 s) + margin, and never before two polls.
    return max(30.0, 2.5 * poll_interval_s)
