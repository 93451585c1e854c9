"""Draws the holes of `fallow simulate --trace summit` (contrib/traces): `python -m bench.summit_holes` writes the file.

They are drawn from percentiles of Summit's idle nodes, and no row of the source is kept. The table has one column each
for the length of holes, the nodes that join or leave at once, and the time between two events. How they go together it
does not say. What is done here gives back its columns, the share of idle time that is lost to a start-up (U(c), below),
and, within a few points, the known scores of simple policies on the source:

- Events come at the table's intervals, on the source's grid of 10 s; nodes join at 62 % of them. The other events are
  leaves that do not meet one of these.
- A slow wave, half a day long, moves batches and lengths alike: few nodes become idle for short, then more for longer.
  Without it half of the time 290 nodes are idle instead of 81, and runs that restart do half as much as on the source.
- A batch is cut into parts of 16 to 600 nodes. Each draws how long it stays, then leaves together with others that do
  so at about that time, the more of them the likelier, or alone.
- Of several draws the one is taken whose percentile had the fewest nodes so far. So a few days have the marginals of
  the two weeks behind the table, although single batches have thousands of nodes.

U(c) = Σ max(0, length - c) / Σ length, of all holes.
"""

from __future__ import annotations

import csv
import gzip
import math
import random
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist

from fallow.sim.traces.summit import NODES
from fallow.traces import FOLDER, trace_path

TABLE = FOLDER / "summit_2021-02_idle_percentiles.csv"
DAYS = 14
DAY_S = 86400.0
SEED = "0/summit/0"
GRID_S = 10.0
SHORTEST_S = 70.0
_JOINS = 14691 / 23883
"""Part of the events at which nodes join."""
TAILS = {
    "hole_length_s": 6.20022425348068,
    "join_batch_nodes": 1.234534267509451,
    "inter_event_s": 1.9563528988033543,
}
"""Column -> exponent of a bounded Pareto between the last two percentiles, of which the table says nothing: with these
the columns have the source's means, 1192 s, 29 nodes and 53.9 s."""
_WARM_UP_S = 43200.0
_WAVE_S, _WAVE_SPREAD = 43200.0, 0.5
_BATCH_FOLLOWS, _LENGTH_FOLLOWS = 0.62, 0.92
"""Correlation with the wave."""
# Logarithms of sizes of parts of a batch.
_PARTS = (math.log(16), math.log(600))
_DRAWS = 9
"""So many lengths are drawn, and one of them taken."""
_TOGETHER, _CROWDS = 0.5, 1.5
"""n nodes that leave at about the right time weigh _TOGETHER · n^_CROWDS, a time of one's own weighs 1."""
_ABOUT = 0.5
"""As much longer or shorter than drawn a hole may be."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_NORMAL = NormalDist()


class Percentiles:
    """A distribution by its percentiles 0-100: linear in between, the last cell a bounded Pareto.

    Args:
        values: the 101 percentiles.
        tail: exponent of the Pareto.
    """

    def __init__(self, values: Sequence[float], tail: float) -> None:
        self._values = tuple(values)
        self._tail = tail

    def at(self, part: float) -> float:
        """The value that `part` (0 to 1) of all are below."""
        cell = min(int(part * 100), 99)
        within = part * 100 - cell
        low, high = self._values[cell], self._values[cell + 1]
        if cell < 99 or not low < high:
            return low + (high - low) * within
        return float(low * (1 - within * (1 - (low / high) ** self._tail)) ** (-1 / self._tail))


class Balanced:
    """Draws of a column that together keep to its percentiles, whatever each of them weighs."""

    def __init__(self, column: Percentiles, rng: random.Random) -> None:
        self._column = column
        self._weight = [0.0] * 100
        self._within = [rng.random() for _ in range(100)]

    def draw(self, parts: Sequence[float]) -> tuple[int, float]:
        """The value at that one of `parts` whose percentile has had the least, and the percentile."""
        cell = min((min(int(100 * part), 99) for part in parts), key=self._weight.__getitem__)
        self._within[cell] = (self._within[cell] + _GOLDEN) % 1.0
        return cell, self._column.at((cell + self._within[cell]) / 100)

    def count(self, cell: int, weight: float) -> None:
        self._weight[cell] += weight


def holes(path: Path, days: int) -> list[tuple[int, int, int]]:
    """(begin, end, nodes) of holes, in seconds from the begin of the first day; of nodes that come and go together.

    Args:
        path: the table of percentiles.
        days: what begins or ends later is cut there.
    """
    since: dict[int, float] = {}
    found: Counter[tuple[int, int]] = Counter()
    last = days * DAY_S
    for at, joined, left in _Machine(read_percentiles(path), SEED).changes(-_WARM_UP_S):
        for node in since if at >= last else left:
            if (end := min(at, last)) > 0:
                found[round(max(since[node], 0.0)), round(end)] += 1
        if at >= last:
            break
        for node in left:
            del since[node]
        since.update(dict.fromkeys(joined, at))
    return sorted((begin, end, nodes) for (begin, end), nodes in found.items())


class _Machine:
    def __init__(self, columns: dict[str, Percentiles], seed: str) -> None:
        self._rng = random.Random(seed)
        self._gaps = Balanced(columns["inter_event_s"], self._rng)
        self._batches = Balanced(columns["join_batch_nodes"], self._rng)
        self._lengths = Balanced(columns["hole_length_s"], self._rng)
        self._ranks = _ranks(columns["join_batch_nodes"])
        self._busy = list(range(NODES))
        self._leaving: dict[float, list[int]] = {}
        self._times: list[float] = []
        "keys of `_leaving`, ascending"
        self._wave_from = self._wave_to = 0.0

    def changes(self, begin: float) -> Iterator[tuple[float, list[int], list[int]]]:
        """Without end: time, nodes that join, nodes that leave."""
        rng = self._rng
        self._wave_to = begin + rng.random() * _WAVE_S
        self._wave_from = self._wave_to - _WAVE_S
        for at in self._joins(begin):
            while self._times and self._times[0] < at:
                time, left = self._leave()
                yield time, [], left
            joined = self._join(at)
            left = self._leave()[1] if self._times and self._times[0] == at else []
            if joined or left:
                yield at, joined, left

    def _joins(self, begin: float) -> Iterator[float]:
        at = begin
        while True:
            cell, gap_s = self._gaps.draw([self._rng.random() for _ in range(2)])
            self._gaps.count(cell, 1.0)
            at += max(GRID_S, round(gap_s / GRID_S) * GRID_S)
            if self._rng.random() < _JOINS:
                yield at

    def _leave(self) -> tuple[float, list[int]]:
        at = self._times.pop(0)
        nodes = self._leaving.pop(at)
        self._busy += nodes
        return at, nodes

    def _join(self, at: float) -> list[int]:
        rng, level = self._rng, self._level(at)
        cell, size = self._batches.draw([_follow(rng, level, _BATCH_FOLLOWS) for _ in range(2)])
        self._batches.count(cell, 1.0)
        joined: list[int] = []
        for _ in range(min(round(size), len(self._busy))):
            number = rng.randrange(len(self._busy))
            self._busy[number], self._busy[-1] = self._busy[-1], self._busy[number]
            joined.append(self._busy.pop())
        begun = 0
        while begun < len(joined):
            part = joined[begun : begun + round(math.exp(rng.uniform(*_PARTS)))]
            begun += len(part)
            parts = [self._rank(_follow(rng, level, _LENGTH_FOLLOWS)) for _ in range(_DRAWS)]
            cell, length_s = self._lengths.draw(parts)
            self._lengths.count(cell, len(part))
            self._leave_at(self._when(at, length_s), part)
        return joined

    def _leave_at(self, at: float, nodes: list[int]) -> None:
        if at in self._leaving:
            self._leaving[at] += nodes
        else:
            self._leaving[at] = list(nodes)
            insort(self._times, at)

    def _when(self, at: float, length_s: float) -> float:
        """When a part leaves that would stay for `length_s`: with others, or alone."""
        first = bisect_left(self._times, at + max(SHORTEST_S, length_s / (1 + _ABOUT)))
        others = self._times[first : bisect_right(self._times, at + length_s * (1 + _ABOUT))]
        weights = [self._weight(len(self._leaving[time]), (time - at) / length_s) for time in others]
        total = _TOGETHER * sum(weights)
        if others and self._rng.random() * (total + 1.0) < total:
            return self._rng.choices(others, weights)[0]
        return at + max(SHORTEST_S, round(length_s / GRID_S) * GRID_S)

    def _weight(self, nodes: int, ratio: float) -> float:
        """Of leaving together with so many nodes, after `ratio` times as long as was drawn.

        More are known to leave soon than late, which alone would make holes shorter.
        """
        return float(nodes**_CROWDS * ratio * math.exp(-abs(math.log(ratio)) / _ABOUT))

    def _level(self, at: float) -> float:
        """The wave, as a standard normal value."""
        while at >= self._wave_to:
            spread = self._rng.uniform(-_WAVE_SPREAD, _WAVE_SPREAD)
            self._wave_from, self._wave_to = self._wave_to, self._wave_to + _WAVE_S * math.exp(spread)
        phase = (at - self._wave_from) / (self._wave_to - self._wave_from)
        return _NORMAL.inv_cdf(min(max(phase, 0.002), 0.998))

    def _rank(self, part: float) -> float:
        """Of all nodes, the part whose lengths are drawn below this."""
        return (bisect_right(self._ranks, part) + self._rng.random()) / (len(self._ranks) + 1)


def _follow(rng: random.Random, level: float, closely: float) -> float:
    """A part (0 to 1) that is even over all levels, and goes with this one."""
    return _NORMAL.cdf(closely * level + math.sqrt(1 - closely * closely) * rng.gauss(0.0, 1.0))


def _ranks(batches: Percentiles) -> list[float]:
    """200-quantiles of the parts at which lengths are drawn, each weighted with the nodes of its batch.

    Large batches come with long holes; nodes, not batches, are to have the table's lengths.
    """
    rng = random.Random("summit/ranks")
    drawn: list[tuple[float, float]] = []
    for _ in range(6000):
        level = rng.gauss(0.0, 1.0)
        size = batches.at(_follow(rng, level, _BATCH_FOLLOWS))
        drawn.append((_follow(rng, level, _LENGTH_FOLLOWS), size))
    drawn.sort()
    total, so_far = sum(size for _, size in drawn), 0.0
    found: list[float] = []
    for part, size in drawn:
        so_far += size
        while len(found) < 199 and so_far >= total * (len(found) + 1) / 200:
            found.append(part)
    return found


def read_percentiles(path: Path) -> dict[str, Percentiles]:
    """The columns of a table of percentiles 0-100."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {name: Percentiles([float(row[name]) for row in rows], tail) for name, tail in TAILS.items()}


def main() -> None:
    text = "\n".join(["begin_s,end_s,nodes", *(",".join(map(str, hole)) for hole in holes(TABLE, DAYS))]) + "\n"
    trace_path("summit").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
