"""The records of one run, which of them were changed, and views of them. The machine alone changes it."""

from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

from fallow.core import records
from fallow.core.membership.messages import Unreadable
from fallow.core.membership.names import member_name
from fallow.core.membership.records import Checkpoints, Failures, History, Node, Root
from fallow.model import MemberPhase

NODE_KEY = "node/"
MOST_NAMED = 8
"""Nodes that one text names; texts are stored and sent as they are."""


class Roster:
    """Membership of one run.

    Args:
        root: of a run that begins, or of one that is loaded.
    """

    def __init__(self, root: Root) -> None:
        self.root = root
        self.nodes: dict[int, Node] = {}
        self.history, self.checkpoints, self.failures = History(), Checkpoints(), Failures()
        self.unwritten: set[str] = {"root"}
        "keys of records that were changed since they were written down"
        self._members: list[int] | None = None
        self._by_place: dict[tuple[str, str], list[int]] = {}

    # -- store ------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, run: str, stored: Mapping[str, bytes]) -> "Roster":
        """Read a run's records.

        Raises:
            Unreadable: naming the run and the record. Other runs are not concerned.
        """
        key = "root"
        try:
            roster = cls(records.decode(stored[key], Root))
            for key, raw in stored.items():
                if key.startswith(NODE_KEY):
                    roster.add(records.decode(raw, Node))
            roster.nodes = dict(sorted(roster.nodes.items()))
            for key in ("history", "checkpoints", "failures"):
                kind = type(getattr(roster, key))
                setattr(roster, key, records.decode(stored[key], kind) if key in stored else kind())
        except KeyError as error:
            raise Unreadable(f"run {run}: record {key} is missing; restore the store from a backup") from error
        except Unreadable as error:
            raise Unreadable(f"run {run}: record {key} cannot be read: {error.message}") from error
        roster.unwritten.clear()
        return roster

    def take_writes(self) -> dict[str, bytes | None]:
        """Records that were changed since the last call, the root among them; None: deleted."""
        if not self.unwritten:
            return {}
        writes: dict[str, bytes | None] = {}
        for key in sorted(self.unwritten | {"root"}):
            if key.startswith(NODE_KEY):
                node = self.nodes.get(int(key[len(NODE_KEY) :]))
                writes[key] = None if node is None else records.encode(node)
            else:
                writes[key] = records.encode(getattr(self, key))
        self.unwritten.clear()
        return writes

    def touch(self, node: Node) -> Node:
        """The node's record is about to be changed."""
        self.unwritten.add(f"{NODE_KEY}{node.id}")
        return node

    def mark(self, key: str) -> None:
        """A record is about to be changed: root, history, checkpoints or failures."""
        self.unwritten.add(key)

    def add(self, node: Node) -> None:
        self.nodes[node.id] = self.touch(node)
        self._by_place.setdefault((node.host, node.token), []).append(node.id)

    def forget(self, node: Node) -> None:
        del self.nodes[self.touch(node).id]
        here = self._by_place[node.host, node.token]
        here.remove(node.id)
        if not here:
            del self._by_place[node.host, node.token]
        self.root.front = max(self.root.front, node.step)
        if node.unrecorded is not None:
            self.root.unrecorded[node.id] = node.unrecorded

    # -- views ------------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[int]:
        """Nodes with a seat in the committed generation, in rank order, those that were lost since among them."""
        if self._members is None:
            seated = [node for node in self.nodes.values() if node.seat]
            self._members = [node.id for node in sorted(seated, key=lambda node: node.seat)]
        return self._members

    @property
    def finishing(self) -> bool:
        """A member's script has ended: the membership is frozen."""
        return self.root.final is not None

    @property
    def restarts(self) -> bool:
        """The script knows nothing of Fallow: each change of the membership restarts it."""
        return self.root.contract is not None and self.root.contract.restarts

    @property
    def rolled_back(self) -> str:
        """Why a generation begins whose members drop what they have."""
        return f"rolled back to step {self.history.rollbacks[-1].to_step}"

    @property
    def front(self) -> int:
        """Finished steps of the node that got furthest."""
        return max([self.root.front, *(node.step for node in self.nodes.values())])

    @property
    def leavers(self) -> list[int]:
        """Nodes that are leaving the generation before the committed one."""
        return self.root.change.leavers if self.root.change is not None else []

    def inside(self) -> list[int]:
        """Nodes with a seat in the committed generation, and those that are leaving the one before."""
        return self.members + self.leavers

    def is_inside(self, node: Node) -> bool:
        return node.seat > 0 or node.id in self.leavers

    def alive(self, node: int) -> bool:
        return node in self.nodes and self.nodes[node].alive

    def present(self, *phases: MemberPhase) -> list[int]:
        """Members in one of these phases, in rank order; by default all that are not lost."""
        wanted = phases or (MemberPhase.MEMBER, MemberPhase.LEAVING)
        return [n for n in self.members if self.nodes[n].phase in wanted]

    def standbys(self) -> list[int]:
        """Ready nodes, oldest first."""
        return sorted(n for n, node in self.nodes.items() if node.phase is MemberPhase.READY)

    def fitting(self, taken: Iterable[int], candidates: Iterable[int]) -> list[int]:
        """The first candidates that have a place beside `taken`: by the limit, and by the number of shards."""
        members, contract = list(taken), self.root.contract
        already, workers = len(members), sum(self.nodes[n].slots for n in members)
        for n in candidates:
            workers += self.nodes[n].slots
            too_many = contract is not None and workers > contract.shards and members
            if too_many or len(members) >= self.root.limit:
                break
            members.append(n)
        return members[already:]

    def at_place(self, host: str, token: str) -> list[Node]:
        """Nodes of one agent: its workers of now, and earlier ones."""
        return [self.nodes[n] for n in self._by_place.get((host, token), ())]

    def name(self, node: int) -> str:
        return f"{member_name(node)} ({self.nodes[node].host})" if node in self.nodes else member_name(node)

    def names(self, nodes: Iterable[int]) -> str:
        named = list(nodes)
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        return ", ".join(map(self.name, named[:MOST_NAMED])) + more

    # -- seats ------------------------------------------------------------------------------------------------------

    def seat(self, members: list[int], joined: Sequence[int]) -> None:
        """Commit these members, in rank order, to the root's generation. Some of them have joined with it.

        A living member that loses its seat without having been asked to leave is a standby again.
        """
        root, staying = self.root, set(members)
        for node in [self.nodes[n] for n in self.members if n not in staying]:
            self.touch(node).seat = 0
            if node.phase is MemberPhase.MEMBER:
                node.phase = MemberPhase.READY
        last = 0
        for node in [self.nodes[n] for n in members]:
            if node.seat <= last:
                self.touch(node).seat, root.next_seat = root.next_seat, root.next_seat + 1
            last = node.seat
            if node.phase is MemberPhase.READY:
                self.touch(node).phase = MemberPhase.MEMBER
        for n in joined:
            self.touch(self.nodes[n]).joined = root.generation
        self._members = None


def check_of(members: Iterable[int]) -> int:
    """CRC-32 of a list of members, by which a node sees that it has counted the same list."""
    return crc32(b"".join(n.to_bytes(8, "big") for n in members))
