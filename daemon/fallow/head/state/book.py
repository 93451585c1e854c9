"""The book: every run that this head looks after, its allocations, and who may speak for what.

Plain memory; `Turn` says which runs changed and the app makes them durable.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec

from fallow.config import Config, Membership
from fallow.core.accounting.backoff import Asker
from fallow.core.allocations import Allocation
from fallow.core.membership.gather import Gathers
from fallow.core.membership.machine import Machine
from fallow.core.membership.records import Root
from fallow.core.membership.roster import Roster
from fallow.core.membership.watch import Timing
from fallow.core.planning.gain import Gain
from fallow.core.protocol import Progress
from fallow.core.tokens import new_run_id, new_token
from fallow.core.training.slow_links import SlowLinks
from fallow.files import Paths, private_dir, unwritable, write_private, write_struct
from fallow.head.state.stored import PrunedRuns, RunRecord, StoredRun, account_of
from fallow.model import (
    AllocationKind,
    AllocationState,
    ChangeKind,
    Exit,
    FallowError,
    GenerationReport,
    KeyFile,
    MemberPhase,
    RunSpec,
)
from fallow.text import quote
from fallow.wire.keys import new_keypair

ABSENCE_S = 5.0
"""When nobody was heard for so long, connections of agents may have broken meanwhile."""

RECONNECT_S = 30.0
"""So long after an absence of the head agents may take to come back."""

RECENT_PAUSES = 50
"""As many of the last changes decide how early a node is released."""
KEPT_GENERATIONS = 1000
"""Of so many generations, the newest, a run's report tells."""


@dataclass(slots=True)
class Stretch:
    """Steps of one generation, undisturbed so far."""

    generation: int
    step: int
    "newest finished step"
    warm: int = 0
    begin: tuple[float, int] | None = None
    "(time on the turns' clock, finished steps) at the end of its first step that counts"


class Run:
    """A run in memory: durable records, membership, and what its nodes say besides.

    Args:
        stored: its records.
        machine: its membership.
        revision: of the root record in the store; 0: nothing of the run was ever written.
        ordered: account and QOS of harvest jobs, where the configuration says so.
    """

    def __init__(self, stored: StoredRun, machine: Machine, revision: int, ordered: Asker | None = None) -> None:
        self.spec = stored.spec
        self.asker = Asker.of(stored.spec, ordered)
        "in whose name its harvest jobs are asked for"
        self.record = stored.record
        self.allocations = stored.allocations
        "by token"
        self.machine = machine
        self.revision = revision
        self.stored: dict[str, int] = {}
        "key -> hash of what is in the store (`head.loop.durable`)"
        self.generations: deque[GenerationReport] = deque(stored.generations, maxlen=KEPT_GENERATIONS)
        "those that became complete, the oldest first; each is a record of its own in the store"
        self.gathers = Gathers()
        self.progress: dict[int, Progress] = {}
        "by the number of the node"
        self.step = 0
        "finished steps of the foremost node"
        self.reached = 0, 0
        "where the foremost member is in its data; both are raised by beats, and found anew with each tick"
        self.agent_seen: dict[tuple[str, str], float] = {}
        "(token, host) -> when its agent was heard, on the head's clock"
        self.shown_at: dict[str, float] = {}
        "token -> Unix time of the last poll of this head that showed its job"
        self.without_agent: dict[str, str] = {}
        "token -> what is said of a job that runs and whose agents do not come, as of the last tick"
        self.stretch: Stretch | None = None
        "steps since the last change, to be measured"
        self.slow_links = SlowLinks()
        self.slow_link = ""
        "which node's link holds the run up, as of the last stretch; empty: none, or the node is let go"
        self.curve_written = 0.0
        "when `record.curve` was last made durable on its own account, on the turns' clock"
        self.gain: Gain | None = None
        "from nodes, as of the last plan"
        self.failures_seen: int | None = None
        "`failures`, as of the last plan"
        self.limited_by = ""
        "the job that waits for a limit, because of which nothing is asked for, as of the last plan"
        self.target: int | None = None
        "harvested nodes that it has and asks for, without those that it gives back, as of the last plan"
        self.held_back = ""
        "why its base job is not submitted again"
        self.is_empty: bool | None = None
        "it had no member at the last tick; None: this head has not looked yet whether there are checkpoints on disk"
        self.look: Future[Any] | None = None
        "at its checkpoints on disk, see `head.peers.checkpoints`"

    @property
    def id(self) -> str:
        return self.spec.run

    @property
    def roster(self) -> Roster:
        return self.machine.roster

    @property
    def root(self) -> Root:
        return self.roster.root

    @property
    def ended(self) -> bool:
        return self.root.status.ended

    @property
    def barred(self) -> dict[str, str]:
        """Nodes that the run does without because too much has failed there, and why."""
        return {host: bar.reason for host, bar in self.roster.failures.bars.items() if bar.reason}

    @property
    def shunned(self) -> list[str]:
        """Nodes that the run does without, barred or drained."""
        return sorted({*self.barred, *self.record.drained})

    @property
    def failures(self) -> int:
        """Jobs in a row that came to nothing: no agent, or no node that got ready."""
        return self.record.fruitless.in_a_row + self.root.start_failures

    @property
    def workers_per_node(self) -> int:
        return self.record.slots or self.spec.workers_per_node or 1

    @property
    def useful_members(self) -> int:
        """Most members that can do something: the limit, or as many as there are shards for their workers."""
        contract = self.root.contract
        if contract is None:
            return self.root.limit
        return min(self.root.limit, max(1, contract.shards // self.workers_per_node))

    def joins(self, node: int) -> bool:
        """Do others train, or are about to begin without this node? Then it is absorbed once it is ready."""
        ballot = self.machine.ballot
        starting = ballot.members if ballot is not None else []
        return self.has_members or bool(starting and node not in starting)

    @property
    def has_members(self) -> bool:
        """Is a member there? Asked at each heartbeat, so it does not look at all of them."""
        return any(map(self.roster.alive, self.roster.members))

    def asks_as(self, allocation: Allocation) -> Asker:
        """In whose name a harvest job is asked for: one of normal priority is in the user's own."""
        return Asker.of(self.spec) if allocation.hurried else self.asker

    def may_restart(self, allocation: Allocation, host: str) -> bool:
        """Would this agent's workers be started again if they crashed?

        Not where the schedule of `fallow local` alone decides, where they were to leave, and on a barred node.
        """
        agent, known = allocation.agents[host], self.roster.nodes.get(allocation.agents[host].node)
        if agent.gone or known is None or known.leaving or known.finished or self.spec.local:
            return False
        here = allocation.state is AllocationState.RUNNING
        return here and not self.ended and not self.roster.finishing and host not in self.barred

    def is_coming(self, allocation: Allocation, host: str) -> bool:
        """Are workers of this agent alive, or will there be some?"""
        agent = allocation.agents[host]
        if agent.gone:
            return False
        known = self.roster.nodes.get(agent.node)
        if known is not None and known.alive:
            return True
        if agent.again_at is not None or not agent.node:
            return allocation.state is AllocationState.RUNNING and host not in self.barred
        # One that is silent may come back; the processes of one that crashed may not all have ended.
        return known is not None and (
            known.phase is MemberPhase.SILENT or (not known.exited and self.may_restart(allocation, host))
        )

    def look_how_far(self) -> None:
        """See where the foremost member is: who said so last may have left, or have gone back to a checkpoint."""
        self.step = self.roster.front
        found = (self.progress[n].reached for n in self.roster.members if n in self.progress)
        self.reached = max(found, default=(0, 0))

    def longest_pause_s(self) -> float:
        """Of the newest planned changes: in others the members wait for what may never come again."""
        recent = islice(reversed(self.generations), RECENT_PAUSES)
        planned = (done.pause_s for done in recent if done.kind not in (ChangeKind.START, ChangeKind.EJECT))
        return max(filter(None, planned), default=0.0)

    def longest_save_s(self) -> float:
        """That a durable checkpoint took: the last members write one before they leave."""
        return max((saved.checkpoint.took_s for saved in self.roster.checkpoints.saved), default=0.0)

    @property
    def bases(self) -> list[Allocation]:
        return [a for a in self.allocations.values() if a.kind is AllocationKind.BASE]

    def live_allocations(self) -> list[Allocation]:
        return [a for a in self.allocations.values() if a.live]


def ordered(config: Config) -> Asker:
    """Account and QOS of harvest jobs, where the configuration says so."""
    return Asker(config.harvest.account or "", config.harvest.qos or "")


def timing(config: Membership) -> Timing:
    """Deadlines of the membership's machines."""
    return Timing(
        prepare_s=config.prepare_timeout_s,
        start_s=config.start_timeout_s,
        lease_s=config.lease_s,
        progress_s=config.progress_s,
        release_s=config.release_margin_s,
        bar_after=config.bar_after,
    )


class Hearing:
    """When this head heard agents, of whichever run. All times are on the head's clock.

    So an agent's silence is known to be its own: a head that was stopped, cut off or busy hears nobody, and blames
    nobody. The membership judges nodes in the same manner (`core.membership.watch`), by what their workers report. This
    is for agents that have no worker to report for.
    """

    def __init__(self) -> None:
        self._heard_at = -inf
        self._back_at = -inf
        "when the last absence ended"

    def hear(self, at: float) -> None:
        """A message of an agent was received."""
        if at - self._heard_at >= ABSENCE_S:
            self._back_at = at
        self._heard_at = max(at, self._heard_at)

    def silent_s(self, seen_at: float, now: float) -> float:
        """For how long an agent that was last heard at `seen_at` was silent while another one was heard."""
        if seen_at < self._back_at and now < self._back_at + RECONNECT_S:
            return 0.0
        return max(0.0, self._heard_at - seen_at)


class Book:
    """All runs, and the allow-list of keys."""

    def __init__(
        self, paths: Paths, config: Config, new_id: Callable[[], str] = partial(token_hex, 6), *, validate: bool = False
    ) -> None:
        """Make an empty book.

        Args:
            paths: where its files are.
            config: of the head.
            new_id: makes random hexadecimal words.
            validate: check the invariants of all runs after each event.
        """
        self.paths = paths
        self.runs: dict[str, Run] = {}
        self.current: dict[str, Run] = {}
        "those of which something may still come; the others rest"
        self.pruned = PrunedRuns()
        self.principals: dict[str, Allocation] = {}
        "authenticated key -> for whose agents it may speak"
        self.hearing = Hearing()
        self.term = 0
        self.endpoint = ""
        "where peers find this head"
        self.config = config
        self._revoked: dict[str, Path] = {}
        "key -> its file"
        self._new_id = new_id
        self._validate = validate

    @property
    def on_slurm(self) -> list[Run]:
        """Runs whose allocations are Slurm jobs, and of which something may still come."""
        return [run for run in self.current.values() if not run.spec.local]

    def get(self, run: str, *, by_name: bool = False) -> Run:
        """The run that is meant: by its id, its name, the number of one of its Slurm jobs, or a beginning of its id.

        Of several with that name the only one that has not ended is meant.

        Args:
            run: what somebody typed.
            by_name: neither a job nor a beginning will do: what is done to the run cannot be undone.

        Raises:
            FallowError: none, or more than one.
        """
        if run in self.runs:
            return self.runs[run]
        found = [each for each in self.runs.values() if each.spec.name == run]
        going = [each for each in found if not each.ended]
        if len(going) == 1:
            return going[0]
        if not found and not by_name:
            found = [each for each in self.runs.values() if any(a.job_id == run for a in each.allocations.values())]
        if not found and not by_name and run:
            found = [each for each in self.runs.values() if each.id.startswith(run)]
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(sorted(each.id for each in found))
            raise FallowError(f"run {quote(run)}: that could be {len(found)} runs; say which: {ids}", Exit.USAGE)
        what = "no run has this very name" if by_name else "no such run"
        raise FallowError(f"run {quote(run)}: {what}; `fallow status` lists them", Exit.NOINPUT)

    def add(self, stored: StoredRun, revision: int, at: float) -> Run:
        """Take in a run; `at`: now, on the head's clock."""
        spec, known = stored.spec, self.runs.get(stored.spec.run)
        machine = Machine(
            stored.roster,
            term=self.term,
            timing=timing(self.config.membership),
            at=at,
            # One in another's place goes on behind the newest order that was sent.
            edition=0 if known is None else known.machine.outbox.edition,
            keep=self.config.checkpoint.keep,
            validate=self._validate or spec.local,
        )
        run = Run(stored, machine, revision, ordered(self.config))
        self.runs[spec.run] = self.current[spec.run] = run
        for allocation in stored.allocations.values():
            if allocation.live or _may_still_come(spec, allocation):
                self.principals[allocation.public_key] = allocation
        return run

    def create(self, spec: RunSpec, at: float, now: float) -> Run:
        """Give a new run its id and folder.

        Raises:
            FallowError: the folder cannot be written; there is no new run.
        """
        run_id, path, checkpoints = new_run_id(spec.name, self._new_id()[:6]), self.config.checkpoint.path, ""
        if path is not None:
            try:
                checkpoints = str(private_dir(Path(path) / run_id))
            except FallowError as error:
                raise FallowError(f"[checkpoint] path cannot be used: {error.message}", error.code) from error
        spec = msgspec.structs.replace(spec, run=run_id, created_at=now)
        folder = self.paths.run(run_id).create()
        if spec.script:
            with unwritable():
                write_private(folder.script, spec.script.encode())
        # Under `fallow local` members are let in by the schedule alone.
        limit = 0 if spec.local else spec.max_nodes
        root = Root(run=run_id, minimum=spec.min_nodes, maximum=spec.max_nodes, limit=limit, scripted=spec.local)
        return self.add(StoredRun(spec, RunRecord(checkpoint_folder=checkpoints), Roster(root), {}), 0, at)

    def checkpoint_folder(self, run: Run) -> Path:
        """Where a run's checkpoints are. A run keeps its place when the configuration changes."""
        named = run.record.checkpoint_folder
        return Path(named) if named else self.paths.run(run.id).checkpoints

    def output_of(self, run: Run, allocation: Allocation) -> str:
        """Where a job's output is. That of a base job, which is as the user's own options say, only Slurm knows."""
        if allocation.kind is AllocationKind.HARVEST:
            return str(self.paths.run(run.id).output(allocation.token))
        return f"StdOut in: scontrol show job {allocation.job_id or allocation.token}"

    def drop(self, run: Run) -> None:
        """Forget a run that was never made durable."""
        self._forget_keys(run)
        self.runs.pop(run.id, None)
        self.current.pop(run.id, None)

    def make_anew(self, run: Run, stored: StoredRun, revision: int, at: float) -> Run:
        """Put a run's durable records in the place of what is in memory, as for a head that has just begun."""
        self._forget_keys(run)
        new = self.add(stored._replace(spec=run.spec), revision, at)
        new.is_empty, new.look, new.reached = run.is_empty, run.look, run.reached
        new.failures_seen, new.limited_by = run.failures_seen, run.limited_by
        return new

    def _forget_keys(self, run: Run) -> None:
        for key in [key for key, allocation in self.principals.items() if allocation.run == run.id]:
            del self.principals[key]

    def rest(self, run: Run) -> None:
        """It has ended, and nothing of its jobs is left to see: polls and ticks pass it by from now on."""
        for allocation in run.allocations.values():
            self.close(run, allocation)
        del self.current[run.id]

    def forget(self, run: Run, now: float) -> None:
        """Drop a run that has ended, and whose jobs are in its sums. `pruned` has what it used; `now`: Unix time."""
        if run.id in self.current:
            self.rest(run)
        if not run.spec.local:
            self.pruned.add(account_of(run.spec), run.record.usage, now)
        del self.runs[run.id]

    def new_allocation(self, run: Run, kind: AllocationKind, now: float, **known: object) -> Allocation:
        """Reserve a token and leave its key file. Must be durable before anything is submitted with it.

        Raises:
            FallowError: the key file cannot be written; there is no new allocation.
        """
        number = run.record.next_allocation
        run.record.next_allocation += 1
        token = new_token(run.id, kind, number, self._new_id()[:6], hurried=bool(known.get("hurried")))
        public_key = self.leave_keys(run, kind, token)
        # Only now: without its keys nobody can use it.
        allocation = run.allocations[token] = Allocation(
            token=token,
            run=run.id,
            kind=kind,
            public_key=public_key,
            number=number,
            requested_at=now,
            **known,  # type: ignore[arg-type]
        )
        self.principals[public_key] = allocation
        return allocation

    def leave_keys(self, run: Run, kind: AllocationKind, token: str) -> str:
        """Make the keys of an allocation, and leave them in its file; returns the public one."""
        keys = new_keypair()
        stands_in = kind is AllocationKind.BASE and not run.spec.local
        key_file = KeyFile(
            run=run.id,
            token=token,
            kind=kind,
            public_key=keys.public,
            secret_key=keys.secret,
            head_file=str(self.paths.head_file),
            workers_per_node=run.spec.workers_per_node,
            stand_in_after_s=self.config.membership.head_patience_s if stands_in else None,
        )
        with unwritable():
            write_struct(self.paths.run(run.id).key(token), key_file)
        return keys.public

    def end_allocation(self, run: Run, allocation: Allocation, reason: str) -> None:
        """Give an allocation up. Its workers are told by whoever noticed.

        Its agents can be heard, and told to end, until Slurm shows that its job is over.
        """
        if allocation.state not in (AllocationState.ENDED, AllocationState.LOST):
            # Its agents lived until now, whether or not polls have shown its job.
            allocation.state, allocation.unseen_at = AllocationState.ENDED, None
        allocation.reason = allocation.reason or reason
        if not _may_still_come(run.spec, allocation):
            self.close(run, allocation)

    def close(self, run: Run, allocation: Allocation) -> None:
        """Forget the keys of an allocation: no job of it is left."""
        self.principals.pop(allocation.public_key, None)
        self._revoked[allocation.public_key] = self.paths.run(run.id).key(allocation.token)

    def take_revoked(self) -> list[str]:
        """Remove the files of keys that were revoked since the last call. To be called when that is durable.

        Returns:
            These keys; whoever routes messages forgets the way to them.
        """
        taken, self._revoked = self._revoked, {}
        # A run that was made anew may have them back.
        gone = {key: file for key, file in taken.items() if key not in self.principals}
        for file in gone.values():
            with contextlib.suppress(OSError):  # a file that stays opens nothing: its key is revoked
                file.unlink(missing_ok=True)
        return list(gone)

    def allowed(self, key: str) -> bool:
        return key in self.principals


def _may_still_come(spec: RunSpec, allocation: Allocation) -> bool:
    """True while agents of an allocation that was given up may live on in its job."""
    return not spec.local and allocation.job_id is not None and not allocation.settled
