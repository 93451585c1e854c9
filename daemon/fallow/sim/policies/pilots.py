"""A head that asks for one-node jobs of fixed lengths, and leaves it to a policy who gets the nodes.

It asks as often as there are idle nodes that the runs could use, knows nothing of the others who wait, and uses each
node until its job's limit, until Slurm announces the end, or until it is gone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Literal

from fallow.model import ClusterState
from fallow.sim.costs import SILENT_S
from fallow.sim.policies.standing import Counts, Crew, Shared, Sharing, Standing
from fallow.sim.types import (
    POLL_REQUESTS,
    Active,
    Ended,
    Engine,
    Happening,
    Measured,
    Notice,
    Options,
    Pool,
    RunPlan,
    Runs,
    Silent,
    Site,
    Started,
    Wanted,
)
from fallow.slurm.client import SubmitRejected
from fallow.slurm.paced import Bucket

SET = (90, 56, 34, 22, 14, 8, 6, 4, 2)
"""Minutes: lengths that a production cluster's pilots had (HPC-Whisk, SC'22)."""

STALE_S = 600.0
"""A request that has waited for so long is withdrawn (as Balsam does)."""

REFUSED_S = 600.0
"""After Slurm has refused a request, nothing is asked for in its partition for so long."""

LEAVING_S = 1.0
"""At most so long before a job's limit its node leaves the training."""

BUSY_FLAGS = frozenset(("DRAIN", "NOT_RESPONDING", "MAINTENANCE", "RESERVED", "COMPLETING", "POWERED_DOWN"))

What = Literal["submit", "leave", "left"]


@dataclass(slots=True)
class _Job:
    """A request of ours, or the job that it became."""

    kind: int
    partition: str
    minutes: int
    asked_at: float
    node: str = ""
    started_at: float = 0.0
    "or when the node was free for another run"
    run: str = ""
    leaving: bool = False


class Pilots:
    """See `fallow.sim.types.Head`.

    Args:
        name: of the policy.
        crew: the runs.
        partitions: of each node, in which of its partitions it is asked for.
        sharing: who gets the nodes.
        lengths: minutes of the jobs; several: the longest that fits, or one after the other where nobody knows what
            fits; none: as long as the partition allows.
        engine, runs, options: as for every head.
    """

    def __init__(
        self,
        name: str,
        crew: Crew,
        partitions: dict[str, str],
        sharing: Sharing,
        lengths: Sequence[int],
        engine: Engine,
        runs: Runs,
        options: Options,
    ) -> None:
        self.name, self.calls = name, 0
        self._crew, self._partitions, self._lengths = crew, partitions, lengths
        self.sharing = sharing
        self._engine, self._runs, self._options = engine, runs, options
        self._at_once = options.latency == "none"
        self._fitted = options.plans == "known" and len(lengths) > 1
        self._longest = {
            p.partition: 30 * 1440 if p.max_time_s is None else int(p.max_time_s // 60) for p in engine.site.partitions
        }
        self._lead_s = min(LEAVING_S, options.costs.release[1])
        self._at = engine.now
        self._bucket = Bucket(options.submits_per_min, lambda: self._at)
        self._look_at, self._share_at = engine.now, inf
        self._timers: list[tuple[float, int, What, str]] = []
        self._order = count()
        self._queued: dict[str, Wanted] = {}
        "token -> request that waits for its turn"
        self._jobs: dict[str, _Job] = {}
        self._asked = 0
        self._refused: dict[str, float] = {}
        "partition -> until when"
        self._held: dict[str, Counts] = {run: [0] * crew.kinds for run in crew.plans}

    # -- Head ---------------------------------------------------------------------------------------------------

    def next_at(self) -> float:
        return min(self._look_at, self._share_at, self._timers[0][0] if self._timers else inf)

    def wake(self, at: float) -> None:
        self._at = at
        while self._timers and self._timers[0][0] <= at:
            _, _, what, which = heapq.heappop(self._timers)
            if what == "submit":
                self._submit(self._queued.pop(which))
            elif which in self._jobs:
                if what == "left":
                    self._engine.left(which)
                else:
                    self._leave(which, at)
        if self._look_at <= at:
            self._look_at = inf if self._at_once else at + self._options.poll_s
            self._look(at)
        if self._share_at <= at:
            self._share_at = inf
            self._share(at)

    def told(self, happening: Happening | Active | Measured) -> None:
        if isinstance(happening, Started):
            self._started(happening)
        elif isinstance(happening, Notice):
            if happening.kill_at > happening.at:
                self._leave(happening.job_id, happening.at)
        elif isinstance(happening, Silent):
            self._silent(happening)
        elif isinstance(happening, Ended):
            self._ended(happening)
        if self._at_once and isinstance(happening, Ended | Pool):
            self._look_at = happening.at

    # -- jobs ---------------------------------------------------------------------------------------------------

    def _started(self, started: Started) -> None:
        job = self._jobs[started.job_id]
        job.node, job.started_at = started.nodes[0], started.at
        self._add(started.end_at - self._lead_s, "leave", started.job_id)
        self._share_at = min(self._share_at, started.at)

    def _leave(self, job_id: str, at: float) -> None:
        """Leave the node: its job's time is over."""
        job = self._jobs.get(job_id)
        if job is None or job.leaving or not job.node:
            return
        job.leaving = True
        left_at = at
        if job.run:
            left_at = self._runs.release(job.run, [job.node], at)
            self._took(job, at)
        self._add(left_at, "left", job_id)

    def _silent(self, silent: Silent) -> None:
        """Nobody will work there any more, whether its node comes back or not."""
        job = self._jobs[silent.job_id]
        if job.run:
            self._runs.lost(job.run, [job.node], silent.at, SILENT_S)
            self._took(job, silent.at)
        job.leaving = True
        self.calls += 1
        self._engine.cancel(silent.job_id)

    def _ended(self, ended: Ended) -> None:
        job = self._jobs.pop(ended.job_id, None)
        if job is not None and job.run:
            self._runs.lost(job.run, [job.node], ended.at)
            self._took(job, ended.at)

    def _took(self, job: _Job, at: float) -> None:
        """A run has this node no more."""
        self._held[job.run][job.kind] -= 1
        job.run = ""
        self._share_at = min(self._share_at, at)

    # -- who gets nodes -----------------------------------------------------------------------------------------

    def _share(self, at: float) -> None:
        spare: list[list[str]] = [[] for _ in range(self._crew.kinds)]
        for job_id, job in self._jobs.items():
            if job.node and not job.run and not job.leaving:
                spare[job.kind].append(job_id)
        shared = self.sharing.share(Standing(at, self._held, [len(some) for some in spare]))
        self._share_at = min(self._share_at, shared.again_at)
        self._take(shared, spare, at)
        for run, nodes in shared.give.items():
            for kind, number in enumerate(nodes):
                for job_id in spare[kind][:number]:
                    job = self._jobs[job_id]
                    job.run = run
                    self._held[run][kind] += 1
                    self._runs.join(run, job.node, job_id, job.started_at)
                del spare[kind][:number]
        for kind, left_over in enumerate(spare):
            for job_id in left_over[self._crew.room(self._held, kind) :]:
                self._leave(job_id, at)

    def _take(self, shared: Shared, spare: list[list[str]], at: float) -> None:
        """Take the newest nodes of runs that give some; their processes end, and others start up."""
        for run, nodes in shared.take.items():
            for kind, number in enumerate(nodes):
                has = [job_id for job_id, job in self._jobs.items() if job.run == run and job.kind == kind]
                gone = has[len(has) - number :]
                left_at = self._runs.release(run, [self._jobs[job_id].node for job_id in gone], at)
                for job_id in gone:
                    job = self._jobs[job_id]
                    job.run, job.started_at = "", left_at
                    self._held[run][kind] -= 1
                    spare[kind].append(job_id)

    # -- what is asked for --------------------------------------------------------------------------------------

    def _look(self, at: float) -> None:
        """Ask for what is idle and useful."""
        if not self._at_once:
            self.calls += POLL_REQUESTS
            self._withdraw(at)
        if not any(self._room()):
            return
        if self._at_once and not self._fitted and len(set(self._partitions.values())) == 1:
            partition = next(iter(self._partitions.values()))
            holding = sum(1 for job in self._jobs.values() if job.node)
            self._ask({partition: self._engine.idle_nodes() - holding}, at)
            return
        state = self._engine.poll()
        idle = [n.node for n in state.nodes if n.state == "IDLE" and BUSY_FLAGS.isdisjoint(n.flags)]
        if self._fitted:
            self._ask_fitting(idle, state, at)
        else:
            self._ask(Counter(self._partitions[node] for node in idle if node in self._partitions), at)

    def _room(self) -> Counts:
        """Of each kind: nodes that the runs could use beyond those that they have and that have been asked for."""
        room = [self._crew.room(self._held, kind) for kind in range(self._crew.kinds)]
        for job in self._jobs.values():
            if not job.run and not job.leaving:
                room[job.kind] -= 1
        for wanted in self._queued.values():
            room[self._crew.kind[wanted.partition]] -= 1
        return [max(0, each) for each in room]

    def _ask(self, idle: dict[str, int], at: float) -> None:
        """So many nodes of each partition are idle."""
        room = self._room()
        asked = Counter(job.partition for job in self._jobs.values() if not job.node)
        asked.update(wanted.partition for wanted in self._queued.values())
        for partition, number in idle.items():
            kind = self._crew.kind[partition]
            for _ in range(min(number - asked[partition], room[kind])):
                room[kind] -= 1
                length = self._lengths[self._asked % len(self._lengths)] if self._lengths else self._longest[partition]
                self._request(partition, length, at)

    def _ask_fitting(self, idle: list[str], state: ClusterState, at: float) -> None:
        """For each idle node the longest job that is over when Slurm has planned another one there; longest first."""
        ends: dict[str, float] = {}
        for info in state.jobs:
            if info.state == "PENDING" and info.start_at is not None:
                for node in info.planned_nodes:
                    ends[node] = min(ends.get(node, inf), info.start_at)
        scheduler = self._engine.site.scheduler
        # It starts in a later cycle, and what is planned begins on the grid of backfill's plan.
        late_s = 0.0 if self._at_once else scheduler.bf_interval_s + scheduler.bf_resolution_s
        wanted: Counter[tuple[int, str]] = Counter()
        for node in idle:
            rest_s = ends.get(node, inf) - at - late_s
            length = next((each for each in self._lengths if 60 * each <= rest_s), None)
            if length is not None and node in self._partitions:
                wanted[min(length, self._longest[self._partitions[node]]), self._partitions[node]] += 1
        wanted.subtract((job.minutes, job.partition) for job in self._jobs.values() if not job.node)
        wanted.subtract((each.minutes, each.partition) for each in self._queued.values())
        room = self._room()
        for (length, partition), number in sorted(wanted.items(), reverse=True):
            kind = self._crew.kind[partition]
            for _ in range(min(number, room[kind])):
                room[kind] -= 1
                self._request(partition, length, at)

    def _request(self, partition: str, minutes: int, at: float) -> None:
        self._asked += 1
        minutes = min(minutes, self._longest[partition])
        wanted = Wanted(token=f"pilot-{self._asked}", partition=partition, minutes=minutes)
        if self._at_once:
            self._submit(wanted)
            return
        self._queued[wanted.token] = wanted
        self._add(at + self._bucket.take(), "submit", wanted.token)

    def _submit(self, wanted: Wanted) -> None:
        if self._refused.get(wanted.partition, -inf) > self._at:
            return
        self.calls += 1
        try:
            job_id = self._engine.submit(wanted)
        except SubmitRejected:
            self._refused[wanted.partition] = self._at + REFUSED_S
            return
        self._jobs[job_id] = _Job(self._crew.kind[wanted.partition], wanted.partition, wanted.minutes, self._at)

    def _withdraw(self, at: float) -> None:
        for job_id, job in list(self._jobs.items()):
            if not job.node and not job.leaving and at - job.asked_at > STALE_S:
                job.leaving = True
                self.calls += 1
                self._engine.cancel(job_id)

    def _add(self, at: float, what: What, which: str) -> None:
        heapq.heappush(self._timers, (at, next(self._order), what, which))


def asked_in(site: Site) -> dict[str, str]:
    """Of each node, in which of its partitions a harvest job is asked for: in the lowest, whose jobs disturb least."""
    tiers = {p.partition: (p.priority_tier, number) for number, p in enumerate(site.partitions) if p.up}
    found: dict[str, str] = {}
    for node in site.nodes:
        open_to = [partition for partition in node.partitions if partition in tiers]
        if open_to:
            found[node.node] = min(open_to, key=tiers.__getitem__)
    return found


def crew_of(plans: Sequence[RunPlan], partitions: dict[str, str]) -> Crew:
    """The runs on the nodes of these partitions."""
    return Crew(plans, sorted(set(partitions.values())))
