"""Limits of accounts and QOS, and licences, that our harvest jobs share with the jobs of others. Pure.

Two rules keep such a limit from being ours. Who waits for a limit that harvest jobs help to fill gets room: harvest
jobs end, the newest first, until what the waiting job needs is free. And harvest jobs never fill a limit: a part of
each one that Slurm tells (`[harvest] limit_reserve`) is left to others.
Reasons: squeue(1), JOB REASON CODES. Limits: https://slurm.schedmd.com/resource_limits.html.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor

import msgspec
from msgspec.structs import replace

from fallow.core.accounting.backoff import Asker
from fallow.core.allocations import WAITING, Allocation
from fallow.core.kinds import Kind
from fallow.core.neighbour.needs import GiveBack
from fallow.core.neighbour.waiting import (
    LOOKS_AGAIN_S,
    array_elements,
    is_ours,
    picks_up,
    running_elements,
    startable,
    turn,
)
from fallow.core.planning.rules import Demand
from fallow.core.states import ENDED_STATES, ENDING, ON_NODES
from fallow.model import AllocationState, ClusterState, JobInfo, LimitView, OwnerView, PartitionInfo

RESERVE = 0.25
"""Part of each limit that is left to others."""

_SHARED = re.compile(
    r"(Assoc(Grp|Max)|QOS(Grp|Max)|Max\w+Per(Account|User)|Association(Job|Resource)Limit|QOS(Job|Resource)Limit)\w*"
)
_OF_ONE_JOB = re.compile(r"PerJob|PerNode|Wall|NotSatisfied")
"""Limits of each job by itself, and of time that is over: no job that ends leaves room."""

_LICENSES = "Licenses"
"""The same for the cluster's licences, of which harvest jobs have as many as their script asks for."""

_COUNTED = re.compile(r"(?:Grp|Max)(SubmitJobs|Jobs)(PU|PA)?|(?:Grp|Max)TRES(PU|PA)? (node|cpu|gres/gpu)")

_WORDS = {"node": "node", "cpu": "cpu", "gres/gpu": "gres", "Jobs": "job"}
"""Unit -> word in the reasons of jobs that wait for a limit of it."""


class Room(msgspec.Struct, frozen=True):
    """What shared limits ask of one plan."""

    give_back: tuple[GiveBack, ...] = ()
    withdraw: Mapping[str, str] = {}
    "token of a request -> why it is withdrawn"
    most: Mapping[str, int] = {}
    "run -> nodes more that it may ask for; below 0: it has so many too many"
    because: Mapping[str, str] = {}
    "run -> what keeps it from asking for more"
    renews: bool = True
    "False: those runs do not even ask again for nodes whose time is nearly over"


Need = dict[str, int]
"""Unit (`cpu`, `gres/gpu`) -> what one harvest job counts for under a limit; it counts once for any other unit."""


def waits_for_limit(job: JobInfo) -> bool:
    """Return True if a job waits for a limit that others' jobs fill, so that one of them must end first."""
    reason = job.reason.strip("()")
    is_shared = reason == _LICENSES or (_SHARED.fullmatch(reason) and not _OF_ONE_JOB.search(reason))
    return job.state == "PENDING" and bool(is_shared)


def fills(ours: JobInfo, waiting: JobInfo, partitions: Mapping[str, PartitionInfo]) -> bool:
    """Return True if our job counts under the limit for which another job waits."""
    reason = waiting.reason.strip("()")
    if reason == _LICENSES:
        return not ours.licenses.keys().isdisjoint(waiting.licenses)
    same_user, same_account = ours.user == waiting.user, ours.account == waiting.account
    if reason.startswith("AssocGrp"):
        # A limit of an account that is above both of theirs shows the same reason.
        return same_user or same_account
    if reason.startswith("Assoc"):
        return same_user and same_account
    if not _qos_of(ours, partitions) & _qos_of(waiting, partitions):
        return False
    return reason.startswith("QOSGrp") or (same_account if "PerAccount" in reason else same_user)


def _qos_of(job: JobInfo, partitions: Mapping[str, PartitionInfo]) -> set[str]:
    """QOS whose limits hold for a job: its own and those of its partitions."""
    those = (partitions[name].qos for name in job.partition.split(",") if name in partitions)
    return {job.qos, *those} - {""}


# ---------------------------------------------------------------------------------------------------------------
# Somebody waits
# ---------------------------------------------------------------------------------------------------------------


def yielded(
    cluster: ClusterState,
    allocations: Sequence[Allocation],
    askers: Mapping[str, Asker],
    owner: OwnerView | None = None,
) -> Room:
    """Say what is given back, and who asks for nothing, because a job waits for a limit that we help to fill.

    Args:
        cluster: one poll.
        allocations: every live allocation of every run.
        askers: run -> in whose name its harvest jobs are.
        owner: what Slurm told of the limits; None: nothing.
    """
    tokens, limits = {a.token for a in allocations if a.harvested}, _limits(owner)
    waiting = [job for job in cluster.jobs if waits_for_limit(job) and not is_ours(job, tokens) and not picks_up(job)]
    waiting = [job for job in waiting if not any(limit.is_too_small_for(job) for limit in limits)]
    if not waiting:
        return Room()
    partitions = {p.partition: p for p in cluster.partitions}
    shown = _shown(cluster, allocations)
    newest = sorted(
        (a for a in allocations if a.harvested and a.token in shown),
        key=lambda a: (-(a.start_at or cluster.at), a.token),
    )
    going = {a.token for a in newest if a.asked_at is not None or a.state is AllocationState.RELEASING}
    left = [job for job in cluster.jobs if _has_just_left(job, cluster.at)]
    running = running_elements(cluster.jobs)
    give_back: dict[str, GiveBack] = {}
    withdraw: dict[str, str] = {}
    because: dict[str, str] = {}
    for job in sorted(waiting, key=turn):
        why = f"job {job.job_id} of {job.user} waits for {job.reason.strip('()')}"
        for allocation in allocations:
            ours = shown.get(allocation.token)
            if ours is not None and fills(_asked_as(ours, allocation, askers), job, partitions):
                because.setdefault(allocation.run, why)
        mine = [a for a in newest if fills(shown[a.token], job, partitions)]
        requests = [a for a in mine if _is_request(a)]
        withdraw |= {a.token: why for a in requests if a.asked_at is None}
        freed = [other for other in left if fills(other, job, partitions)]
        for allocation in sorted(mine, key=lambda a: a.token not in going):
            if allocation in requests:
                continue
            if _enough(freed, job, startable(job, running)):
                break
            freed.append(shown[allocation.token])
            if allocation.token not in going:
                going.add(allocation.token)
                give_back[allocation.token] = GiveBack(allocation.token, why, urgent=True)
        # What is freed for one job is not there for the next one.
        left = [other for other in left if other not in freed]
        newest = [a for a in newest if shown[a.token] not in freed]
    return Room(tuple(give_back.values()), withdraw, dict.fromkeys(because, 0), because, renews=False)


def named(cluster: ClusterState, allocations: Sequence[Allocation], askers: Mapping[str, Asker]) -> dict[str, Asker]:
    """Return in whose name each run asks, with the defaults that Slurm shows in place of what nobody said."""
    shown, found = _shown(cluster, allocations), dict(askers)
    for allocation in sorted(allocations, key=lambda a: not a.harvested):
        job, asker = shown.get(allocation.token), found.get(allocation.run)
        if job is not None and asker is not None:
            found[allocation.run] = Asker(asker.account or job.account, asker.qos or job.qos)
    return found


def _shown(cluster: ClusterState, allocations: Sequence[Allocation]) -> dict[str, JobInfo]:
    """Token -> the job that Slurm shows for it."""
    tokens = {a.token for a in allocations}
    live = [job for job in cluster.jobs if job.state not in ENDED_STATES]
    return {word: job for job in live for word in (*job.comment.split(), job.name) if word in tokens}


def _asked_as(shown: JobInfo, allocation: Allocation, askers: Mapping[str, Asker]) -> JobInfo:
    """A job of a run as its harvest jobs are: a base job may be in another account and QOS."""
    asker = askers.get(allocation.run, Asker())
    if allocation.harvested:
        return shown
    return replace(shown, account=asker.account or shown.account, qos=asker.qos or shown.qos)


def _has_just_left(job: JobInfo, at: float) -> bool:
    """Return True for a harvest job that ended so lately that Slurm may not have looked at who waits since."""
    over = job.state in ENDED_STATES or job.state in ENDING
    return over and picks_up(job) and bool(job.nodes) and job.end_at is not None and at - job.end_at < LOOKS_AGAIN_S


def _enough(freed: Sequence[JobInfo], job: JobInfo, times: int) -> bool:
    """Do these harvest jobs leave what so many elements of a job need: as many jobs, nodes, CPUs and GPUs?

    Of licences as many of each as it needs, of which they have any: the others are not theirs to leave.
    """
    if job.reason.strip("()") == _LICENSES:
        left = Counter[str]()
        for each in freed:
            left.update(each.licenses)
        return bool(freed) and all(left[name] >= times * n for name, n in job.licenses.items() if name in left)
    cpus = sum(each.cpus_per_node * each.num_nodes for each in freed)
    gpus = sum(each.gpus_per_node * each.num_nodes for each in freed)
    return (
        len(freed) >= times * max(1, job.num_nodes)
        and cpus >= times * job.cpus_per_node * job.num_nodes
        and gpus >= times * job.gpus_per_node * job.num_nodes
    )


# ---------------------------------------------------------------------------------------------------------------
# Nobody waits: a part of each limit is left to others
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit of jobs, nodes, CPUs or GPUs that Slurm tells."""

    shown: LimitView
    unit: str
    by_qos: bool
    whose: str
    "account or QOS"
    user: str
    "whose jobs alone count; empty: everybody's"
    is_above: bool
    "of an account in which the owner has no jobs, so it is above one of theirs"

    def binds(self, asker: Asker, qos: Collection[str]) -> bool:
        """Does it hold for harvest jobs in this name? Where the name is a default that nobody tells, it may."""
        if self.by_qos:
            return self.whose in qos or not asker.qos or self.whose == asker.qos
        return not asker.account or self.whose == asker.account or self.is_above

    def holds_for(self, job: JobInfo) -> bool:
        return self.user in ("", job.user) and (job.qos if self.by_qos else job.account) == self.whose

    def is_too_small_for(self, job: JobInfo) -> bool:
        """Return True if a job waits for it and asks for more than all of it: no job that ends lets it start.

        Slurm keeps such a job in the queue, unless its QOS has DenyOnLimit (sacctmgr(1)).
        """
        reason = job.reason.strip("()").lower()
        is_meant = reason.startswith("assoc") != self.by_qos and _WORDS.get(self.unit, "?") in reason
        # CPUs and GPUs of a job are shown by node, rounded up.
        rounded = max(0, job.num_nodes - 1) if self.unit in ("cpu", "gres/gpu") else 0
        return is_meant and self.holds_for(job) and self.takes(job) - rounded > self.shown.limit

    def takes(self, job: JobInfo) -> int:
        """What a job, or one element of an array, counts for while it runs."""
        each = {"cpu": job.cpus_per_node, "gres/gpu": job.gpus_per_node, "node": 1}.get(self.unit)
        return 1 if each is None else each * job.num_nodes

    def used_by(self, job: JobInfo) -> int:
        """What a job of somebody else, or of normal priority, takes of it now."""
        if not self.holds_for(job):
            return 0
        if self.unit == "SubmitJobs":
            return array_elements(job.array_tasks)[0] if job.array_tasks else 1
        return self.takes(job) if job.state in ON_NODES else 0

    def ours(self, ours: Sequence[Allocation], needs: Mapping[str, Need], running: bool = False) -> int:
        """What harvest jobs take of it; `running`: those alone that Slurm counts, where only running ones count."""
        counted = [a for a in ours if not running or self.unit == "SubmitJobs" or a.state not in WAITING]
        return sum(count * needs[run].get(self.unit, 1) for run, count in Counter(a.run for a in counted).items())


def _limits(owner: OwnerView | None) -> list[_Limit]:
    if owner is None:
        return []
    accounts, found = {share.account for share in owner.shares}, list[_Limit]()
    for shown in owner.limits:
        counted = _COUNTED.fullmatch(shown.name)
        if counted is not None and shown.used is not None:
            kind, _, name = shown.of.partition(" ")
            whose = name if kind == "QOS" else name.rpartition(" ")[2]
            user = owner.user if kind == "user" or "PU" in (counted[2], counted[3]) else ""
            is_above = kind != "QOS" and whose not in accounts
            found.append(_Limit(shown, counted[1] or counted[4], kind == "QOS", whose, user, is_above))
    return found


class Reserve:
    """How many harvest jobs more may be asked for under the limits that Slurm tells.

    Of a limit of an account above ours more is left where a job of another account waits that would fit without ours.
    Others' jobs are counted in each poll, and by Slurm's own figure, which counts accounts below an account too.

    Args:
        reserve: part of each limit that is left to others.
    """

    def __init__(self, reserve: float = RESERVE) -> None:
        self._reserve = reserve
        self._told: OwnerView | None = None
        self._hidden: list[int] = []
        "of each limit: what others used when Slurm told it"

    def room(
        self,
        owner: OwnerView | None,
        cluster: ClusterState,
        allocations: Sequence[Allocation],
        demands: Sequence[Demand],
        askers: Mapping[str, Asker],
        whole: Collection[str],
        qos: Collection[str],
    ) -> Room:
        """Return what each run may ask for, and what is given back because there is too much of ours.

        Args:
            owner: what Slurm told of the limits; None: nothing.
            cluster: one poll.
            allocations: every live allocation of every run.
            demands: of the runs, in the order in which they get what is left.
            askers: run -> in whose name its harvest jobs are.
            whole: runs whose harvest jobs take whole nodes.
            qos: of partitions in which jobs are asked for.
        """
        if owner is None or not owner.limits:
            return Room()
        needs = {demand.run: _need(demand.kind, cluster, demand.run in whole) for demand in demands}
        tokens = {a.token for a in allocations if a.harvested}
        # A node that is asked for again counts once.
        ours = [a for a in allocations if a.harvested and a.asked_at is None and a.run in needs]
        ours = [a for a in ours if a.replaces not in tokens]
        others = [job for job in cluster.jobs if job.state not in ENDED_STATES and not is_ours(job, tokens)]
        limits = _limits(owner)
        if owner is not self._told:
            self._told = owner
            self._hidden = [floor(each.shown.used or 0.0) - each.ours(ours, needs, running=True) for each in limits]
        accounts = {share.account for share in owner.shares}
        waiting = [job for job in others if _may_wait_above(job, accounts)]
        left: list[float] = []
        reserves: list[float] = []
        for limit, hidden in zip(limits, self._hidden, strict=True):
            most, used = limit.shown.limit, max(hidden, sum(map(limit.used_by, others)))
            asked = [limit.takes(job) for job in waiting] if limit.is_above else []
            reserves.append(max([most * self._reserve, *(n for n in asked if used + n <= most)]))
            left.append(most - reserves[-1] - used - limit.ours(ours, needs))
        rooms: dict[str, int] = {}
        because: dict[str, str] = {}
        give_back: list[GiveBack] = []
        for demand in demands:
            asker, need = askers.get(demand.run, Asker()), needs[demand.run]
            counts = {i: need.get(each.unit, 1) for i, each in enumerate(limits) if each.binds(asker, qos)}
            places = {i: floor(left[i] / count) for i, count in counts.items() if count}
            if not places:
                continue
            tightest = min(places, key=lambda i: (places[i], i))
            room, shown = places[tightest], limits[tightest].shown
            part = reserves[tightest] / shown.limit if shown.limit else self._reserve
            rooms[demand.run] = room
            because[demand.run] = f"{shown.of}: {shown.name}={shown.limit:g}, of which {part:.0%} are left"
            mine = sorted((a for a in ours if a.run == demand.run), key=lambda a: (-(a.start_at or 0.0), a.token))
            for i in places:
                left[i] -= counts[i] * max(min(max(0, demand.nodes), room), -len(mine))
            waits = [a for a in mine if _is_request(a)]
            # Requests go first, then the newest nodes.
            held = [a for a in mine if a not in waits][: max(0, -room - len(waits))]
            give_back += [GiveBack(a.token, f"too much of a limit is ours: {because[demand.run]}") for a in held]
        return Room(tuple(give_back), {}, rooms, because)


def capped(demands: Iterable[Demand], rooms: Sequence[Room]) -> list[Demand]:
    """Return the demands, no larger than shared limits allow."""
    out: list[Demand] = []
    for demand in demands:
        binding = [room for room in rooms if demand.run in room.most]
        nodes = min([demand.nodes, *(room.most[demand.run] for room in binding)])
        out.append(replace(demand, nodes=nodes, renew=demand.renew and all(room.renews for room in binding)))
    return out


def _is_request(allocation: Allocation) -> bool:
    """Return True for one that Slurm has given no node yet."""
    return allocation.state in WAITING and not allocation.is_booting


def _may_wait_above(job: JobInfo, accounts: Collection[str]) -> bool:
    """Return True for a job of another account that may wait for a limit above both: Slurm does not say."""
    by_account = waits_for_limit(job) and job.reason.strip("()").startswith("AssocGrp")
    return by_account and job.account not in accounts and not picks_up(job)


def _need(kind: Kind, cluster: ClusterState, whole: bool) -> Need:
    cpus, gpus = kind.cpus, kind.gpus
    if whole:
        nodes = [node for node in cluster.nodes if kind.suits(node)]
        cpus, gpus = (max(counts, default=0) for counts in ([n.cpus for n in nodes], [n.gpus for n in nodes]))
    return {"cpu": max(1, cpus), "gres/gpu": gpus}
