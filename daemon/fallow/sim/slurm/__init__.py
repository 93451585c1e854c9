"""A discrete-event Slurm: priority order, main pass, backfill with planned starts, preemption, limits.

The simulation follows Slurm's sources (`src/plugins/sched/backfill/backfill.c`, `src/slurmctld/job_scheduler.c`,
`src/plugins/select/cons_tres/job_test.c`). Its delays were measured on a real Slurm.
"""

from fallow.sim.slurm.engine import SlurmSim

__all__ = ["SlurmSim"]
