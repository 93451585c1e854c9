"""A discrete-event Slurm: priority order, main pass, backfill with planned starts, preemption, limits.

What it does is what slurmctld does, read in Slurm's sources (`src/plugins/sched/backfill/backfill.c`,
`src/slurmctld/job_scheduler.c`, `src/plugins/select/cons_tres/job_test.c`) and measured on a real one.
"""

from fallow.sim.slurm.engine import SlurmSim

__all__ = ["SlurmSim"]
