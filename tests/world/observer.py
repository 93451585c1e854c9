"""What must never happen in the simulated world. The observer sees everything, and raises `Violation`.

- a number has one list of members, numbers only grow, and a number is durable before anybody hears of it;
- a commit is durable before anybody hears of it; no older generation acts after a newer one; each acts as committed;
- a survivor needs the state of nobody: a generation in place of a broken one has members with state only, or none;
- no healthy node is given up: for silence never (unless many messages are lost), for late votes while the head is well;
- at most one step is lost where anybody has the state;
- a checkpoint is loaded only while nobody has begun again before its step: two histories are not mixed.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Checkpoint, Order, Plan
from fallow.core.membership.names import member_name
from fallow.core.membership.records import History, Node
from fallow.core.records import decode
from world.head import Head
from world.node import Host, Worker

if TYPE_CHECKING:
    from world.world import World


@lru_cache(maxsize=256)
def _node(raw: bytes) -> Node:
    return decode(raw, Node)


class Violation(AssertionError):
    """A seed's history breaks a promise."""


class Observer:
    def __init__(self, w: "World") -> None:
        self.w = w
        self.committed: dict[int, tuple[int, ...]] = {}
        self._lost: set[int] = set()
        "generations whose commit the store has lost"
        self._resumed_at = 0.0
        "when steps began again after a while without any"
        self._begun: list[tuple[int, int]] = []
        "generations, and the steps at which they have begun"
        self._highest = self._ever_highest = 0
        "the stored one, and the highest that ever was: a store may have lost it since"

    # -- store ------------------------------------------------------------------------------------------------------

    def read_store(self, nodes_changed: bool) -> None:
        root = self.w.store.root
        if root.highest < self._highest:
            self.w.fail(f"the highest number went back from {self._highest} to {root.highest}")
        self._highest, self._ever_highest = root.highest, max(root.highest, self._ever_highest)
        if not root.generation or not (nodes_changed or root.generation not in self.committed):
            return
        for generation in [g for g in self._lost if g >= root.generation and not self._has_witness(g)]:
            self._lost.discard(generation)
            del self.committed[generation]
            self.w.plane.acted = min(self.w.plane.acted, max((g for g in self.committed if g < generation), default=0))
        if root.generation not in self.committed and root.generation < max(self.committed, default=0):
            self.w.fail(f"generation {root.generation} is committed after {max(self.committed)}")
        seats = self._seats()
        if self.committed.setdefault(root.generation, seats) != seats:
            self.w.fail(f"generation {root.generation} has two lists: {self.committed[root.generation]} and {seats}")

    def _seats(self) -> tuple[int, ...]:
        stored = self.w.store.records.items()
        nodes = [_node(raw) for key, raw in stored if key.startswith("node/")]
        return tuple(node.id for node in sorted(nodes, key=lambda node: node.seat) if node.seat)

    def see_store_go_back(self) -> None:
        """What was lost may act in the world. A head must learn of it, and go on above it."""
        self._highest = self.w.store.root.highest
        self._lost |= {g for g in self.committed if g > self.w.store.root.generation}

    def _has_witness(self, generation: int) -> bool:
        """Is anybody left of a generation that the store lost, or a checkpoint? If not, nothing knows its number."""
        hosts = self.w.hosts.values()
        if any(checkpoint.generation == generation for checkpoint in self.w.plane.checkpoints.values()):
            return True
        return any(host.up and host.node in self.committed[generation] and host.node > 0 for host in hosts)

    # -- agents -----------------------------------------------------------------------------------------------------

    def read_order(self, host: Host, order: Order) -> None:
        root = self.w.store.root
        plan = order.plan.generation if order.plan is not None else 0
        if plan > self._ever_highest:
            self.w.fail(f"generation {plan} was told before its number was durable ({root.highest})")
        if order.committed > max(self.committed, default=0):
            self.w.fail(f"generation {order.committed} was told before it was durable")
        if order.end is not None and ("silent for" in order.end.reason or not order.end.reason):
            self.w.fail(f"{host.name} is alive and was told to end: {order.end.reason}")

    # -- data plane -------------------------------------------------------------------------------------------------

    def see_exchange(self, plan: Plan, members: list[int], holders: Sequence[Worker], ws: Sequence[Worker]) -> None:
        g, plane = plan.generation, self.w.plane
        if g not in self.committed:
            self.w.fail(f"generation {g} begins and is not committed")
        if self.committed[g] != tuple(members):
            self.w.fail(f"generation {g} begins with {members}, {self.committed[g]} are committed")
        if g <= plane.acted:
            self.w.fail(f"generation {g} begins after {plane.acted}")
        if holders and max(x.step for x in holders) < plane.front - 1:
            self.w.fail(f"generation {g} begins below step {plane.front}, which was finished")
        hosts = {x.host for x in ws}
        whole = [host for host in hosts if all(x.has_state for x in host.workers)]
        if plan.interrupt and whole and len(whole) < len(hosts) and not self.w.restarts:
            self.w.fail(f"generation {g} of survivors has some with state and some without")

    def see_begin(self, generation: int, before: int, step: int, has_state: bool) -> None:
        """It begins at this step, with somebody's state or a checkpoint's, after the generation that acted before."""
        self._begun.append((generation, step))
        stored = self.w.store.records.get("history")
        for back in [] if stored is None else decode(stored, History).rollbacks:
            if before < back.generation <= generation and (has_state or step > back.to_step):
                self.w.fail(f"generation {generation} begins at step {step}, in spite of {back}")

    def see_load(self, checkpoint: Checkpoint) -> None:
        later = [begun for begun in self._begun if begun[0] > checkpoint.generation and begun[1] < checkpoint.step]
        if later and not self.w.fired["store goes back"]:
            self.w.fail(f"{checkpoint} is loaded, though generation {later[-1][0]} has begun at step {later[-1][1]}")

    def see_step(self, generation: int, step: int) -> None:
        if generation != self.w.plane.acted:
            self.w.fail(f"generation {generation} finishes step {step}, and {self.w.plane.acted} acts")
        if self.w.t > self.w.plane.stepped_at + 3:
            self._resumed_at = self.w.t

    # -- what the head decides --------------------------------------------------------------------------------------

    def read_log(self, entry: ev.Log, head: Head) -> None:
        w = self.w
        if head is not w.head:
            return  # it was replaced while it was stopped: what it decides is never written
        w.logs.append(f"{w.t:.2f} {entry.kind}: {entry.text}")
        if entry.kind != "eject" or w.loss >= 0.1:
            return
        for host in w.hosts.values():
            if host.node and entry.text.startswith(f"{member_name(host.node)} ({host.name}) is gone"):
                self._judge(host, entry.text)

    def _judge(self, host: Host, text: str) -> None:
        w, plane = self.w, self.w.plane
        members = self.committed.get(plane.acted, ())
        is_there = host.up and not host.frozen and not host.over
        is_linked = is_there and host.hears and host.is_heard and w.t > host.bad_until + 4
        is_up = w.t > host.bad_until + 12 and all(x.alive and not x.stopped for x in host.workers)
        is_working = is_linked and is_up and not host.deserted
        others = [other for other in w.hosts.values() if other.node in members and other is not host]
        has_seat = host.node in members and host.node in self.committed.get(w.store.root.generation, ())
        is_stepping = has_seat and w.t - plane.stepped_at < 1.5 and w.t > max(host.froze_until, self._resumed_at) + 3
        seen = any(other.is_heard and other.up and w.t > other.bad_until + 4 for other in others)
        is_well = w.t > max(host.cut_until + 8, w.unwell_until)
        if "silent for" in text and is_stepping and seen and w.t > w.unwell_until:
            w.fail(f"a node without which no step is finished was given up: {text}")
        if "silent for" in text and is_linked:
            w.fail(f"a healthy node was given up: {text}")
        if "no connection" in text and not is_well:
            return
        if "no connection" in text:
            w.fail(f"a node that all reach was given up: {text}")
        if ("did not vote" in text or "no progress" in text) and is_working and is_well and w.is_calm:
            w.fail(f"a node that works was given up: {text}")
        if "in a row broke" in text and w.t > w.broke_at + 40:
            w.fail(f"a node was given up though groups break on none: {text}")
        if "had to leave" in text and (host.ends_at is None or w.t < host.ends_at - w.timing.last_call_s - 0.1):
            w.fail(f"a node that still had time to leave was given up: {text}")
        if "stopped" in text and not any(x.stopped for x in host.workers) and w.t > host.bad_until + 4:
            w.fail(f"a node that is not stopped was given up: {text}")

    def see_walltime(self, host: Host) -> None:
        """A node goes away: it must be out of the run before, if the head could know of it."""
        w = self.w
        raw = w.store.records.get(f"node/{host.node}")
        if not host.up or raw is None or w.t < max(w.unwell_until, host.bad_until + 10):
            return
        known, root = decode(raw, Node), w.store.root
        if known.alive and known.ends_at is not None and root.final is None and not root.status.ended:
            w.fail(f"{member_name(host.node)} ({host.name}) was still in the run at its walltime: {known}")
