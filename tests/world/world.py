"""The simulated world: time, network, and one history from a seed."""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn
from unittest.mock import patch

from fallow.core.membership import events as ev
from fallow.core.membership import proposals
from fallow.core.membership.records import Root
from fallow.core.membership.watch import Timing
from fallow.model import RunStatus
from history import check_history
from world.data_plane import DataPlane
from world.faults import choose_kinds, strike
from world.head import Head, Store
from world.node import Host
from world.observer import Observer, Violation

TIMING = Timing(
    prepare_s=8,
    rebuild_s=5,
    start_s=60,
    lease_s=6,
    progress_s=25,
    probe_s=3,
    release_s=8,
    last_call_s=2,
    resend_s=1,
    reconnect_s=8,
    listen_s=2,
)


OF_MESSAGES = {"message lost", "message repeated", "message late"}
"""Faults that are drawn for each message."""

USUAL_S = 0.02
"""A message that takes longer is late."""

EXPECTED_ENDS = (
    "main member",
    "before its training loop",
    "the only member",
    "inside of the run.updates loop",
    "is gone: ValueError",
    "is gone: code",
    "cancelled by hand",
    "no older checkpoint is left",
)
"""What a run's message says when faults here have ended it."""


class World:
    """One history.

    Args:
        seed: decides everything.
        mutant: a guard of the head's or of the agents' that is taken away, see `test_mutants`.
        faults_s: for how long there are faults.
    """

    def __init__(self, seed: int, *, mutant: str = "", faults_s: float = 40.0) -> None:
        self.rng = rng = random.Random(seed)
        self.seed, self.mutant, self.timing = seed, mutant, TIMING
        self.t = 1000.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.fired: Counter[str] = Counter()
        "faults that have happened"
        self.rules: Counter[str] = Counter()
        "rows of the machine's tables that were carried out"
        self.counts: Counter[str] = Counter()
        self.logs: list[str] = []
        self.ended: list[tuple[RunStatus, str]] = []
        self.loss = self.repeats = self.poison = 0.0
        self.slow_s = rng.choice((0.02, 0.05, 0.5, 2.0))
        self.cut: set[frozenset[str]] = set()
        self.stuck_until = 0.0
        "until then no group carries anything, though links can be made"
        self.broke_at = -math.inf
        "when a group broke for no other reason than a bad node"
        self.unwell_until = self.reliable_until = 0.0
        "until then the head or its store was not well; until then no message is lost"
        count = rng.randint(2, 6)
        self.total = rng.choice((20, 40, 80, 10000))
        root = Root(run="r", minimum=rng.randint(1, count), maximum=8, limit=rng.choice((8, 8, count)))
        self.store = Store(root)
        self.store.is_fenced = mutant != "the store does not fence"
        self.observer = Observer(self)
        self.plane = DataPlane(self)
        self.hosts: dict[str, Host] = {}
        self.host_of: dict[int, str] = {}
        self.head = Head(self)
        for _ in range(count):
            self.add_host()
        self.faults_until = self.t + faults_s
        self.between_s = rng.choice((2.0, 4.0, 8.0))
        "the longest time from one fault to the next"
        self.kinds = choose_kinds(rng)
        self.restarts = rng.random() < 0.2
        "the script knows nothing of Fallow: it begins again with each generation, from what it has saved itself"
        if rng.random() < 0.5:
            self.loss, self.repeats = rng.choice((0.0, 0.05, 0.2)), rng.choice((0.0, 0.1, 0.3))
        self.poison = rng.choice((0.0, 0.0, 0.001, 0.01))
        self.is_calm = self.loss == 0 and self.slow_s <= 0.5
        self.after(rng.uniform(3, 10), lambda: strike(self))

    # -- time -------------------------------------------------------------------------------------------------------

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.t + seconds, self._number, do))

    def run_until(self, end: float) -> None:
        while self._queue and self._queue[0][0] <= end:
            self.t, _, do = heapq.heappop(self._queue)
            do()
        self.t = end

    def fail(self, what: str) -> NoReturn:
        story = "\n".join(self.logs[-60:])
        raise Violation(f"seed {self.seed} at {self.t:.2f}: {what}\n{story}\n{self.head.machine.roster.root}")

    def upset(self, seconds: float) -> None:
        """The head or its store is not well, and what follows from that takes until then."""
        self.unwell_until = max(self.unwell_until, self.t + seconds)

    # -- who is there -----------------------------------------------------------------------------------------------

    def running(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.up and not host.over]

    def add_host(self) -> None:
        name = f"h{len(self.hosts)}"
        self.hosts[name] = Host(self, name)

    def start_head(self) -> None:
        self.head = Head(self)

    def note_rules(self, head: Head) -> None:
        self.rules.update(head.machine.carried_out)
        head.machine.carried_out.clear()

    def thaw_host(self, host: Host) -> None:
        host.frozen, host.stopped_at = False, None
        for x in host.workers:
            x.stopped = False

    def poll_end(self, over: tuple[Any, ...]) -> None:
        self.head.receive(over)
        self.after(5.0, lambda: self.poll_end(over))

    # -- network ----------------------------------------------------------------------------------------------------

    def _delays(self, *, may_be_lost: bool) -> list[float]:
        """When copies of a message arrive."""
        rng = self.rng
        if may_be_lost and self.t > self.reliable_until and rng.random() < self.loss:
            self.fired["message lost"] += 1
            return []
        copies = 2 if rng.random() < self.repeats else 1
        delays = [rng.uniform(0.001, USUAL_S if rng.random() < 0.8 else self.slow_s) for _ in range(copies)]
        if copies > 1:
            self.fired["message repeated"] += 1
        if max(delays) > USUAL_S:
            self.fired["message late"] += 1
        return delays

    def to_head(self, host: Host, message: tuple[Any, ...]) -> None:
        if host.is_heard:
            for delay in self._delays(may_be_lost=message[0] == "report"):
                self.after(delay, lambda: self.head.receive(message))

    def to_agent(self, name: str, message: tuple[Any, ...]) -> None:
        host = self.hosts[name]
        if host.hears:
            for delay in self._delays(may_be_lost=True):
                self.after(delay, lambda: self._deliver(host, message))

    def _deliver(self, host: Host, message: tuple[Any, ...]) -> None:
        if host.frozen:
            self.after(0.5, lambda: self._deliver(host, message))
        else:
            host.take(message)

    # -- the end ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Faults are over: everybody gets well."""
        self.slow_s, self.loss, self.repeats, self.poison = 0.05, 0.0, 0.0, 0.0
        self.cut.clear()
        self.store.away_until = self.stuck_until = 0.0
        for host in self.hosts.values():
            host.hears = host.is_heard = True
            host.breaks_until = host.lies_until = 0.0
            self.thaw_host(host)
        for seconds in (0, 10, 25, 45):  # who was asked to leave may need `progress_s` for it
            self.after(seconds, self._top_up)
        self.head.thaw()
        for seconds in (1, 6):
            self.after(seconds, self._lift_limit)

    def _top_up(self) -> None:
        while len(self.running()) < self.store.root.minimum:
            self.add_host()

    def _lift_limit(self) -> None:
        self.head.receive(("event", lambda at: ev.Release(at=at, limit=8, reason="the end")))

    def what_is_missing(self, steps: int) -> str:
        """Why the run is not well; empty: all who are there train together, or it has ended as it should."""
        root = self.store.root
        if len(self.ended) > 1 and not self.fired["store goes back"]:
            return "it ended more than once"
        if root.status.ended:
            expected = root.status is RunStatus.FINISHED or any(words in root.message for words in EXPECTED_ENDS)
            return "" if expected else f"it has failed: {root.message}"
        members = set(self.head.machine.roster.present())
        missing = [host.name for host in self.running() if host.node not in members]
        if missing or root.change is not None:
            return f"not everybody is in at the end: {missing}, {self.head.machine.phase}"
        if self.counts["steps"] <= steps + 10:
            return f"no progress after the faults: {self.counts['steps'] - steps} steps, {self.head.machine.phase}"
        return ""


@patch.object(proposals, "EVERY_S", 5.0)
def play(seed: int, *, mutant: str = "", settle_s: float = 80.0) -> World:
    """One history.

    Raises:
        Violation: something happened that must not, or what had to happen did not.
    """
    w = World(seed, mutant=mutant)
    w.run_until(w.faults_until)
    w.settle()
    steps, end, problem = w.counts["steps"], w.t + settle_s, "-"
    w.run_until(w.t + 8)
    while problem and w.t < end:
        w.run_until(w.t + 3)
        problem = w.what_is_missing(steps)
    if problem:
        w.fail(problem)
    # What a script that is restarted saves, nobody tells the head.
    problems = [] if w.restarts or w.fired["store goes back"] else check_history(w.store.events)
    if problems:
        w.fail("; ".join(problems))
    w.note_rules(w.head)
    return w
