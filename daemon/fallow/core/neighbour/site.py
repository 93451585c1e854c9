"""What the good neighbour takes from the site's slurm.conf. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from fallow.model import ClusterConfig

UNKNOWN = ClusterConfig(cluster="", slurm_version="")
"""Stands for a configuration that Slurm has not told yet: its own defaults, without shared nodes."""

LOOKED_AT = 500
"""Slurm's own default of bf_max_job_test."""

LOOKS_AGAIN_S = 60.0
"""Slurm looks at the whole queue this often at the least, whatever backfill does (sched_interval)."""


@lru_cache(maxsize=64)
def numbers(pattern: str, parameters: str) -> tuple[int, ...]:
    """Those behind some words of SchedulerParameters, in their order; kept, for every plan asks for the same.

    Args:
        pattern: regular expression with one group, the number.
        parameters: as Slurm shows them (https://slurm.schedmd.com/slurm.conf.html#OPT_SchedulerParameters).
    """
    return tuple(int(number) for number in re.findall(pattern, parameters))


@dataclass(frozen=True, slots=True)
class SiteRules:
    """How this Slurm treats jobs that wait. The defaults are Slurm's own, with shared nodes."""

    whole_nodes: bool = False
    "every job gets whole nodes"
    looked_at: int = LOOKED_AT
    "so many waiting jobs are looked at in each partition"
    looks_again_s: float = LOOKS_AGAIN_S
    "from one look of Slurm at a job to the next, at the most"
    preempts_again_s: float = 30.0 + 10.0 + LOOKS_AGAIN_S
    "a job for which Slurm has preempted others has it do so again only after this time, whatever became of the nodes"


def site_rules(config: ClusterConfig) -> SiteRules:
    """Read the site's configuration.

    Only cons_tres and cons_res share nodes between jobs. Backfill sleeps for bf_interval after a cycle, which lasts up
    to bf_max_time (as long as bf_interval, if that is not set: https://slurm.schedmd.com/slurm.conf.html). For
    `preempts_again_s` see `select_nodes` in Slurm's src/slurmctld/node_scheduler.c; tried on 22.05.
    """
    most_jobs = numbers(r"(?:^|,)bf_max_job_test=(\d+)", config.scheduler_parameters)
    max_time_s = numbers(r"(?:^|,)bf_max_time=(\d+)", config.scheduler_parameters)
    cycle_s = config.backfill_interval_s + (max_time_s[0] if max_time_s else config.backfill_interval_s)
    return SiteRules(
        whole_nodes="cons_" not in config.select_type,
        looked_at=max((LOOKED_AT, *most_jobs[:1])),
        looks_again_s=max(LOOKS_AGAIN_S, cycle_s),
        preempts_again_s=config.kill_wait_s + config.message_timeout_s + LOOKS_AGAIN_S,
    )
