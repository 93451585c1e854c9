"""What a simulated cluster says of its configuration, whichever engine plays it."""

from __future__ import annotations

from fallow.model import ClusterConfig
from fallow.sim.types import Site


def config(site: Site) -> ClusterConfig:
    """As `scontrol show config` would say it."""
    s = site.scheduler
    shared = not all(partition.exclusive for partition in site.partitions)
    return ClusterConfig(
        cluster=site.name,
        slurm_version=f"{s.version[0]}.{s.version[1]:02}.0",
        preempt_type=site.preempt_type,
        preempt_mode=site.preempt_mode,
        kill_wait_s=s.kill_wait_s,
        backfill_interval_s=s.bf_interval_s,
        message_timeout_s=s.message_timeout_s,
        slurmd_timeout_s=s.slurmd_timeout_s,
        priority_type="priority/basic",
        scheduler_parameters=s.words,
        select_type="select/cons_tres" if shared else "select/linear",
    )
