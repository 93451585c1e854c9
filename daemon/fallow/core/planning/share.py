"""How many nodes each run gets: each next node goes to the run to which it is worth most. Pure.

The worth of training at speed v is w · log(1 + v/v1), where v1 is the speed with one node and w the run's weight. The
relative speed-up counts, so curves of different models can be compared. Runs that scale alike get nodes in proportion
to their weights (proportional fairness: Kelly, J. Oper. Res. Soc. 49, 1998). A run that gains nothing from further
nodes leaves them to other runs.

A change has a cost: all members stall for `pause_s`, and a new node trains only after `start_s` (BFTrainer's objective,
arXiv 2106.12091, with costs in time). A node changes hands only if that pays for both runs until the next node comes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf, log1p
from typing import NamedTuple

from fallow.core.allocations import Allocation

DOUBT = 0.1
"""Part of an expected gain that does not count: a gain is an estimate, a loss is certain."""

LOOK_AHEAD = 16
"""Number of nodes beyond the best step so far at which a better step is looked for: curves bend down."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What nodes are worth to a run.

    Attributes:
        values: worth of 0, 1, ... nodes, base nodes included; never falling; comparable between runs.
        base: number of base nodes.
        least: fewest nodes that the user wants; moves leave the run at least this many.
        start_s: time from the request for a node until it trains.
        pause_s: stall of all members when nodes come or go.
    """

    values: tuple[float, ...]
    base: int = 0
    least: int = 1
    start_s: float = 30.0
    pause_s: float = 0.5

    def value(self, harvested: int) -> float:
        """Worth of the base nodes with this number of harvested nodes."""
        return self.values[max(0, min(self.base + harvested, len(self.values) - 1))]


class Step(NamedTuple):
    """A number of further nodes, and the gain per node."""

    gain: float
    nodes: int


def values(
    speeds: Sequence[tuple[int, float]],
    most: int,
    weight: float = 1.0,
    *,
    least: int = 1,
    urgency: float = 1.0,
    urgent_nodes: int = 0,
) -> tuple[float, ...]:
    """Worth of 0 to `most` nodes.

    Args:
        speeds: (nodes, steps per second), both ascending; a number in between is as fast as the next lower one.
        most: largest number of nodes.
        weight: of the run, relative to other runs.
        least: fewest nodes with which the run trains.
        urgency: factor for the speed up to that of `urgent_nodes`; 1: none.
        urgent_nodes: number of nodes that the deadline needs.
    """
    speed_of, first_speed = dict(speeds), speeds[0][1] if speeds else 1.0
    urgent_speed = max((speed for nodes, speed in speeds if nodes <= urgent_nodes), default=0.0)
    speed, worths = 0.0, [0.0]
    for nodes in range(1, most + 1):
        speed = speed_of.get(nodes, speed)
        more = (urgency - 1.0) * log1p(min(speed, urgent_speed) / first_speed)
        worths.append(weight * (log1p(speed / first_speed) + more) if nodes >= least else 0.0)
    return tuple(worths)


def step_up(worth: Worth, have: int, most: int, stay_s: float) -> Step:
    """Return the step with the largest gain per node.

    Args:
        worth: of the run.
        have: number of harvested nodes.
        most: number of further nodes that it may have.
        stay_s: time for which nodes stay.
    """
    value, best, begin = worth.value(have), Step(0.0, 0), worth.base + have
    stall = worth.pause_s / stay_s * value
    certain_part = max(0.1, 1.0 - worth.start_s / stay_s - DOUBT)
    for nodes in range(1, min(most, len(worth.values) - 1 - begin) + 1):
        gain = (certain_part * (worth.values[begin + nodes] - value) - stall) / nodes
        if gain > best.gain * (1.0 + 1e-9):
            best = Step(gain, nodes)
        elif best.nodes and nodes > best.nodes + LOOK_AHEAD:
            break
    return best


def useful_nodes(worth: Worth, have: int) -> int:
    """Return the smallest number of harvested nodes that is worth as much as all of them."""
    value = worth.value(have)
    while have > 0 and worth.base + have > worth.least and worth.value(have - 1) >= value:
        have -= 1
    return have


@dataclass(slots=True)
class Party:
    """A run that has or wants harvested nodes."""

    run: str
    worth: Worth
    have: int
    "harvested nodes, requests included"
    allowance: int
    "number of further nodes that it may have; below 0: it has this many too many"

    def add(self, nodes: int) -> None:
        """Count this many further nodes, requests included."""
        self.have += nodes
        self.allowance -= nodes


def move(
    parties: Collection[Party],
    leases: Sequence[Allocation],
    usable: Callable[[str, Allocation], bool],
    horizon_s: float,
) -> tuple[Allocation, str] | None:
    """Return the node that gains most by moving, and the run that gets it; None: no move pays.

    Args:
        parties: the runs.
        leases: nodes that may change hands; the first of a run goes first.
        usable: (run, lease) -> True if the run can use the node.
        horizon_s: usual time until the next node comes, which goes where most is missing: a move gains until then.
    """
    leases_by_run: dict[str, list[Allocation]] = {}
    for lease in leases:
        leases_by_run.setdefault(lease.run, []).append(lease)
    sellers = sorted(
        (_loss(party, horizon_s), party.run) for party in parties if party.run in leases_by_run and party.allowance >= 0
    )
    # One node changes hands at a time, so what several together would gain does not count.
    steps = (
        (step_up(party.worth, party.have, min(1, party.allowance), horizon_s).gain, party.run) for party in parties
    )
    best: tuple[float, Allocation, str] | None = None
    for gain, buyer in sorted((step for step in steps if step[0] > 0.0), key=lambda pair: (-pair[0], pair[1])):
        for loss, seller in sellers:
            if gain - loss <= (0.0 if best is None else best[0]):
                break
            movable = next((lease for lease in leases_by_run[seller] if seller != buyer and usable(buyer, lease)), None)
            if movable is not None:
                best = gain - loss, movable, buyer
                break
    return None if best is None else (best[1], best[2])


def _loss(party: Party, horizon_s: float) -> float:
    """Loss of a run that gives up one node; infinity: it may give up none."""
    worth, have = party.worth, party.have
    if worth.base + have <= worth.least:
        return inf
    value = worth.value(have)
    return value - worth.value(have - 1) + worth.pause_s / horizon_s * value


def linear(nodes: int) -> tuple[float, ...]:
    """Values for a run whose speed is unknown: speed in proportion to nodes, up to this number of nodes."""
    return values([(n, float(n)) for n in range(1, nodes + 1)], nodes)
