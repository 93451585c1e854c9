"""Courtesy to other users: where harvesting is allowed, how soon nodes are given back, and how long others waited."""

from fallow.config import Config
from fallow.core import records
from fallow.core.allocations import CANCEL_AGAIN_S, Allocation
from fallow.core.neighbour.needs import ExternalDemand, assess
from fallow.core.neighbour.permission import Visibility, nice_for, refusals, too_small_for
from fallow.core.neighbour.waiting import UNKNOWN, site_rules
from fallow.core.neighbour.watch import END_S, LEAVE_S, Delays, Memory, poll_interval_s, remember
from fallow.head.loop.turn import Turn
from fallow.head.state.registry import Registry, Run
from fallow.model import AllocationKind, AllocationState, ClusterConfig, ClusterState, Exit

DELAYS = "delays"
"""Key of the record of others' waiting times in the store."""

ALERT_POLLS = 2
"""Number of early polls after a run first trains or Slurm takes a node from us. The first shows jobs that came at the
same time. The second shows jobs that came while we left the node: they may have counted on it, too
(`core.neighbour.needs`)."""


def _without_histogram(fields: "records.Fields") -> "records.Fields":
    past = fields.pop("past")
    return fields | {"forgotten": sum(past["classes"].values()), "longest_s": past["max_s"]}


records.SCHEMAS[Delays] = 2
records.MIGRATIONS[Delays, 1] = _without_histogram


class Neighbours:
    """The head's watch over others' jobs, from poll to poll."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.refused_partitions: dict[str, str] = {}
        "partition -> reason why it is not harvested"
        self.nice = config.harvest.nice
        "value of `--nice` for requests"
        self.delays = Delays()
        self._alert = 0
        "number of early polls that are still due"
        self._taken_at = 0.0
        self._unpreempted: dict[str, frozenset[str]] = {}
        "partition -> its nodes from which Slurm preempts nobody, so that only we give them back; no empty sets"
        self._visibility = Visibility()
        self._memory = Memory()
        self._has_waiting_job = False
        "True if somebody waits for such a node whose job is over for us, and not for Slurm"

    def polled(self, turn: Turn, cluster: ClusterState, site: ClusterConfig | None) -> ExternalDemand:
        """Take in a poll. The planner decides later which of our nodes are given back.

        Args:
            turn: takes the effects.
            cluster: the poll.
            site: configuration of Slurm; None: not known yet.

        Returns:
            Others' demand for our nodes.
        """
        allocations = [a for run in turn.registry.on_slurm for a in run.allocations.values()]
        live, lost_state = [a for a in allocations if a.is_live], AllocationState.LOST
        # The rest of a user's batch script may run on in a base job. Of lost base jobs, those that the head submitted
        # are cancelled when they appear (`jobs.sweep`).
        head_jobs = (
            a for a in allocations if a.kind is AllocationKind.HARVEST or (a.state is lost_state and a.was_renewed)
        )
        ended_jobs = [a for a in head_jobs if not a.is_live]
        if cluster.at >= self._taken_at:
            self._alert = max(0, self._alert - 1)
        nodes = {p.partition: p.unpreempted if p.preempts else frozenset(p.nodes) for p in cluster.partitions}
        self._unpreempted = {name: some for name, some in nodes.items() if some}
        self._ask_permission(turn, cluster, site)
        rules, former_tokens = site_rules(site or UNKNOWN), [a.token for a in ended_jobs]
        demand = assess(cluster, live, former=former_tokens, passed_over=self._memory.passed_over, site=rules)
        self._memory = remember(self._memory, cluster.at, demand, rules.looks_again_s)
        tokens = frozenset[str]().union(*demand.delayed_jobs.values())
        self._has_waiting_job = any(a.token in tokens and self._is_ours_to_give(a) for a in ended_jobs)
        waits = self.delays.note(cluster, demand.delayed_jobs)
        for job in waits:
            text = f"job {job.job_id} of {job.user} has waited {job.waited_s:.1f} s for our nodes"
            turn.record(None, "delayed", text, job=job.job_id, user=job.user, waited_s=job.waited_s)
        if waits or demand.delayed_jobs:
            turn.notes[DELAYS] = records.encode(self.delays)
        return demand

    def poll_soon(self, at: float) -> None:
        """Ask for early polls. Args: at: Unix time; polls before it do not count."""
        self._alert, self._taken_at = ALERT_POLLS, at

    def interval_s(self, registry: Registry) -> float:
        """Interval between polls, given the nodes that we hold now."""
        return poll_interval_s(self._config.slurm.poll_interval_s, watchful=self._is_watchful(registry))

    def next_poll_s(self, registry: Registry, least_s: float = 0.0, failures: int = 0) -> float:
        """Seconds from the start of the last poll to the start of the next one.

        Args:
            registry: all runs, with the nodes that we hold.
            least_s, failures: as in `poll_interval_s`.
        """
        usual_s, watchful = self._config.slurm.poll_interval_s, self._is_watchful(registry)
        return poll_interval_s(usual_s, watchful=watchful, alert=self._alert > 0, least=least_s, failures=failures)

    def _is_watchful(self, registry: Registry) -> bool:
        """True if we hold nodes that only we can give back, or somebody waits for the end of our job on such a node."""
        live = (a for run in registry.current.values() for a in run.live_allocations() if a.is_harvested)
        return self._has_waiting_job or any(map(self._is_ours_to_give, live))

    def _is_ours_to_give(self, allocation: Allocation) -> bool:
        """Return True if only we can give back the nodes that the allocation has, or may get."""
        nodes = self._unpreempted.get(allocation.partition, frozenset())
        may_get = bool(nodes) and self._config.harvest.allow_without_preemption
        return not nodes.isdisjoint(allocation.nodes) if allocation.nodes else may_get

    def _ask_permission(self, turn: Turn, cluster: ClusterState, site: ClusterConfig | None) -> None:
        """Decide which partitions may be harvested with which `--nice`, and log changes."""
        harvest, permissions, former_reasons = self._config.harvest, self._config.site, self.refused_partitions
        # The check is not needed if the site allows harvesting where others' jobs cannot be seen.
        unseen = not permissions.harvest_unseen and self._visibility.look(cluster, site)
        reasons = refusals(cluster, site, are_jobs_hidden=unseen, allow_unfair=permissions.harvest_unfair)
        if not harvest.allow_without_preemption:
            # Other partitions are not harvested anyway, so they need no message.
            small_partitions = {p.partition for p in cluster.partitions if p.preempts and too_small_for(p)}
            reasons = {name: reason for name, reason in reasons.items() if name in small_partitions}
        partitions = harvest.partitions
        self.refused_partitions = {
            name: reason for name, reason in reasons.items() if not partitions or name in partitions
        }
        for name in sorted(former_reasons.keys() | self.refused_partitions.keys()):
            if former_reasons.get(name) != self.refused_partitions.get(name):
                reason = self.refused_partitions.get(name)
                text = f"is not harvested: {reason}" if reason else "may be harvested again"
                turn.record(None, "courtesy", f"partition {name} {text}")
        nice, self.nice = self.nice, nice_for(site, harvest.nice)
        if nice != self.nice:
            text = (
                f"requests are submitted with --nice={self.nice}: {harvest.nice} is too little for the site's weights"
            )
            turn.record(None, "courtesy", text)


def give_back(turn: Turn, run: Run, allocation: Allocation, reason: str) -> None:
    """Release a node for which somebody waits. Its members leave at the next step boundary, or within `LEAVE_S`."""
    if allocation.wanted_at is not None:
        return
    if allocation.state is AllocationState.RELEASING:
        turn.record(run, "release", f"{allocation.token} must leave soon: {reason}")
    turn.release_allocation(run, allocation, reason)
    allocation.wanted_at, allocation.kill_at = turn.now, turn.now + LEAVE_S
    if not allocation.agents:
        # Its script has not reached `fallow run` yet.
        turn.cancel(run, allocation, reason)


def enforce_departure(turn: Turn, run: Run, allocation: Allocation) -> None:
    """End an allocation that has not left in time: its workers first, then its job."""
    if (
        allocation.kill_at is None
        or turn.now < allocation.kill_at <= turn.now + CANCEL_AGAIN_S
        or not allocation.is_live
    ):
        return
    # A clock may be set back, so this is at most the present time.
    allocation.wanted_at = min(allocation.wanted_at or 0.0, turn.now)
    last_at = allocation.wanted_at + LEAVE_S + END_S
    if allocation.hosts and turn.now < last_at:
        turn.record(run, "release", f"{allocation.token} has not left in time and is ended: {allocation.reason}")
        turn.end_agents(allocation, Exit.NO_RESTART, allocation.reason, kill_after_s=0.0)
        allocation.kill_at = last_at
    else:
        # Repeated while the job exists: a scancel may have failed, or a head may have died before it.
        turn.cancel(run, allocation, allocation.reason)
        allocation.kill_at = turn.now + CANCEL_AGAIN_S
