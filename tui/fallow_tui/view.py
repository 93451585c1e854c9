"""The data of the screens, reduced from the head's stream. Pure: times are arguments, and nothing is drawn here."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from fallow.model import (
    AllocationKind,
    ChangeKind,
    EventRecord,
    MemberPhase,
    NodeOwner,
    NodeView,
    RunStatus,
    RunView,
    Snapshot,
)
from fallow_tui.text import clean_item

KEEP_EVENTS = 2000
KEEP_S = 2 * 3600.0
"""Seconds that the timeline keeps."""
RATE_EVERY_S = 5.0
KEEP_RATES = 64
YELLOW_S = 6.0
RED_S = 20.0

CHANGES = frozenset({*ChangeKind, *RunStatus, "suspend", "lost"})
"""Kinds of events that explain changes of the membership."""


class Freshness(StrEnum):
    """How old the data is."""

    FRESH = "fresh"
    AGING = "aging"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Cell:
    """State of one node (or, without Slurm, of one member) at one time."""

    owner: NodeOwner | None
    "None: no data"
    run: str | None = None
    kind: AllocationKind | None = None
    phase: MemberPhase | None = None
    "None: the node is allocated, but its agent has not connected yet"


NO_DATA = Cell(None)


@dataclass(slots=True)
class View:
    """State of the monitor, updated by what the head sends and by the loss of the connection."""

    snapshot: Snapshot | None = None
    received_at: float = 0.0
    "monotonic time at which the last snapshot came"
    away_since: float | None = None
    "Unix time since which the head cannot be reached"
    away_reason: str = ""
    events: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=KEEP_EVENTS))
    cells: dict[str, Cell] = field(default_factory=dict)
    history: dict[str, list[tuple[float, Cell]]] = field(default_factory=dict)
    "row -> its changes, as (Unix time of the head, new state), oldest first"
    our_rows: set[str] = field(default_factory=set)
    "rows that were ours at some time"
    rates: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    "run -> number, in the order in which the runs appeared"
    _last_seq: int = -1

    def apply(self, item: Snapshot | EventRecord, now: float) -> None:
        """Apply one item of the stream. `now` is monotonic time."""
        if isinstance(item, EventRecord):
            self._add_event(clean_item(item))
        else:
            self._add_snapshot(clean_item(item), now)

    def apply_disconnect(self, reason: str, at: float) -> None:
        """Note that the head cannot be reached since `at` (Unix time). The first call of an outage counts."""
        if self.away_since is None:
            self.away_since = at
            if self.snapshot is not None:
                for row in self.cells:
                    self._add_mark(row, self.snapshot.at, NO_DATA)
        self.away_reason = reason

    # -- queries ------------------------------------------------------------------------------------------------

    def age(self, now: float) -> float | None:
        """Seconds since the last snapshot."""
        return None if self.snapshot is None else max(0.0, now - self.received_at)

    def freshness(self, now: float) -> Freshness:
        age = self.age(now)
        if age is None or age >= RED_S:
            return Freshness.STALE
        return Freshness.AGING if age >= YELLOW_S or self.away_since is not None else Freshness.FRESH

    def poll_age(self, now: float) -> float | None:
        """Seconds since Slurm last answered the head."""
        if self.snapshot is None or self.snapshot.head.poll_age_s is None:
            return None
        return self.snapshot.head.poll_age_s + max(0.0, now - self.received_at)

    def run(self, run: str) -> RunView | None:
        runs = self.snapshot.runs if self.snapshot is not None else []
        return next((view for view in runs if view.run == run), None)

    def node(self, node: str) -> NodeView | None:
        nodes = self.snapshot.nodes if self.snapshot is not None else []
        return next((view for view in nodes if view.node == node), None)

    def number(self, run: str) -> int:
        """Number of a run, from 0, in order of appearance. It selects the letter and the colour."""
        return self._numbers[run]

    def next_release(self, run: RunView, now: float) -> float | None:
        """Seconds until the first allocation of the run ends."""
        ends = [member.ends_in_s for member in run.members if member.ends_in_s is not None]
        ends += [allocation.ends_in_s for allocation in run.allocations if allocation.ends_in_s is not None]
        return max(0.0, min(ends) - (now - self.received_at)) if ends else None

    def rate_history(self, run: str) -> list[float]:
        return [rate for _, rate in self.rates.get(run, ())]

    def changes(self, limit: int) -> list[EventRecord]:
        """The newest membership changes, newest first."""
        newest: list[EventRecord] = []
        for event in reversed(self.events):
            if len(newest) == limit:
                break
            if event.kind in CHANGES:
                newest.append(event)
        return newest

    def timeline(self, columns: int, column_s: float) -> dict[str, list[Cell]]:
        """Rows that were ours at some time shown, as `columns` cells up to now. Rows with changes come first."""
        if self.snapshot is None:
            return {}
        # Columns begin at multiples of their length, so that the picture moves by whole columns.
        last = self.snapshot.at // column_s * column_s
        ends = [last + column_s * (2 - columns + number) for number in range(columns)]
        rows: dict[str, list[Cell]] = {}
        for row in sorted(self.our_rows):
            cells = list(_sample(self.history[row], ends))
            if any(cell.owner is NodeOwner.OURS for cell in cells):
                rows[row] = cells
        # If few rows fit, rows with changes say most.
        return dict(sorted(rows.items(), key=lambda item: len(set(item[1])) == 1))

    # -- reduction ----------------------------------------------------------------------------------------------

    def _add_event(self, event: EventRecord) -> None:
        # A new subscription may repeat events.
        if event.seq > self._last_seq:
            self._last_seq = event.seq
            self.events.append(event)
            self._name_runs([event.run])

    def _add_snapshot(self, snapshot: Snapshot, now: float) -> None:
        if self.away_since is not None:
            self.away_since, self.away_reason = None, ""
            if snapshot.last_event < self._last_seq:
                # Event numbers only grow in a state folder, so this is another state folder.
                self.events.clear()
                self._last_seq = -1
        self.snapshot, self.received_at = snapshot, now
        cells = _cells(snapshot)
        for row in self.cells.keys() - cells.keys():
            self._add_mark(row, snapshot.at, NO_DATA)
        for row, cell in cells.items():
            self._add_mark(row, snapshot.at, cell)
        self.cells = cells
        # Runs that have not ended come first: there are 26 letters, and fewer colours.
        runs = sorted(snapshot.runs, key=lambda run: run.status.ended)
        self._name_runs([*(run.run for run in runs), *(cell.run for cell in cells.values())])
        for run in runs:
            self._add_rate(run, snapshot.at)

    def _name_runs(self, runs: Iterable[str | None]) -> None:
        for run in runs:
            if run is not None:
                self._numbers.setdefault(run, len(self._numbers))

    def _add_mark(self, row: str, at: float, cell: Cell) -> None:
        marks = self.history.setdefault(row, [])
        if marks and marks[-1][1] == cell:
            return
        marks.append((at, cell))
        if cell.owner is NodeOwner.OURS:
            self.our_rows.add(row)
        # Keep the newest mark before the horizon: it has the state at the horizon.
        while len(marks) > 1 and marks[1][0] < at - KEEP_S:
            del marks[0]

    def _add_rate(self, run: RunView, at: float) -> None:
        rates = self.rates.setdefault(run.run, deque(maxlen=KEEP_RATES))
        rate = 0.0 if run.status.ended else run.samples_per_s
        if rates and at - rates[-1][0] < RATE_EVERY_S:
            rates[-1] = (rates[-1][0], rate)
        else:
            rates.append((at, rate))


def _sample(marks: list[tuple[float, Cell]], ends: list[float]) -> Iterator[Cell]:
    """State of a row at the end of each column."""
    position, cell = 0, NO_DATA
    for end in ends:
        while position < len(marks) and marks[position][0] < end:
            cell = marks[position][1]
            position += 1
        yield cell


def _cells(snapshot: Snapshot) -> dict[str, Cell]:
    """One cell per node, or per member if Slurm does not list its node."""
    kinds: dict[str, tuple[str, AllocationKind]] = {}
    phases: dict[str, MemberPhase] = {}
    node_names = {node.node for node in snapshot.nodes}
    cells: dict[str, Cell] = {}
    for run in snapshot.runs:
        for allocation in run.allocations:
            for name in allocation.nodes:
                kinds[name] = (run.run, allocation.kind)
        for member in run.members:
            if member.phase is MemberPhase.GONE:
                continue
            kinds[member.node] = (run.run, member.allocation)
            # Of several members on a node, show the one with the highest rank below.
            if _RANK[member.phase] >= _RANK[phases.get(member.node)]:
                phases[member.node] = member.phase
            if member.node not in node_names:
                cells[member.member] = Cell(NodeOwner.OURS, run.run, member.allocation, member.phase)
    for node in snapshot.nodes:
        if node.owner is not NodeOwner.OURS:
            cells[node.node] = Cell(node.owner)
            continue
        owner, kind = kinds.get(node.node, (node.run, None))
        phase = phases.get(node.node, MemberPhase.LEAVING if node.ending else None)
        cells[node.node] = Cell(NodeOwner.OURS, node.run or owner, kind, phase)
    return cells


_RANK: dict[MemberPhase | None, int] = {
    None: -1,
    MemberPhase.GONE: 0,
    MemberPhase.SILENT: 0,
    MemberPhase.STARTING: 1,
    MemberPhase.READY: 2,
    MemberPhase.LEAVING: 3,
    MemberPhase.MEMBER: 4,
}
