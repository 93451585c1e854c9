"""The planner's wishes become submissions, withdrawals and releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from fallow.config import Config
from fallow.core import records
from fallow.core.accounting.backoff import Backoff, base_job, harvest_jobs
from fallow.core.accounting.cancelled import Cancels, awaits_verdict
from fallow.core.accounting.duds import DUDS, ROUNDS, Duds
from fallow.core.allocations import WAITING, Allocation
from fallow.core.kinds import within
from fallow.core.membership import events as ev
from fallow.core.neighbour.needs import ExternalDemand, GiveBack
from fallow.core.planning.asking import Ask
from fallow.core.planning.known import Known
from fallow.core.planning.plan import plan
from fallow.core.planning.rules import FEW, Demand, HarvestRules, allowed_now, harvestable
from fallow.core.planning.shared_limits import Reserve, capped, named, yielded
from fallow.core.planning.situation import Situation
from fallow.core.planning.withdrawals import Withdraw
from fallow.core.submission.sbatch import takes_whole_nodes
from fallow.head.loop.turn import Turn
from fallow.head.slurm.budgets import left_s, renew_base
from fallow.head.slurm.demands import demand
from fallow.head.slurm.gains import gains
from fallow.head.slurm.neighbours import give_back
from fallow.head.slurm.pace import keep_pace
from fallow.head.state.book import Run
from fallow.model import AllocationKind, ClusterConfig, ClusterState, OwnerView
from fallow.slurm.parse import folded, nodes

BACKOFF = "backoff"
"""Its key among the notes of the store."""

records.SCHEMAS[Backoff] = 2
# What an older Fallow left alone is tried at once: nothing of it lasts for more than an hour.
records.MIGRATIONS[Backoff, 1] = lambda _: msgspec.to_builtins(Backoff())


class Asking:
    """Asks for nodes on behalf of all runs; `known` is what has been learned, kept up to date by others."""

    def __init__(self, config: Config, known: Known, groups: frozenset[str] | None = None) -> None:
        """Args: groups: of the owner; None: not known."""
        self._config = config
        self._configured = _configured(config, groups)
        self._known = known
        self.interval_s = config.slurm.poll_interval_s
        "from one poll to the next, as things are"
        self.stopped = ""
        "why nothing is harvested at all; empty: it is"
        self.owner: OwnerView | None = None
        "what Slurm has told of the limits of accounts and QOS; None: nothing"
        self._reserve = Reserve(config.harvest.limit_reserve)
        self.unused: dict[str, str] = {}
        "idle node -> why it is not used, as of the last plan"

    def rules(self, now: float, site: ClusterConfig | None, refused: Mapping[str, str]) -> HarvestRules:
        """What may be asked for now, at Unix time `now`; nothing in the partitions that are `refused`."""
        slurm = self._config.slurm
        return allowed_now(
            replace(self._configured, refused=refused, stopped=self.stopped),
            site,
            self._known.experience,
            now,
            self.interval_s,
            max_pending=self._config.harvest.max_pending,
            poll_interval_s=slurm.poll_interval_s,
            submits_per_min=slurm.submits_per_min,
            limits_known=self.owner is not None,
        )

    def plan(self, turn: Turn, cluster: ClusterState, rules: HarvestRules, external: ExternalDemand) -> None:
        """Carry out what the planner wants for the next interval.

        Args:
            turn: takes the effects.
            cluster: the last poll.
            rules: what is allowed.
            external: what others' jobs need of us.
        """
        runs = {run.id: run for run in turn.book.on_slurm}
        cluster = within(cluster, {run.spec.harvest_given.get("reservation", "") for run in runs.values()})
        if self.stopped:
            # A submission of unknown outcome may have come to something after all.
            for run in runs.values():
                _give_all_back(turn, run, self.stopped)
        put_off = {run.id for run in runs.values() if not run.ended and self._put_off(turn, run)}
        # Whether its base job was preempted or its owner has cancelled the run, Slurm has to say first.
        unsure = (a.run for run in runs.values() for a in run.bases if a.warned and awaits_verdict(a, turn.now))
        put_off.update(unsure)
        # First, for the nodes of a base job need not be harvested.
        wanting = [run for run in runs.values() if run.id not in put_off]
        turn.for_each(wanting, "base job", lambda run: renew_base(turn, run, cluster.at, self._known.backoff))
        known_nodes = {node.node: node for node in cluster.nodes}
        experience = self._known.experience
        start_s = experience.wait_s(cluster.at) + experience.start_s(cluster.at)
        known = gains(turn.book.runs.values(), cluster.at, start_s)
        demands = [
            replace(
                _tried(runs[name], demand(runs[name], known_nodes, cluster.at, asks=name not in put_off)),
                worth=gain.worth,
            )
            for name, gain in known.items()
        ]
        demands, external = self._within_limits(turn, runs, cluster, demands, rules, external)
        live = [a for run in runs.values() for a in run.live_allocations()]
        self._known.unstarted = self._known.unstarted.look(cluster)
        excluded = {a.token: frozenset(nodes(a.exclude)) for a in live if a.exclude and a.state in WAITING}
        found = plan(Situation(cluster, demands, live, rules, self._known, external, excluded))
        self._known.backoff, self._known.unstarted = found.known.backoff, found.known.unstarted
        for action in found.actions:
            match action:
                case Ask() as ask:
                    turn.for_each([runs[ask.run]], "request", partial(_submit, turn, ask))
                case Withdraw(token, reason):
                    run, allocation = _find(runs, token)
                    if allocation.asked_at is not None:
                        continue
                    turn.record(run, "withdraw", f"{token} (job {allocation.job_id}): {reason}")
                    turn.cancel(run, allocation, reason)
                case GiveBack(token, reason, urgent):
                    run, allocation = _find(runs, token)
                    if urgent:
                        give_back(turn, run, allocation, reason)
                    else:
                        turn.release_allocation(run, allocation, reason)
        self.unused = dict(found.unused)
        for run in runs.values():
            run.gain, run.target = known.get(run.id), found.targets.get(run.id)
            if run.id not in put_off and not self.stopped:
                most = 1 if run.failures >= DUDS else min(FEW, rules.max_pending)
                keep_pace(turn, run, cluster, left_s(run, cluster.at), most, self._known.backoff, rules)

    def _within_limits(
        self,
        turn: Turn,
        runs: Mapping[str, Run],
        cluster: ClusterState,
        demands: Sequence[Demand],
        rules: HarvestRules,
        external: ExternalDemand,
    ) -> tuple[list[Demand], ExternalDemand]:
        """Leave to others what they need of the limits of accounts and QOS.

        Returns:
            The demands that are left, and what others need with what is given back for such a limit.
        """
        live = [a for run in runs.values() for a in run.live_allocations()]
        askers = named(cluster, live, {run.id: run.asker for run in runs.values()})
        qos = {p.qos for p in harvestable(cluster, rules)} - {""}
        whole = {run.id for run in runs.values() if takes_whole_nodes(run.spec)}
        waits = yielded(cluster, live, askers, self.owner)
        kept = self._reserve.room(self.owner, cluster, live, demands, askers, whole, qos)
        for run in runs.values():
            before, run.limited_by = run.limited_by, waits.because.get(run.id, "")
            if run.limited_by not in ("", before):
                turn.record(run, "limit", f"nothing is asked for: {run.limited_by}")
        for token, why in waits.withdraw.items():
            run, allocation = _find(dict(runs), token)
            turn.record(run, "withdraw", f"{token} (job {allocation.job_id}): {why}")
            turn.cancel(run, allocation, why)
        given = {wish.token for wish in external.give_backs}
        more = {wish.token: wish for wish in (*kept.give_back, *waits.give_back) if wish.token not in given}
        both = (*external.give_backs, *more.values())
        return capped(demands, (waits, kept)), msgspec.structs.replace(external, give_backs=both)

    def pause(self, turn: Turn, run: Run) -> None:
        """Ask for nothing more for this run, and give its harvest nodes back. Its base job stays."""
        run.record.paused_by_hand = True
        turn.record(run, "pause", "paused by hand: harvest nodes are given back, and none is asked for")
        _give_all_back(turn, run, "the run is paused")

    def switch(self, turn: Turn, why: str) -> None:
        """Harvest nothing from now on, and give back what was, for this reason; empty: go on with the next poll."""
        before, self.stopped = self.stopped, why
        if why:
            turn.record(None, "stop", f"nothing is harvested: {why}")
        elif before:
            turn.record(None, "stop", "nodes are harvested again: what had stopped it is over")
        for run in turn.book.on_slurm if why else ():
            _give_all_back(turn, run, why)

    def drain(self, turn: Turn, run: Run, nodes: list[str]) -> None:
        """Do without these nodes from now on. Requests that could still get one of them are made anew without."""
        run.record.drained = sorted({*run.record.drained, *nodes})
        turn.dirty.add(run.id)
        for allocation in run.live_allocations():
            waits = allocation.state in WAITING and not allocation.agents
            waits = waits and allocation.kind is AllocationKind.HARVEST and allocation.asked_at is None
            if waits and (allocation.part is None or allocation.part.node in nodes):
                turn.cancel(run, allocation, f"{', '.join(nodes)} drained by hand")

    def resume(self, turn: Turn, run: Run) -> None:
        """Ask for nodes again from the next poll on, whoever or whatever stopped it."""
        run.record.paused_by_hand, run.record.harvest_paused, run.record.drained = False, "", []
        turn.apply(run, ev.Unbar(at=turn.at, hosts=(*run.record.fruitless.barred, *run.record.cancelled.barred)))
        run.record.refusals, run.record.fruitless, run.record.cancelled = {}, Duds(), Cancels()
        self._known.backoff.forget(run.asker)
        for what in (base_job(run.id), harvest_jobs(run.id)):
            self._known.backoff.take_up(what)
        turn.record(run, "resume", "resumed by hand: nodes are asked for again")

    def waits_after_failures(self, turn: Turn, run: Run) -> bool:
        """Are its requests put off because the last jobs came to nothing, or its base job because Slurm refused it?"""
        put_off = (self._known.backoff.put_off_until(what(run.id)) for what in (base_job, harvest_jobs))
        return run.failures >= DUDS or turn.now < max(put_off)

    def _put_off(self, turn: Turn, run: Run) -> bool:
        """Is it too early to ask for more, because the last jobs came to nothing?"""
        duds, failures = run.record.fruitless, run.failures
        backoff, what = self._known.backoff, harvest_jobs(run.id)
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
                note_pauses(turn, backoff)
                wait_s = backoff.put_off_until(what) - turn.now
                turn.record(run, "pause", f"{why}; the next one is tried in {wait_s:.0f} s")
        return turn.now < backoff.put_off_until(what)


def note_pauses(turn: Turn, backoff: Backoff) -> None:
    """Have it written down with this turn what is left alone, and until when."""
    turn.notes[BACKOFF] = records.encode(backoff)


def _tried(run: Run, wanted: Demand) -> Demand:
    """After jobs that came to nothing, one alone is tried until its node trains or it has come to nothing, too."""
    if run.failures < DUDS:
        return wanted
    on_its_way = (a for a in run.live_allocations() if a.asked_at is None and a.active_at is None and not a.ahead)
    most = 0 if any(a.kind is AllocationKind.HARVEST for a in on_its_way) else 1
    return replace(wanted, nodes=min(wanted.nodes, most), renew=False)


def _give_all_back(turn: Turn, run: Run, reason: str) -> None:
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


def _find(runs: dict[str, Run], token: str) -> tuple[Run, Allocation]:
    for run in runs.values():
        if token in run.allocations:
            return run, run.allocations[token]
    raise KeyError(token)


def _submit(turn: Turn, wish: Ask, run: Run) -> None:
    turn.new_allocation(
        run,
        AllocationKind.HARVEST,
        partition=wish.partition,
        minutes=wish.minutes,
        part=wish.part,
        exclude=folded(wish.exclude),
        replaces=wish.replaces,
        ahead=wish.ahead,
    )
