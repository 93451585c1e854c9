"""Limits of accounts and QOS, and licences, that our harvest jobs share with the jobs of others. Pure.

Two rules keep our harvest jobs from blocking others. If a job waits for a limit that harvest jobs help to fill, harvest
jobs end, the newest first, until what the job needs is free. And harvest jobs leave a part of each known limit
(`[harvest] limit_reserve`) to others.
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
    startable_elements,
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
"""Limits of a single job, and of used-up time: the end of another job does not help."""

_LICENSES = "Licenses"
"""Reason of a job that waits for licences. A harvest job has the licences that its script asks for."""

_COUNTED = re.compile(r"(?:Grp|Max)(SubmitJobs|Jobs)(PU|PA)?|(?:Grp|Max)TRES(PU|PA)? (node|cpu|gres/gpu)")

_WORDS = {"node": "node", "cpu": "cpu", "gres/gpu": "gres", "Jobs": "job"}
"""Unit -> word in the reason of a job that waits for a limit of this unit."""


class LimitVerdict(msgspec.Struct, frozen=True):
    """What shared limits demand of one plan."""

    give_backs: tuple[GiveBack, ...] = ()
    withdrawals: Mapping[str, str] = {}
    "token of a request -> why it is withdrawn"
    max_more: Mapping[str, int] = {}
    "run -> number of further nodes that it may ask for; below 0: it has this many too many"
    reasons: Mapping[str, str] = {}
    "run -> limit that keeps it from asking for more"
    may_renew: bool = True
    "False: these runs do not renew nodes that are near the end of their time limit either"


Need = dict[str, int]
"""Unit (`cpu`, `gres/gpu`) -> use of one harvest job; a harvest job counts as 1 in any other unit."""


def waits_for_limit(job: JobInfo) -> bool:
    """Return True if a job waits for a limit that other jobs fill, so that one of these must end first."""
    reason = job.reason.strip("()")
    is_shared = reason == _LICENSES or (_SHARED.fullmatch(reason) and not _OF_ONE_JOB.search(reason))
    return job.state == "PENDING" and bool(is_shared)


def fills(our_job: JobInfo, waiting: JobInfo, partitions: Mapping[str, PartitionInfo]) -> bool:
    """Return True if our job counts under the limit for which another job waits."""
    reason = waiting.reason.strip("()")
    if reason == _LICENSES:
        return not our_job.licenses.keys().isdisjoint(waiting.licenses)
    same_user, same_account = our_job.user == waiting.user, our_job.account == waiting.account
    if reason.startswith("AssocGrp"):
        # A limit of a common parent account shows this reason, too.
        return same_user or same_account
    if reason.startswith("Assoc"):
        return same_user and same_account
    if not _qos_of(our_job, partitions) & _qos_of(waiting, partitions):
        return False
    return reason.startswith("QOSGrp") or (same_account if "PerAccount" in reason else same_user)


def _qos_of(job: JobInfo, partitions: Mapping[str, PartitionInfo]) -> set[str]:
    """QOS whose limits hold for a job: its own QOS and those of its partitions."""
    partition_qos = (partitions[name].qos for name in job.partition.split(",") if name in partitions)
    return {job.qos, *partition_qos} - {""}


# ---------------------------------------------------------------------------------------------------------------
# Jobs that wait for a limit
# ---------------------------------------------------------------------------------------------------------------


def yield_to_waiting(
    cluster: ClusterState,
    allocations: Sequence[Allocation],
    askers: Mapping[str, Asker],
    owner: OwnerView | None = None,
) -> LimitVerdict:
    """Give back nodes, and stop runs from asking, because a job waits for a limit that we help to fill.

    Args:
        cluster: one poll.
        allocations: every live allocation of every run.
        askers: run -> account and QOS of its harvest jobs.
        owner: limits as Slurm shows them; None: unknown.
    """
    tokens, limits = {a.token for a in allocations if a.is_harvested}, _limits(owner)
    waiting = [job for job in cluster.jobs if waits_for_limit(job) and not is_ours(job, tokens) and not picks_up(job)]
    waiting = [job for job in waiting if not any(limit.is_too_small_for(job) for limit in limits)]
    if not waiting:
        return LimitVerdict()
    partitions = {p.partition: p for p in cluster.partitions}
    jobs_by_token = _jobs_by_token(cluster, allocations)
    newest = sorted(
        (a for a in allocations if a.is_harvested and a.token in jobs_by_token),
        key=lambda a: (-(a.start_at or cluster.at), a.token),
    )
    outgoing = {a.token for a in newest if a.asked_at is not None or a.state is AllocationState.RELEASING}
    ended_jobs = [job for job in cluster.jobs if _has_just_left(job, cluster.at)]
    running = running_elements(cluster.jobs)
    give_backs: dict[str, GiveBack] = {}
    withdrawals: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for job in sorted(waiting, key=turn):
        why = f"job {job.job_id} of {job.user} waits for {job.reason.strip('()')}"
        for allocation in allocations:
            our_job = jobs_by_token.get(allocation.token)
            if our_job is not None and fills(_as_harvest_job(our_job, allocation, askers), job, partitions):
                reasons.setdefault(allocation.run, why)
        our_allocations = [a for a in newest if fills(jobs_by_token[a.token], job, partitions)]
        requests = [a for a in our_allocations if _is_request(a)]
        withdrawals |= {a.token: why for a in requests if a.asked_at is None}
        freed = [other for other in ended_jobs if fills(other, job, partitions)]
        for allocation in sorted(our_allocations, key=lambda a: a.token not in outgoing):
            if allocation in requests:
                continue
            if _is_enough(freed, job, startable_elements(job, running)):
                break
            freed.append(jobs_by_token[allocation.token])
            if allocation.token not in outgoing:
                outgoing.add(allocation.token)
                give_backs[allocation.token] = GiveBack(allocation.token, why, urgent=True)
        # What is freed for one job does not count for the next job.
        ended_jobs = [other for other in ended_jobs if other not in freed]
        newest = [a for a in newest if jobs_by_token[a.token] not in freed]
    return LimitVerdict(tuple(give_backs.values()), withdrawals, dict.fromkeys(reasons, 0), reasons, may_renew=False)


def resolve_askers(
    cluster: ClusterState, allocations: Sequence[Allocation], askers: Mapping[str, Asker]
) -> dict[str, Asker]:
    """Return the account and QOS of each run, with the defaults that Slurm shows for those that are not configured."""
    jobs_by_token, full_askers = _jobs_by_token(cluster, allocations), dict(askers)
    for allocation in sorted(allocations, key=lambda a: not a.is_harvested):
        job, asker = jobs_by_token.get(allocation.token), full_askers.get(allocation.run)
        if job is not None and asker is not None:
            full_askers[allocation.run] = Asker(asker.account or job.account, asker.qos or job.qos)
    return full_askers


def _jobs_by_token(cluster: ClusterState, allocations: Sequence[Allocation]) -> dict[str, JobInfo]:
    """Token -> job in the poll."""
    tokens = {a.token for a in allocations}
    live = [job for job in cluster.jobs if job.state not in ENDED_STATES]
    return {word: job for job in live for word in (*job.comment.split(), job.name) if word in tokens}


def _as_harvest_job(job: JobInfo, allocation: Allocation, askers: Mapping[str, Asker]) -> JobInfo:
    """A job of a run with the account and QOS of the run's harvest jobs, which those of a base job may not be."""
    asker = askers.get(allocation.run, Asker())
    if allocation.is_harvested:
        return job
    return replace(job, account=asker.account or job.account, qos=asker.qos or job.qos)


def _has_just_left(job: JobInfo, at: float) -> bool:
    """Return True for a harvest job that ended after Slurm last looked at the whole queue, as far as we know."""
    over = job.state in ENDED_STATES or job.state in ENDING
    return over and picks_up(job) and bool(job.nodes) and job.end_at is not None and at - job.end_at < LOOKS_AGAIN_S


def _is_enough(freed: Sequence[JobInfo], job: JobInfo, times: int) -> bool:
    """Return True if these harvest jobs free the jobs, nodes, CPUs and GPUs that `times` elements of a job need.

    For licences, only the kinds that the harvest jobs have count: they can free no others.
    """
    if job.reason.strip("()") == _LICENSES:
        licenses = Counter[str]()
        for each in freed:
            licenses.update(each.licenses)
        return bool(freed) and all(licenses[name] >= times * n for name, n in job.licenses.items() if name in licenses)
    cpus = sum(each.cpus_per_node * each.num_nodes for each in freed)
    gpus = sum(each.gpus_per_node * each.num_nodes for each in freed)
    return (
        len(freed) >= times * max(1, job.num_nodes)
        and cpus >= times * job.cpus_per_node * job.num_nodes
        and gpus >= times * job.gpus_per_node * job.num_nodes
    )


# ---------------------------------------------------------------------------------------------------------------
# The reserve of each limit
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit of jobs, nodes, CPUs or GPUs that Slurm tells."""

    view: LimitView
    unit: str
    by_qos: bool
    holder: str
    "account or QOS"
    user: str
    "user whose jobs count; empty: all users"
    is_above: bool
    "True: the account is a parent of the owner's accounts, since the owner has no share in it"

    def binds(self, asker: Asker, qos: Collection[str]) -> bool:
        """Return True if the limit may hold for harvest jobs of this account and QOS (empty: unknown default)."""
        if self.by_qos:
            return self.holder in qos or not asker.qos or self.holder == asker.qos
        return not asker.account or self.holder == asker.account or self.is_above

    def holds_for(self, job: JobInfo) -> bool:
        return self.user in ("", job.user) and (job.qos if self.by_qos else job.account) == self.holder

    def is_too_small_for(self, job: JobInfo) -> bool:
        """Return True if a job waits for this limit and asks for more than the limit: it can never start.

        Slurm keeps such a job in the queue, unless its QOS has DenyOnLimit (sacctmgr(1)).
        """
        reason = job.reason.strip("()").lower()
        is_meant = reason.startswith("assoc") != self.by_qos and _WORDS.get(self.unit, "?") in reason
        # Slurm shows CPUs and GPUs of a job per node, rounded up.
        rounded = max(0, job.num_nodes - 1) if self.unit in ("cpu", "gres/gpu") else 0
        return is_meant and self.holds_for(job) and self.takes(job) - rounded > self.view.limit

    def takes(self, job: JobInfo) -> int:
        """Use of the limit by a job, or by one element of an array, while it runs."""
        each = {"cpu": job.cpus_per_node, "gres/gpu": job.gpus_per_node, "node": 1}.get(self.unit)
        return 1 if each is None else each * job.num_nodes

    def used_by(self, job: JobInfo) -> int:
        """Present use of the limit by a job that is not a harvest job of ours."""
        if not self.holds_for(job):
            return 0
        if self.unit == "SubmitJobs":
            return array_elements(job.array_tasks)[0] if job.array_tasks else 1
        return self.takes(job) if job.state in ON_NODES else 0

    def our_use(self, our_allocations: Sequence[Allocation], needs: Mapping[str, Need], running: bool = False) -> int:
        """Use of the limit by our harvest jobs. Args: running: no pending ones if the limit is for running jobs."""
        counted = [a for a in our_allocations if not running or self.unit == "SubmitJobs" or a.state not in WAITING]
        return sum(count * needs[run].get(self.unit, 1) for run, count in Counter(a.run for a in counted).items())


def _limits(owner: OwnerView | None) -> list[_Limit]:
    if owner is None:
        return []
    accounts, limits = {share.account for share in owner.shares}, list[_Limit]()
    for view in owner.limits:
        counted = _COUNTED.fullmatch(view.name)
        if counted is not None and view.used is not None:
            kind, _, name = view.of.partition(" ")
            holder = name if kind == "QOS" else name.rpartition(" ")[2]
            user = owner.user if kind == "user" or "PU" in (counted[2], counted[3]) else ""
            is_above = kind != "QOS" and holder not in accounts
            limits.append(_Limit(view, counted[1] or counted[4], kind == "QOS", holder, user, is_above))
    return limits


class Reserve:
    """Computes how many more harvest jobs may be requested under the known limits.

    The reserve of a parent account's limit is larger while a job of another account waits that would fit without our
    jobs. The use by others is the larger of two figures: their jobs in the poll, and Slurm's own figure, which also
    counts child accounts.

    Args:
        reserve: part of each limit that is left to others.
    """

    def __init__(self, reserve: float = RESERVE) -> None:
        self._reserve = reserve
        self._owner_view: OwnerView | None = None
        self._others_use: list[int] = []
        "use of each limit by others at the time of `_owner_view`, in the order of its limits"

    def verdict(
        self,
        owner: OwnerView | None,
        cluster: ClusterState,
        allocations: Sequence[Allocation],
        demands: Sequence[Demand],
        askers: Mapping[str, Asker],
        whole_node_runs: Collection[str],
        qos: Collection[str],
    ) -> LimitVerdict:
        """Return what each run may ask for, and which nodes go back because our use is above a limit.

        Args:
            owner: limits as Slurm shows them; None: unknown.
            cluster: one poll.
            allocations: every live allocation of every run.
            demands: of the runs; earlier ones get their part first.
            askers: run -> account and QOS of its harvest jobs.
            whole_node_runs: runs whose harvest jobs take whole nodes.
            qos: QOS of the partitions that are harvested.
        """
        if owner is None or not owner.limits:
            return LimitVerdict()
        needs = {demand.run: _need(demand.kind, cluster, demand.run in whole_node_runs) for demand in demands}
        tokens = {a.token for a in allocations if a.is_harvested}
        # A node and its requested successor count once.
        our_allocations = [a for a in allocations if a.is_harvested and a.asked_at is None and a.run in needs]
        our_allocations = [a for a in our_allocations if a.replaces not in tokens]
        other_jobs = [job for job in cluster.jobs if job.state not in ENDED_STATES and not is_ours(job, tokens)]
        limits = _limits(owner)
        if owner is not self._owner_view:
            self._owner_view = owner
            self._others_use = [
                floor(each.view.used or 0.0) - each.our_use(our_allocations, needs, running=True) for each in limits
            ]
        accounts = {share.account for share in owner.shares}
        waiting = [job for job in other_jobs if _may_wait_above(job, accounts)]
        free_units: list[float] = []
        reserves: list[float] = []
        for limit, hidden in zip(limits, self._others_use, strict=True):
            max_units, used_units = limit.view.limit, max(hidden, sum(map(limit.used_by, other_jobs)))
            waiting_units = [limit.takes(job) for job in waiting] if limit.is_above else []
            reserves.append(
                max([max_units * self._reserve, *(n for n in waiting_units if used_units + n <= max_units)])
            )
            free_units.append(max_units - reserves[-1] - used_units - limit.our_use(our_allocations, needs))
        max_more: dict[str, int] = {}
        reasons: dict[str, str] = {}
        give_backs: list[GiveBack] = []
        for demand in demands:
            asker, need = askers.get(demand.run, Asker()), needs[demand.run]
            counts = {i: need.get(each.unit, 1) for i, each in enumerate(limits) if each.binds(asker, qos)}
            places = {i: floor(free_units[i] / count) for i, count in counts.items() if count}
            if not places:
                continue
            tightest = min(places, key=lambda i: (places[i], i))
            nodes_left, view = places[tightest], limits[tightest].view
            part = reserves[tightest] / view.limit if view.limit else self._reserve
            max_more[demand.run] = nodes_left
            reasons[demand.run] = f"{view.of}: {view.name}={view.limit:g}, of which {part:.0%} are left"
            run_allocations = sorted(
                (a for a in our_allocations if a.run == demand.run), key=lambda a: (-(a.start_at or 0.0), a.token)
            )
            for i in places:
                free_units[i] -= counts[i] * max(min(max(0, demand.nodes), nodes_left), -len(run_allocations))
            requests = [a for a in run_allocations if _is_request(a)]
            # Requests go first, then the newest nodes.
            excess = [a for a in run_allocations if a not in requests][: max(0, -nodes_left - len(requests))]
            give_backs += [
                GiveBack(a.token, f"our jobs use too much of a limit: {reasons[demand.run]}") for a in excess
            ]
        return LimitVerdict(tuple(give_backs), {}, max_more, reasons)


def cap_demands(demands: Iterable[Demand], verdicts: Sequence[LimitVerdict]) -> list[Demand]:
    """Return the demands, reduced to what these verdicts allow."""
    capped_demands: list[Demand] = []
    for demand in demands:
        binding = [verdict for verdict in verdicts if demand.run in verdict.max_more]
        nodes = min([demand.nodes, *(verdict.max_more[demand.run] for verdict in binding)])
        capped_demands.append(
            replace(demand, nodes=nodes, can_renew=demand.can_renew and all(verdict.may_renew for verdict in binding))
        )
    return capped_demands


def _is_request(allocation: Allocation) -> bool:
    """Return True if Slurm has given the allocation no node yet."""
    return allocation.state in WAITING and not allocation.is_booting


def _may_wait_above(job: JobInfo, accounts: Collection[str]) -> bool:
    """Return True for a job of another account that may wait for a limit of a common parent account."""
    by_account = waits_for_limit(job) and job.reason.strip("()").startswith("AssocGrp")
    return by_account and job.account not in accounts and not picks_up(job)


def _need(kind: Kind, cluster: ClusterState, whole_nodes: bool) -> Need:
    cpus, gpus = kind.cpus, kind.gpus
    if whole_nodes:
        nodes = [node for node in cluster.nodes if kind.suits(node)]
        cpus, gpus = (max(counts, default=0) for counts in ([n.cpus for n in nodes], [n.gpus for n in nodes]))
    return {"cpu": max(1, cpus), "gres/gpu": gpus}
