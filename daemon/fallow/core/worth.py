"""What nodes are worth to a run, all things considered, in a unit that runs have in common. Pure.

The worth of training at speed v is w · log(1 + v/v1), v1 being the speed with one node and w the run's weight: what
counts is by which part a node speeds a run up. So a curve in steps per second of one model compares with another's,
runs that scale alike get nodes in proportion to their weights (proportional fairness: Kelly, J. Oper. Res. Soc. 49,
1998), and one that gains nothing more leaves the rest to others. A late run counts for more, up to the speed it needs.

A change costs: all members stall for `pause_s`, and a new node trains only after `start_s`. Over the time for which
nodes are expected to stay, `horizon_s`, the worth of x nodes beside h held ones with U(x) as above is

    x > h:  U(h) + (1 - start/horizon - doubt) (U(x) - U(h)) - pause/horizon U(h)
    x < h:  U(x) - pause/horizon U(h)

(BFTrainer's objective, arXiv 2106.12091, for costs in time). Two changes in a row never cost less than the one that
leads to the same end, so every plan that is carried out raises the sum of U by more than its cost: no going in circles.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log1p

from fallow.core.pacing import Schedule

DOUBT = 0.1
"""Part of an expected gain that is not counted on: curves are estimates, and losses are sure."""

PRICE = 1e-6
"""Worth of a node to nobody in particular: those that gain nothing are not asked for, and not kept."""


@dataclass(frozen=True, slots=True)
class Worth:
    """How a run values nodes.

    Attributes:
        speeds: (nodes, steps per second), both ascending; nodes of all allocations together.
        weight: of its gain beside that of others.
        base: nodes that are there anyway: those of its base allocations, and idle ones that cannot be moved.
        least: nodes that the user wants at least; it is not started with fewer, and none is taken away below that.
        going: it trains, or has trained: one node is then better than none.
        start_s: from the request until a new node trains.
        pause_s: stall of all members at a change.
        urgent_nodes: nodes that its deadline takes.
        urgency: how much more the gain up to there counts; 1: no more.
    """

    speeds: tuple[tuple[int, float], ...]
    weight: float = 1.0
    base: int = 0
    least: int = 1
    going: bool = True
    start_s: float = 30.0
    pause_s: float = 0.5
    urgent_nodes: int = 0
    urgency: float = 1.0
    _known: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    "what `of` has found: a plan asks many times"
    _steps: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    "numbers of nodes besides `base` at which the speed changes, ascending"
    _changes: dict[tuple[int, int, int, float, bool], tuple[tuple[int, ...], tuple[float, ...]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    "what `changes` has found"
    _margins: dict[tuple[int, int, int, float], tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    "what `margins` has found"

    def __post_init__(self) -> None:
        self._steps.extend([nodes - self.base for nodes, _ in self.speeds])
        if self.going:
            # Every plan asks for all of them.
            if self.urgency > 1:
                self._known.update({nodes: self._at(speed) for nodes, speed in self.speeds if nodes >= 1})
            elif self.speeds:
                one, weight = self.speeds[0][1], self.weight
                self._known.update({nodes: weight * log1p(speed / one) for nodes, speed in self.speeds if nodes >= 1})

    def speed(self, nodes: int) -> float:
        """Steps per second with so many nodes."""
        if nodes < 1 or (nodes < self.least and not self.going):
            return 0.0
        at = bisect_right(self.speeds, (nodes, inf)) - 1
        return self.speeds[at][1] if at >= 0 else 0.0

    def of(self, nodes: int) -> float:
        """Worth of training with so many nodes."""
        known = self._known.get(nodes)
        if known is None:
            known = self._known[nodes] = self._at(self.speed(nodes)) if self.speeds else 0.0
        return known

    def _at(self, speed: float) -> float:
        one, more = self.speeds[0][1], 0.0
        if self.urgency > 1:
            more = (self.urgency - 1) * log1p(min(speed, self.speed(self.urgent_nodes)) / one)
        return self.weight * (log1p(speed / one) + more)


@dataclass(frozen=True, slots=True)
class Gain:
    """One run's.

    Attributes:
        worth: of nodes to it.
        speeds: (nodes, steps per second) as long as no node is lost.
        measured: numbers of workers at which it, or an earlier run like it, was measured.
        schedule: how it stands to its deadline; None: it has none, or it is not known how long it takes.
        known: the speeds are in steps per second; else only their ratios mean something.
    """

    worth: Worth
    speeds: tuple[tuple[int, float], ...]
    measured: frozenset[int]
    schedule: Schedule | None
    known: bool = True


def changes(
    worth: Worth, held: int, low: int, high: int, horizon_s: float, *, stalls: bool = True
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Numbers of harvested nodes worth having, ascending, and the worth of coming to each from now.

    Args:
        worth: of the run.
        held: harvested nodes that it has or has asked for.
        low, high: least and most that it may have now.
        horizon_s: for so long nodes are expected to stay.
        stalls: False: its members change in any case, so that costs nothing more.
    """
    key = held, low, high, horizon_s, stalls
    known = worth._changes.get(key)
    if known is None:
        known = worth._changes[key] = _changes(worth, held, low, high, horizon_s, stalls)
    return known


def _changes(
    worth: Worth, held: int, low: int, high: int, horizon_s: float, stalls: bool
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    base, known = worth.base, worth._known
    now = worth.of(base + held)
    stall = min(1.0, worth.pause_s / horizon_s) * now if stalls else 0.0
    # Never nothing: that starts take longer than nodes stay is only known as long as some are tried.
    stays = max(0.1, 1.0 - worth.start_s / horizon_s - DOUBT)
    at_once = max(1, worth.least if not worth.going else 1)
    extra = [low, held, max(low, at_once - base)]
    if worth.urgency > 1:
        extra.append(worth.urgent_nodes - base)
    steps = worth._steps
    chosen = steps[bisect_left(steps, low) : bisect_right(steps, high)]
    for size in extra:
        at = bisect_left(chosen, size)
        if low <= size <= high and (at == len(chosen) or chosen[at] != size):
            chosen.insert(at, size)
    price = PRICE * worth.weight
    there = [base + x for x in chosen] if base else chosen
    try:
        thens = list(map(known.__getitem__, there))
    except KeyError:
        thens = [worth.of(nodes) for nodes in there]
    fewer = bisect_right(chosen, held)
    values = [
        now - price * x if then == now else then - stall - price * x
        for x, then in zip(chosen[:fewer], thens[:fewer], strict=True)
    ]
    values += [
        now - price * x if then == now else now + stays * (then - now) - stall - price * x
        for x, then in zip(chosen[fewer:], thens[fewer:], strict=True)
    ]
    return tuple(chosen), tuple(values)


def margins(worth: Worth, held: int, low: int, high: int, horizon_s: float) -> tuple[float, float]:
    """The most that some nodes more are worth to a run, each, and the least that some fewer cost it, each.

    Args: as for `changes`; `held` is from `low` to `high`.
    """
    key = held, low, high, horizon_s
    known = worth._margins.get(key)
    if known is None:
        sizes, values = changes(worth, held, low, high, horizon_s)
        at = sizes.index(held)
        now = values[at]
        more = [(value - now) / (size - held) for size, value in zip(sizes[at + 1 :], values[at + 1 :], strict=True)]
        fewer = [(now - value) / (held - size) for size, value in zip(sizes[:at], values[:at], strict=True)]
        known = worth._margins[key] = max(more, default=-inf), min(fewer, default=inf)
    return known


def as_many_as(nodes: int) -> tuple[tuple[int, float], ...]:
    """Speeds of a run of which nothing is known but that it can use so many nodes: twice as many, twice as fast."""
    return tuple((n, float(n)) for n in range(1, nodes + 1))


def slope(sizes: Sequence[int], values: Sequence[float], begin: int, end: int) -> float:
    """Worth per node between two of the sizes."""
    first, last = sizes.index(begin), sizes.index(end)
    return (values[last] - values[first]) / (end - begin)
