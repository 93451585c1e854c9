"""Stored records from which a restarted head continues a run: a root, a record per node, three lists.

Each record has its own key (`core.records`). A turn writes the root and the records that it changed, in one
compare-and-set on the root. When one of a thousand nodes joins, three records are written.
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
    "token of its allocation"
    boot: int
    "counts how often its agent has started its workers"
    slots: int
    "number of its workers"
    entry: str
    "where its workers listen, see `messages.Peer`"
    phase: MemberPhase = MemberPhase.STARTING
    seat: int = 0
    "position in the order of ranks; 0: none. A lost node keeps its seat until a generation without it is committed"
    joined: int = 0
    "generation in which the node got its seat"
    accepted: bool = False
    "the head has accepted its contract"
    step: int = 0
    ends_at: float | None = None
    leaving: str = ""
    "why the node was asked to leave; empty: it was not"
    ended: str = ""
    "why the node ended or was given up; empty: it is alive"
    code: int | None = None
    traceback: str = ""
    proved_gone: bool = False
    "certain to finish no more step"
    exited: bool = False
    "its agent or Slurm reports that its processes have ended"
    finished: bool = False
    deserted: bool = False
    noted: str = ""
    "path of its newest recorded checkpoint"
    healed: int = 0
    unrecorded: int | None = None
    "see `messages.Report`"

    @property
    def alive(self) -> bool:
        return self.phase not in (MemberPhase.SILENT, MemberPhase.GONE)


class Change(msgspec.Struct, kw_only=True):
    """A change of the membership. Stored once committed; before, only its number is stored, in `Root.highest`."""

    generation: int
    replaces: int
    kind: ChangeKind
    leavers: list[int]
    "nodes that leave at the boundary"
    joined: list[int]
    reason: str
    began_at: float
    interrupt: bool = False
    "the previous generation is broken"
    probe: bool = False
    "only tests the links; never committed"
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
    "least and most nodes, as the user asked"
    limit: int
    "most nodes at present"
    scripted: bool = False
    "only a schedule changes the membership (`fallow local`): no standby replaces a lost node"
    status: RunStatus = RunStatus.WAITING
    generation: int = 0
    "newest committed generation; 0: none"
    highest: int = 0
    "highest generation number ever proposed or reported; never used again"
    complete: int = 0
    "newest generation whose members are all known to have had the state"
    recovered: int = 0
    "newest generation that the store had lost; the state of a node that did not compute in it is too old"
    old_may_step: bool = False
    "the previous generation may still finish steps: no member is known to have passed the boundary"
    entered: bool = False
    "a member is known to compute in the committed generation, so the previous one is over"
    change: Change | None = None
    "the committed change, as long as not all members have switched"
    next_id: int = 1
    next_seat: int = 1
    contract: Contract | None = None
    rollback_below: int = 0
    "the first generation above this number drops the members' state, for a rollback; 0: no rollback"
    front: int = 0
    "most finished steps of any node whose record was deleted"
    discarded: int = 0
    first: int = 0
    "first member of the committed generation, whose first worker has rank 0"
    first_before: int = 0
    main: int = 0
    "first member of the generation in which the training ended"
    final: Finish | None = None
    outcome: Outcome | None = None
    "see `messages.Plan`"
    unsaved: tuple[int, int] = (0, 0)
    unsaved_reason: str = ""
    "why the last checkpoint could not be written; empty: it was"
    unrecorded: dict[int, int] = {}
    "node whose record was deleted -> first step that is missing in its ledger"
    diverged: str = ""
    "how members' final states differ; empty: they do not"
    start_failures: int = 0
    "number of consecutive nodes that ended before they were ready"
    message: str = ""
    traceback: str = ""


class History(msgspec.Struct, kw_only=True):
    members: list[int] = []
    "members of the newest complete generation, in rank order"
    first_steps: list[tuple[int, int]] = []
    "(generation, first step) of the newest complete generations"
    rollbacks: list[RollbackReport] = []


class Saved(msgspec.Struct, kw_only=True):
    """A checkpoint, and whether the run may continue from it.

    A checkpoint belongs to the history that led to it. Once a later generation has begun before its step (a rollback,
    or the loss of all members before the checkpoint was known), continuing from it would mix two histories. Then the
    checkpoint is set aside.
    """

    checkpoint: Checkpoint
    problem: str = ""
    "how it is damaged; empty: it is not"
    aside: bool = False
    "the run has continued from an earlier step since"

    @property
    def usable(self) -> bool:
        return not self.problem and not self.aside


class Checkpoints(msgspec.Struct, kw_only=True):
    saved: list[Saved] = []
    "checkpoints in the order in which they became known"

    def usable(self) -> list[Checkpoint]:
        """Return usable checkpoints, newest step first."""
        good = [saved.checkpoint for saved in self.saved if saved.usable]
        return sorted(good, key=lambda checkpoint: checkpoint.step, reverse=True)

    def take_spare(self, keep: int) -> list[str]:
        """Remove checkpoints that are no longer needed, and return their paths. Call only while a node has the state.

        Args:
            keep: number of newest usable checkpoints to keep, besides those that a person requested. A checkpoint
                that is damaged or set aside stays until so many usable ones have followed it.
        """
        ordinary = [saved for saved in self.saved if not saved.checkpoint.by_hand]
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
    "the script raised, or ended with a nonzero exit code"
    CRASH = "crash"
    "a signal that the process caused itself ended it (SIGSEGV and the like)"
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
    "empty: the bar is over; it still lengthens the next bar"


class Failures(msgspec.Struct, kw_only=True):
    failures: list[Failure] = []
    bars: dict[str, HostBar] = {}
    "host -> its bar"


def _without_leave_by(fields: Fields) -> Fields:
    del fields["leave_by"]
    return fields


SCHEMAS.update({Root: 1, Node: 2, History: 1, Checkpoints: 1, Failures: 1})
MIGRATIONS[Node, 1] = _without_leave_by
