"""What a play looked like over time, for plots: nodes by use in equal bins, and which node did what when.

Between a play and its engine, runs and meter stand thin wrappers that pass everything on and note what they see.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import IntEnum

from fallow.model import ClusterConfig, ClusterState, Score, Struct
from fallow.sim.types import (
    Active,
    Ended,
    Engine,
    Happening,
    Kind,
    Measured,
    Meter,
    Runs,
    Silent,
    Site,
    Started,
    Wanted,
)

WIDTHS_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
BINS = 800
"""At most so many bins, unless days are too narrow, too."""

ROWS = 400
"""Of a map: of larger clusters every n-th node is shown."""


class Cell(IntEnum):
    """What a node does."""

    OTHERS = 0
    IDLE = 1
    STARTING = 2
    "ours, without a part in the training: starts, or leaves"
    TRAINING = 3
    DOWN = 4


class NodeMap(Struct, frozen=True, kw_only=True):
    """Node x time."""

    nodes: tuple[str, ...]
    groups: tuple[str, ...]
    "of each node, its first partition"
    cells: tuple[bytes, ...]
    "per bin, one `Cell` per node, at the middle of the bin"
    every: int
    "one node in so many is shown"


class Series(Struct, frozen=True, kw_only=True):
    """Mean numbers of nodes in bins of equal length; the last may be cut short by the end."""

    begin: float
    end: float
    width_s: float
    nodes: int
    idle: tuple[float, ...]
    "up, not reserved, without a job of others: ours are among them"
    ours: tuple[float, ...]
    "that have a job of ours"
    training: tuple[float, ...]
    "of them, those that take part in a training"
    waits_s: tuple[float, ...]
    "how long jobs of others waited for nodes of ours, ascending"
    queued_s: tuple[float, ...] = ()
    "from their submission to their start, in equal steps from the shortest to the longest; empty: nobody knows"
    queued_without_s: tuple[float, ...] = ()
    "the same without us"
    map: NodeMap | None = None


def width_of(seconds: float) -> float:
    """Length of a bin for a play of `seconds`."""
    return next((float(width) for width in WIDTHS_S if seconds <= width * BINS), float(WIDTHS_S[-1]))


class Level:
    """The integral of a number that changes in steps, by bin."""

    def __init__(self, begin: float, end: float, width_s: float) -> None:
        self._begin, self._width_s = begin, width_s
        self._at, self._level = begin, 0.0
        self._sums = [0.0] * max(1, -int(-(end - begin) // width_s))

    def set(self, at: float, level: float) -> None:
        """From `at` on it is `level`; times do not go back."""
        if at > self._at:
            if self._level:
                self._add(self._at, at)
            self._at = at
        self._level = level

    def change(self, at: float, by: float) -> None:
        self.set(at, self._level + by)

    def means(self, until: float) -> tuple[float, ...]:
        """Of the bins that have begun before `until`."""
        self.set(until, self._level)
        found = []
        for number, total in enumerate(self._sums):
            left = self._begin + number * self._width_s
            length_s = min(left + self._width_s, until) - left
            if length_s > 0:
                found.append(round(total / length_s, 6))
        return tuple(found)

    def _add(self, begin: float, end: float) -> None:
        number = int((begin - self._begin) // self._width_s)
        while begin < end and number < len(self._sums):
            right = min(end, self._begin + (number + 1) * self._width_s)
            self._sums[number] += (right - begin) * self._level
            begin, number = right, number + 1


class Recorder:
    """Notes what happens in one play.

    Args:
        site: the cluster.
        begin, end: of the play, virtual Unix time.
        with_map: look at all nodes in the middle of every bin.
    """

    def __init__(self, site: Site, begin: float, end: float, with_map: bool) -> None:
        self._site, self._begin, self._end = site, begin, end
        self._width_s = width_of(end - begin)
        self._idle, self._ours, self._training = (Level(begin, end, self._width_s) for _ in range(3))
        self._of_run: dict[str, int] = {}
        self._members = 0
        self._waits: dict[str, float] = {}
        self._every = max(1, -(-len(site.nodes) // ROWS)) if with_map else 0
        self._shown = [(place, node.node) for place, node in enumerate(site.nodes)][:: self._every or 1]
        self._cells: list[bytes] = []
        self._jobs: dict[str, tuple[str, ...]] = {}
        self._active: set[str] = set()

    def series(self, until: float) -> Series:
        """Until then, the end or earlier."""
        return Series(
            begin=self._begin,
            end=until,
            width_s=self._width_s,
            nodes=len(self._site.nodes),
            idle=self._idle.means(until),
            ours=self._ours.means(until),
            training=self._training.means(until),
            waits_s=tuple(sorted(round(seconds, 6) for seconds in self._waits.values())),
            map=self._map() if self._every else None,
        )

    def _map(self) -> NodeMap:
        partitions = [self._site.nodes[place].partitions for place, _ in self._shown]
        return NodeMap(
            nodes=tuple(name for _, name in self._shown),
            groups=tuple(names[0] if names else "" for names in partitions),
            cells=tuple(self._cells),
            every=self._every,
        )

    # What the wrappers tell.

    def pool(self, at: float, idle: int) -> None:
        self._idle.set(at, idle)

    def members(self, at: float, run: str, nodes: int) -> None:
        self._members += nodes - self._of_run.get(run, 0)
        self._of_run[run] = nodes
        self._training.set(at, self._members)

    def waited(self, job_id: str, seconds: float) -> None:
        if seconds > 0:
            self._waits[job_id] = self._waits.get(job_id, 0.0) + seconds

    def happened(self, happening: Happening) -> None:
        if isinstance(happening, Started):
            self._jobs[happening.job_id] = happening.nodes
            self._ours.change(happening.at, len(happening.nodes))
        elif isinstance(happening, Ended | Silent):
            self._active.discard(happening.job_id)
            self._ours.change(happening.at, -len(self._jobs.pop(happening.job_id, ())))

    def active(self, job_id: str) -> None:
        if job_id in self._jobs:
            self._active.add(job_id)

    def next_look(self) -> float:
        """When the nodes are to be looked at."""
        if not self._every:
            return float("inf")
        at = self._begin + (len(self._cells) + 0.5) * self._width_s
        return at if at < self._end else float("inf")

    def look(self, idle: int, down: int) -> None:
        """Nodes by their place in the site, as bits: without a job of others (ours are among them), and down."""
        held = {node: job_id for job_id, nodes in self._jobs.items() for node in nodes}
        cells = bytearray()
        for place, name in self._shown:
            job_id = held.get(name)
            if job_id is not None:
                cells.append(Cell.TRAINING if job_id in self._active else Cell.STARTING)
            elif idle >> place & 1:
                cells.append(Cell.IDLE)
            else:
                cells.append(Cell.DOWN if down >> place & 1 else Cell.OTHERS)
        self._cells.append(bytes(cells))


Look = Callable[[], tuple[int, int]]
"""What `Recorder.look` takes, of an engine as it stands."""


class WatchedEngine:
    """An engine (see `fallow.sim.types.Engine`) whose happenings and nodes are noted.

    Args:
        inner: the engine.
        hear: each is told of everything that happens.
        recorder: looks at the nodes when it wants to; None: nobody does.
        look: what it sees then.
    """

    def __init__(
        self, inner: Engine, hear: Sequence[Callable[[Happening], None]], recorder: Recorder | None, look: Look
    ) -> None:
        self._inner, self._hear, self._recorder, self._look = inner, hear, recorder, look
        self.site = inner.site
        # Asked for each moment.
        self.next_at = inner.next_at

    @property
    def now(self) -> float:
        return self._inner.now

    def advance(self, to: float) -> list[Happening]:
        if self._recorder is None:
            return self._noted(self._inner.advance(to))
        found = []
        while (look_at := self._recorder.next_look()) <= to:
            found += self._noted(self._inner.advance(max(look_at, self._inner.now)))
            self._recorder.look(*self._look())
        return found + self._noted(self._inner.advance(to))

    def _noted(self, happenings: list[Happening]) -> list[Happening]:
        for happening in happenings:
            for hear in self._hear:
                hear(happening)
        return happenings

    def submit(self, request: Wanted) -> str:
        return self._inner.submit(request)

    def cancel(self, job_id: str) -> None:
        self._inner.cancel(job_id)

    def left(self, job_id: str) -> None:
        self._inner.left(job_id)

    def poll(self) -> ClusterState:
        return self._inner.poll()

    def config(self) -> ClusterConfig:
        return self._inner.config()

    def idle_nodes(self) -> int:
        return self._inner.idle_nodes()


class WatchedRuns:
    """Runs (see `fallow.sim.types.Runs`) of which is noted which node trains."""

    def __init__(self, inner: Runs, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def join(self, run: str, node: str, job_id: str, at: float) -> None:
        self._inner.join(run, node, job_id, at)

    def release(self, run: str, nodes: Collection[str], at: float) -> float:
        return self._inner.release(run, nodes, at)

    def lost(self, run: str, nodes: Collection[str], at: float, silent_s: float = 0.0) -> None:
        self._inner.lost(run, nodes, at, silent_s)

    def members(self, run: str) -> int:
        return self._inner.members(run)

    def next_at(self) -> float:
        return self._inner.next_at()

    def advance(self, to: float) -> list[Active | Measured]:
        found = self._inner.advance(to)
        for each in found:
            if isinstance(each, Active):
                self._recorder.active(each.job_id)
        return found


class WatchedMeter:
    """A meter (see `fallow.sim.types.Meter`) whose numbers are noted."""

    def __init__(self, inner: Meter, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def pool(self, at: float, idle: int) -> None:
        self._recorder.pool(at, idle)
        self._inner.pool(at, idle)

    def members(self, at: float, run: str, nodes: int, stalled_until: float) -> None:
        self._recorder.members(at, run, nodes)
        self._inner.members(at, run, nodes, stalled_until)

    def change(self, at: float, kind: Kind, nodes: int) -> None:
        self._inner.change(at, kind, nodes)

    def waited(self, job_id: str, seconds: float) -> None:
        self._recorder.waited(job_id, seconds)
        self._inner.waited(job_id, seconds)

    def calls(self, number: int) -> None:
        self._inner.calls(number)

    def score(self) -> Score:
        return self._inner.score()


def shares(series: Series) -> tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]:
    """Per bin, in nodes: not to be had (others', down), training, ours otherwise, idle."""
    taken = [max(0.0, series.nodes - idle) for idle in series.idle]
    training = [min(a, b) for a, b in zip(series.training, series.idle, strict=True)]
    ours = [max(0.0, min(a, b) - c) for a, b, c in zip(series.ours, series.idle, training, strict=True)]
    free = [max(0.0, a - b - c) for a, b, c in zip(series.idle, training, ours, strict=True)]
    return taken, training, ours, free
