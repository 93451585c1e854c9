"""A cluster of which only the holes are known: when each node is idle, and not what its owner runs in between.

Our requests start in holes. What becomes of them when the owner comes back is what the site's partitions say: where
they preempt, Slurm ends our job; else the owner is a job that waits for us to leave. His own end is where the trace has
it, however late he starts.

With `plans="known"` Slurm has planned the end of every hole, and nothing starts that would not be over by then; with
"hidden" owners come back unannounced. With `latency="none"` a request starts at once, and every delay of Slurm's is 0.
Else a job of somebody else is always waiting before ours, so that they start in backfill cycles only: every
bf_interval.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from typing import Literal

from msgspec.structs import replace

from fallow.model import ClusterConfig, ClusterState
from fallow.sim.configured import config
from fallow.sim.pool_state import ENDED, Ending, Owner, PoolJob, PoolState
from fallow.sim.pool_view import PoolView
from fallow.sim.types import Ended, Happening, Holes, Notice, Options, Pool, Started, Waited, Wanted
from fallow.slurm.client import SubmitRejected

SWEEP_S = 30.0
"""Slurm looks so often for jobs that are over their limit."""

# Seconds until a signal is at the job's step, and by how much SIGKILL comes before KillWait is over where there is no
# grace; measured on a real Slurm.
_CANCEL_NOTICE_S, _GRACE_NOTICE_S, _NO_GRACE_NOTICE_S, _NO_GRACE_EARLY_S = 0.03, 0.17, 0.28, 0.5
_SHORTEST_KILL_WAIT_S = 5.0

Kind = Literal["free", "limit", "notice", "kill", "pass"]
_ORDER: dict[Kind, int] = {"free": 1, "limit": 1, "kill": 1, "notice": 2, "pass": 3}


class PoolSim:
    """`Engine` over `Holes`."""

    def __init__(self, holes: Holes, options: Options) -> None:
        self.site = holes.site
        self.now = holes.begin
        scheduler = self.site.scheduler
        self._ideal = options.latency == "none"
        self._known = options.plans == "known"
        self._pass_s = 0.0 if self._ideal else scheduler.pass_s
        self._epilog_s = 0.0 if self._ideal else scheduler.epilog_s
        self._kill_wait_s = max(scheduler.kill_wait_s, _SHORTEST_KILL_WAIT_S)
        rng = random.Random(f"{options.seed}/pool/clock")
        self._sweep_phase = rng.uniform(0.0, SWEEP_S)
        self._cycle_phase = holes.begin + rng.uniform(0.0, scheduler.bf_interval_s)
        self._cycle_at = self._cycle_phase
        self._numbers = {node.node: number for number, node in enumerate(self.site.nodes)}
        self._masks = {
            p.partition: sum(1 << self._numbers[name] for name in set(p.nodes)) for p in self.site.partitions if p.up
        }
        self._partitions = {p.partition: p for p in self.site.partitions}
        self._taken_by_slurm = {p.partition: self._is_preempted(p.partition) for p in self.site.partitions}
        self._changes = holes.changes()
        self._over = False
        self._ahead: deque[tuple[float, tuple[int, ...], tuple[int, ...]]] = deque()
        self._returns: list[deque[float]] = [deque() for _ in self.site.nodes]
        "of each node, when its owner comes back, as far as Slurm plans"
        self._planned = 0
        "so many of the changes ahead are in Slurm's plans"
        self._state = PoolState()
        self._pending: dict[str, PoolJob] = {}
        self._events: list[tuple[float, int, int, Kind, str]] = []
        self._count = 0
        self._idle = -1
        self._next_pass = math.inf
        self._told: list[Happening] = []
        self._view = PoolView(self.site, self._state, self._planned_end if self._known else None)
        self._read_ahead()

    # -- Engine -------------------------------------------------------------------------------------------------

    def next_at(self) -> float:
        if self._idle < 0 or self._told:
            return self.now
        return min(
            self._ahead[0][0] if self._ahead else math.inf,
            self._events[0][0] if self._events else math.inf,
            self._cycle_at if self._pending and not self._ideal else math.inf,
        )

    def advance(self, to: float) -> list[Happening]:
        while True:
            change = self._ahead[0][0] if self._ahead else math.inf
            event = self._events[0][0] if self._events else math.inf
            cycle = self._cycle_at if self._pending and not self._ideal else math.inf
            at = min(change, event, cycle)
            if at > to:
                break
            self.now = max(self.now, at)
            if change == at:
                self._change()
            elif event == at:
                self._happen()
            else:
                self._cycle_at += self.site.scheduler.bf_interval_s
                self._start_ours()
        if self._idle < 0:
            self._tell_idle()
        self.now = max(self.now, to)
        told, self._told = self._told, []
        return told

    def submit(self, request: Wanted) -> str:
        pinned = self._numbers.get(request.node, -1) if request.node else None
        if request.partition not in self._masks:
            raise SubmitRejected(request.token, f"invalid partition specified: {request.partition}")
        if pinned is not None and (pinned < 0 or not self._masks[request.partition] >> pinned & 1):
            raise SubmitRejected(request.token, "Requested node configuration is not available")
        job = PoolJob(self._new_id(), request, self.now)
        if not self._pending:
            interval = self.site.scheduler.bf_interval_s
            done = math.floor((self.now - self._cycle_phase) / interval)
            self._cycle_at = self._cycle_phase + (done + 1) * interval
        self._state.jobs[job.job_id] = self._pending[job.job_id] = job
        self._view.job_changed(job.job_id)
        if self._ideal:
            self._pass_soon()
        return job.job_id

    def cancel(self, job_id: str) -> None:
        job = self._state.jobs.get(job_id)
        if job is None or job.tidying or job.state in ENDED:
            return
        if job.state == "PENDING":
            self._end(job, "CANCELLED")
        elif not job.ending:
            at = self.now + (0.0 if self._ideal else _CANCEL_NOTICE_S)
            self._signal(job, "CANCELLED", at, at + self.site.scheduler.kill_wait_s)

    def left(self, job_id: str) -> None:
        job = self._state.jobs.get(job_id)
        if job is not None and job.state == "RUNNING":
            named = job.preempt_at is not None and self.site.scheduler.version >= (24, 5)
            self._end(job, job.ending or ("PREEMPTED" if named else "COMPLETED"))

    def poll(self) -> ClusterState:
        return self._view.poll(self.now)

    def config(self) -> ClusterConfig:
        if not self._ideal:
            return config(self.site)
        return config(replace(self.site, scheduler=replace(self.site.scheduler, bf_resolution_s=0.0)))

    def idle_nodes(self) -> int:
        return self._state.hole.bit_count()

    def idle_mask(self) -> int:
        """`idle_nodes` as a set of bits, by their places in `site.nodes`."""
        return self._state.hole

    # -- the trace ----------------------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        """At least one change; where plans are known as far as Slurm plans."""
        until = self.now + self.site.scheduler.bf_window_s if self._known else self.now
        while not self._over and (not self._ahead or self._ahead[-1][0] <= until):
            change = next(self._changes, None)
            if change is None:
                self._over = True
            else:
                self._ahead.append(change)
        while self._known and self._planned < len(self._ahead) and self._ahead[self._planned][0] <= until:
            at, _, left = self._ahead[self._planned]
            for node in left:
                self._returns[node].append(at)
            self._planned += 1
            self._view.plans_changed(left)

    def _planned_end(self, node: int) -> float:
        """When the owner of an idle node comes back."""
        return self._returns[node][0] if self._returns[node] else math.inf

    def _change(self) -> None:
        at, joined, left = self._ahead.popleft()
        if self._planned:
            self._planned -= 1
            for node in left:
                self._returns[node].popleft()
        for node in left:
            self._state.hole &= ~(1 << node)
            if self._state.ours >> node & 1:
                self._state.owners[node] = Owner(self._new_id(), at)
        for node in joined:
            self._state.hole |= 1 << node
            owner = self._state.owners.pop(node, None)
            if owner is not None:
                self._had_waited(owner)
        self._view.nodes_changed((*left, *joined), at)
        self._read_ahead()
        self._tell_idle()
        if self._state.owners or (self._ideal and self._pending):
            self._pass_soon()

    def _tell_idle(self) -> None:
        idle = self._state.hole.bit_count()
        if idle != self._idle:
            self._idle = idle
            self._told.append(Pool(at=self.now, idle=idle))

    # -- what happens to jobs -----------------------------------------------------------------------------------

    def _happen(self) -> None:
        _, _, _, kind, what = heapq.heappop(self._events)
        if kind == "pass":
            self._next_pass = math.inf
            self._pass()
            return
        job = self._state.jobs.get(what)
        if job is None:
            return
        if kind == "free":
            self._free(job)
        elif job.state != "RUNNING":
            return
        elif kind == "limit":
            if not job.ending and job.preempt_at is None:
                self._signal(job, "TIMEOUT", self.now, self.now + self.site.scheduler.kill_wait_s)
        elif kind == "notice":
            graced = job.preempt_at is not None and not job.ending and job.end_at is not None
            self._told.append(Notice(at=self.now, job_id=what, kill_at=job.end_at or 0.0 if graced else job.kill_at))
        elif job.kill_at <= self.now:
            self._end(job, job.ending or "PREEMPTED")

    def _pass(self) -> None:
        """The main pass: owners take their nodes, from jobs of ours where those may be preempted."""
        for node, owner in list(self._state.owners.items()):
            job = self._state.on.get(node)
            if not self._state.ours >> node & 1:
                del self._state.owners[node]
                self._had_waited(owner)
                self._view.nodes_changed((node,), self.now)
            elif job is not None and self._taken_by_slurm[job.wanted.partition]:
                self._preempt(job)
        if self._ideal:
            self._start_ours()

    def _preempt(self, job: PoolJob) -> None:
        if job.state != "RUNNING" or job.ending or job.preempt_at is not None:
            return
        grace_s = self._partitions[job.wanted.partition].grace_s
        job.preempt_at = self.now
        if grace_s > 0:
            job.end_at = min(job.end_at or math.inf, self.now + grace_s)
            job.kill_at = self._sweep(job.end_at) + self._kill_wait_s
            self._add(self.now + (0.0 if self._ideal else _GRACE_NOTICE_S), "notice", job.job_id)
            self._add(job.kill_at, "kill", job.job_id)
            self._view.job_changed(job.job_id)
        else:
            early_s, notice_s = (0.0, 0.0) if self._ideal else (_NO_GRACE_EARLY_S, _NO_GRACE_NOTICE_S)
            self._signal(job, "PREEMPTED", self.now + notice_s, self.now + self._kill_wait_s - early_s)

    def _signal(self, job: PoolJob, why: Ending, notice_at: float, kill_at: float) -> None:
        """It is told to end, and ended if it has not by then."""
        job.ending, job.kill_at = why, min(job.kill_at, kill_at)
        self._add(notice_at, "notice", job.job_id)
        self._add(job.kill_at, "kill", job.job_id)
        self._view.job_changed(job.job_id)

    def _end(self, job: PoolJob, state: str) -> None:
        self._pending.pop(job.job_id, None)
        job.tidying = job.node >= 0
        job.state, job.end_at = state, self.now
        if job.start_at is None:
            job.start_at = self.now
        self._told.append(Ended(at=self.now, job_id=job.job_id, state=state))
        self._view.job_ended(job.job_id, self.now)
        if job.node >= 0:
            del self._state.on[job.node]
            self._view.nodes_changed((job.node,), self.now)
            if self._epilog_s > 0:
                self._add(self.now + self._epilog_s, "free", job.job_id)
            else:
                self._free(job)

    def _free(self, job: PoolJob) -> None:
        job.tidying = False
        self._state.ours &= ~(1 << job.node)
        self._view.job_changed(job.job_id)
        self._view.nodes_changed((job.node,), self.now)
        if job.node in self._state.owners or self._ideal:
            self._pass_soon()

    def _had_waited(self, owner: Owner) -> None:
        if self.now > owner.since:
            self._told.append(Waited(at=self.now, job_id=owner.job_id, seconds=self.now - owner.since))

    # -- starts -------------------------------------------------------------------------------------------------

    def _start_ours(self) -> None:
        """As backfill does, in the order in which they came."""
        self._read_ahead()
        scheduler = self.site.scheduler
        looked_at = scheduler.bf_max_job_user or scheduler.bf_max_job_test
        unfit: dict[tuple[str, int], int] = {}
        for number, job in enumerate(list(self._pending.values())):
            if not self._ideal and number >= looked_at:
                break
            needed_s = 60.0 * job.wanted.minutes
            longest = self._partitions[job.wanted.partition].max_time_s
            if longest is not None and needed_s > longest:
                self._wait_for(job, "PartitionTimeLimit")
                continue
            node = self._place(job.wanted, needed_s, unfit)
            if node is None:
                self._wait_for(job, "Resources" if job.wanted.node else "Priority")
            else:
                self._start(job, node, longest)

    def _wait_for(self, job: PoolJob, reason: str) -> None:
        if job.reason != reason:
            job.reason = reason
            self._view.job_changed(job.job_id)

    def _place(self, wanted: Wanted, needed_s: float, unfit: dict[tuple[str, int], int]) -> int | None:
        """The first node that it may have for so long; `unfit` remembers those that are idle for too short a time."""
        nodes = self._state.hole & ~self._state.ours & self._masks[wanted.partition]
        if wanted.node:
            nodes &= 1 << self._numbers[wanted.node]
        for name in wanted.exclude:
            if name in self._numbers:
                nodes &= ~(1 << self._numbers[name])
        key = (wanted.partition, int(needed_s))
        nodes &= ~unfit.get(key, 0)
        while nodes:
            bit = nodes & -nodes
            node = bit.bit_length() - 1
            if needed_s <= self._room_s(node):
                return node
            unfit[key] = unfit.get(key, 0) | bit
            nodes ^= bit
        return None

    def _room_s(self, node: int) -> float:
        """What a job that starts now may be granted there."""
        if not self._known or not self._returns[node]:
            return math.inf
        end, resolution = self._returns[node][0], self.site.scheduler.bf_resolution_s
        # A reservation begins on the grid of backfill's plan.
        return end - self.now if self._ideal else math.floor(end / resolution) * resolution - self.now

    def _start(self, job: PoolJob, node: int, longest: float | None) -> None:
        full_s = min(60.0 * job.wanted.minutes, math.inf if longest is None else longest)
        job.limit_s = min(full_s, self._room_s(node)) if self._ideal else full_s
        del self._pending[job.job_id]
        job.state, job.reason, job.node = "RUNNING", "", node
        job.start_at, job.end_at = self.now, self.now + job.limit_s
        self._state.ours |= 1 << node
        self._state.on[node] = job
        self._add(self._sweep(job.end_at), "limit", job.job_id)
        self._view.job_changed(job.job_id)
        self._view.nodes_changed((node,), self.now)
        name = self.site.nodes[node].node
        self._told.append(Started(at=self.now, job_id=job.job_id, nodes=(name,), end_at=job.end_at))

    # -- small things -------------------------------------------------------------------------------------------

    def _is_preempted(self, name: str) -> bool:
        """Would Slurm end a job in this partition for one of another?"""
        own = self._partitions[name]
        above = (p for p in self.site.partitions if p.up and p.priority_tier > own.priority_tier)
        nodes = frozenset(own.nodes)
        by_tier = self.site.preempt_type == "preempt/partition_prio" and own.preempts
        return by_tier and any(not nodes.isdisjoint(p.nodes) for p in above)

    def _sweep(self, at: float) -> float:
        """When Slurm notices that a time is over."""
        if self._ideal:
            return at
        return math.ceil((at - self._sweep_phase) / SWEEP_S) * SWEEP_S + self._sweep_phase

    def _pass_soon(self) -> None:
        at = self.now + self._pass_s
        if at < self._next_pass:
            self._next_pass = at
            self._add(at, "pass", "")

    def _add(self, at: float, kind: Kind, what: str) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, _ORDER[kind], self._count, kind, what))

    def _new_id(self) -> str:
        self._count += 1
        return str(self._count)
