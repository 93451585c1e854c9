"""A node of the simulated world: an agent that speaks with the head, and its workers' condition."""

from typing import TYPE_CHECKING, Any

from fallow.core.membership.messages import (
    Checkpoint,
    Contract,
    Fault,
    Finish,
    Order,
    Plan,
    Problem,
    Refusal,
    Report,
    Switch,
)
from fallow.model import Doing
from world.head import SLOTS

if TYPE_CHECKING:
    from world.world import World

BEAT_S = 1.0
CONTRACT = {
    restarts: Contract(signature="s", shards=64, global_batch=64, total_steps=100, restarts=restarts)
    for restarts in (False, True)
}


class Worker:
    def __init__(self, host: "Host", number: int) -> None:
        self.host, self.number = host, number
        self.alive, self.stopped = True, False
        self.generation = self.entering = 0
        "it computes in this one; it is in the first exchange of that one"
        self.step = self.given_up = self.left = self.switches_to = 0
        self.arrived_for = -1
        "step at whose end it waits for the others"
        self.has_state = self.finished = self.ready = False
        self.plan: Plan | None = None
        self.stands = self.committed = False
        "is the plan's group built, and its generation committed?"
        self.refusal: Refusal | None = None
        self.switch: Switch | None = None
        self.waits_since: float | None = None
        self.receives: bool | None = None
        "in the exchange that goes on; None: none does"

    @property
    def prepared(self) -> int:
        return self.plan.generation if self.plan is not None and self.stands else self.entering or self.generation


class Host:
    """A machine with an agent, which starts its workers anew when they end."""

    def __init__(self, w: "World", name: str) -> None:
        self.w, self.name = w, name
        self.up, self.frozen, self.over = True, False, False
        self.hears = self.is_heard = True
        "can orders come in, can reports get out?"
        self.bad_until = self.cut_until = self.froze_until = 0.0
        self.breaks_until = self.lies_until = 0.0
        "until then every group breaks on it; until then it claims to obey a head that never was"
        self.token, self.jobs = f"t{name}", 1
        "of the allocation that it is in; how many jobs have begun on it, each attempt of one for itself"
        self.ends_at: float | None = None
        self.boot = self.highest = 0
        self.unsaid: list[tuple[Any, ...]] = []
        "news of ends that no head has noted"
        self._begin()
        self._beat()

    def _begin(self) -> None:
        self.boot += 1
        self.node, self.seq, self.obeyed = 0, 0, (0, 0)
        self.order: Order | None = None
        self.lists: dict[int, list[int]] = {}
        "generation -> its members, as this node counts them"
        self.dying = False
        self.stopped_at: float | None = None
        self.saved: Checkpoint | None = None
        self.damaged: Problem | None = None
        self.fault: Fault | None = None
        self.deserted = False
        "the script has ended in the middle of the training, its processes have not"
        self.workers = [Worker(self, number) for number in range(SLOTS)]
        for worker in self.workers:
            self.w.after(self.w.rng.uniform(0.5, 4), lambda x=worker: self._rehearsed(x))

    @property
    def script_ended(self) -> bool:
        """On one of its workers at least: no step is finished with this node any more."""
        return self.deserted or self.fault is not None

    def _rehearsed(self, worker: Worker) -> None:
        if worker.alive and worker in self.workers:
            worker.ready = True
            self.say()

    def _beat(self) -> None:
        if not self.up:
            return
        self._end_in_vain()
        if self.workers and all(x.finished for x in self.workers) and not self.dying:
            self.w.after(self.w.rng.uniform(0.2, 1.5), lambda: self.kill(0, None))
        self.say()
        for message in self.unsaid:
            self.w.to_head(self, message)
        self.w.after(BEAT_S * self.w.rng.uniform(0.8, 1.2), self._beat)

    def _end_in_vain(self) -> None:
        """Others' scripts have ended: what a worker waits for will not come."""
        if self.order is not None and self.order.finish is not None:
            for x in self.workers:
                waits = x.alive and not x.stopped and x.waits_since is not None
                x.finished = x.finished or (waits and self.w.t - (x.waits_since or 0.0) > 2)

    def say(self) -> None:
        if not self.up or self.frozen or self.over or not (self.node or self.workers):
            return
        if not self.node:
            self.w.to_head(self, ("hello", self.name, self.token, self.boot, 0))
        elif self.workers and all(x.alive for x in self.workers):
            self.w.to_head(self, ("report", self.name, self.report()))

    def report(self) -> Report:
        ws, t = self.workers, self.w.t
        self.seq += 1
        waits = [x.waits_since for x in ws if x.waits_since is not None]
        all_wait = len(waits) == len(ws)
        is_new = self.saved is not None and (self.order is None or self.order.noted != self.saved.path)
        accepted = self.order is not None and self.order.accepted
        finish = Finish(generation=ws[0].generation, steps=ws[0].step, digest="d")
        return Report(
            node=self.node,
            boot=self.boot,
            seq=self.seq,
            term=self.obeyed[0] + (1000 if t < self.lies_until else 0),
            edition=self.obeyed[1],
            ready=CONTRACT[self.w.restarts] if all(x.ready for x in ws) and not accepted else None,
            generation=min(x.generation for x in ws),
            highest=self.highest,
            prepared=min(x.prepared for x in ws),
            refusal=next((x.refusal for x in ws if x.refusal is not None), None),
            given_up=min(x.given_up for x in ws),
            passed_boundary=min(x.left for x in ws),
            step=min(x.step for x in ws),
            has_state=all(x.has_state for x in ws),
            switch=ws[0].switch,
            doing=Doing.WAITING if all_wait else Doing.WORKING,
            stalled_s=t - max(waits) if all_wait else 0.0,
            stopped_s=t - self.stopped_at if self.stopped_at is not None else 0.0,
            deserted=self.deserted,
            fault=self.fault,
            finish=finish if all(x.finished for x in ws) else None,
            saved=self.saved if is_new else None,
            damaged=self.damaged,
        )

    def take(self, message: tuple[Any, ...]) -> None:
        if not self.up:
            return
        match message:
            case ("admitted", node, boot):
                if boot == self.boot and node != self.node and not self.over:
                    self.node = node
                    self.say()
            case ("introduce", node):
                if node == self.node:
                    self.w.to_head(self, ("hello", self.name, self.token, self.boot, node))
            case ("noted", node):
                self.unsaid = [message for message in self.unsaid if message[2] != node]
            case ("over",):
                self.over = True
                self._end_job()
            case ("order", node, order):
                self._obey(node, order)

    def _obey(self, node: int, order: Order) -> None:
        if node != self.node or (order.term, order.edition) <= self.obeyed:
            return
        self.w.observer.read_order(self, order)
        self.obeyed, self.order = (order.term, order.edition), order
        self.highest = max(self.highest, order.committed, order.plan.generation if order.plan is not None else 0)
        if order.end is not None:
            is_well = order.end.code == 0
            self.kill(0 if is_well else None, None if is_well else 9, restarts=not is_well, is_ordered=True)
            return
        for worker in self.workers:
            self.w.after(self.w.rng.uniform(0.001, 0.02), lambda x=worker: self.w.plane.obey(x, order))
        self.w.after(0.021, self.say)

    def kill(self, code: int | None, signal: int | None, *, restarts: bool = False, is_ordered: bool = False) -> None:
        """Its workers end. The agent says so, and starts others."""
        if self.dying or not self.up:
            return
        self.dying = True
        for worker in self.workers:
            if worker.alive:
                self.w.plane.end(worker)
        self.w.after(self.w.rng.uniform(0.01, 0.1), lambda: self._tell_end(code, signal, restarts, is_ordered))

    def _tell_end(self, code: int | None, signal: int | None, restarts: bool, is_ordered: bool) -> None:
        if self.frozen and self.up:
            self.w.after(0.5, lambda: self._tell_end(code, signal, restarts, is_ordered))
        if self.frozen or not self.up:
            return
        if self.node:
            self.unsaid.append(("gone", self.name, self.node, self.boot, code, signal, is_ordered, self.report()))
            self.w.to_head(self, self.unsaid[-1])
        finished = all(x.finished for x in self.workers)
        self.node, self.workers = 0, []
        if restarts and not finished:
            jobs = self.jobs
            self.w.after(self.w.rng.uniform(0.5, 3), lambda: self._begin() if self.up and self.jobs == jobs else None)
        else:
            self.over = True
            self._end_job()

    def lose_power(self) -> None:
        """The machine is gone at once, without a word."""
        if not self.up:
            return
        self.up = False
        for worker in self.workers:
            worker.alive = False
        self._end_job()

    def _end_job(self) -> None:
        """Slurm sees it in a while, and says so with each poll."""
        over = ("job over", self.name, self.token, self.boot, not self.up)
        self.w.after(self.w.rng.uniform(3, 20), lambda: self.w.poll_end(over))

    def come_back(self, *, requeued: bool) -> None:
        """Another job begins here, or the next attempt of the one that was lost."""
        was_up, self.up, self.over = self.up, True, False
        self.jobs, self.ends_at, self.unsaid = self.jobs + 1, None, []
        if not requeued:
            self.token, self.boot = f"t{self.name}-{self.jobs}", 0
        self.w.thaw_host(self)
        self._begin()
        if not was_up:
            self._beat()
