"""The generation that comes next, and the making of its group beside the current one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from fallow.model import FallowError, Prepare, Vote
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import CutOff, build_group, reap
from fallow.worker.transport.group import Group
from fallow.worker.transport.rendezvous import Ask, HeadStore

_SETTLE_S = 1.0
"""An agent tells of a worker's death much sooner than this."""


@dataclass(slots=True)
class Built:
    """What came of making a group."""

    group: Group | None = None
    "None for one who leaves, and where it could not be built"
    reason: str = ""
    "why it could not be built"
    tried: dict[str, str] = field(default_factory=dict)
    "members to whom there is no connection, which is why -> ADDRESS:PORT to which it was to lead; empty: not known"

    def drop(self, reason: str) -> None:
        """It is not needed."""
        if self.group is not None:
            self.group.interrupt(reason)
            reap(self.group)


@dataclass(slots=True)
class Upcoming:
    """A generation that was announced."""

    prepare: Prepare
    rank: int | None
    "None for one who leaves"
    built: Built | None = None
    "None: still at it"
    committed: bool = False
    dropped: bool = False
    "nobody wants it any more"

    @property
    def group(self) -> Group | None:
        return None if self.built is None else self.built.group

    @property
    def standing(self) -> bool:
        """The group is there (or need not be: one who leaves has none)."""
        return self.built is not None and not self.built.reason

    def build(
        self,
        worker: str,
        address: str,
        ask: Ask,
        *,
        holds: bool,
        device: torch.device = devices.HOST,
        ports: range | None = None,
    ) -> Built:
        """Make the group, as `build_group` does; blocks until it stands or could not be made.

        `device` becomes the calling thread's current one. `worker` is this one's name, `ask` puts a rendezvous question
        to the head.
        """
        built, prepare = Built(), self.prepare
        if self.rank is None:
            return built
        devices.enter(device)
        size = len(prepare.members)
        # The head must have the votes, which say whom it is better to do without, before its own patience ends.
        patience_s = 0.8 * prepare.timeout_s
        end = time.monotonic() + patience_s
        store = HeadStore(prepare.generation, size, ask, patience_s)
        try:
            built.group = build_group(
                prepare.generation,
                self.rank,
                size,
                store,
                address,
                patience_s,
                device=device,
                siblings=self.siblings,
                holds=holds,
                ports=ports,
                dropped=lambda: self.dropped,
            )
        except CutOff as error:
            built.tried = {prepare.members[rank].worker: at for rank, at in error.tried.items()}
            others = (f"{other} (tried {at})" if at else other for other, at in built.tried.items())
            built.reason = f"{worker} at {address} has no connection to {', '.join(others)}"
        except FallowError as error:
            built.reason = error.message
            # Who has died is known to the head by then, and it does not blame who tells of a lost connection.
            time.sleep(min(_SETTLE_S, max(0.0, end - time.monotonic())))
        return built

    def drop(self, reason: str) -> None:
        """It is not needed, whether its group stands or is still being made."""
        self.dropped = True
        if self.built is not None:
            self.built.drop(reason)

    @property
    def siblings(self) -> list[int]:
        """Ranks on this member's node, with its own."""
        if self.rank is None:
            return []
        members = self.prepare.members
        node = members[self.rank].node
        return [rank for rank, peer in enumerate(members) if rank == self.rank or peer.node == node >= 0]

    def vote(self, worker: str) -> Vote | None:
        """What the head is told of it; None as long as it is not known."""
        built = self.built
        if built is None:
            return None
        return Vote(
            worker=worker,
            generation=self.prepare.generation,
            ok=not built.reason,
            reason=built.reason,
            unreachable=list(built.tried),
            tried=list(built.tried.values()),
        )
