"""Faults of the simulated world: each says for itself what it does, and counts when it has done it."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Fault
from world.node import Host, Worker

if TYPE_CHECKING:
    from world.world import World

MOST_HOSTS = 7

Strike = Callable[["World", Host, float], bool]
"""(world, a host, seconds that it lasts) -> has it fired?"""


# -- head and store ---------------------------------------------------------------------------------------------------


def head_crash(w: "World", host: Host, lasts: float) -> bool:
    w.upset(20)
    w.head.die()
    return True


def head_crash_at_write(w: "World", host: Host, lasts: float) -> bool:
    w.upset(20)
    w.head.crash_at_write = True  # counted when it happens
    return False


def head_crash_amid_orders(w: "World", host: Host, lasts: float) -> bool:
    w.upset(20)
    w.head.orders_left = w.rng.randint(0, 5)
    return False


def head_stall(w: "World", host: Host, lasts: float) -> bool:
    if w.head.frozen or not w.head.alive:
        return False
    lasts *= w.rng.choice((1, 3))
    w.upset(lasts + 10)
    w.head.freeze(lasts)
    return True


def second_head(w: "World", host: Host, lasts: float) -> bool:
    if w.head.frozen or not w.head.alive:
        return False
    w.upset(lasts + 20)
    w.head.freeze(lasts)
    w.start_head()
    return True


def second_head_at_write(w: "World", host: Host, lasts: float) -> bool:
    w.upset(20)
    w.head.usurped_at_write_s = lasts
    return False


def store_away(w: "World", host: Host, lasts: float) -> bool:
    w.upset(lasts + 10)
    w.store.away_until = w.t + lasts
    return True


def store_goes_back(w: "World", host: Host, lasts: float) -> bool:
    """It loses what it acknowledged in the last second. The next head begins while the network is well."""
    w.upset(25)
    for other in w.hosts.values():
        other.hears = other.is_heard = True
        w.thaw_host(other)
    w.reliable_until = w.t + 10
    w.store.go_back(w.t - 1.0)
    w.observer.see_store_go_back()
    w.head.die()
    return True


# -- network ----------------------------------------------------------------------------------------------------------


def _cut_off(w: "World", hosts: list[Host], lasts: float, *, hears: bool = False, is_heard: bool = False) -> bool:
    if w.t < w.reliable_until:
        return False
    for host in hosts:
        host.hears, host.is_heard = host.hears and hears, host.is_heard and is_heard
        host.bad_until = max(host.bad_until, w.t + lasts)

    def heal() -> None:
        for host in hosts:
            host.hears = host.is_heard = True

    w.after(lasts, heal)
    return bool(hosts)


def members_cut_off(w: "World", host: Host, lasts: float) -> bool:
    members = w.observer.committed.get(w.plane.acted, ())
    join(w, host, lasts)
    return _cut_off(w, [other for other in w.running() if other.node in members], lasts)


def _cut_links(w: "World", host: Host, others: list[Host], lasts: float) -> bool:
    pairs = {frozenset((host.name, other.name)) for other in others if other is not host}
    w.cut |= pairs
    for one in [host, *others]:
        one.cut_until = max(one.cut_until, w.t + lasts)
    w.after(lasts, lambda: w.cut.difference_update(pairs))
    return bool(pairs)


def groups_stuck(w: "World", host: Host, lasts: float) -> bool:
    w.stuck_until = w.t + lasts
    return True


# -- nodes ------------------------------------------------------------------------------------------------------------


def join(w: "World", host: Host, lasts: float) -> bool:
    if len(w.running()) >= MOST_HOSTS:
        return False
    w.add_host()
    return True


def comes_back(w: "World", host: Host, lasts: float) -> bool:
    """A node that was lost, or whose job has ended, has another one, or its lost job is requeued there."""
    left = [other for other in w.hosts.values() if not other.up or other.over]
    if not left or len(w.running()) >= MOST_HOSTS:
        return False
    other = w.rng.choice(left)
    other.come_back(requeued=not other.up and w.rng.random() < 0.5)
    return True


def worker_killed(w: "World", host: Host, lasts: float) -> bool:
    living = [x for x in host.workers if x.alive]
    if living:
        w.plane.end(w.rng.choice(living))
        host.kill(None, 9, restarts=True)
    return bool(living)


def script_fails(w: "World", host: Host, lasts: float) -> bool:
    """On this node alone: an exception that comes nowhere else."""
    is_lying = w.t < host.lies_until
    if not host.workers or host.dying or host.deserted or is_lying or any(x.finished for x in host.workers):
        return False
    step = min(x.step for x in host.workers)
    host.fault = Fault(code=1, message="ValueError", signature=f"E{w.t}", step=step)
    host.say()
    w.after(w.rng.uniform(0.05, 1), lambda: host.kill(1, None, restarts=True))
    return True


def script_deserts(w: "World", host: Host, lasts: float) -> bool:
    """The script ends on one node in the middle of the training. Its exit code comes later."""
    if not any(x.generation for x in host.workers) or host.dying or any(x.finished for x in host.workers):
        return False
    host.deserted, boot = True, host.boot
    for x in host.workers:
        w.plane.leave_peers(x)
    host.say()
    w.counts["deserters"] += 1
    # The same exit code on two nodes would be the script's own failure.
    code = 0 if w.rng.random() < 0.25 else 2 + w.counts["deserters"]
    w.after(w.rng.uniform(0.1, 9), lambda: host.kill(code, None, restarts=True) if host.boot == boot else None)
    return True


def leaves_alone(w: "World", host: Host, lasts: float) -> bool:
    """Its node goes away, and it hears no head that could release it."""
    if not host.workers or host.dying or host.script_ended or not all(x.generation and x.alive for x in host.workers):
        return False
    for x in host.workers:
        w.plane.give_up(x, x.generation)
        x.left = x.generation
    host.say()
    w.after(0.2, lambda: host.kill(0, None))
    return True


def power_lost(w: "World", host: Host, lasts: float) -> bool:
    if len(w.running()) < 2:
        return False
    host.lose_power()
    return True


def worker_stopped(w: "World", host: Host, lasts: float) -> bool:
    if not host.workers:
        return False
    x, boot = w.rng.choice(host.workers), host.boot
    x.stopped, host.stopped_at = True, host.stopped_at or w.t
    host.bad_until = max(host.bad_until, w.t + lasts)

    def go_on(x: Worker = x) -> None:
        x.stopped = False
        if host.boot == boot and not any(other.stopped for other in host.workers):
            host.stopped_at = None

    w.after(lasts, go_on)
    return True


def node_frozen(w: "World", host: Host, lasts: float) -> bool:
    if w.t < w.reliable_until:
        return False
    host.frozen = True
    host.bad_until = host.froze_until = max(host.bad_until, w.t + lasts)
    for x in host.workers:
        x.stopped = True
    w.after(lasts, lambda: w.thaw_host(host))
    return True


def groups_break(w: "World", host: Host, lasts: float) -> bool:
    """Launches fail on this node, in each group anew."""
    host.breaks_until = w.t + lasts
    return True


def agent_lies(w: "World", host: Host, lasts: float) -> bool:
    """It claims to obey a head of a higher term than any that ever was."""
    if host.fault is not None or host.dying:
        return False  # its last words would not be heard
    host.lies_until = w.t + lasts
    host.bad_until = max(host.bad_until, w.t + lasts)
    return True


# -- people and Slurm -------------------------------------------------------------------------------------------------


def release(w: "World", host: Host, lasts: float) -> bool:
    node = host.node
    w.head.receive(("event", lambda at: ev.Release(at=at, nodes=(node,), reason="asked")))
    return node > 0


def two_released(w: "World", host: Host, lasts: float) -> bool:
    """Both are wanted at the same moment, each for itself."""
    nodes = {host.node, w.rng.choice(w.running()).node} - {0}
    for node in sorted(nodes):
        w.head.receive(("event", lambda at, n=node: ev.Release(at=at, nodes=(n,), reason="asked")))
    return len(nodes) == 2


def walltime(w: "World", host: Host, lasts: float) -> bool:
    if host.ends_at is not None or len(w.running()) < 3:
        return False
    host.ends_at = w.t + w.rng.uniform(10, 25)

    jobs = host.jobs

    def end() -> None:
        if host.jobs == jobs:
            w.observer.see_walltime(host)
            host.lose_power()

    w.after(host.ends_at - w.t, end)
    return True


def limit(w: "World", host: Host, lasts: float) -> bool:
    most = w.rng.randint(0, 8)
    w.head.receive(("event", lambda at: ev.Release(at=at, limit=most, reason="asked")))
    return True


def bar(w: "World", host: Host, lasts: float) -> bool:
    """The run does without the node for a while."""
    w.head.receive(("event", lambda at: ev.Bar(at=at, host=host.name, reason="asked")))
    w.after(lasts, lambda: w.head.receive(("event", lambda at: ev.Unbar(at=at, hosts=(host.name,)))))
    return True


def cancel(w: "World", host: Host, lasts: float) -> bool:
    if w.rng.random() < 0.8:
        return False
    w.head.receive(("event", lambda at: ev.Cancel(at=at, reason="cancelled by hand")))
    return True


def rollback(w: "World", host: Host, lasts: float) -> bool:
    def make(at: float) -> ev.Event:
        roster = w.head.machine.roster
        usable = roster.checkpoints.usable()
        if not usable or roster.finishing:
            return ev.Unbar(at=at, hosts=())
        w.fired["rollback"] += 1
        return ev.Rollback(at=at, step=w.rng.choice(usable).step)

    w.head.receive(("event", make))
    return False


def checkpoint_torn(w: "World", host: Host, lasts: float) -> bool:
    """One of those on disk can never be loaded."""
    whole = sorted(w.plane.checkpoints.keys() - w.plane.torn)
    w.plane.torn.update(whole and [w.rng.choice(whole)])
    return bool(whole)


FAULTS: dict[str, tuple[int, Strike]] = {
    "head crash": (1, head_crash),
    "head crash at a write": (2, head_crash_at_write),
    "head crash amid orders": (2, head_crash_amid_orders),
    "head stall": (2, head_stall),
    "second head": (1, second_head),
    "second head at a write": (1, second_head_at_write),
    "store away": (1, store_away),
    "store goes back": (1, store_goes_back),
    "partition": (2, lambda w, host, lasts: _cut_off(w, [host], lasts)),
    "orders lost": (1, lambda w, host, lasts: _cut_off(w, [host], lasts, is_heard=True)),
    "reports lost": (1, lambda w, host, lasts: _cut_off(w, [host], lasts, hears=True)),
    "head cut off": (1, lambda w, host, lasts: _cut_off(w, w.running(), lasts)),
    "members cut off": (2, members_cut_off),
    "link cut": (1, lambda w, host, lasts: _cut_links(w, host, [w.rng.choice(w.running())], lasts)),
    "node cut": (1, lambda w, host, lasts: _cut_links(w, host, w.running(), lasts)),
    "groups stuck": (1, groups_stuck),
    "join": (2, join),
    "comes back": (2, comes_back),
    "worker killed": (3, worker_killed),
    "script fails": (1, script_fails),
    "script deserts": (1, script_deserts),
    "leaves alone": (1, leaves_alone),
    "power lost": (1, power_lost),
    "worker stopped": (1, worker_stopped),
    "node frozen": (1, node_frozen),
    "groups break": (1, groups_break),
    "agent lies": (1, agent_lies),
    "release": (2, release),
    "two released": (1, two_released),
    "walltime": (1, walltime),
    "limit": (1, limit),
    "bar": (1, bar),
    "cancel": (1, cancel),
    "rollback": (1, rollback),
    "checkpoint torn": (1, checkpoint_torn),
}
"""Name -> how often it is chosen, and what it does."""


def choose_kinds(rng: random.Random) -> list[str]:
    """Which faults one history has: all kinds, or a few of them, which then meet more often."""
    names = list(FAULTS)
    return names if rng.random() < 0.4 else rng.sample(names, rng.randint(2, 6))


def strike(w: "World") -> None:
    """One fault, and the next one later."""
    if w.t > w.faults_until:
        return
    rng, running = w.rng, w.running()
    lasts = rng.choice((0.5, 3.0, 10.0, 30.0))
    name = rng.choices(w.kinds, [FAULTS[kind][0] for kind in w.kinds])[0]
    if running:
        host = rng.choice(running)
        w.logs.append(f"{w.t:.2f} FAULT {name} {host.name} {lasts}")
        if FAULTS[name][1](w, host, lasts):
            w.fired[name] += 1
    else:
        w.add_host()
    w.after(rng.uniform(0.1, w.between_s), lambda: strike(w))
