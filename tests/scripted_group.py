"""Members of a run in threads of one process, whose generations begin, break and end as a test says.

There is no head and no network but the lines of the hand-over. Members wait for each other as in a real group, and each
counts its waits in a generation, which are the same on all. A `Break` names one of them, and for whom it still ends
well: so each way in which a loss can reach the members can be forced exactly.
"""

import string
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fallow.core.membership.messages import Outcome, Peer
from fallow.worker.transport.build import RankMap
from fallow.worker.transport.group import Connections, Group
from fallow.worker.transport.waits import Interrupted

HOST = torch.device("cpu")


class Killed(BaseException):
    """The end of a member's thread, as that of a process by SIGKILL."""


@dataclass(frozen=True)
class Break:
    """How a generation is broken off.

    Args:
        wait: number of the wait, from 1 in each generation; that of its members' first exchange is 1. 0: members break
            it themselves, and hear of that one by one.
        certain: members for whom this wait ends well, if all come to it; they hear of the break when they wait next.
        dies: a member that is killed there, in or behind that wait.
    """

    wait: int
    certain: Collection[str] = ()
    dies: str = ""


@dataclass(frozen=True)
class Generation:
    """One membership.

    Args:
        members: their names, a letter each, by rank.
        at_step: the members before it change over to it when they have finished so many steps; None: when they have
            to, because theirs is broken.
        breaks: how it ends; None: as planned, or not at all.
        rollback: its members load the newest checkpoint, as soon as there is one.
        forgotten: members of an earlier generation that count as newcomers.
        outcome: what a lost member of the one before has told the head of its joint calls.
        workers_per_node: those whose letters follow each other are on one node: a and b, c and d.
    """

    members: str
    at_step: int | None = None
    breaks: Break | None = None
    rollback: bool = False
    forgotten: Collection[str] = ()
    outcome: Outcome | None = None
    workers_per_node: int = 1

    def node(self, name: str) -> str:
        """The members on the node of this one, by rank."""
        return "".join(one for one in self.members if self._node(one) == self._node(name))

    def ranks(self, name: str) -> RankMap:
        """As a member of that name sees them."""
        nodes = dict.fromkeys(map(self._node, self.members))
        peers = [Peer(number + 1, sum(self._node(one) == number for one in self.members), "") for number in nodes]
        return RankMap(tuple(peers), self._node(name) + 1, self.node(name).index(name))

    def _node(self, name: str) -> int:
        return string.ascii_letters.index(name) // self.workers_per_node


class _Work:
    def __init__(self) -> None:
        self.future: torch.futures.Future[None] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[None]:
        return self.future


@dataclass
class _Collective:
    given: dict[int, Any] = field(default_factory=dict)
    takes: list[Callable[[list[Any]], None]] = field(default_factory=list)
    works: list[_Work] = field(default_factory=list)


class Board:
    """Where the members of a group put what they have for the others."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._launched = [0] * size
        self._collectives: dict[int, _Collective] = {}

    def launch(self, rank: int, given: Any, take: Callable[[list[Any]], None]) -> _Work:
        work = _Work()
        with self._lock:
            number = self._launched[rank]
            self._launched[rank] += 1
            one = self._collectives.setdefault(number, _Collective())
            one.given[rank] = given
            one.takes.append(take)
            one.works.append(work)
            whole = len(one.given) == self._size
        if whole:
            del self._collectives[number]
            for each in one.takes:
                each([one.given[rank] for rank in range(self._size)])
            for done in one.works:
                done.future.set_result(None)
        return work


class ProcessGroup:
    """As one of torch's, for one member of a board."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank

    def allreduce(self, tensors: list[torch.Tensor]) -> _Work:
        (tensor,) = tensors
        return self._board.launch(self._rank, tensor.clone(), lambda given: tensor.copy_(sum(given[1:], given[0])))  # type: ignore[func-returns-value]

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        (tensor,) = tensors
        root = options.rootRank
        return self._board.launch(self._rank, tensor.clone(), lambda given: tensor.copy_(given[root]))  # type: ignore[func-returns-value]

    def alltoall_base(self, taken: torch.Tensor, given: torch.Tensor, arriving: list[int], counts: list[int]) -> _Work:
        def take(all_given: list[Any]) -> None:
            taken.copy_(torch.cat([pieces[self._rank] for pieces in all_given]))

        return self._board.launch(self._rank, given.clone().split(counts), take)

    def _allgather_base(self, whole: torch.Tensor, piece: torch.Tensor) -> _Work:
        return self._board.launch(self._rank, piece.clone(), lambda given: whole.copy_(torch.cat(given)))  # type: ignore[func-returns-value]


class ScriptedGroup(Group):
    """A member's group, which breaks where the test says."""

    def __init__(self, number: int, rank: int, plan: Generation, connections: Connections) -> None:
        super().__init__(number, rank, len(plan.members), connections, HOST)
        self._name, self._breaks = plan.members[rank], plan.breaks
        self.waits_so_far = 0

    def finish(self, works: Sequence[Any]) -> None:
        """Wait, unless this is where the generation breaks."""
        self.waits_so_far += 1
        at = self._breaks
        if at is None or self.waits_so_far != at.wait:
            super().finish(works)
            return
        try:
            # Also one who will not hear of it: else its break would reach others by their lines before they come here.
            super().finish(works)
        except Interrupted:  # another member was lost before it came here
            if self._name != at.dies:
                raise
        if self._name == at.dies:
            raise Killed
        self.interrupt("the test breaks it")
        if self._name not in at.certain:
            raise Interrupted(self.broken)
