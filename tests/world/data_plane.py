"""What workers do with each other: groups, first exchanges, steps, the boundary, broken connections."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fallow.core.membership.messages import Checkpoint, Order, Plan, Problem, Refusal, Switch
from fallow.core.membership.roster import check_of
from world.node import Host, Worker

if TYPE_CHECKING:
    from world.world import World


class DataPlane:
    """A step is finished by all workers of a generation, or by none. Who has finished one may not know it of others."""

    def __init__(self, w: "World") -> None:
        self.w = w
        self.front = 0
        "finished steps"
        self.acted = 0
        "newest generation that began"
        self.stepped_at = 0.0
        self.checkpoints: dict[str, Checkpoint] = {}
        "those on disk, by their paths"
        self.torn: set[str] = set()
        "of them those that cannot be loaded"
        self._saved_by_script = 0
        "the newest step of those of a script that is restarted"

    # -- orders -----------------------------------------------------------------------------------------------------

    def obey(self, x: Worker, order: Order) -> None:
        host = x.host
        if not x.alive or host.script_ended or x not in host.workers or host.order is not order:
            return  # it is gone, or a newer order is on its way
        if x.stopped or host.frozen:
            self.w.after(0.3, lambda: self.obey(x, order))
            return
        plan = order.plan
        broken = max(order.broken, plan.replaces if plan is not None and plan.interrupt else 0)
        self.give_up(x, broken)
        known = x.plan.generation if x.plan is not None else 0
        # An order without a plan says nothing of one that is committed.
        is_kept = plan is None and order.committed == known
        if not is_kept and (plan.generation if plan is not None else 0) != known:
            x.plan, x.stands, x.committed, x.refusal = plan, False, False, None
            if plan is not None and plan.generation != x.generation:
                rng = self.w.rng
                builds_s = rng.uniform(0.02, 0.3) if rng.random() < 0.9 else rng.uniform(0.3, 3)
                self.w.after(builds_s, lambda: self._build(x, plan))
        if x.plan is not None and order.committed == x.plan.generation and x.stands:
            self._commit(x, x.plan)

    def _build(self, x: Worker, plan: Plan) -> None:
        if x.alive and x.stopped:
            self.w.after(0.5, lambda: self._build(x, plan))
        host = x.host
        if not x.alive or host.script_ended or x.plan is not plan or x.stopped:
            return
        if plan.base == plan.generation:
            return  # a head that came back knows that it was built
        if plan.leave:
            x.stands = True
        elif self.w.t < host.breaks_until and self.w.rng.random() < 0.5:
            self.w.broke_at = self.w.t
            self._refuse(x, plan, ())
            return
        else:
            members = self._count(host, plan)
            if check_of(members) != plan.check:
                self.w.after(0.1, lambda: self._refuse(x, plan, ()))
                return
            lost = tuple(n for n in members if frozenset((self.w.host_of[n], host.name)) in self.w.cut)
            if lost:
                self.w.after(self.w.rng.uniform(0.2, 1.5), lambda: self._refuse(x, plan, lost))
                return
            host.lists[plan.generation] = members
            x.stands = True
        host.say()
        if host.order is not None and host.order.committed == plan.generation:
            self._commit(x, plan)

    def _count(self, host: Host, plan: Plan) -> list[int]:
        may_differ = self.w.fired["store goes back"] > 0  # numbers may have been used again
        if plan.base and plan.base not in host.lists and not may_differ:
            self.w.fail(f"{host.name} does not know generation {plan.base}, on which {plan.generation} is built")
        without = set(plan.without)
        members = [n for n in host.lists.get(plan.base, []) if n not in without] + [peer.node for peer in plan.more]
        if check_of(members) != plan.check and not may_differ:
            self.w.fail(f"{host.name} counts another list for {plan.generation}: {members}")
        return members

    def _refuse(self, x: Worker, plan: Plan, lost: tuple[int, ...]) -> None:
        if x.alive and x.plan is plan:
            x.refusal = Refusal(generation=plan.generation, reason="cut", unreachable=lost)
            x.host.say()

    def _commit(self, x: Worker, plan: Plan) -> None:
        x.committed = True
        is_idle = x.generation == 0 or x.given_up >= x.generation
        if is_idle and x.entering != plan.generation and x.given_up < plan.generation:
            if plan.leave:
                self._leave(x, plan.generation)
            else:
                self._enter(x, plan)

    # -- broken groups ----------------------------------------------------------------------------------------------

    def give_up(self, x: Worker, generation: int) -> None:
        """Give up a generation and all before it. Peers notice, or do not."""
        if generation <= x.given_up:
            return
        x.given_up = generation
        busy = x.entering or x.generation
        if busy and busy <= generation:
            if x.entering and x.receives:
                x.has_state = False  # torn
            x.entering, x.arrived_for, x.waits_since = 0, -1, self.w.t
            self._break(x, busy, 0.8)
            self.w.after(0.01, x.host.say)

    def end(self, x: Worker) -> None:
        x.alive = False
        self.leave_peers(x)

    def leave_peers(self, x: Worker) -> None:
        """Its connections close."""
        for generation in {x.generation, x.entering} - {0}:
            self._break(x, generation, 1.0)

    def _break(self, x: Worker, generation: int, share: float) -> None:
        for other in self._peers(generation):
            if other is not x and other.alive and self.w.rng.random() < share:
                self.w.after(self.w.rng.uniform(0.05, 0.6), lambda o=other: self._lose_peer(o, generation))

    def _peers(self, generation: int) -> list[Worker]:
        hosts = self.w.hosts.values()
        return [x for host in hosts for x in host.workers if generation in (x.generation, x.entering)]

    def _lose_peer(self, x: Worker, generation: int) -> None:
        if x.entering and generation < x.entering:
            return  # it has passed the boundary
        in_it = x.alive and generation in (x.generation, x.entering) and x.given_up < generation
        if in_it and not x.stopped and not x.finished:
            self.give_up(x, generation)

    # -- first exchange ---------------------------------------------------------------------------------------------

    def _enter(self, x: Worker, plan: Plan) -> None:
        x.entering, x.arrived_for, x.waits_since, x.receives = plan.generation, -1, self.w.t, None
        order = x.host.order
        if order is not None and x.generation < order.state_since:
            x.has_state = False
        members = x.host.lists[plan.generation]
        self.w.after(0.01, x.host.say)
        self.w.after(0.02, lambda: self._exchange(plan, members))

    def _workers(self, nodes: Sequence[int]) -> list[Worker] | None:
        """All workers of these nodes; None: some are no more."""
        found: list[Worker] = []
        for n in nodes:
            host = self.w.hosts.get(self.w.host_of.get(n, ""))
            if host is None or host.node != n or not host.up:
                return None
            found += host.workers
        return found

    def _reach(self, nodes: Sequence[int]) -> bool:
        if self.w.t < self.w.stuck_until:
            return False
        names = [self.w.host_of[n] for n in nodes]
        return not any(frozenset((a, b)) in self.w.cut for i, a in enumerate(names) for b in names[:i])

    def _exchange(self, plan: Plan, members: list[int]) -> None:
        """All have come: who is furthest gives its state to the others."""
        g, ws = plan.generation, self._workers(members)
        if not ws or not all(x.alive and not x.stopped and x.entering == g and x.receives is None for x in ws):
            return
        if not self._reach(members):
            self.w.after(1.0, lambda: self._exchange(plan, members))
            return
        holders = [x for x in ws if x.has_state and not self.w.restarts]
        self.w.observer.see_exchange(plan, members, holders, ws)
        paths = next((x.plan.checkpoints for x in ws if x.plan is not None), ())
        step = max(x.step for x in holders) if holders else self._load(ws[0].host, paths)
        if step is None:
            return
        self.w.observer.see_begin(g, self.acted, step, bool(holders))
        self.acted = g
        self.w.counts["lost steps"] += max(0, self.front - step - 1)
        self.w.counts["exchanges"] += 1
        self.front = step
        for x in ws:
            x.receives = not (x.has_state and x.step == step)
            takes_s = self.w.rng.uniform(0.2, 1.5) if x.receives else 0.02
            self.w.after(takes_s, lambda x=x: self._arrive(x, g, step))

    def _load(self, host: Host, paths: Sequence[str]) -> int | None:
        """The step of the newest checkpoint that is named, there and whole; None: there is none, the script fails."""
        if self.w.restarts:
            return self._saved_by_script
        # A head that stood still before a removal may remove an older one that the next head has found meanwhile.
        if paths and paths[0] not in self.checkpoints and not self.w.fired["store goes back"]:
            self.w.fail(f"{paths[0]} is to be loaded, there are {list(self.checkpoints)}")
        there = [self.checkpoints[path] for path in paths if path in self.checkpoints]
        if paths and not there:
            self.w.fail(f"none of {paths} is there")
        for checkpoint in there:
            if checkpoint.path not in self.torn:
                self.w.observer.see_load(checkpoint)
                return checkpoint.step
            host.damaged = Problem(path=checkpoint.path, reason="torn")
            host.say()
        return None if there else 0

    def _arrive(self, x: Worker, generation: int, step: int) -> None:
        if not x.alive or x.entering != generation or x.given_up >= generation:
            return
        if x.stopped:
            self.w.after(0.3, lambda: self._arrive(x, generation, step))
            return
        x.generation, x.step, x.has_state, x.entering, x.receives = generation, step, True, 0, None
        x.switch = Switch(generation=generation, first_step=step)
        self.w.after(0.001, x.host.say)
        self._work(x)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _work(self, x: Worker) -> None:
        x.waits_since = None
        if x.step >= self.w.total:
            x.finished = True
            x.host.say()
            if all(other.finished for other in x.host.workers):
                self.w.after(self.w.rng.uniform(0.2, 1.5), lambda h=x.host: h.kill(0, None))
            return
        generation, step = x.generation, x.step
        if self.w.t < x.host.breaks_until:
            self.w.broke_at = self.w.t
            self.w.after(0.05, lambda: self.give_up(x, generation))
            return
        self.w.after(self.w.rng.uniform(0.2, 0.6), lambda: self._worked(x, generation, step))

    def _is_at(self, x: Worker, generation: int, step: int) -> bool:
        is_in_it = x.alive and not x.host.script_ended and x.generation == generation and x.given_up < generation
        return is_in_it and x.step == step

    def _worked(self, x: Worker, generation: int, step: int) -> None:
        if not self._is_at(x, generation, step):
            return
        if x.stopped:
            self.w.after(0.3, lambda: self._worked(x, generation, step))
            return
        x.arrived_for, x.waits_since, plan = step, self.w.t, x.plan
        can_switch = plan is not None and x.stands and x.committed and not plan.interrupt
        x.switches_to = plan.generation if can_switch and plan is not None and plan.replaces == generation else 0
        self._reduce(generation, step)

    def _reduce(self, generation: int, step: int) -> None:
        members = self.w.observer.committed[generation]
        ws = self._workers(members)
        if ws is None or not all(x.arrived_for == step and self._is_at(x, generation, step) for x in ws):
            return
        if not self._reach(members):
            self.w.after(1.0, lambda: self._reduce(generation, step))
            return
        self.w.observer.see_step(generation, step)
        targets = {x.switches_to for x in ws}
        target = targets.pop() if len(targets) == 1 else 0
        self.w.counts["steps"] += 1
        self.front, self.stepped_at = step + 1, self.w.t
        for x in ws:
            x.arrived_for = -1
            self.w.after(self.w.rng.uniform(0.001, 0.02), lambda x=x: self._finished(x, generation, step, target))

    def _finished(self, x: Worker, generation: int, step: int, target: int) -> None:
        if not self._is_at(x, generation, step):
            return
        if x.stopped:
            self.w.after(0.3, lambda: self._finished(x, generation, step, target))
            return
        x.step = step + 1
        members = self.w.observer.committed
        is_main = x.host.node == members[generation][0] and x.number == 0
        if is_main and (x.step % 10 == 0 or (target and not members[target])):
            self._save(x)
        if not target:
            self._work(x)
            return
        if x.plan is None or x.plan.generation != target:
            self.give_up(x, generation)  # the head has forgotten the generation that all have agreed on
        elif x.plan.leave:
            self._leave(x, target)
        else:
            self._enter(x, x.plan)

    def _save(self, x: Worker) -> None:
        if self.w.restarts:
            self._saved_by_script = x.step
            return
        path = f"/c{x.generation}-{x.step}"
        x.host.saved = self.checkpoints[path] = Checkpoint(path=path, generation=x.generation, step=x.step)

    def _leave(self, x: Worker, generation: int) -> None:
        x.left, x.given_up, x.waits_since = generation, max(x.given_up, x.generation), self.w.t
        x.host.say()
        if all(other.left for other in x.host.workers):
            self.w.after(0.2, lambda h=x.host: h.kill(0, None))
