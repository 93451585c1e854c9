"""The head of the simulated world: its loop around the machine, and its store."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fallow.core.membership import events as ev
from fallow.core.membership.failures import is_barred
from fallow.core.membership.machine import Machine
from fallow.core.membership.messages import Order
from fallow.core.membership.records import Root
from fallow.core.membership.roster import Roster
from fallow.core.records import decode, encode
from fallow.model import EventRecord

if TYPE_CHECKING:
    from world.world import World

TICK_S = 0.5
SLOTS = 2
"""Workers of a node."""


class Store:
    """Compare-and-set on (term, revision).

    What was not acknowledged may be written or lost. `go_back` loses acknowledged writes, too, as a server does that
    writes its log once a second and loses power. Terms are never lost.
    """

    def __init__(self, root: Root) -> None:
        self.records: dict[str, bytes] = {"root": encode(root)}
        self.root = root
        self.term = self.revision = 0
        self.away_until = 0.0
        self.is_fenced = True
        self.events: list[EventRecord] = []
        self._past: list[tuple[float, dict[str, bytes]]] = []

    def begin_term(self) -> int:
        self.term += 1
        return self.term

    def save(
        self, at: float, term: int, revision: int, writes: dict[str, bytes | None], logs: Sequence[ev.Log] = ()
    ) -> bool:
        """Write records, and lines of the event log with them."""
        if self.is_fenced and (term, revision) != (self.term, self.revision):
            return False
        self._past = [*self._past[-20:], (at, dict(self.records))]
        self.revision += 1
        for line in logs:
            number = len(self.events) + 1
            self.events.append(EventRecord(seq=number, at=at, run="r", kind=line.kind, text=line.text, data=line.data))
        for key, raw in writes.items():
            if raw is None:
                self.records.pop(key, None)
            else:
                self.records[key] = raw
        if "root" in writes:
            self.root = decode(self.records["root"], Root)
        return True

    def go_back(self, to: float) -> None:
        """Lose what was written since."""
        older = [records for at, records in self._past if at >= to]
        if older:
            self.records, self.root = dict(older[0]), decode(older[0]["root"], Root)
        self._past.clear()
        self.revision += 1


def _line(told: ev.Log | ev.RunEnded) -> ev.Log:
    """For the event log."""
    return ev.Log(told.status.value, told.message) if isinstance(told, ev.RunEnded) else told


class Head:
    """Drain what was received, handle it, tick, make it durable, then carry it out."""

    def __init__(self, w: "World") -> None:
        self.w, self.alive, self.frozen = w, True, False
        self.crash_at_write = False
        self.usurped_at_write_s = 0.0
        self.orders_left: int | None = None
        "the head dies behind so many more orders; None: it does not"
        self.skew_s = w.rng.choice((0.0, 0.0, w.rng.uniform(-90, 90)))
        "its clock's difference to Slurm's"
        self._has_ticked = False
        self.term = w.store.begin_term()
        self._revision = w.store.revision
        self._kernel: list[tuple[Any, ...]] = []
        "received by the kernel while the process was stopped"
        self._inbox: list[tuple[float, tuple[Any, ...]]] = []
        self._busy = False
        self._writes: dict[str, bytes | None] = {}
        self._then: list[Any] = []
        self._last_tick = w.t
        self.machine = self._load()
        w.after(TICK_S, self._loop)

    def _load(self, edition: int = 0) -> Machine:
        records = {key: raw for key, raw in {**self.w.store.records, **self._writes}.items() if raw is not None}
        roster = Roster.load("r", records)
        return Machine(roster, term=self.term, timing=self.w.timing, at=self._at, edition=edition, validate=True)

    @property
    def _at(self) -> float:
        return self.w.t + self.skew_s

    def receive(self, message: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self._kernel.append(message)
        else:
            self._inbox.append((self._at, message))
            self._step()

    def freeze(self, seconds: float) -> None:
        self.frozen = True
        self.w.after(seconds, self.thaw)

    def thaw(self) -> None:
        if not self.frozen:
            return
        self.frozen = False
        late, self._kernel = self._kernel, []
        self.w.rng.shuffle(late)
        self._inbox += [(self._at, message) for message in late]
        self._step()

    def _loop(self) -> None:
        if self.alive:
            self._step()
            self.w.after(TICK_S, self._loop)

    def _step(self) -> None:
        if not self.alive or self.frozen or self._busy:
            return
        while self._inbox and self.alive:
            self._hear(*self._inbox.pop(0))
        if self.alive and self.w.t >= self._last_tick + TICK_S - 1e-9:
            self._last_tick = self.w.t
            machine = self.machine
            self._look_at_jobs()
            if self.machine is machine:  # else what Slurm says of walltimes was poisoned, and comes once more
                self._has_ticked = True
                self.apply(ev.Ticked(at=self._at))
        if self.alive and (self._writes or self._then):
            self._persist()

    def _look_at_jobs(self) -> None:
        """The first tick of a head says what it knows of walltimes, and finds checkpoints that no report told of."""
        for n, node in list(self.machine.roster.nodes.items()):
            host = self.w.hosts[node.host]
            is_known = node.ends_at is not None and not self._has_ticked
            if host.ends_at is not None and host.token == node.token and (is_known or self.w.rng.random() < 0.2):
                self.apply(ev.Ends(at=self._at, node=n, ends_at=host.ends_at + self.skew_s))
        for found in () if self._has_ticked else list(self.w.plane.checkpoints.values()):
            self.apply(ev.CheckpointFound(at=self._at, checkpoint=found))

    def _hear(self, at: float, message: tuple[Any, ...]) -> None:
        match message:
            case ("hello", host, token, boot, node):
                if self.machine.roster.root.status.ended or is_barred(self.machine.roster, host):
                    self._then.append(("over", host))
                else:
                    self.apply(
                        ev.Expected(at=at, host=host, token=token, boot=boot, slots=SLOTS, entry=host, node=node)
                    )
            case ("report", host, report):
                self.apply(ev.Reported(at=at, host=host, report=report))
            case ("gone", host, node, boot, code, signal, is_ordered, report):
                end = {"reason": f"code {code} signal {signal}", "code": code, "signal": signal}
                who = {"host": host, "boot": boot, "is_ordered": is_ordered, "report": report}
                self.apply(ev.NodeEnded(at=at, node=node, **who, **end))
                self._then.append(("noted", host, node))
            case ("job over", host, token, boot, taken):
                for node in self.machine.roster.at_place(host, token):
                    if node.boot <= boot:
                        self.apply(ev.NodeEnded(at=at, node=node.id, reason="its job is over", by_slurm=taken))
            case ("event", make):
                self.apply(make(at))

    def apply(self, event: ev.Event) -> None:
        if not self.alive:
            return
        if self.w.rng.random() < self.w.poison:
            # A message that raises: this run begins again from what is stored or about to be, the head goes on.
            self.w.fired["poisoned message"] += 1
            if self.w.store.revision != self._revision and not self._busy:
                self.die()  # another head has written; the store would refuse the next write
                return
            self.w.note_rules(self)
            self.machine = self._load(self.machine.outbox.edition + 1000)
            return
        turn = self.machine.handle(event)
        self._writes.update(self.machine.roster.take_writes())
        for instruction in turn:
            if isinstance(instruction, ev.Log):
                self.w.observer.read_log(instruction, self)
        self._then += turn

    def die(self) -> None:
        if self.alive:
            self.w.note_rules(self)
            self.alive = False
            if self.w.head is self:
                self.w.after(self.w.rng.uniform(0.5, 4), self.w.start_head)

    def _persist(self) -> None:
        self._busy = True
        writes, then = self._writes, self._then
        self._writes, self._then = {}, []
        if self.w.mutant == "orders go out before the write":
            self._carry_out(then)
            then = []
        self._write(writes, then, [_line(told) for told in then if isinstance(told, ev.Log | ev.RunEnded)])

    def _write(self, writes: dict[str, bytes | None], then: list[Any], logs: list[ev.Log]) -> None:
        w = self.w
        if not self.alive:
            return
        if w.t < w.store.away_until:  # no answer: the head asks again
            w.after(0.3, lambda: self._write(writes, then, logs))
            return
        changes = bool(writes or logs)
        if changes and self.crash_at_write:
            self.crash_at_write = False
            w.fired["head crash at a write"] += 1
            if w.rng.random() < 0.5:
                self._save(writes, logs)  # it is written, and nobody knows
            self.die()
            return
        if changes and not self._save(writes, logs):
            self.die()
            return
        if changes and self.usurped_at_write_s and w.head is self:
            w.fired["second head at a write"] += 1
            self.freeze(self.usurped_at_write_s)
            self.usurped_at_write_s = 0.0
            w.after(0.1, w.start_head)
        w.after(w.rng.uniform(0.0005, 0.01), lambda: self._written(then))

    def _written(self, then: list[Any]) -> None:
        if self.frozen and self.alive:
            self.w.after(0.1, lambda: self._written(then))
        elif self.alive:
            self._busy = False
            self._carry_out(then)
            self._step()

    def _save(self, writes: dict[str, bytes | None], logs: list[ev.Log]) -> bool:
        if not self.w.store.save(self.w.t, self.term, self._revision, writes, logs):
            return False
        self._revision = self.w.store.revision
        self.w.observer.read_store(any(key.startswith("node/") for key in writes))
        return True

    def _carry_out(self, then: list[Any]) -> None:
        w = self.w
        for instruction in then:
            match instruction:
                case Order(node=node) as order:
                    if self.orders_left == 0:
                        w.fired["head crash amid orders"] += 1
                        self.die()
                        return
                    self.orders_left = self.orders_left - 1 if self.orders_left else None
                    if node in w.host_of:
                        w.to_agent(w.host_of[node], ("order", node, order))
                case ev.Admitted(node, host, _, boot):
                    if w.head is self or node not in w.host_of:
                        w.host_of[node] = host
                    w.to_agent(host, ("admitted", node, boot))
                case ev.Unknown(node, host):
                    w.to_agent(host, ("introduce", node))
                case ("noted", host, node):
                    w.to_agent(host, ("noted", node))
                case ("over", host):
                    w.to_agent(host, ("over",))
                case ev.RemoveCheckpoint(path):
                    w.plane.checkpoints.pop(path, None)
                case ev.RunEnded(status, message):
                    w.ended.append((status, message))
