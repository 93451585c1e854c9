"""Good neighbour: which jobs of others could start but for nodes that we hold, and what is given up for them. Pure.

Where nothing preempts, and for jobs that may not preempt ours, nobody but us can give a node back. Where Slurm takes
nodes for several jobs at once, two of them may count on the same one, and it is long until the other one preempts
again: once it has taken one, those that wait still get theirs from us. Slurm never plans a
waiting job onto nodes that we hold and comes late with its own answer, so what would happen without us is worked out
here, as its backfill would: jobs in the order of their priority, each with its partition's limits, constraints,
reservations and times; one that cannot start yet but has a planned start keeps its nodes free of jobs that would run
into it. What other heads hold they give back as we do, so a job may wait for nodes of several; ours go first, for
nothing but Slurm's records tells that those heads are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import msgspec
from msgspec.structs import replace

from fallow.core.allocations import Allocation
from fallow.core.neighbour.constraint import alternatives
from fallow.core.neighbour.fit import FEW_NODES, Packing, Part, Share
from fallow.core.neighbour.room import Room
from fallow.core.neighbour.tiers import Tiers
from fallow.core.neighbour.waiting import LOOKED_AT, Waiting, foremost, is_ours, others_waiting, picks_up
from fallow.core.states import ON_NODES
from fallow.core.tokens import PREFIX
from fallow.model import AllocationState, ClusterConfig, ClusterState, JobInfo, PartitionInfo

VARIANTS = 16
"""Ways to place one job (partitions × alternatives of its constraint) that are tried."""

ELEMENTS = 256
"""Elements of a job array that are placed at once."""

DIVIDED = 200_000
"""Nodes that are looked at, in all, for jobs whose tasks need not be spread evenly over their nodes."""

LOOKS_AGAIN_S = 60.0
"""From one look of Slurm at the whole queue to the next."""

PREEMPTS_AGAIN_S = 30.0 + 10.0 + LOOKS_AGAIN_S
"""`preempts_again_s` of a site that has said nothing else."""

STARTS = 1000
"""Jobs (elements of arrays each) that are placed at once in a partition: twice as many as one cycle of Slurm's backfill
looks at."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Release a node that somebody else could use now."""

    token: str
    reason: str
    urgent: bool = False
    "somebody waits: what has not left soon is ended"


class Standing(msgspec.Struct, frozen=True):
    """Where we stand with the others, after one poll."""

    give_back: tuple[GiveBack, ...] = ()
    leaving: tuple[GiveBack, ...] = ()
    "on their way out for another reason, but now somebody waits for their nodes"
    spoken_for: Mapping[str, frozenset[str]] = {}
    "partition -> nodes on which waiting jobs start now or once ours have left, and which Slurm would not take from us"
    compete: frozenset[str] = frozenset()
    "tokens of pending requests of ours that could take such a node, or that come before others' jobs"
    wanted: frozenset[str] = frozenset()
    "partitions in which others' jobs wait, whether they could start or not"
    delayed: Mapping[str, frozenset[str]] = {}
    "job of somebody else -> tokens of ours whose nodes it needs to start"
    awaited: Mapping[str, frozenset[str]] = {}
    "job of somebody else -> names of other heads' jobs whose nodes it needs to start"
    offered: tuple[tuple[Waiting, frozenset[str]], ...] = ()
    "jobs that need nothing of us, and the nodes on which they could start now"


@dataclass(frozen=True, slots=True)
class Terms:
    """What `assess` goes by besides the poll and our allocations; see there."""

    former: Collection[str]
    deaf: Collection[str]
    whole_nodes: bool
    declined: Callable[[Waiting], frozenset[str]]
    most: int
    again_s: float


def preempts_again_s(config: ClusterConfig | None) -> float:
    """From when a job has had others preempted until it does so again, whatever became of their nodes.

    KillWait and MessageTimeout (`select_nodes` in Slurm's src/slurmctld/node_scheduler.c), and Slurm's next look at the
    whole queue. Tried on 22.05.
    """
    return PREEMPTS_AGAIN_S if config is None else config.kill_wait_s + config.message_timeout_s + LOOKS_AGAIN_S


def assess(
    cluster: ClusterState,
    allocations: Sequence[Allocation],
    *,
    former: Collection[str] = (),
    deaf: Collection[str] = (),
    whole_nodes: bool = False,
    declined: Callable[[Waiting], frozenset[str]] = lambda _: frozenset(),
    most: int = LOOKED_AT,
    again_s: float = PREEMPTS_AGAIN_S,
) -> Standing:
    """What the jobs that wait need of us.

    Args:
        cluster: one poll.
        allocations: every live allocation of every run.
        former: tokens of harvest allocations that are over; Slurm may still show their jobs.
        deaf: names of other heads' jobs that are not given up for anybody (`core.heads`).
        whole_nodes: the site never shares nodes between jobs (select/linear).
        declined: nodes on which Slurm does not start a job, for reasons that a poll does not show.
        most: jobs that are looked at, in all and in each partition with nodes that they could have.
        again_s: `preempts_again_s` of the site.
    """
    others = who_waits(cluster, allocations, former)
    if not others:
        return Standing()
    tiers = Tiers(cluster.partitions)
    return needs(cluster, allocations, tiers, others, Terms(former, deaf, whole_nodes, declined, most, again_s))


def who_waits(cluster: ClusterState, allocations: Sequence[Allocation], former: Collection[str] = ()) -> list[Waiting]:
    """Jobs to which a node of ours may matter, in Slurm's order. Args: as for `assess`."""
    # Base jobs that wait, and whatever else has normal priority, are others' jobs to what was picked up idle, as they
    # are to Slurm where it preempts.
    ours = {a.token for a in allocations if a.harvested or a.asked_at is not None}
    return others_waiting(cluster, ours.union(former))


def needs(
    cluster: ClusterState,
    allocations: Sequence[Allocation],
    tiers: Tiers,
    others: Sequence[Waiting],
    terms: Terms,
) -> Standing:
    """What these need of us. Args: as for `assess`; `tiers` of the poll's partitions, `others` from `who_waits`."""
    view = _View(cluster, allocations, tiers, others, terms)
    # All of them first: a later one may move an earlier one to another node.
    placed: list[tuple[Waiting, int]] = []
    started: dict[str, int] = {}
    for job in foremost(others, terms.most, view.near):
        if any(started.get(name, 0) < STARTS for name in job.partitions):
            numbers = view.place(job)
            placed += [(job, number) for number in numbers]
            for name in job.partitions if numbers else ():
                started[name] = started.get(name, 0) + len(numbers)
    nodes = view.packing.nodes()
    takers: dict[str, list[Waiting]] = {}
    for job, number in placed:
        for node in sorted(nodes[number]):  # sets come in another order in each process
            takers.setdefault(node, []).append(job)
    found = view.standing(takers, others)
    now = view.free_now
    return replace(found, offered=tuple((job, frozenset(nodes[n])) for job, n in placed if nodes[n] <= now))


class _View:
    """The cluster as it would be without us."""

    def __init__(
        self,
        cluster: ClusterState,
        allocations: Sequence[Allocation],
        tiers: Tiers,
        others: Sequence[Waiting],
        terms: Terms,
    ) -> None:
        self._cluster = cluster
        self._allocations = allocations
        self._whole_nodes = terms.whole_nodes
        self._declined = terms.declined
        self._tiers, self._partitions, self._nodes = tiers, tiers.partitions, tiers.nodes
        self._others: dict[str, frozenset[str]] = {}
        "user -> nodes that only somebody else's jobs may use"
        self._strangers: dict[str, frozenset[str]] = {}
        "user -> nodes on which others' jobs stay"
        self._users_matter = any(p.exclusive_user for p in cluster.partitions) or any(
            job.exclusive_user for job in cluster.jobs if job.state == "PENDING"
        )
        harvest = [a for a in allocations if a.harvested]
        self._hurried = {a.token: a.run for a in allocations if a.hurried}
        self._held: dict[str, list[Allocation]] = {}
        "node -> allocations of ours on it; several where nodes are shared"
        self._left: dict[str, list[Allocation]] = {}
        "node -> those that are on their way out"
        for allocation in harvest:
            if allocation.state in (AllocationState.RUNNING, AllocationState.RELEASING) or allocation.is_booting:
                there = self._left if allocation.state is AllocationState.RELEASING else self._held
                for node in allocation.nodes:
                    there.setdefault(node, []).append(allocation)
        self._tokens = {*terms.former, *(a.token for a in harvest)}
        self._taken = frozenset(
            node
            for job in cluster.jobs
            if job.preempt_at is not None and cluster.at - job.preempt_at < terms.again_s
            if is_ours(job, self._tokens)
            for node in job.nodes
        )
        "nodes that Slurm has just taken from us"
        # Where nobody waits, nothing follows.
        wanted = tiers.nodes_of(name for job in others for name in job.partitions)
        heads_jobs = [job for job in cluster.jobs if job.name.startswith(PREFIX) and job.name not in self._tokens]
        theirs = [job for job in heads_jobs if self._is_given_back_by_its_head(job) and job.name not in terms.deaf]
        self._beside: dict[str, set[str]] = {}
        "node -> jobs of other heads on it, by name"
        for job in theirs:
            for name in job.nodes:
                self._beside.setdefault(name, set()).add(job.name)
        beside = sorted(self._beside.keys() - self._held.keys())
        heads = self._tokens.union(job.name for job in theirs)
        self._room = Room(cluster, heads, self._held.keys() | set(beside), wanted)
        # An owner goes with the last of his jobs; where only ours are, we are the owner.
        self._owned = {n.node: n.owner for n in cluster.nodes if n.owner and not self._room.left_alone(n.node)}
        newest = sorted(self._held, key=lambda n: (-max([a.start_at or 0.0 for a in self._held[n]]), n))
        free = self._room.free()
        held = [place for n in (*newest, *beside) if (place := self._room.without_us(n)) is not None]
        self.packing = Packing([*free, *held], dear=len(held))
        self._within_reach = frozenset(place.node for place in (*free, *held))
        self._shadows: list[tuple[float, frozenset[str]]] = []
        "(Unix time, nodes that are kept for a planned job from then on)"
        self._fits: dict[object, frozenset[str]] = {}
        self._looks = DIVIDED

    def _is_given_back_by_its_head(self, job: JobInfo) -> bool:
        """Does it hold what another head picked up idle, where Slurm takes it for nobody?"""
        if job.state == "COMPLETING" or job.state not in ON_NODES or not picks_up(job):
            return False
        partition = self._partitions.get(job.partition)
        return partition is not None and not partition.preempts

    @cached_property
    def _features(self) -> dict[str, list[str]]:
        return {n.node: n.features for n in self._cluster.nodes}

    @property
    def near(self) -> frozenset[str]:
        """Partitions with nodes that have room, or would without us."""
        return frozenset(name for name, nodes in self._nodes.items() if not nodes.isdisjoint(self._within_reach))

    @property
    def free_now(self) -> frozenset[str]:
        """Nodes with room that nobody has to leave first."""
        return frozenset(self._room.now)

    # -- placing ------------------------------------------------------------------------------------------------

    def place(self, waiting: Waiting) -> list[int]:
        """Place as many of its elements as can start; what cannot start but is planned casts its shadow."""
        numbers: list[int] = []
        variants = self._variants(waiting, self._within_reach)
        for _ in range(min(waiting.startable, ELEMENTS)):
            number = self._cheapest(waiting, variants)
            if number is None:
                break
            numbers.append(number)
        if not numbers:
            self._cast_shadow(waiting)
        return numbers

    def _cheapest(self, waiting: Waiting, variants: list[list[Part]]) -> int | None:
        uneven = any(job.tasks for job in waiting.jobs)
        if len(variants) == 1 and not uneven:
            return self.packing.place(variants[0])
        costs = self._costs(variants)
        # Evenly, a node's share may be no whole number of tasks.
        loose = any(job.tasks and job.cpus_per_node % job.cpus_per_task for job in waiting.jobs)
        if loose or (uneven and not (costs and min(costs)[0] == 0)):
            variants = [*([] if loose else variants), *self._divided(waiting, variants)]
            costs = self._costs(variants)
        return self.packing.place(variants[min(costs)[1]]) if costs else None

    def _costs(self, variants: list[list[Part]]) -> list[tuple[int, int]]:
        """Dear nodes for each of them that fits, and its number."""
        found = ((self.packing.cost_of(parts), i) for i, parts in enumerate(variants))
        return [(cost, i) for cost, i in found if cost is not None]

    def _divided(self, waiting: Waiting, variants: list[list[Part]]) -> list[list[Part]]:
        """The same with tasks where there is room for them: 4 and 2 where 3 and 3 do not fit."""
        found: list[list[Part]] = []
        for parts in variants:
            ways = [self._divide(job, part) for job, part in zip(waiting.jobs, parts, strict=True)]
            if all(ways):
                found.append([part for way in ways for part in way])
        return found

    def _divide(self, job: JobInfo, part: Part) -> list[Part]:
        """[]: there is no room. What would take too long stays as it is."""
        known = not job.tasks or part.share.whole or part.must or part.nodes > FEW_NODES
        if known or self._looks < len(part.may):
            return [part]
        self._looks -= len(part.may)
        task = replace(part.share, cpus=job.cpus_per_task, memory_mb=job.memory_mb_per_task)
        each = self.packing.divide(part, job.tasks, task)
        return [
            replace(
                part,
                nodes=1,
                share=replace(
                    task,
                    cpus=tasks * task.cpus,
                    memory_mb=tasks * task.memory_mb or part.share.memory_mb,
                ),
            )
            for tasks in each or ()
        ]

    def _variants(self, waiting: Waiting, among: frozenset[str]) -> list[list[Part]]:
        """All ways to place a job: one partition and one alternative of its constraint for each component."""
        found: list[list[Part]] = [[]]
        declined = self._declined(waiting)
        for job in waiting.jobs:
            parts = [
                part
                for name in job.partition.split(",")
                if (partition := self._partitions.get(name)) is not None and _allows(partition, job)
                for part in self._parts(job, partition, among, declined)
            ]
            found = [[*before, part] for before in found for part in parts][:VARIANTS]
        return found

    def _parts(
        self, job: JobInfo, partition: PartitionInfo, among: frozenset[str], declined: frozenset[str]
    ) -> list[Part]:
        gpus = {job.gpu_type: job.gpus_per_node} if job.gpus_per_node else {}
        whole = job.exclusive or partition.exclusive or self._whole_nodes
        own_user = job.exclusive_user or partition.exclusive_user
        user = job.user if self._users_matter else ""
        share = Share(job.cpus_per_node, job.memory_mb_per_node, gpus, whole, user, own_user)
        end = None if job.time_limit_s is None else self._cluster.at + job.time_limit_s
        taboo = frozenset(job.excluded_nodes).union(*(nodes for at, nodes in self._shadows if end is None or end > at))
        reserved, inside = self._reserved(job, end)
        taboo |= declined | reserved | self._kept_from(job.user) | self._same_run(job)
        if own_user:
            taboo |= self._beside_strangers(job.user)
        must = frozenset(job.required_nodes)
        parts: list[Part] = []
        for index, wanted in enumerate(alternatives(job.constraint)):
            key = (among, partition.partition, job.constraint, index)
            if key not in self._fits:
                self._fits[key] = frozenset(
                    n for n in partition.nodes if n in among and wanted(frozenset(self._features[n]))
                )
            may = self._fits[key] if inside is None else self._fits[key] & inside
            parts.append(Part(max(job.num_nodes, len(must)), share, may - taboo, must))
        return parts

    def _same_run(self, job: JobInfo) -> frozenset[str]:
        """Nodes that a hurried job does not take, since they are its own run's: that would have no more than before."""
        runs = {self._hurried[word] for word in (job.name, *job.comment.split()) if word in self._hurried}
        if not runs:
            return frozenset()
        return frozenset(node for node, held in self._held.items() if any(a.run in runs for a in held))

    def _kept_from(self, user: str) -> frozenset[str]:
        if user not in self._others:
            self._others[user] = frozenset(node for node, owner in self._owned.items() if owner != user)
        return self._others[user]

    def _beside_strangers(self, user: str) -> frozenset[str]:
        if user not in self._strangers:
            self._strangers[user] = self._room.strangers(user)
        return self._strangers[user]

    def _reserved(self, job: JobInfo, end: float | None) -> tuple[frozenset[str], frozenset[str] | None]:
        """Nodes that reservations keep from it, and those that its own reservation keeps it to (None: it has none)."""
        now, named = self._cluster.at, job.reservation.split(",") if job.reservation else []
        others: set[str] = set()
        own: set[str] = set()
        for reservation in self._cluster.reservations:
            if reservation.reservation in named:
                own.update(reservation.nodes if reservation.start_at <= now < reservation.end_at else ())
            elif reservation.end_at > now and (end is None or reservation.start_at < end):
                others.update(reservation.nodes)
        return frozenset(others), frozenset(own) if named else None

    def _cast_shadow(self, waiting: Waiting) -> None:
        """A job that others still keep from starting, and that Slurm has planned, has its nodes from then on."""
        planned = [job.start_at for job in waiting.jobs if job.start_at is not None]
        variants = self._variants(waiting, self._room.usable) if len(planned) == len(waiting.jobs) else []
        for part in variants[0] if variants else ():
            free_at = list(islice((each for each in self._soonest if each[1] in part.may), part.nodes))
            if len(free_at) == part.nodes:
                start = min(free_at[-1][0], max(planned))
                self._shadows.append((start, frozenset(node for _, node in free_at)))

    @cached_property
    def _soonest(self) -> list[tuple[float, str]]:
        """When others will have left each node, soonest first."""
        now, room = self._cluster.at, self._room
        return sorted((now if node in self._within_reach else room.free_at(node), node) for node in room.usable)

    # -- what follows -------------------------------------------------------------------------------------------

    def standing(self, takers: Mapping[str, Sequence[Waiting]], others: Sequence[Waiting]) -> Standing:
        """Args: takers: node -> jobs that would start on it; others: all that wait."""
        spoken_for = {
            name: frozenset([node for node in nodes & takers.keys() if not self._gets(name, node, takers[node])])
            for name, nodes in (self._nodes if takers else {}).items()
        }
        give_back: dict[str, GiveBack] = {}
        leaving: dict[str, GiveBack] = {}
        newest = {a.token: (-(a.start_at or 0.0), a.token) for some in self._held.values() for a in some}
        delayed: dict[str, set[str]] = {}
        awaited: dict[str, set[str]] = {}
        for node, jobs in takers.items():
            for job in jobs if node in self._beside else ():
                awaited.setdefault(job.job_id, set()).update(self._beside[node])
            held = self._held.get(node, [])
            left = self._left.get(node, []) if held or node in self._room.leaving else []
            tokens = {a.token for a in (*held, *left)} or {self._token(self._room.leaving.get(node))} - {""}
            for job in jobs if tokens else ():
                delayed.setdefault(job.job_id, set()).update(tokens)
            reason = f"job {jobs[0].job_id} of {jobs[0].user} waits for a node"
            for wishes, allocations in ((give_back, held), (leaving, left)):
                for allocation in allocations:
                    if not self._left_to_slurm(allocation.partition, node, jobs):
                        wishes[allocation.token] = GiveBack(allocation.token, reason, urgent=True)
        return Standing(
            give_back=tuple(give_back[token] for token in sorted(give_back, key=newest.__getitem__)),
            leaving=tuple(leaving.values()),
            spoken_for={name: nodes for name, nodes in spoken_for.items() if nodes},
            compete=self._tiers.competing(self._cluster, self._allocations, spoken_for, others),
            wanted=frozenset(name for job in others for name in job.partitions),
            delayed={job: frozenset(tokens) for job, tokens in delayed.items()},
            awaited={job: frozenset(names) for job, names in awaited.items()},
        )

    def _token(self, job: JobInfo | None) -> str:
        words = [] if job is None else [job.name, *job.comment.split()]
        return next((word for word in words if word in self._tokens), "")

    def _left_to_slurm(self, partition: str, node: str, jobs: Sequence[Waiting]) -> bool:
        """Does Slurm take this node from a job of ours in this partition for all of these, and has just taken none?"""
        begun = any(not self._taken.isdisjoint(self._nodes.get(name, ())) for job in jobs for name in job.partitions)
        return not begun and self._tiers.slurm_takes(partition, jobs, node)

    def _gets(self, partition: str, node: str, jobs: Sequence[Waiting]) -> bool:
        """Do these get a node whatever we ask for in this partition? One that Slurm has taken from us for them, too:
        they come before ours, and it is theirs as soon as it is free."""
        taken = node in self._taken and self._tiers.slurm_takes(partition, jobs, node)
        return taken or self._left_to_slurm(partition, node, jobs)


def _allows(partition: PartitionInfo, job: JobInfo) -> bool:
    """The partition's own limits: what breaks one waits for another reason, unless it names several partitions."""
    too_long = partition.max_time_s is not None and job.time_limit_s is not None
    return (
        partition.up
        and not (too_long and (job.time_limit_s or 0.0) > (partition.max_time_s or 0.0))
        and (partition.max_nodes is None or job.num_nodes <= partition.max_nodes)
        and (not partition.requires_reservation or bool(job.reservation))
    )
