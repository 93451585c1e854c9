"""One round of harvesting: take in a poll, let the planner decide, and turn its plan into requests and releases."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import structlog
from msgspec.structs import astuple, replace

from fallow.config import Config
from fallow.core import records
from fallow.core.accounting.backoff import Asker, Backoff, Scope, base_job, harvest_jobs, scope_of
from fallow.core.accounting.cancelled import awaits_verdict
from fallow.core.accounting.launch_failures import MAX_LAUNCH_FAILURES, MAX_ROUNDS
from fallow.core.allocations import WAITING, Allocation, begin_sbatch, end_sbatch
from fallow.core.kinds import may_use, with_reservations
from fallow.core.membership.messages import Unreadable
from fallow.core.neighbour.needs import ExternalDemand, GiveBack
from fallow.core.neighbour.preemption import as_for_us
from fallow.core.neighbour.watch import Delays
from fallow.core.planning.knowledge import Experience, Learner
from fallow.core.planning.plan import plan
from fallow.core.planning.requests import Ask
from fallow.core.planning.rules import MIN_PENDING, Demand, HarvestRules, current_rules, harvestable_partitions
from fallow.core.planning.shared_limits import Reserve, cap_demands, resolve_askers, yield_to_waiting
from fallow.core.planning.situation import Situation
from fallow.core.planning.withdrawals import Withdraw
from fallow.core.submission.sbatch import takes_whole_nodes
from fallow.files import Paths
from fallow.head.loop.turn import Turn
from fallow.head.slurm import accounts, jobs
from fallow.head.slurm.demands import (
    budget_left_node_s,
    demand,
    estimate,
    keep_within_budget,
    note_base_hold,
    renew_base,
)
from fallow.head.slurm.gains import gains
from fallow.head.slurm.neighbours import DELAYS, Neighbours, give_back
from fallow.head.slurm.pace import keep_pace
from fallow.head.state.registry import Registry, Run, ordered
from fallow.model import (
    AllocationKind,
    ClusterConfig,
    ClusterState,
    Estimate,
    Exit,
    FallowError,
    JobRequest,
    OwnerView,
    PartitionInfo,
    RunSpec,
)
from fallow.slurm.parse import folded, nodes

log = structlog.get_logger("fallow.head")

T = TypeVar("T", bound=msgspec.Struct)

TRIAL = "fallow-trial"
"""Token of an allocation whose submission is only tested."""

EXPERIENCE, BACKOFF = "experience", "backoff"
"""Keys of these records in the store."""

WRITE_EVERY_S = 300.0
"""Interval between writes of what was learned. It is also written when the head ends and when a run's pause changes.
Statistics since the last write are lost if the head is killed."""

REFUSALS = 3
"""Number of refused submissions in a row, with the pauses of `core.accounting.backoff` between them, after which a
run's harvesting pauses (HyperQueue pauses after 10)."""

records.SCHEMAS |= {Experience: 1, Backoff: 2}
# Forget the pauses of an older Fallow: none lasts longer than an hour.
records.MIGRATIONS[Backoff, 1] = lambda _: msgspec.to_builtins(Backoff())


class Harvest:
    """Keeps allocations and Slurm's jobs in step, and requests nodes for all runs."""

    def __init__(self, config: Config, groups: frozenset[str] | None = None) -> None:
        """Args: groups: Unix groups of the owner; None: not known."""
        self._config = config
        self._configured = _configured(config, groups)
        self._learner = Learner()
        self.knowledge = self._learner.knowledge
        self._reserve = Reserve(config.harvest.limit_reserve)
        self._written_at = 0.0
        self.neighbours = Neighbours(config)
        self.interval_s = config.slurm.poll_interval_s
        "present interval between polls"
        self.stopped = ""
        "reason why the site has stopped harvesting; empty: not stopped"
        self.owner: OwnerView | None = None
        "limits of accounts and QOS; None: Slurm has not told them"
        self.cluster: ClusterState | None = None
        "the last poll, corrected by `core.neighbour.preemption`"
        self._site: ClusterConfig | None = None
        self._external = ExternalDemand()
        "nodes that others' jobs need, as of the last poll"
        self.unused: dict[str, str] = {}
        "idle node -> reason why no run uses it, as of the last plan"

    def recall(self, notes: Mapping[str, bytes]) -> None:
        """Take over what an earlier head has learned. Unreadable notes are ignored."""
        self.knowledge.experience = _read(notes.get(EXPERIENCE), Experience)
        self.knowledge.backoff = _read(notes.get(BACKOFF), Backoff)
        self.neighbours.delays = _read(notes.get(DELAYS), Delays)
        # Nobody has polled since the earlier head.
        self.neighbours.delays.polled_at = None

    def note(self, turn: Turn) -> None:
        """Have what was learned written with this turn."""
        self._written_at = turn.at
        turn.notes[EXPERIENCE] = records.encode(self.knowledge.experience)
        turn.notes[BACKOFF] = records.encode(self.knowledge.backoff)

    def rules(self, now: float, site: ClusterConfig | None) -> HarvestRules:
        """Rules for requests at Unix time `now`."""
        slurm = self._config.slurm
        return current_rules(
            replace(self._configured, refusals=self.neighbours.refused_partitions, stop_reason=self.stopped),
            site,
            self.knowledge.experience,
            now,
            self.interval_s,
            max_pending=self._config.harvest.max_pending,
            poll_interval_s=slurm.poll_interval_s,
            submits_per_min=slurm.submits_per_min,
            limits_known=self.owner is not None,
        )

    def set_stop_reason(self, turn: Turn, why: str) -> None:
        """Stop harvesting and give everything back, for the reason `why`; empty: go on with the next poll."""
        former_reason, self.stopped = self.stopped, why
        if why:
            turn.record(None, "stop", f"nothing is harvested: {why}")
        elif former_reason:
            turn.record(None, "stop", "nodes are harvested again: the stop file is gone")
        turn.for_each(turn.registry.on_slurm if why else (), "stop", lambda run: give_all_back(turn, run, why))

    # -- polls and plans ------------------------------------------------------------------------------------------

    def polled(self, turn: Turn, cluster: ClusterState, site: ClusterConfig | None) -> None:
        """Take in a poll, then plan. `site` is None until Slurm has told its configuration."""
        cluster = as_for_us(cluster, site, self._config.harvest.qos)
        self.cluster, self._site = cluster, site
        jobs.take_in(turn, cluster, self.knowledge.backoff)
        accounts.settle(turn, cluster.at)
        turn.for_each(turn.registry.current.values(), "budget", lambda run: keep_within_budget(turn, run, cluster.at))
        with turn.contain_errors("neighbours"):
            self._external = self.neighbours.polled(turn, cluster, site)
        with turn.contain_errors("orphans"):
            jobs.sweep(turn, cluster, frozenset[str]().union(*self._external.delayed_jobs.values()))
        with turn.contain_errors("plan"):
            self.interval_s = self.neighbours.interval_s(turn.registry)
            rules = self.rules(cluster.at, site)
            partitions = harvestable_partitions(cluster, rules)
            self._learn(turn, cluster, partitions)
            self._plan(turn, cluster, rules, partitions)

    def _learn(self, turn: Turn, cluster: ClusterState, partitions: Sequence[PartitionInfo]) -> None:
        our_allocations = ((run, a) for run in turn.registry.on_slurm for a in run.allocations.values())
        harvest = [(a, run.asker_of(a)) for run, a in our_allocations if a.is_harvested]
        names = {p.partition for p in partitions}
        for run_id, text in self._learner.take_in(cluster, harvest, names, turn.now):
            turn.record(turn.registry.runs[run_id], "backoff", text)
        if turn.at - self._written_at > WRITE_EVERY_S:
            self.note(turn)

    def _plan(
        self, turn: Turn, cluster: ClusterState, rules: HarvestRules, partitions: Sequence[PartitionInfo]
    ) -> None:
        """Plan the next interval and carry the plan out. `partitions`: those that may be harvested."""
        runs, knowledge = {run.id: run for run in turn.registry.on_slurm}, self.knowledge
        cluster = with_reservations(cluster, {run.spec.harvest_given.get("reservation", "") for run in runs.values()})
        if self.stopped:
            # A submission of unknown outcome may have become a job.
            turn.for_each(runs.values(), "stop", lambda run: give_all_back(turn, run, self.stopped))
        put_off = set[str]()

        def look(run: Run) -> None:
            if not run.ended and self._is_put_off(turn, run):
                put_off.add(run.id)

        turn.for_each(runs.values(), "pause", look)
        # Wait until Slurm tells whether the base job was preempted, or cancelled by its owner.
        undecided_runs = (
            a.run for run in runs.values() for a in run.bases if a.was_warned and awaits_verdict(a, turn.now)
        )
        put_off.update(undecided_runs)
        # Base jobs come first: their nodes need not be harvested.
        asking_runs = [run for run in runs.values() if run.id not in put_off]
        turn.for_each(asking_runs, "base job", lambda run: renew_base(turn, run, cluster.at, knowledge.backoff))
        known_nodes = {node.node: node for node in cluster.nodes}
        start_s = knowledge.experience.wait_s(cluster.at) + knowledge.experience.start_s(cluster.at)
        gains_by_run = gains(turn.registry.runs.values(), cluster.at, start_s)
        demands = list[Demand]()

        def want(run: Run) -> None:
            run_demand = demand(run, known_nodes, cluster.at, asks=run.id not in put_off)
            demands.append(replace(_limit_after_failures(run, run_demand), worth=gains_by_run[run.id].worth))

        turn.for_each([runs[name] for name in gains_by_run], "demand", want)
        live = [a for run in runs.values() for a in run.live_allocations()]
        demands, external = self._within_limits(turn, runs, live, cluster, demands, partitions)
        live = [a for a in live if a.is_live]
        knowledge.unschedulable = knowledge.unschedulable.after_poll(cluster)
        excluded = {a.token: frozenset(nodes(a.exclude)) for a in live if a.exclude and a.state in WAITING}
        result = plan(Situation(cluster, demands, live, rules, knowledge, external, excluded))
        knowledge.backoff, knowledge.unschedulable = result.knowledge.backoff, result.knowledge.unschedulable
        allocations_by_token = {a.token: a for a in live}
        for action in result.actions:
            if isinstance(action, Ask):
                turn.for_each([runs[action.run]], "request", partial(_submit, turn, action))
            elif action.token in allocations_by_token:  # demand of an earlier poll may name an ended allocation
                allocation = allocations_by_token[action.token]
                turn.for_each([runs[allocation.run]], "give back", partial(_give_up_node, turn, action, allocation))
        self.unused = dict(result.unused)

        def update_pace(run: Run) -> None:
            run.gain, run.target = gains_by_run.get(run.id), result.targets.get(run.id)
            if run.id not in put_off and not self.stopped:
                limit = 1 if run.failures >= MAX_LAUNCH_FAILURES else min(MIN_PENDING, rules.max_pending)
                keep_pace(turn, run, cluster, budget_left_node_s(run, cluster.at), limit, knowledge.backoff, rules)

        turn.for_each(runs.values(), "pace", update_pace)

    def _within_limits(
        self,
        turn: Turn,
        runs: Mapping[str, Run],
        live: Sequence[Allocation],
        cluster: ClusterState,
        demands: Sequence[Demand],
        partitions: Sequence[PartitionInfo],
    ) -> tuple[list[Demand], ExternalDemand]:
        """Leave to others their part of the limits of accounts and QOS.

        Returns:
            The reduced demands, and others' demand including the nodes that are given back because of a limit.
        """
        askers = resolve_askers(cluster, live, {run.id: run.asker for run in runs.values()})
        qos = {p.qos for p in partitions} - {""}
        whole_node_runs = {run.id for run in runs.values() if takes_whole_nodes(run.spec)}
        limit_waits = yield_to_waiting(cluster, live, askers, self.owner)
        reserve = self._reserve.verdict(self.owner, cluster, live, demands, askers, whole_node_runs, qos)
        for run in runs.values():
            former_limit, run.limited_by = run.limited_by, limit_waits.reasons.get(run.id, "")
            if run.limited_by not in ("", former_limit):
                turn.record(run, "limit", f"no nodes are requested: {run.limited_by}")
        for allocation in live:
            if allocation.token in limit_waits.withdrawals:
                _withdraw(turn, runs[allocation.run], allocation, limit_waits.withdrawals[allocation.token])
        external = self._external
        returning = {request.token for request in external.give_backs}
        more_give_backs = {
            request.token: request
            for request in (*reserve.give_backs, *limit_waits.give_backs)
            if request.token not in returning
        }
        give_backs = (*external.give_backs, *more_give_backs.values())
        return cap_demands(demands, (limit_waits, reserve)), replace(external, give_backs=give_backs)

    def _is_put_off(self, turn: Turn, run: Run) -> bool:
        """True if it is too early to request nodes, because the last jobs failed or lack their keys."""
        launch_failures, failures = run.record.fruitless, run.failures
        backoff, job_key = self.knowledge.backoff, harvest_jobs(run.id)
        former_failures, run.failures_seen = run.failures_seen, failures
        if former_failures is None:
            former_failures = failures if launch_failures.rounds else 0
        is_worse = failures > max(former_failures, MAX_LAUNCH_FAILURES - 1) and not run.record.paused
        if not failures:
            backoff.resume(job_key)
            launch_failures.rounds = 0
        elif is_worse and turn.now >= backoff.put_off_until(job_key):
            launch_failures.rounds += 1
            turn.dirty.add(run.id)
            reason = f"{failures} jobs in a row failed to start training"
            if launch_failures.rounds > MAX_ROUNDS:
                reason += f", with growing pauses between them; to try again: fallow resume {run.id}"
                turn.pause_requests(run, f"{reason}; the last: {launch_failures.last or run.root.message}")
            else:
                backoff.put_off(job_key, turn.now)
                self.note(turn)
                wait_s = backoff.put_off_until(job_key) - turn.now
                turn.record(run, "pause", f"{reason}; the next one is tried in {wait_s:.0f} s")
        return turn.now < max(backoff.put_off_until(job_key), run.keys_retry_at)

    # -- submissions and their outcomes ---------------------------------------------------------------------------

    def request(self, paths: Paths, run: Run, allocation: Allocation) -> JobRequest:
        return jobs.job_request(self._config, paths, run, allocation, self.neighbours.nice)

    def send(self, turn: Turn, run: Run, token: str) -> bool:
        """Mark an allocation as sent to sbatch; False: the allocation is no longer wanted."""
        allocation = run.allocations.get(token)
        if allocation is None:
            return False
        backoff_reason = self.knowledge.backoff.words(run.asker_of(allocation), allocation.partition, turn.now)
        if allocation.is_queued and allocation.kind is AllocationKind.HARVEST and backoff_reason:
            turn.record(run, "withdraw", f"{token}, not submitted yet: {backoff_reason}")
            turn.cancel(run, allocation, backoff_reason)
        if not begin_sbatch(allocation, turn.now):
            return False
        turn.dirty.add(run.id)
        return True

    def note_submission(self, turn: Turn, run: Run, token: str, job_id: str) -> None:
        jobs.submitted(turn, run, token, job_id)
        if run.allocations[token].kind is AllocationKind.BASE:
            self.knowledge.backoff.resume(base_job(run.id))
            self.note(turn)

    def note_refusal(self, turn: Turn, run: Run, token: str, reason: str) -> None:
        """Note that Slurm refused a submission. A run that is refused in every usable partition pauses until somebody
        resumes it."""
        allocation, refusals, is_news = run.allocations[token], run.record.refusals, True
        turn.registry.end_allocation(run, allocation, reason)
        if allocation.kind is AllocationKind.HARVEST:
            asker = run.asker_of(allocation)
            is_news = self._strike(turn, run, asker, allocation.partition, allocation.minutes, reason)
        else:
            self.knowledge.backoff.put_off(base_job(run.id), turn.now)
            # This is rare, and the next head must know the pause even if this head is killed.
            self.note(turn)
            note_base_hold(turn, run, f"Slurm refused it and the head tries again within the hour: {reason}")
        if is_news and scope_of(reason) not in (Scope.OWNER, Scope.LENGTH):
            # The other scopes are limits that pass as others' jobs end, or with a shorter request.
            place = allocation.partition if allocation.kind is AllocationKind.HARVEST else ""
            refusals[place] = refusals.get(place, 0) + 1
        turn.record(run, "refused", f"{token}: Slurm refused it: {reason}")
        usable_partitions: list[PartitionInfo] = []
        if self.cluster is not None:
            usable_partitions = _usable(
                run, harvestable_partitions(self.cluster, self.rules(self.cluster.at, self._site))
            )
        if _is_refused_everywhere(refusals, {p.partition for p in usable_partitions}) and not run.record.harvest_paused:
            turn.pause_requests(run, f"Slurm refused {REFUSALS} submissions in a row: {reason}")

    def note_unknown_outcome(self, turn: Turn, run: Run, token: str, reason: str) -> None:
        """Note that sbatch gave no clear answer. The job may exist, so it is never submitted twice."""
        end_sbatch(run.allocations[token], turn.now)
        turn.record(run, "unknown", f"{token}: it is unknown whether Slurm has its job ({reason}); polls will show it")

    def note_trial(self, turn: Turn, run_id: str, partition: str, reason: str) -> None:
        """Note that Slurm would refuse harvest jobs of a run. None are submitted there for a while."""
        run = turn.registry.runs[run_id]
        turn.record(run, "refused", f"harvest jobs in {partition} would be refused: {reason}")
        self._strike(turn, run, run.asker, partition, None, reason)

    def _strike(self, turn: Turn, run: Run, asker: Asker, partition: str, minutes: int | None, reason: str) -> bool:
        """Note a refusal for back-off. Return False if the account or partition was already avoided."""
        if text := self._learner.strike(asker, partition, minutes, reason, turn.now):
            turn.record(run, "backoff", text)
            return True
        return scope_of(reason) is Scope.NOTHING

    # -- hypothetical requests ------------------------------------------------------------------------------------

    def example(self, run: Run) -> Allocation | str:
        """A harvest allocation that the run would request, or the reason why it requests none; empty: not known yet."""
        if self.cluster is None or run.spec.max_nodes <= run.spec.min_nodes:
            return ""
        if self.stopped:
            return self.stopped
        rules = self.rules(self.cluster.at, self._site)
        partitions = harvestable_partitions(self.cluster, rules)
        if not partitions:
            reasons = [
                f"{name} is not harvested: {reason}" for name, reason in self.neighbours.refused_partitions.items()
            ]
            none = "no partition lets others' jobs preempt ours; see allow_without_preemption under [harvest]"
            return "; ".join(reasons) or none
        usable_partitions = _usable(run, partitions)
        if not usable_partitions:
            return f"the run may use none of the harvested partitions: {', '.join(p.partition for p in partitions)}"
        return Allocation(
            token=TRIAL,
            run=run.id,
            kind=AllocationKind.HARVEST,
            public_key="",
            partition=usable_partitions[0].partition,
            minutes=max(rules.min_minutes, run.spec.min_harvest_minutes),
        )

    def estimate(self, registry: Registry, spec: RunSpec) -> Estimate:
        """Estimate the nodes that a new run would get.

        Raises:
            FallowError: there was no poll yet.
        """
        if self.cluster is None:
            raise FallowError("the head has no poll of Slurm yet; try again in a moment", Exit.TEMPFAIL)
        live = [a for run in registry.current.values() for a in run.live_allocations()]
        rules = self.rules(self.cluster.at, self._site)
        return estimate(self.cluster, spec, rules, live, self.knowledge, ordered(self._config))


def give_all_back(turn: Turn, run: Run, reason: str) -> None:
    for allocation in run.live_allocations():
        if allocation.kind is AllocationKind.BASE or allocation.asked_at is not None:
            continue
        if allocation.agents:
            turn.release_allocation(run, allocation, reason)
        else:
            turn.cancel(run, allocation, reason)


def _configured(config: Config, groups: frozenset[str] | None) -> HarvestRules:
    h = config.harvest
    return HarvestRules(
        partitions=tuple(h.partitions),
        allow_without_preemption=h.allow_without_preemption,
        groups=groups,
        max_nodes=h.max_nodes,
        partition_nodes=h.partition_nodes,
        max_minutes=h.max_minutes,
        min_minutes=h.min_minutes,
        margin_s=config.membership.release_margin_s,
    )


def _limit_after_failures(run: Run, run_demand: Demand) -> Demand:
    """After several failed jobs, limit the demand to one job at a time until its node trains."""
    if run.failures < MAX_LAUNCH_FAILURES:
        return run_demand
    on_its_way = (
        a for a in run.live_allocations() if a.asked_at is None and a.active_at is None and not a.requested_ahead
    )
    max_nodes = 0 if any(a.kind is AllocationKind.HARVEST for a in on_its_way) else 1
    return replace(run_demand, nodes=min(run_demand.nodes, max_nodes), can_renew=False)


def _submit(turn: Turn, ask: Ask, run: Run) -> None:
    turn.new_allocation(
        run,
        AllocationKind.HARVEST,
        partition=ask.partition,
        minutes=ask.minutes,
        part=ask.part,
        exclude=folded(ask.exclude),
        replaces=ask.replaces,
        requested_ahead=ask.requested_ahead,
    )


def _give_up_node(turn: Turn, action: GiveBack | Withdraw, allocation: Allocation, run: Run) -> None:
    if isinstance(action, GiveBack):
        leave = give_back if action.urgent else Turn.release_allocation
        leave(turn, run, allocation, action.reason)
    elif allocation.asked_at is None:
        _withdraw(turn, run, allocation, action.reason)


def _withdraw(turn: Turn, run: Run, allocation: Allocation, reason: str) -> None:
    turn.record(run, "withdraw", f"{allocation.token} (job {allocation.job_id}): {reason}")
    turn.cancel(run, allocation, reason)


def _usable(run: Run, harvestable: Collection[PartitionInfo]) -> list[PartitionInfo]:
    """Partitions that the run wants to harvest and that its account and QOS may use."""
    partitions_wanted = run.spec.harvest_partitions
    candidates = [p for p in harvestable if not partitions_wanted or p.partition in partitions_wanted]
    return [p for p in candidates if may_use(p, *astuple(run.asker))]


def _is_refused_everywhere(refusals: Mapping[str, int], usable: set[str]) -> bool:
    """True if Slurm has refused the run often enough in every usable partition."""
    harvest = {partition: number for partition, number in refusals.items() if partition}
    nowhere = sum(harvest.values()) >= REFUSALS and harvest.keys() >= usable
    return nowhere or refusals.get("", 0) >= REFUSALS


def _read(note: bytes | None, kind: type[T]) -> T:
    try:
        return kind() if note is None else records.decode(note, kind)
    except Unreadable as error:
        log.warning("note.unreadable", kind=kind.__name__, error=error.message)
        return kind()
