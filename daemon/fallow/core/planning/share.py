"""Who gets how many nodes: always the next one to the run to which it is worth most. Pure.

The worth of training at speed v is w · log(1 + v/v1), v1 being the speed with one node and w the run's weight: what
counts is by which part a node speeds a run up. So curves of unlike models compare, runs that scale alike get nodes in
proportion to their weights (proportional fairness: Kelly, J. Oper. Res. Soc. 49, 1998), and a run that gains nothing
more leaves the rest to others.

A change costs: all members stall for `pause_s`, and a new node trains only after `start_s` (BFTrainer's objective,
arXiv 2106.12091, with costs in time). A node changes hands only if that pays for both runs until another one comes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf, log1p
from typing import NamedTuple

from fallow.core.allocations import Allocation

DOUBT = 0.1
"""Part of an expected gain that is not counted on: curves are estimates, and losses are sure."""

LOOK_AHEAD = 16
"""Nodes beyond the first ones that help that are looked at for a better step: curves bend down."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What nodes are worth to a run.

    Attributes:
        values: of 0, 1, ... nodes, those of its own included; never falling; in a unit that runs share.
        base: nodes of its own.
        least: nodes that the user wants at least; none is taken away below that.
        start_s: from the request for a node until it trains.
        pause_s: all members stall for so long when nodes come or go.
    """

    values: tuple[float, ...]
    base: int = 0
    least: int = 1
    start_s: float = 30.0
    pause_s: float = 0.5

    def of(self, harvested: int) -> float:
        """With so many harvested nodes besides its own."""
        return self.values[max(0, min(self.base + harvested, len(self.values) - 1))]


class Step(NamedTuple):
    """A number of nodes more, and what each of them gains."""

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
        speeds: (nodes, steps per second), both ascending; with numbers of nodes in between it is as fast as with fewer.
        most: nodes.
        weight: beside other runs.
        least: with fewer it does not train.
        urgency: how much more the speed up to that with `urgent_nodes` counts; 1: no more.
        urgent_nodes: that a deadline takes.
    """
    known, one = dict(speeds), speeds[0][1] if speeds else 1.0
    enough = max((speed for nodes, speed in speeds if nodes <= urgent_nodes), default=0.0)
    speed, found = 0.0, [0.0]
    for nodes in range(1, most + 1):
        speed = known.get(nodes, speed)
        more = (urgency - 1.0) * log1p(min(speed, enough) / one)
        found.append(weight * (log1p(speed / one) + more) if nodes >= least else 0.0)
    return tuple(found)


def step_up(worth: Worth, have: int, most: int, stay_s: float) -> Step:
    """The best next step.

    Args:
        worth: of the run.
        have: harvested nodes.
        most: nodes more that it may have.
        stay_s: for so long nodes stay.
    """
    now, best, begin = worth.of(have), Step(0.0, 0), worth.base + have
    stall = worth.pause_s / stay_s * now
    kept = max(0.1, 1.0 - worth.start_s / stay_s - DOUBT)
    for nodes in range(1, min(most, len(worth.values) - 1 - begin) + 1):
        gain = (kept * (worth.values[begin + nodes] - now) - stall) / nodes
        if gain > best.gain * (1.0 + 1e-9):
            best = Step(gain, nodes)
        elif best.nodes and nodes > best.nodes + LOOK_AHEAD:
            break
    return best


def useful(worth: Worth, have: int) -> int:
    """As many of its harvested nodes do as much as all of them."""
    now = worth.of(have)
    while have > 0 and worth.base + have > worth.least and worth.of(have - 1) >= now:
        have -= 1
    return have


@dataclass(slots=True)
class Party:
    """A run that has or wants harvested nodes."""

    run: str
    worth: Worth
    have: int
    "harvested nodes, requests included"
    room: int
    "more that it may have; below 0: it has so many too many"

    def add(self, nodes: int) -> None:
        """It has so many nodes more, requests included."""
        self.have += nodes
        self.room -= nodes


def move(
    parties: Collection[Party],
    leases: Sequence[Allocation],
    usable: Callable[[str, Allocation], bool],
    soon_s: float,
) -> tuple[Allocation, str] | None:
    """The node that is worth most elsewhere, and to which run; None: all are where they are worth most.

    Args:
        parties: the runs.
        leases: nodes, or requests for them, that may change hands; those that go first come first.
        usable: can this run use that node?
        soon_s: after so long another node comes, as a rule: it goes where most is missing, so what a move gains, it
            gains until then.
    """
    of: dict[str, list[Allocation]] = {}
    for lease in leases:
        of.setdefault(lease.run, []).append(lease)
    sellers = sorted((_loss(party, soon_s), party.run) for party in parties if party.run in of and party.room >= 0)
    # One node changes hands at a time, so what several together would gain does not count.
    steps = ((step_up(party.worth, party.have, min(1, party.room), soon_s).gain, party.run) for party in parties)
    best: tuple[float, Allocation, str] | None = None
    for gain, buyer in sorted((step for step in steps if step[0] > 0.0), key=lambda pair: (-pair[0], pair[1])):
        for loss, seller in sellers:
            if gain - loss <= (0.0 if best is None else best[0]):
                break
            found = next((lease for lease in of[seller] if seller != buyer and usable(buyer, lease)), None)
            if found is not None:
                best = gain - loss, found, buyer
                break
    return None if best is None else (best[1], best[2])


def _loss(party: Party, soon_s: float) -> float:
    """What a node fewer costs a run; infinity: none may go."""
    worth, have = party.worth, party.have
    if worth.base + have <= worth.least:
        return inf
    now = worth.of(have)
    return now - worth.of(have - 1) + worth.pause_s / soon_s * now


def linear(nodes: int) -> tuple[float, ...]:
    """Values for a run of which nothing is known but that it can use so many nodes: twice as many, twice as fast."""
    return values([(n, float(n)) for n in range(1, nodes + 1)], nodes)
