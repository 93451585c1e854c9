"""The Slurm side of the head: what polls show is taken in, and what the planner wants becomes requests and releases."""

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
from fallow.core.accounting.duds import DUDS, ROUNDS
from fallow.core.allocations import WAITING, Allocation, send, sent
from fallow.core.kinds import may_use, within
from fallow.core.membership.messages import Unreadable
from fallow.core.neighbour.needs import ExternalDemand, GiveBack
from fallow.core.neighbour.preemption import as_for_us
from fallow.core.neighbour.watch import Delays
from fallow.core.planning.asking import Ask
from fallow.core.planning.known import Experience, Learner
from fallow.core.planning.plan import plan
from fallow.core.planning.rules import FEW, Demand, HarvestRules, allowed_now, harvestable
from fallow.core.planning.shared_limits import Reserve, capped, named, yielded
from fallow.core.planning.situation import Situation
from fallow.core.planning.withdrawals import Withdraw
from fallow.core.submission.sbatch import takes_whole_nodes
from fallow.files import Paths
from fallow.head.loop.turn import Turn
from fallow.head.slurm import accounts, jobs
from fallow.head.slurm.demands import demand, estimate, hold_back, keep_within_budget, left_s, renew_base
from fallow.head.slurm.gains import gains
from fallow.head.slurm.neighbours import DELAYS, Neighbours, give_back
from fallow.head.slurm.pace import keep_pace
from fallow.head.state.book import Book, Run, ordered
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
"""Name of submissions that are only tried."""

EXPERIENCE, BACKOFF = "experience", "backoff"
"""Their keys among the notes of the store."""

WRITE_EVERY_S = 300.0
"""And when the head ends, and with a turn that changes a pause of one run: a base job is refused or taken, harvest jobs
came to nothing, or the run is resumed. What was learned since is lost when the head is killed; that is a statistic."""

REFUSALS = 3
"""Submissions that Slurm refuses in a row, with the pauses of `core.accounting.backoff` between them, before a run's
harvesting pauses (HyperQueue pauses after 10)."""

records.SCHEMAS |= {Experience: 1, Backoff: 2}
# What an older Fallow left alone is tried at once: nothing of it lasts for more than an hour.
records.MIGRATIONS[Backoff, 1] = lambda _: msgspec.to_builtins(Backoff())


class Harvest:
    """Keeps allocations and Slurm in step, and asks for more on behalf of all runs."""

    def __init__(self, config: Config, groups: frozenset[str] | None = None) -> None:
        """Args: groups: of the owner; None: not known."""
        self._config = config
        self._configured = _configured(config, groups)
        self._learner = Learner()
        self.known = self._learner.known
        self._reserve = Reserve(config.harvest.limit_reserve)
        self._written_at = 0.0
        self.neighbours = Neighbours(config)
        self.interval_s = config.slurm.poll_interval_s
        "from one poll to the next, as things are"
        self.stopped = ""
        "why nothing is harvested at all; empty: it is"
        self.owner: OwnerView | None = None
        "what Slurm has told of the limits of accounts and QOS; None: nothing"
        self.cluster: ClusterState | None = None
        "the last poll, put right (`core.neighbour.preemption`)"
        self._site: ClusterConfig | None = None
        self._external = ExternalDemand()
        "what others' jobs needed of us then"
        self.unused: dict[str, str] = {}
        "idle node -> why it is not used, as of the last plan"

    def recall(self, notes: Mapping[str, bytes]) -> None:
        """Go on with what an earlier head has learned. What cannot be read is forgotten."""
        self.known.experience = _read(notes.get(EXPERIENCE), Experience)
        self.known.backoff = _read(notes.get(BACKOFF), Backoff)
        self.neighbours.delays = _read(notes.get(DELAYS), Delays)
        # What happened in between, nobody has seen.
        self.neighbours.delays.polled_at = None

    def note(self, turn: Turn) -> None:
        """Have what was learned written down with this turn: the head ends, or a pause does."""
        self._written_at = turn.at
        turn.notes[EXPERIENCE] = records.encode(self.known.experience)
        turn.notes[BACKOFF] = records.encode(self.known.backoff)

    def rules(self, now: float, site: ClusterConfig | None) -> HarvestRules:
        """What may be asked for now, at Unix time `now`."""
        slurm = self._config.slurm
        return allowed_now(
            replace(self._configured, refused=self.neighbours.refused, stopped=self.stopped),
            site,
            self.known.experience,
            now,
            self.interval_s,
            max_pending=self._config.harvest.max_pending,
            poll_interval_s=slurm.poll_interval_s,
            submits_per_min=slurm.submits_per_min,
            limits_known=self.owner is not None,
        )

    def switch(self, turn: Turn, why: str) -> None:
        """Harvest nothing from now on, and give back what was, for this reason; empty: go on with the next poll."""
        before, self.stopped = self.stopped, why
        if why:
            turn.record(None, "stop", f"nothing is harvested: {why}")
        elif before:
            turn.record(None, "stop", "nodes are harvested again: what had stopped it is over")
        turn.for_each(turn.book.on_slurm if why else (), "stop", lambda run: give_all_back(turn, run, why))

    # -- a poll and what follows ----------------------------------------------------------------------------------

    def polled(self, turn: Turn, cluster: ClusterState, site: ClusterConfig | None) -> None:
        """Take in one poll, then plan. `site` is None as long as Slurm has not told its configuration."""
        cluster = as_for_us(cluster, site, self._config.harvest.qos)
        self.cluster, self._site = cluster, site
        jobs.take_in(turn, cluster, self.known.backoff)
        accounts.settle(turn, cluster.at)
        turn.for_each(turn.book.current.values(), "budget", lambda run: keep_within_budget(turn, run, cluster.at))
        with turn.apart("neighbours"):
            self._external = self.neighbours.polled(turn, cluster, site)
        with turn.apart("orphans"):
            jobs.sweep(turn, cluster, frozenset[str]().union(*self._external.delayed_jobs.values()))
        with turn.apart("plan"):
            self.interval_s = self.neighbours.interval_s(turn.book)
            rules = self.rules(cluster.at, site)
            partitions = harvestable(cluster, rules)
            self._learn(turn, cluster, partitions)
            self._plan(turn, cluster, rules, partitions)

    def _learn(self, turn: Turn, cluster: ClusterState, partitions: Sequence[PartitionInfo]) -> None:
        ours = ((run, a) for run in turn.book.on_slurm for a in run.allocations.values())
        harvest = [(a, run.asks_as(a)) for run, a in ours if a.harvested]
        names = {p.partition for p in partitions}
        for run_id, text in self._learner.take_in(cluster, harvest, names, turn.now):
            turn.record(turn.book.runs[run_id], "backoff", text)
        if turn.at - self._written_at > WRITE_EVERY_S:
            self.note(turn)

    def _plan(
        self, turn: Turn, cluster: ClusterState, rules: HarvestRules, partitions: Sequence[PartitionInfo]
    ) -> None:
        """Carry out what the planner wants for the next interval. Args: partitions: that may be harvested."""
        runs, known = {run.id: run for run in turn.book.on_slurm}, self.known
        cluster = within(cluster, {run.spec.harvest_given.get("reservation", "") for run in runs.values()})
        if self.stopped:
            # A submission of unknown outcome may have come to something after all.
            turn.for_each(runs.values(), "stop", lambda run: give_all_back(turn, run, self.stopped))
        put_off = set[str]()

        def look(run: Run) -> None:
            if not run.ended and self._put_off(turn, run):
                put_off.add(run.id)

        turn.for_each(runs.values(), "pause", look)
        # Whether its base job was preempted or its owner has cancelled the run, Slurm has to say first.
        unsure = (a.run for run in runs.values() for a in run.bases if a.warned and awaits_verdict(a, turn.now))
        put_off.update(unsure)
        # First, for the nodes of a base job need not be harvested.
        wanting = [run for run in runs.values() if run.id not in put_off]
        turn.for_each(wanting, "base job", lambda run: renew_base(turn, run, cluster.at, known.backoff))
        known_nodes = {node.node: node for node in cluster.nodes}
        start_s = known.experience.wait_s(cluster.at) + known.experience.start_s(cluster.at)
        gained = gains(turn.book.runs.values(), cluster.at, start_s)
        demands = list[Demand]()

        def want(run: Run) -> None:
            wanted = demand(run, known_nodes, cluster.at, asks=run.id not in put_off)
            demands.append(replace(_tried(run, wanted), worth=gained[run.id].worth))

        turn.for_each([runs[name] for name in gained], "demand", want)
        live = [a for run in runs.values() for a in run.live_allocations()]
        demands, external = self._within_limits(turn, runs, live, cluster, demands, partitions)
        live = [a for a in live if a.live]
        known.unstarted = known.unstarted.look(cluster)
        excluded = {a.token: frozenset(nodes(a.exclude)) for a in live if a.exclude and a.state in WAITING}
        found = plan(Situation(cluster, demands, live, rules, known, external, excluded))
        known.backoff, known.unstarted = found.known.backoff, found.known.unstarted
        held = {a.token: a for a in live}
        for action in found.actions:
            if isinstance(action, Ask):
                turn.for_each([runs[action.run]], "request", partial(_submit, turn, action))
            elif action.token in held:  # what others need may be known of an earlier poll
                allocation = held[action.token]
                turn.for_each([runs[allocation.run]], "give back", partial(_let_go, turn, action, allocation))
        self.unused = dict(found.unused)

        def hurry(run: Run) -> None:
            run.gain, run.target = gained.get(run.id), found.targets.get(run.id)
            if run.id not in put_off and not self.stopped:
                most = 1 if run.failures >= DUDS else min(FEW, rules.max_pending)
                keep_pace(turn, run, cluster, left_s(run, cluster.at), most, known.backoff, rules)

        turn.for_each(runs.values(), "pace", hurry)

    def _within_limits(
        self,
        turn: Turn,
        runs: Mapping[str, Run],
        live: Sequence[Allocation],
        cluster: ClusterState,
        demands: Sequence[Demand],
        partitions: Sequence[PartitionInfo],
    ) -> tuple[list[Demand], ExternalDemand]:
        """Leave to others what they need of the limits of accounts and QOS.

        Returns:
            The demands that are left, and what others need with what is given back for such a limit.
        """
        askers = named(cluster, live, {run.id: run.asker for run in runs.values()})
        qos = {p.qos for p in partitions} - {""}
        whole = {run.id for run in runs.values() if takes_whole_nodes(run.spec)}
        waits = yielded(cluster, live, askers, self.owner)
        kept = self._reserve.room(self.owner, cluster, live, demands, askers, whole, qos)
        for run in runs.values():
            before, run.limited_by = run.limited_by, waits.because.get(run.id, "")
            if run.limited_by not in ("", before):
                turn.record(run, "limit", f"nothing is asked for: {run.limited_by}")
        for allocation in live:
            if allocation.token in waits.withdraw:
                _withdraw(turn, runs[allocation.run], allocation, waits.withdraw[allocation.token])
        external = self._external
        given = {wish.token for wish in external.give_backs}
        more = {wish.token: wish for wish in (*kept.give_back, *waits.give_back) if wish.token not in given}
        both = (*external.give_backs, *more.values())
        return capped(demands, (waits, kept)), replace(external, give_backs=both)

    def _put_off(self, turn: Turn, run: Run) -> bool:
        """Is it too early to ask for more, because the last jobs came to nothing?"""
        duds, failures = run.record.fruitless, run.failures
        backoff, what = self.known.backoff, harvest_jobs(run.id)
        before, run.failures_seen = run.failures_seen, failures
        if before is None:
            before = failures if duds.rounds else 0
        is_worse = failures > max(before, DUDS - 1) and not run.record.paused
        if not failures:
            backoff.take_up(what)
            duds.rounds = 0
        elif is_worse and turn.now >= backoff.put_off_until(what):
            duds.rounds += 1
            turn.dirty.add(run.id)
            why = f"{failures} jobs in a row came to nothing"
            if duds.rounds > ROUNDS:
                why += f", with longer and longer waits in between; to try again: fallow resume {run.id}"
                turn.stop_asking(run, f"{why}; the last: {duds.last or run.root.message}")
            else:
                backoff.put_off(what, turn.now)
                self.note(turn)
                wait_s = backoff.put_off_until(what) - turn.now
                turn.record(run, "pause", f"{why}; the next one is tried in {wait_s:.0f} s")
        return turn.now < backoff.put_off_until(what)

    # -- submissions and what becomes of them ---------------------------------------------------------------------

    def request(self, paths: Paths, run: Run, allocation: Allocation) -> JobRequest:
        """What to hand to sbatch for an allocation."""
        return jobs.job_request(self._config, paths, run, allocation, self.neighbours.nice)

    def send(self, turn: Turn, run: Run, token: str) -> bool:
        """An allocation's turn at sbatch has come; False: it is not wanted any more."""
        allocation = run.allocations.get(token)
        if allocation is None:
            return False
        alone = self.known.backoff.words(run.asks_as(allocation), allocation.partition, turn.now)
        if allocation.queued and allocation.kind is AllocationKind.HARVEST and alone:
            turn.record(run, "withdraw", f"{token}, not submitted yet: {alone}")
            turn.cancel(run, allocation, alone)
        if not send(allocation, turn.now):
            return False
        turn.dirty.add(run.id)
        return True

    def submitted(self, turn: Turn, run: Run, token: str, job_id: str) -> None:
        """Slurm took a submission."""
        jobs.submitted(turn, run, token, job_id)
        if run.allocations[token].kind is AllocationKind.BASE:
            self.known.backoff.take_up(base_job(run.id))
            self.note(turn)

    def refused(self, turn: Turn, run: Run, token: str, reason: str) -> None:
        """Slurm said no to a submission. A run that it refuses wherever the run may go pauses, until somebody has a
        look."""
        allocation, refusals, is_news = run.allocations[token], run.record.refusals, True
        turn.book.end_allocation(run, allocation, reason)
        if allocation.kind is AllocationKind.HARVEST:
            asker = run.asks_as(allocation)
            is_news = self._strike(turn, run, asker, allocation.partition, allocation.minutes, reason)
        else:
            self.known.backoff.put_off(base_job(run.id), turn.now)
            # It is rare, and a head that is killed must not begin anew with it.
            self.note(turn)
            hold_back(turn, run, f"Slurm refused it; it is tried again within the hour: {reason}")
        if is_news and scope_of(reason) not in (Scope.OWNER, Scope.LENGTH):
            # Those are limits that others' jobs, or time, lift again.
            place = allocation.partition if allocation.kind is AllocationKind.HARVEST else ""
            refusals[place] = refusals.get(place, 0) + 1
        turn.record(run, "refused", f"{token}: Slurm refused it: {reason}")
        usable: list[PartitionInfo] = []
        if self.cluster is not None:
            usable = _usable(run, harvestable(self.cluster, self.rules(self.cluster.at, self._site)))
        if _everywhere(refusals, {p.partition for p in usable}) and not run.record.harvest_paused:
            turn.stop_asking(run, f"Slurm refused {REFUSALS} submissions in a row: {reason}")

    def unknown(self, turn: Turn, run: Run, token: str, reason: str) -> None:
        """sbatch failed without a clear answer: the job may exist, so it is looked for and never sent again."""
        sent(run.allocations[token], turn.now)
        turn.record(run, "unknown", f"{token}: nobody knows whether Slurm has it ({reason}); it is looked for")

    def tested(self, turn: Turn, run_id: str, partition: str, reason: str) -> None:
        """Slurm would say no to harvest jobs of a run: they are not even tried for a while."""
        run = turn.book.runs[run_id]
        turn.record(run, "refused", f"harvest jobs in {partition} would be refused: {reason}")
        self._strike(turn, run, run.asker, partition, None, reason)

    def _strike(self, turn: Turn, run: Run, asker: Asker, partition: str, minutes: int | None, reason: str) -> bool:
        """False: it is no news, for the account or partition was left alone already when this was on its way."""
        if text := self._learner.strike(asker, partition, minutes, reason, turn.now):
            turn.record(run, "backoff", text)
            return True
        return scope_of(reason) is Scope.NOTHING

    # -- what would be asked for ----------------------------------------------------------------------------------

    def example(self, run: Run) -> Allocation | str:
        """A harvest allocation as the run would ask for, or why it would ask for none; empty: nobody knows yet."""
        if self.cluster is None or run.spec.max_nodes <= run.spec.min_nodes:
            return ""
        if self.stopped:
            return self.stopped
        rules = self.rules(self.cluster.at, self._site)
        there = harvestable(self.cluster, rules)
        if not there:
            why = [f"{name} is not harvested: {reason}" for name, reason in self.neighbours.refused.items()]
            none = "in no partition would others' jobs preempt ours; see allow_without_preemption under [harvest]"
            return "; ".join(why) or none
        usable = _usable(run, there)
        if not usable:
            return f"it may use none of the partitions that are harvested: {', '.join(p.partition for p in there)}"
        return Allocation(
            token=TRIAL,
            run=run.id,
            kind=AllocationKind.HARVEST,
            public_key="",
            partition=usable[0].partition,
            minutes=max(rules.min_minutes, run.spec.min_harvest_minutes),
        )

    def estimate(self, book: Book, spec: RunSpec) -> Estimate:
        """What a run would find that does not exist yet.

        Raises:
            FallowError: no poll has come yet.
        """
        if self.cluster is None:
            raise FallowError("the head has not seen Slurm yet; ask again in a moment", Exit.TEMPFAIL)
        live = [a for run in book.current.values() for a in run.live_allocations()]
        rules = self.rules(self.cluster.at, self._site)
        return estimate(self.cluster, spec, rules, live, self.known, ordered(self._config))


def give_all_back(turn: Turn, run: Run, reason: str) -> None:
    """End all that the head asked for on top of the base job."""
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


def _tried(run: Run, wanted: Demand) -> Demand:
    """After jobs that came to nothing, one alone is tried until its node trains or it has come to nothing, too."""
    if run.failures < DUDS:
        return wanted
    on_its_way = (a for a in run.live_allocations() if a.asked_at is None and a.active_at is None and not a.ahead)
    most = 0 if any(a.kind is AllocationKind.HARVEST for a in on_its_way) else 1
    return replace(wanted, nodes=min(wanted.nodes, most), renew=False)


def _submit(turn: Turn, ask: Ask, run: Run) -> None:
    turn.new_allocation(
        run,
        AllocationKind.HARVEST,
        partition=ask.partition,
        minutes=ask.minutes,
        part=ask.part,
        exclude=folded(ask.exclude),
        replaces=ask.replaces,
        ahead=ask.ahead,
    )


def _let_go(turn: Turn, action: GiveBack | Withdraw, allocation: Allocation, run: Run) -> None:
    if isinstance(action, GiveBack):
        leave = give_back if action.urgent else Turn.release_allocation
        leave(turn, run, allocation, action.reason)
    elif allocation.asked_at is None:
        _withdraw(turn, run, allocation, action.reason)


def _withdraw(turn: Turn, run: Run, allocation: Allocation, reason: str) -> None:
    turn.record(run, "withdraw", f"{allocation.token} (job {allocation.job_id}): {reason}")
    turn.cancel(run, allocation, reason)


def _usable(run: Run, harvestable: Collection[PartitionInfo]) -> list[PartitionInfo]:
    """Those in which the run wants to harvest and its account and QOS may."""
    wanted = run.spec.harvest_partitions
    named = [p for p in harvestable if not wanted or p.partition in wanted]
    return [p for p in named if may_use(p, *astuple(run.asker))]


def _everywhere(refusals: Mapping[str, int], usable: set[str]) -> bool:
    """Is there nowhere else to go?"""
    harvest = {partition: number for partition, number in refusals.items() if partition}
    nowhere = sum(harvest.values()) >= REFUSALS and harvest.keys() >= usable
    return nowhere or refusals.get("", 0) >= REFUSALS


def _read(note: bytes | None, kind: type[T]) -> T:
    try:
        return kind() if note is None else records.decode(note, kind)
    except Unreadable as error:
        log.warning("note.unreadable", kind=kind.__name__, error=error.message)
        return kind()
