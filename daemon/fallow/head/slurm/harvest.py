"""The Slurm side of the head: what is observed, what is asked for, and what nobody looks after any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import structlog
from msgspec.structs import astuple

from fallow.config import Config
from fallow.core import records
from fallow.core.accounting.backoff import Asker, Backoff, Scope, base_job, scope_of
from fallow.core.allocations import Allocation, send, sent
from fallow.core.kinds import may_use
from fallow.core.membership.messages import Unreadable
from fallow.core.neighbour.needs import ExternalDemand
from fallow.core.neighbour.preemption import as_for_us
from fallow.core.neighbour.watch import Delays
from fallow.core.planning.known import Experience, Learner
from fallow.core.planning.rules import HarvestRules, harvestable
from fallow.files import Paths
from fallow.head.loop.turn import Turn
from fallow.head.slurm import accounts, submissions
from fallow.head.slurm.asking import BACKOFF, Asking, note_pauses
from fallow.head.slurm.budgets import hold_back, keep_within_budget
from fallow.head.slurm.estimate import estimate
from fallow.head.slurm.jobs import sweep, take_in
from fallow.head.slurm.neighbours import DELAYS, Neighbours
from fallow.head.state.book import Book, Run, ordered
from fallow.model import (
    AllocationKind,
    ClusterConfig,
    ClusterState,
    Exit,
    FallowError,
    JobRequest,
    PartitionInfo,
    Prospect,
    RunSpec,
)

log = structlog.get_logger("fallow.head")

T = TypeVar("T", bound=msgspec.Struct)

TRIAL = "fallow-trial"
"""Name of submissions that are only tried."""

EXPERIENCE = "experience"
"""Its key among the notes of the store."""

WRITE_EVERY_S = 300.0
"""And when the head ends, and with a turn that changes a pause of one run: a base job is refused or taken, harvest jobs
came to nothing, or the run is resumed. What was learned since is lost when the head is killed; that is a statistic."""

records.SCHEMAS[Experience] = 1


class Harvest:
    """Keeps allocations and Slurm in step, and asks for more."""

    def __init__(self, config: Config, groups: frozenset[str] | None = None) -> None:
        """Args: groups: of the owner; None: not known."""
        self._config = config
        self._learner = Learner()
        self.known = self._learner.known
        self._written_at = 0.0
        self.asking = Asking(config, self.known, groups)
        self.neighbours = Neighbours(config)
        self._site: ClusterConfig | None = None
        self.cluster: ClusterState | None = None
        "the last poll, put right (`core.neighbour.preemption`)"
        self._external = ExternalDemand()
        "what others' jobs needed of us then"

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
        note_pauses(turn, self.known.backoff)

    def polled(self, turn: Turn, cluster: ClusterState, site: ClusterConfig | None) -> None:
        """Take in one poll, then plan. `site` is None as long as Slurm has not told its configuration."""
        cluster = as_for_us(cluster, site, self._config.harvest.qos)
        self.cluster, self._site = cluster, site
        take_in(turn, cluster, self.known.backoff)
        accounts.settle(turn, cluster.at)
        turn.for_each(turn.book.current.values(), "budget", lambda run: keep_within_budget(turn, run, cluster.at))
        with turn.apart("neighbours"):
            self._external = self.neighbours.polled(turn, cluster, site)
        external = self._external
        with turn.apart("orphans"):
            sweep(turn, cluster, frozenset[str]().union(*external.delayed_jobs.values()))
        with turn.apart("plan"):
            self.asking.interval_s = self.neighbours.interval_s(turn.book)
            rules = self._rules(cluster)
            self._learn(turn, cluster, rules)
            self.asking.plan(turn, cluster, rules, external)

    def _learn(self, turn: Turn, cluster: ClusterState, rules: HarvestRules) -> None:
        ours = ((run, a) for run in turn.book.on_slurm for a in run.allocations.values())
        harvest = [(a, run.asks_as(a)) for run, a in ours if a.harvested]
        names = {p.partition for p in harvestable(cluster, rules)}
        for run_id, text in self._learner.take_in(cluster, harvest, names, turn.now):
            turn.record(turn.book.runs[run_id], "backoff", text)
        if turn.at - self._written_at > WRITE_EVERY_S:
            self.note(turn)

    def _strike(self, turn: Turn, run: Run, asker: Asker, partition: str, minutes: int | None, reason: str) -> bool:
        """False: it is no news, for the account or partition was left alone already when this was on its way."""
        if text := self._learner.strike(asker, partition, minutes, reason, turn.now):
            turn.record(run, "backoff", text)
            return True
        return scope_of(reason) is Scope.NOTHING

    def _rules(self, cluster: ClusterState) -> HarvestRules:
        return self.asking.rules(cluster.at, self._site, self.neighbours.refused)

    def request(self, paths: Paths, run: Run, allocation: Allocation) -> JobRequest:
        """What to hand to sbatch for an allocation."""
        return submissions.job_request(self._config, paths, run, allocation, self.neighbours.nice)

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
            place = submissions.place(allocation)
            refusals[place] = refusals.get(place, 0) + 1
        turn.record(run, "refused", f"{token}: Slurm refused it: {reason}")
        usable: list[PartitionInfo] = []
        if self.cluster is not None:
            usable = _usable(run, harvestable(self.cluster, self._rules(self.cluster)))
        if submissions.everywhere(refusals, [p.partition for p in usable]) and not run.record.harvest_paused:
            turn.stop_asking(run, f"Slurm refused {submissions.REFUSALS} submissions in a row: {reason}")

    def unknown(self, turn: Turn, run: Run, token: str, reason: str) -> None:
        """sbatch failed without a clear answer: the job may exist, so it is looked for and never sent again."""
        sent(run.allocations[token], turn.now)
        turn.record(run, "unknown", f"{token}: nobody knows whether Slurm has it ({reason}); it is looked for")

    def example(self, run: Run) -> Allocation | str:
        """A harvest allocation as the run would ask for, or why it would ask for none; empty: nobody knows yet."""
        if self.cluster is None:
            return ""
        rules = self._rules(self.cluster)
        there = harvestable(self.cluster, rules)
        may = _usable(run, there)
        if run.spec.max_nodes <= run.spec.min_nodes:
            return ""
        if self.asking.stopped:
            return self.asking.stopped
        if not there:
            why = [f"{name} is not harvested: {reason}" for name, reason in self.neighbours.refused.items()]
            none = "in no partition would others' jobs preempt ours; see allow_without_preemption under [harvest]"
            return "; ".join(why) or none
        if not may:
            return f"it may use none of the partitions that are harvested: {', '.join(p.partition for p in there)}"
        return Allocation(
            token=TRIAL,
            run=run.id,
            kind=AllocationKind.HARVEST,
            public_key="",
            partition=may[0].partition,
            minutes=max(rules.min_minutes, run.spec.min_harvest_minutes),
        )

    def prospect(self, book: Book, spec: RunSpec) -> Prospect:
        """What a run would find that does not exist yet.

        Raises:
            FallowError: no poll has come yet.
        """
        if self.cluster is None:
            raise FallowError("the head has not seen Slurm yet; ask again in a moment", Exit.TEMPFAIL)
        live = [a for run in book.current.values() for a in run.live_allocations()]
        known, names = self.known, ordered(self._config)
        return estimate(self.cluster, spec, self._rules(self.cluster), live, known, names)

    def tested(self, turn: Turn, run: Run, partition: str, reason: str) -> None:
        """Slurm would say no to harvest jobs of a run: they are not even tried for a while."""
        turn.record(run, "refused", f"harvest jobs in {partition} would be refused: {reason}")
        self._strike(turn, run, run.asker, partition, None, reason)

    def submitted(self, turn: Turn, run: Run, token: str, job_id: str) -> None:
        """Slurm took a submission."""
        submissions.submitted(turn, run, token, job_id)
        if run.allocations[token].kind is AllocationKind.BASE:
            self.known.backoff.take_up(base_job(run.id))
            self.note(turn)


def _usable(run: Run, harvestable: Sequence[PartitionInfo]) -> list[PartitionInfo]:
    """Those in which the run wants to harvest and its account and QOS may."""
    wanted = run.spec.harvest_partitions
    named = [p for p in harvestable if not wanted or p.partition in wanted]
    return [p for p in named if may_use(p, *astuple(run.asker))]


def _read(note: bytes | None, kind: type[T]) -> T:
    try:
        return kind() if note is None else records.decode(note, kind)
    except Unreadable as error:
        log.warning("note.unreadable", kind=kind.__name__, error=error.message)
        return kind()
