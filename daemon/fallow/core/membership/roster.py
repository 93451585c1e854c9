"""Records of one run, the set of changed records, and views of them. Only the machine changes records."""

from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

from fallow.core import records
from fallow.core.membership.messages import Unreadable
from fallow.core.membership.names import member_name
from fallow.core.membership.records import Checkpoints, Failures, History, Node, Root
from fallow.model import MemberPhase

NODE_KEY = "node/"
MOST_NAMED = 8
"""Most nodes that one text names, because texts are stored and sent."""


class Roster:
    """Membership of one run.

    Args:
        root: root record, new or loaded.
    """

    def __init__(self, root: Root) -> None:
        self.root = root
        self.nodes: dict[int, Node] = {}
        self.history, self.checkpoints, self.failures = History(), Checkpoints(), Failures()
        self.unwritten: set[str] = {"root"}
        "keys of records that have changed since they were written"
        self._members: list[int] | None = None
        self._by_place: dict[tuple[str, str], list[int]] = {}

    # -- store ------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, run: str, stored: Mapping[str, bytes]) -> "Roster":
        """Read a run's records.

        Raises:
            Unreadable: a record of this run cannot be decoded; the message names it.
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
        """Return key -> record for all records that changed since the last call, the root included; None: deleted."""
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
        """Mark the node's record as changed, and return the node."""
        self.unwritten.add(f"{NODE_KEY}{node.id}")
        return node

    def mark(self, key: str) -> None:
        """Mark a record as changed: root, history, checkpoints or failures."""
        self.unwritten.add(key)

    def add(self, node: Node) -> None:
        self.nodes[node.id] = self.touch(node)
        self._by_place.setdefault((node.host, node.token), []).append(node.id)

    def forget(self, node: Node) -> None:
        del self.nodes[self.touch(node).id]
        numbers = self._by_place[node.host, node.token]
        numbers.remove(node.id)
        if not numbers:
            del self._by_place[node.host, node.token]
        self.root.front = max(self.root.front, node.step)
        if node.unrecorded is not None:
            self.root.unrecorded[node.id] = node.unrecorded

    # -- views ------------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[int]:
        """Nodes with a seat in the committed generation, in rank order, lost ones included."""
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
        """Restart mode: each change of the membership restarts the script."""
        return self.root.contract is not None and self.root.contract.restarts

    @property
    def rolled_back(self) -> str:
        """Reason of a generation whose members drop their state."""
        return f"rolled back to step {self.history.rollbacks[-1].to_step}"

    @property
    def front(self) -> int:
        """Most finished steps of any node."""
        return max([self.root.front, *(node.step for node in self.nodes.values())])

    @property
    def leavers(self) -> list[int]:
        """Nodes that leave with the committed change, as long as it is not complete."""
        return self.root.change.leavers if self.root.change is not None else []

    def inside(self) -> list[int]:
        """Nodes with a seat in the committed generation, and nodes that are leaving the previous one."""
        return self.members + self.leavers

    def is_inside(self, node: Node) -> bool:
        return node.seat > 0 or node.id in self.leavers

    def alive(self, node: int) -> bool:
        return node in self.nodes and self.nodes[node].alive

    def present(self, *phases: MemberPhase) -> list[int]:
        """Return members in one of these phases, in rank order; by default all members that are not lost."""
        chosen_phases = phases or (MemberPhase.MEMBER, MemberPhase.LEAVING)
        return [n for n in self.members if self.nodes[n].phase in chosen_phases]

    def standbys(self) -> list[int]:
        """Return ready nodes, oldest first."""
        return sorted(n for n, node in self.nodes.items() if node.phase is MemberPhase.READY)

    def fitting(self, occupants: Iterable[int], candidates: Iterable[int]) -> list[int]:
        """Return the first candidates that fit beside `occupants`, by the node limit and the number of shards."""
        members, contract = list(occupants), self.root.contract
        already, workers = len(members), sum(self.nodes[n].slots for n in members)
        for n in candidates:
            workers += self.nodes[n].slots
            too_many = contract is not None and workers > contract.shards and members
            if too_many or len(members) >= self.root.limit:
                break
            members.append(n)
        return members[already:]

    def at_place(self, host: str, token: str) -> list[Node]:
        """Return nodes of one agent: for its present workers, and for earlier ones."""
        return [self.nodes[n] for n in self._by_place.get((host, token), ())]

    def name(self, node: int) -> str:
        return f"{member_name(node)} ({self.nodes[node].host})" if node in self.nodes else member_name(node)

    def names(self, nodes: Iterable[int]) -> str:
        named = list(nodes)
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        return ", ".join(map(self.name, named[:MOST_NAMED])) + more

    # -- seats ------------------------------------------------------------------------------------------------------

    def seat(self, members: list[int], joined: Sequence[int]) -> None:
        """Give seats in the committed generation to these members, in rank order; `joined` are the new ones.

        A living member that loses its seat without having been asked to leave becomes a standby.
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
    """Return the CRC-32 of a member list, by which a node checks that it has the same list."""
    return crc32(b"".join(n.to_bytes(8, "big") for n in members))
