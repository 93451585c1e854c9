"""How nodes of one kind are shared out well, and what the best sharing cannot be.

Each run gains something by each number of nodes; the sum of the gains is to be large. With a price p on a node no
sharing is worth more than p · supply + Σ max(gain - p · nodes) (Lagrange). A number of nodes whose use alone costs more
than what lies between that bound and a sharing already found is in no better sharing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Gains = Sequence[float]
"""Of a run, by its nodes from 0 on; minus infinity: it may not have so many. Without any it may be."""

HALVINGS = 60
"""Of the range of prices."""

TINY = 1e-9
"""Relative; smaller differences are rounding."""


@dataclass(frozen=True, slots=True)
class Narrowed:
    found: list[int]
    "a good sharing: the nodes of each run"
    kept: list[list[int]]
    "of each run: numbers of nodes that one as good may have, so that of this one, too"


def narrow(gains: Sequence[Gains], supply: int) -> Narrowed:
    """Share out, and leave away what is no better.

    Args:
        gains: of each run, in the same order everywhere here; more nodes than the supply have no place in them.
        supply: nodes in all.
    """
    price = _price(gains, supply)
    best = [_best(each, price) for each in gains]
    bound = price * supply + sum(each[nodes] - price * nodes for each, nodes in zip(gains, best, strict=True))
    found = _improved(gains, best, supply)
    total = sum(each[nodes] for each, nodes in zip(gains, found, strict=True))
    room = bound - total + TINY * abs(bound)
    kept = []
    for each, top in zip(gains, best, strict=True):
        least = each[top] - price * top - room
        kept.append([nodes for nodes, gain in enumerate(each) if gain - price * nodes >= least])
    return Narrowed(found, kept)


def _best(gains: Gains, price: float) -> int:
    """The number of nodes that is worth most at this price, the least of them."""
    return max(range(len(gains)), key=lambda nodes: gains[nodes] - price * nodes)


def _price(gains: Sequence[Gains], supply: int) -> float:
    """The lowest at which the runs want no more than there is."""
    if sum(_best(each, 0.0) for each in gains) <= supply:
        return 0.0
    low, high = 0.0, 1.0 + max(max(each) - each[0] for each in gains)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if sum(_best(each, middle) for each in gains) <= supply:
            high = middle
        else:
            low = middle
    return high


def _improved(gains: Sequence[Gains], nodes: Sequence[int], supply: int) -> list[int]:
    """By changing one run, or one for the sake of another, as long as that gains anything."""
    found = list(nodes)
    up_to = [_best_up_to(each) for each in gains]
    longest = max(map(len, gains))
    while True:
        spare = supply - sum(found)
        # Of each number of nodes beyond its own: the two runs that gain most by at most so many.
        partners = [
            sorted(
                (
                    (gains[run][up_to[run][min(has + more, len(gains[run]) - 1)]] - gains[run][has], -run)
                    for run, has in enumerate(found)
                ),
                reverse=True,
            )[:2]
            for more in range(longest)
        ]
        steps = [(gain, -run, -run, found[-run]) for gain, run in partners[min(spare, longest - 1)]]
        for run, has in enumerate(found):
            for fewer in range(min(len(gains[run]), has + spare + 1)):
                loss = gains[run][fewer] - gains[run][has]
                more = min(spare + has - fewer, longest - 1)
                steps += [(loss + gain, -other, run, fewer) for gain, other in partners[more] if -other != run]
        gain, other, run, fewer = max(steps, key=lambda step: step[0])
        if not gain > TINY * (1.0 + sum(abs(each[n]) for each, n in zip(gains, found, strict=True))):
            return found
        found[run] = fewer
        left = supply - sum(found)
        found[other] = up_to[other][min(found[other] + left, len(gains[other]) - 1)]


def _best_up_to(gains: Gains) -> list[int]:
    """By a number of nodes: the one that gains most among those up to it."""
    best = [0]
    for nodes in range(1, len(gains)):
        best.append(nodes if gains[nodes] > gains[best[-1]] else best[-1])
    return best
