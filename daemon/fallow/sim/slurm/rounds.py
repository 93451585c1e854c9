"""When the main scheduler and backfill look at which part of the queue.

Only what changed is looked at again: for the rest a pass would come to the same result.
"""

from __future__ import annotations

from math import inf

from fallow.sim.slurm.backfill import Cycle, Limits
from fallow.sim.slurm.clock import BACKFILL, PASS, Agenda, Clock
from fallow.sim.slurm.cluster import Cluster
from fallow.sim.slurm.jobs import Component, Queue
from fallow.sim.slurm.lives import Lives
from fallow.sim.slurm.mainpass import MainPass
from fallow.sim.types import Scheduler


class Rounds:
    """Args: preempting: partitions of a higher tier preempt."""

    def __init__(
        self, scheduler: Scheduler, cluster: Cluster, queue: Queue, agenda: Agenda, clock: Clock, preempting: bool
    ) -> None:
        self._scheduler = scheduler
        self._cluster = cluster
        self._queue = queue
        self._agenda = agenda
        self._clock = clock
        self._preempting = preempting
        self.lives = Lives(scheduler, cluster, queue, agenda, clock, self.changed, self.due)
        self._main = MainPass(cluster, self.lives, preempting, scheduler.preempt_youngest_first)
        self._pass_at = inf
        self._full_at = inf
        self._cycle_at = inf
        self._submits_at = -inf
        "of the last pass for submitted jobs: the next one waits for batch_sched_delay"
        self._cycles = 0
        self._watched = False

    def watch(self) -> None:
        """Somebody polls: jobs' planned starts are needed, from the next cycle on.

        That one comes when it would have come anyway: whether somebody looks does not change what happens.
        """
        if not self._watched:
            self._watched = True
            for component in self._cluster.components:
                component.stale = True

    def changed(self, nodes: int) -> None:
        """A job has left these, or they have changed: looked at, at once."""
        for component in self._cluster.components:
            if component.mask & nodes:
                component.dirty = component.stale = True
        self._pass_by(self._agenda.now + self._scheduler.pass_s)
        self._cycle_soon()

    def due(self, component: Component) -> None:
        """A job of it may preempt again, and a pass or a cycle is due."""
        component.dirty = component.stale = True
        self._pass_by(self._agenda.now)
        self._cycle_soon()

    def submitted(self, component: Component) -> None:
        """A job has come: it may be held for a while, with those that come meanwhile."""
        component.dirty = component.stale = True
        now = self._agenda.now
        if self._submits_at < now:  # else one is planned that will see this job, too
            self._submits_at = max(now, self._submits_at + self._scheduler.batch_sched_delay_s)
        self._pass_by(self._submits_at + self._scheduler.pass_s)
        self._cycle_soon()

    # -- main scheduler -----------------------------------------------------------------------------------------

    def _pass_by(self, at: float) -> None:
        if at < self._pass_at:
            self._pass_at = at
            self._agenda.at(at, PASS, self._pass)

    def _pass(self) -> None:
        if self._pass_at != self._agenda.now:
            return  # another came before it
        self._pass_at = inf
        self._look(self._scheduler.default_queue_depth)
        if self._full_at == inf and any(c.cut for c in self._cluster.components):
            now = self._agenda.now
            self._full_at = self._clock.full_pass(now)
            if self._full_at == now:
                self._full_at += self._scheduler.sched_interval_s
            self._agenda.at(self._full_at, PASS, self._full_pass)

    def _full_pass(self) -> None:
        self._full_at = inf
        for component in self._cluster.components:
            component.dirty = component.dirty or component.cut
        self._look(self._queue.length)

    def _look(self, depth: int) -> None:
        last = self._queue.last_within(depth) if any(c.dirty for c in self._cluster.components) else None
        for component in self._cluster.components:  # higher tiers first
            if not component.dirty:
                continue
            waiting = len(component.pending)
            self._main.run(component, last)
            if len(component.pending) != waiting:
                component.stale = True
                self._cycle_soon()

    # -- backfill -----------------------------------------------------------------------------------------------

    def _cycle_soon(self) -> None:
        if self._cycle_at == inf:
            self._cycle_at = self._clock.cycle(self._agenda.now)
            if self._cycle_at < inf:
                self._agenda.at(self._cycle_at, BACKFILL, self._cycle)

    def _cycle(self) -> None:
        self._cycle_at = inf
        self._cycles += 1
        queue, scheduler, limits = self._queue, self._scheduler, Limits(self._scheduler)
        for component in self._cluster.components:
            for other in component.below if component.stale else ():
                other.stale = True  # planned around the jobs above
        stale = [component for component in self._cluster.components if component.stale]
        for component in stale:
            component.stale = False
        starts = 0
        if queue.hets or queue.length > self._each_for_itself():
            # What happens in one place bears on the others.
            cycle = self._new_cycle(self._cluster.components, limits)
            cycle.run(queue.in_order(), queue.hets, clear=self._cycles % 2 == 1)
            starts = cycle.starts
        else:
            for component in stale:
                if component.pending:
                    cycle = self._new_cycle([component], limits)
                    cycle.keep(job for above in component.above for job in above.pending)
                    cycle.run(list(component.pending), {}, clear=False)
                    starts += cycle.starts
        clock = self._clock
        clock.took_s = limits.tested * scheduler.bf_test_s
        clock.cycle_end, clock.busy = self._agenda.now + clock.took_s, queue.length > 0
        if starts or queue.hets or any(component.stale for component in self._cluster.components):
            self._cycle_soon()

    def _new_cycle(self, components: list[Component], limits: Limits) -> Cycle:
        watched = self._watched or any(other.pending for component in components for other in component.below)
        return Cycle(self._scheduler, self._cluster, self.lives, components, self._preempting, limits, watched)

    def _each_for_itself(self) -> int:
        """With up to so many jobs none of the limits of a cycle is reached."""
        s = self._scheduler
        return min(n for n in (s.bf_max_job_test, s.bf_max_job_user, s.bf_max_job_part, s.bf_max_job_start) if n > 0)
