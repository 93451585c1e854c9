"""The registry: every run of this head, its allocations, and the allow-list of their keys.

The registry is plain memory. `Turn` notes which runs changed, and `loop.durable` writes those.
"""

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
from fallow.control.protocol import BaseJob
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
from fallow.files import Paths, write_private, write_struct
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
"""After this time without any message, the head assumes that it was absent and that agents' connections broke."""

RECONNECT_S = 30.0
"""Time that agents get to reconnect after an absence of the head."""

RECENT_PAUSES = 50
"""Number of the newest changes whose pauses decide how early a node is released."""
KEPT_GENERATIONS = 1000
"""Number of the newest generations in a run's report."""


@dataclass(slots=True)
class Stretch:
    """Undisturbed steps of one generation, whose speed is being measured."""

    generation: int
    step: int
    "newest finished step"
    warm: int = 0
    "number of steps so far, of which the first do not count"
    begin: tuple[float, int] | None = None
    "(time on the turns' clock, finished steps) at the end of the last step that does not count"


class Run:
    """A run in memory: durable records, membership, and the volatile reports of its nodes.

    Args:
        stored: records of the run.
        machine: state machine of its membership.
        revision: revision of the root record in the store; 0: no record of the run was ever written.
        ordered: account and QOS of harvest jobs, if the configuration sets them.
    """

    def __init__(self, stored: StoredRun, machine: Machine, revision: int, ordered: Asker | None = None) -> None:
        self.spec = stored.spec
        self.asker = Asker.of(stored.spec, ordered)
        "account and QOS of its harvest jobs"
        self.record = stored.record
        self.allocations = stored.allocations
        "by token"
        self.machine = machine
        self.revision = revision
        self.stored: dict[str, int] = {}
        "key -> hash of what is in the store (`head.loop.durable`)"
        self.generations: deque[GenerationReport] = deque(stored.generations, maxlen=KEPT_GENERATIONS)
        "complete generations, oldest first; each is a record of its own in the store"
        self.gathers = Gathers()
        self.progress: dict[int, Progress] = {}
        "number of a node -> its last progress report"
        self.step = 0
        "finished steps of the foremost node"
        self.reached = 0, 0
        "position of the foremost member in its data; beats raise `step` and `reached`, each tick computes them again"
        self.agent_seen: dict[tuple[str, str], float] = {}
        "(token, host) -> time of the agent's last message, on the head's clock"
        self.shown_at: dict[str, float] = {}
        "token -> Unix time of the last poll of this head that showed its job"
        self.without_agent: dict[str, str] = {}
        "token -> message about a running job whose agents do not come, as of the last tick"
        self.stretch: Stretch | None = None
        "steps since the last change, whose speed is being measured"
        self.slow_links = SlowLinks()
        self.slow_link = ""
        "message about a node whose link slows the run down; empty: no such node, or the node is released"
        self.curve_written = 0.0
        "time on the turns' clock at which a measurement last caused a write of `record.curve`"
        self.gain: Gain | None = None
        "gain from further nodes, as of the last plan"
        self.failures_seen: int | None = None
        "`failures`, as of the last plan"
        self.limited_by = ""
        "other user's job that waits for a limit and stops requests of this run, as of the last plan; empty: none"
        self.target: int | None = None
        "number of harvested nodes, held and requested, without those that are given back, as of the last plan"
        self.base_hold_reason = ""
        "why its base job is not submitted again"
        self.is_empty: bool | None = None
        "True if the run had no member at the last tick; None: this head has not looked for checkpoints on disk yet"
        self.look: Future[Any] | None = None
        "scan of its checkpoints on disk that is under way (`head.peers.checkpoints`)"
        self.keys_retry_at = 0.0
        "Unix time until which it requests no nodes, because a key file could not be written"
        self.left_job_id: Future[BaseJob] | None = None
        "look for the id of its base job in a file (`head.slurm.jobs`)"

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
        """Node -> reason, for nodes that the run avoids because too much has failed there."""
        return {host: bar.reason for host, bar in self.roster.failures.bars.items() if bar.reason}

    @property
    def avoided_nodes(self) -> list[str]:
        """Nodes that the run avoids: barred or drained."""
        return sorted({*self.barred, *self.record.drained})

    @property
    def failures(self) -> int:
        """Number of jobs in a row that failed: no agent came, or no node became ready."""
        return self.record.fruitless.in_a_row + self.root.start_failures

    @property
    def workers_per_node(self) -> int:
        return self.record.slots or self.spec.workers_per_node or 1

    @property
    def useful_members(self) -> int:
        """Largest number of members that have work: the limit, or as many as there are shards for their workers."""
        contract = self.root.contract
        if contract is None:
            return self.root.limit
        return min(self.root.limit, max(1, contract.shards // self.workers_per_node))

    def joins(self, node: int) -> bool:
        """True if other nodes train or are about to start without this node. This node then joins once it is ready."""
        ballot = self.machine.ballot
        starting = ballot.members if ballot is not None else []
        return self.has_members or bool(starting and node not in starting)

    @property
    def has_members(self) -> bool:
        """True if a member is alive. Called at each heartbeat, so it stops at the first living member."""
        return any(map(self.roster.alive, self.roster.members))

    def asker_of(self, allocation: Allocation) -> Asker:
        """Account and QOS of a harvest job. A job of normal priority uses those of the user's own job."""
        return Asker.of(self.spec) if allocation.has_normal_priority else self.asker

    def may_restart(self, allocation: Allocation, host: str) -> bool:
        """True if this agent's workers would be restarted after a crash.

        They are not restarted under `fallow local` (its schedule decides), when they were to leave, or on a barred
        node.
        """
        agent, node = allocation.agents[host], self.roster.nodes.get(allocation.agents[host].node)
        if agent.has_left or node is None or node.leaving or node.finished or self.spec.local:
            return False
        is_running = allocation.state is AllocationState.RUNNING
        return is_running and not self.ended and not self.roster.finishing and host not in self.barred

    def is_coming(self, allocation: Allocation, host: str) -> bool:
        """True if this agent has living workers, or will have some."""
        agent = allocation.agents[host]
        if agent.has_left:
            return False
        node = self.roster.nodes.get(agent.node)
        if node is not None and node.alive:
            return True
        if agent.retry_at is not None or not agent.node:
            return allocation.state is AllocationState.RUNNING and host not in self.barred
        # A silent node may come back. Of a crashed node some processes may still run.
        return node is not None and (
            node.phase is MemberPhase.SILENT or (not node.exited and self.may_restart(allocation, host))
        )

    def update_position(self) -> None:
        """Update `step` and `reached`: the foremost member may have left, or gone back to a checkpoint."""
        self.step = self.roster.front
        positions = (self.progress[n].reached for n in self.roster.members if n in self.progress)
        self.reached = max(positions, default=(0, 0))

    def longest_pause_s(self) -> float:
        """Longest pause of the newest planned changes. An unplanned change also waits for the lost node's lease."""
        recent = islice(reversed(self.generations), RECENT_PAUSES)
        planned = (report.pause_s for report in recent if report.kind not in (ChangeKind.START, ChangeKind.EJECT))
        return max(filter(None, planned), default=0.0)

    def longest_save_s(self) -> float:
        """Longest time to write a durable checkpoint. The last members write one before they leave."""
        return max((saved.checkpoint.took_s for saved in self.roster.checkpoints.saved), default=0.0)

    @property
    def bases(self) -> list[Allocation]:
        return [a for a in self.allocations.values() if a.kind is AllocationKind.BASE]

    def live_allocations(self) -> list[Allocation]:
        return [a for a in self.allocations.values() if a.is_live]


def ordered(config: Config) -> Asker:
    """Account and QOS of harvest jobs, if the configuration sets them."""
    return Asker(config.harvest.account or "", config.harvest.qos or "")


def timing(config: Membership) -> Timing:
    return Timing(
        prepare_s=config.prepare_timeout_s,
        start_s=config.start_timeout_s,
        lease_s=config.lease_s,
        progress_s=config.progress_s,
        release_s=config.release_margin_s,
        bar_after=config.bar_after,
    )


class Hearing:
    """Measures agents' silence, across all runs. All times are on the head's clock.

    An agent's silence counts only while the head hears other agents. A head that was stopped, cut off or busy hears no
    agent, and blames none. The membership judges nodes by their workers' reports (`core.membership.watch`). This class
    judges agents that have no worker.
    """

    def __init__(self) -> None:
        self._heard_at = -inf
        self._back_at = -inf
        "end of the head's last absence"

    def hear(self, at: float) -> None:
        """Note that a message of some agent was received."""
        if at - self._heard_at >= ABSENCE_S:
            self._back_at = at
        self._heard_at = max(at, self._heard_at)

    def silent_s(self, seen_at: float, now: float) -> float:
        """Seconds during which an agent, last heard at `seen_at`, was silent while another agent was heard."""
        if seen_at < self._back_at and now < self._back_at + RECONNECT_S:
            return 0.0
        return max(0.0, self._heard_at - seen_at)


class Registry:
    """All runs, and the allow-list of keys."""

    def __init__(
        self, paths: Paths, config: Config, new_id: Callable[[], str] = partial(token_hex, 6), *, validate: bool = False
    ) -> None:
        """Make an empty registry.

        Args:
            paths: files of the head.
            config: configuration of the head.
            new_id: makes random hexadecimal words.
            validate: check the invariants of all runs after each event.
        """
        self.paths = paths
        self.runs: dict[str, Run] = {}
        self.current: dict[str, Run] = {}
        "runs that still need attention; the others are retired"
        self.pruned = PrunedRuns()
        self.principals: dict[str, Allocation] = {}
        "authenticated key -> allocation whose agents use it"
        self.hearing = Hearing()
        self.term = 0
        self.endpoint = ""
        "address at which peers find this head"
        self.config = config
        self.unwritten_keys: dict[str, KeyFile] = {}
        "token -> key file to write before a job uses the keys"
        self._revoked: dict[str, Path] = {}
        "key -> its file"
        self._new_id = new_id
        self._validate = validate

    @property
    def on_slurm(self) -> list[Run]:
        """Current runs whose allocations are Slurm jobs."""
        return [run for run in self.current.values() if not run.spec.local]

    def get(self, run: str, *, by_name: bool = False) -> Run:
        """Find a run by its id, its name, the number of one of its Slurm jobs, or a prefix of its id.

        If several runs have the name, the only one that has not ended matches.

        Args:
            run: words that somebody typed.
            by_name: accept only the id or the name. For operations that cannot be undone.

        Raises:
            FallowError: no run matches, or more than one.
        """
        if run in self.runs:
            return self.runs[run]
        matches = [each for each in self.runs.values() if each.spec.name == run]
        live_runs = [each for each in matches if not each.ended]
        if len(live_runs) == 1:
            return live_runs[0]
        if not matches and not by_name:
            matches = [each for each in self.runs.values() if any(a.job_id == run for a in each.allocations.values())]
        if not matches and not by_name and run:
            matches = [each for each in self.runs.values() if each.id.startswith(run)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            ids = ", ".join(sorted(each.id for each in matches))
            raise FallowError(f"run {quote(run)} matches {len(matches)} runs; say which: {ids}", Exit.USAGE)
        problem = "no run has exactly this name" if by_name else "no such run"
        raise FallowError(f"run {quote(run)}: {problem}; `fallow status` lists them", Exit.NOINPUT)

    def add(self, stored: StoredRun, revision: int, at: float) -> Run:
        """Add a run; `at`: now, on the head's clock."""
        spec, former_run = stored.spec, self.runs.get(stored.spec.run)
        machine = Machine(
            stored.roster,
            term=self.term,
            timing=timing(self.config.membership),
            at=at,
            # A machine that replaces another continues the numbers of its orders.
            edition=0 if former_run is None else former_run.machine.outbox.edition,
            keep=self.config.checkpoint.keep,
            validate=self._validate or spec.local,
        )
        run = Run(stored, machine, revision, ordered(self.config))
        self.runs[spec.run] = self.current[spec.run] = run
        for allocation in stored.allocations.values():
            if allocation.is_live or _may_have_agents(spec, allocation):
                self.principals[allocation.public_key] = allocation
        return run

    def draft(self, spec: RunSpec, now: float) -> StoredRun:
        """Give a new run its id. `add` adds the run once its files are written; `now`: Unix time."""
        run_id, path = new_run_id(spec.name, self._new_id()[:6]), self.config.checkpoint.path
        spec = msgspec.structs.replace(spec, run=run_id, created_at=now)
        # Under `fallow local` the schedule alone admits members.
        limit = 0 if spec.local else spec.max_nodes
        root = Root(run=run_id, minimum=spec.min_nodes, maximum=spec.max_nodes, limit=limit, scripted=spec.local)
        record = RunRecord(checkpoint_folder="" if path is None else str(Path(path) / run_id))
        return StoredRun(spec, record, Roster(root), {})

    def checkpoint_folder(self, run: Run) -> Path:
        """Folder of a run's checkpoints. A run keeps its folder when the configuration changes."""
        folder = run.record.checkpoint_folder
        return Path(folder) if folder else self.paths.run(run.id).checkpoints

    def output_of(self, run: Run, allocation: Allocation) -> str:
        """Path of a job's output. For a base job the user's options decide, so the text says how to ask Slurm."""
        if allocation.kind is AllocationKind.HARVEST:
            return str(self.paths.run(run.id).output(allocation.token))
        return f"StdOut in: scontrol show job {allocation.job_id or allocation.token}"

    def drop(self, run: Run) -> None:
        """Forget a run that was never made durable."""
        self._forget_keys(run)
        self.runs.pop(run.id, None)
        self.current.pop(run.id, None)

    def reload(self, run: Run, stored: StoredRun, revision: int, at: float) -> Run:
        """Replace a run in memory by its durable records, as a head does that starts."""
        self._forget_keys(run)
        new = self.add(stored._replace(spec=run.spec), revision, at)
        new.is_empty, new.look, new.reached = run.is_empty, run.look, run.reached
        new.failures_seen, new.limited_by = run.failures_seen, run.limited_by
        return new

    def _forget_keys(self, run: Run) -> None:
        for key in [key for key, allocation in self.principals.items() if allocation.run == run.id]:
            self.unwritten_keys.pop(self.principals.pop(key).token, None)

    def retire(self, run: Run) -> None:
        """Retire an ended run without jobs: polls and ticks skip it from now on."""
        for allocation in run.allocations.values():
            self.close(run, allocation)
        del self.current[run.id]

    def forget(self, run: Run, now: float) -> None:
        """Drop an ended run and add its usage to `pruned`; `now`: Unix time."""
        if run.id in self.current:
            self.retire(run)
        if not run.spec.local:
            self.pruned.add(account_of(run.spec), run.record.usage, now)
        del self.runs[run.id]

    def new_allocation(self, run: Run | StoredRun, kind: AllocationKind, now: float, **fields: object) -> Allocation:
        """Reserve a token and make its keys. Before a job uses them, the allocation must be durable and the key file
        written (`unwritten_keys`).

        Args:
            run: a run, or a draft, whose keys are allowed once `add` adds it.
            kind: of the allocation.
            now: Unix time.
            fields: other fields of `Allocation`.
        """
        run_id, number = run.spec.run, run.record.next_allocation
        run.record.next_allocation += 1
        token = new_token(
            run_id, kind, number, self._new_id()[:6], normal_priority=bool(fields.get("has_normal_priority"))
        )
        allocation = run.allocations[token] = Allocation(
            token=token,
            run=run_id,
            kind=kind,
            public_key=self.make_keys(run.spec, kind, token),
            number=number,
            requested_at=now,
            **fields,  # type: ignore[arg-type]
        )
        if isinstance(run, Run):
            self.principals[allocation.public_key] = allocation
        return allocation

    def make_keys(self, spec: RunSpec, kind: AllocationKind, token: str) -> str:
        """Make the keys of an allocation. Return the public key."""
        keys = new_keypair()
        stands_in = kind is AllocationKind.BASE and not spec.local
        self.unwritten_keys[token] = KeyFile(
            run=spec.run,
            token=token,
            kind=kind,
            public_key=keys.public,
            secret_key=keys.secret,
            head_file=str(self.paths.head_file),
            workers_per_node=spec.workers_per_node,
            stand_in_after_s=self.config.membership.head_patience_s if stands_in else None,
        )
        return keys.public

    def end_allocation(self, run: Run, allocation: Allocation, reason: str) -> None:
        """Give an allocation up. The caller informs its workers.

        The head still accepts messages of its agents, and answers that they must end, until Slurm shows that the job
        is over.
        """
        if allocation.state not in (AllocationState.ENDED, AllocationState.LOST):
            # Its agents lived until now, even if polls did not show its job.
            allocation.state, allocation.unseen_at = AllocationState.ENDED, None
        allocation.reason = allocation.reason or reason
        if not _may_have_agents(run.spec, allocation):
            self.close(run, allocation)

    def close(self, run: Run, allocation: Allocation) -> None:
        """Revoke the key of an allocation that has no job any more."""
        self.principals.pop(allocation.public_key, None)
        self.unwritten_keys.pop(allocation.token, None)
        self._revoked[allocation.public_key] = self.paths.run(run.id).key(allocation.token)

    def take_revoked(self) -> dict[str, Path]:
        """Keys that were revoked since the last call, with their files. Call once the turn is durable. The router drops
        their connections, and the files are removed."""
        revoked, self._revoked = self._revoked, {}
        # A run that was reloaded from the store may use a key again.
        return {key: file for key, file in revoked.items() if key not in self.principals}

    def is_allowed(self, key: str) -> bool:
        return key in self.principals


def _may_have_agents(spec: RunSpec, allocation: Allocation) -> bool:
    """True while the job of an allocation that was given up may still have agents."""
    return not spec.local and allocation.job_id is not None and not allocation.is_settled


def write_run(paths: Paths, spec: RunSpec, keys: KeyFile) -> None:
    """Make the folder of a new run, with its script and the keys of its base allocation."""
    folder = paths.run(spec.run).create()
    if spec.script:
        write_private(folder.script, spec.script.encode())
    write_struct(folder.key(keys.token), keys)
