"""What a head that comes back must know about a run, as values to store: a root, a record per node, three lists.

Each record is stored under a key of its own (`core.records`). A turn writes the root and the records that it changed,
in one compare-and-set on the root: when one of a thousand nodes joins, three records are written.
"""

from enum import StrEnum

import msgspec

from fallow.core.membership.messages import Checkpoint, Contract, Finish, Outcome
from fallow.core.records import MIGRATIONS, SCHEMAS, Fields
from fallow.model import ChangeKind, MemberPhase, Parts, RollbackReport, RunStatus


class Node(msgspec.Struct, kw_only=True):
    id: int
    "number by arrival, never used again: the youngest node has the highest"
    host: str
    token: str
    "of the allocation"
    boot: int
    "which start of its workers by that agent"
    slots: int
    "number of its workers"
    entry: str
    "where they listen, see `messages.Peer`"
    phase: MemberPhase = MemberPhase.STARTING
    seat: int = 0
    "its place in the order of ranks; 0: none. A lost node keeps its seat until a generation without it is committed"
    joined: int = 0
    "generation in which it got its seat"
    accepted: bool = False
    "its contract was"
    step: int = 0
    ends_at: float | None = None
    leaving: str = ""
    "why it was asked to leave"
    ended: str = ""
    "why it is gone or given up"
    code: int | None = None
    traceback: str = ""
    proved_gone: bool = False
    "none of its workers will ever finish a step again"
    exited: bool = False
    "its agent or Slurm says that its processes have ended"
    finished: bool = False
    deserted: bool = False
    noted: str = ""
    "path of its newest checkpoint on record"
    healed: int = 0
    unrecorded: int | None = None
    "see `messages.Report`"

    @property
    def alive(self) -> bool:
        return self.phase not in (MemberPhase.SILENT, MemberPhase.GONE)


class Change(msgspec.Struct, kw_only=True):
    """A change of the membership. It is stored once it is committed. Before, only its number is, in `Root.highest`."""

    generation: int
    replaces: int
    kind: ChangeKind
    leavers: list[int]
    "nodes that are asked to go at the boundary"
    joined: list[int]
    reason: str
    began_at: float
    interrupt: bool = False
    "the generation before is broken"
    probe: bool = False
    "only a look at the links; never committed"
    first_step: int | None = None
    pause_s: float = 0.0
    parts: Parts = Parts()
    bytes_in_pause: int = 0
    bytes_behind: int = 0
    discarded: int = 0


class Root(msgspec.Struct, kw_only=True):
    run: str
    minimum: int
    maximum: int
    "of nodes, as the user asked"
    limit: int
    "most nodes now"
    scripted: bool = False
    "nodes come and go by a schedule alone (`fallow local`): no standby takes a lost node's place"
    status: RunStatus = RunStatus.WAITING
    generation: int = 0
    "the committed one"
    highest: int = 0
    "highest number that was ever proposed or heard of; never used again"
    complete: int = 0
    "newest generation of which all members are known to have had the state"
    recovered: int = 0
    "newest generation that the store had lost: what a node holds that did not compute in it is too old"
    old_may_step: bool = False
    "members of the generation before may still finish steps in it: nobody is known to have passed the boundary"
    entered: bool = False
    "a member is known to compute in the committed generation: whoever is not out of the one before is left behind"
    change: Change | None = None
    "committed, and not all members have gone over"
    next_id: int = 1
    next_seat: int = 1
    contract: Contract | None = None
    rollback_below: int = 0
    "a rollback is wanted: the first generation above this one drops the members' state. 0: none is"
    front: int = 0
    "finished steps of nodes that are forgotten"
    discarded: int = 0
    first: int = 0
    "first member of the committed generation: its first worker has rank 0"
    first_before: int = 0
    main: int = 0
    "first member of the generation in which the training ended"
    final: Finish | None = None
    outcome: Outcome | None = None
    "see `messages.Plan`"
    unsaved: tuple[int, int] = (0, 0)
    unsaved_reason: str = ""
    "the last checkpoint could not be written; empty: it could"
    unrecorded: dict[int, int] = {}
    "nodes that are forgotten -> the step from which on their ledgers lack records"
    diverged: str = ""
    "members' final states differ, in words"
    start_failures: int = 0
    "nodes in a row that ended before they were ready"
    message: str = ""
    traceback: str = ""


class History(msgspec.Struct, kw_only=True):
    members: list[int] = []
    "of the newest generation that became complete, in rank order"
    first_steps: list[tuple[int, int]] = []
    "(generation, first step) of those that became complete, the newest"
    rollbacks: list[RollbackReport] = []


class Saved(msgspec.Struct, kw_only=True):
    """A checkpoint belongs to the history that led to it.

    Once a later generation has begun before its step (a rollback, or all members were lost before the checkpoint was
    known), it is set aside: going on from it would mix two histories.
    """

    checkpoint: Checkpoint
    problem: str = ""
    "it is damaged, in words"
    aside: bool = False
    "the run went on from an earlier step since"

    @property
    def usable(self) -> bool:
        return not self.problem and not self.aside


class Checkpoints(msgspec.Struct, kw_only=True):
    saved: list[Saved] = []
    "in the order in which they became known"

    def usable(self) -> list[Checkpoint]:
        """Newest step first."""
        good = [saved.checkpoint for saved in self.saved if saved.usable]
        return sorted(good, key=lambda checkpoint: checkpoint.step, reverse=True)

    def take_spare(self, keep: int) -> list[str]:
        """Take out what is not needed any more, and return the paths. Call it only while a node has the state.

        Args:
            keep: so many of the newest usable ones stay, besides those that were asked for by hand. One that was set
                aside or is damaged stays until so many usable ones have come after it.
        """
        ordinary = [saved for saved in self.saved if not saved.checkpoint.asked]
        good = sorted((saved for saved in ordinary if saved.usable), key=lambda saved: saved.checkpoint.step)
        spare = good[: max(0, len(good) - keep)]
        for number, saved in enumerate(self.saved):
            if saved in ordinary and not saved.usable and sum(later.usable for later in self.saved[number:]) >= keep:
                spare.append(saved)
        for saved in spare:
            self.saved.remove(saved)
        return [saved.checkpoint.path for saved in spare]


class FailureKind(StrEnum):
    EXCEPTION = "exception"
    "the script raised, or ended with an exit code"
    CRASH = "crash"
    "a process was ended by a fault of its own (SIGSEGV and the like)"
    HANG = "hang"
    UNREACHABLE = "unreachable"
    "cut off from other members"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    node: int
    host: str
    token: str
    kind: FailureKind
    signature: str
    step: int
    text: str
    at: float


class HostBar(msgspec.Struct, kw_only=True):
    times: int = 0
    until: float = 0.0
    reason: str = ""
    "empty: the bar is over, and counts if there is another"


class Failures(msgspec.Struct, kw_only=True):
    failures: list[Failure] = []
    bars: dict[str, HostBar] = {}
    "host -> its bar"


def _without_leave_by(fields: Fields) -> Fields:
    del fields["leave_by"]
    return fields


SCHEMAS.update({Root: 1, Node: 2, History: 1, Checkpoints: 1, Failures: 1})
MIGRATIONS[Node, 1] = _without_leave_by
