"""The generation that comes next, and the making of its group beside the current one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from fallow.model import FallowError, Prepare, Vote
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import build_group, reap
from fallow.worker.transport.group import Group
from fallow.worker.transport.reach import unreachable
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
    cut_off: list[str] = field(default_factory=list)
    "members to whom there is no connection, which is why"
    tried: list[str] = field(default_factory=list)
    "ADDRESS:PORT to which each of those connections was to lead; empty: nobody has said"

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
        """Make the group; blocks until it stands or could not be made.

        Args:
            worker: this one.
            address: on which its process groups listen.
            ask: puts a rendezvous question to the head.
            holds: this worker has the state of the training.
            device: of the tensors that the group will sum; becomes the calling thread's current one.
            ports: on which they listen; None: the kernel chooses.
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
            lost = unreachable(store, self.rank, size, address, 0.8 * patience_s, ports)
            built.cut_off = [prepare.members[rank].worker for rank in lost]
            built.tried = list(lost.values())
            if not lost:
                left_s = max(0.1, end - time.monotonic())
                built.group = build_group(
                    prepare.generation,
                    self.rank,
                    size,
                    store,
                    address,
                    left_s,
                    device=device,
                    siblings=self.siblings,
                    holds=holds,
                    ports=ports,
                )
        except FallowError as error:
            built.reason = error.message
            # Who has died is known to the head by then, and it does not blame who tells of a lost connection.
            time.sleep(min(_SETTLE_S, max(0.0, end - time.monotonic())))
        except RuntimeError as error:
            built.reason = f"rendezvous of generation {prepare.generation}: {error}"
        if built.cut_off:
            others = (
                f"{other} (tried {at})" if at else other for other, at in zip(built.cut_off, built.tried, strict=True)
            )
            built.reason = f"{worker} at {address} has no connection to {', '.join(others)}"
        return built

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
            unreachable=built.cut_off,
            tried=built.tried,
        )
