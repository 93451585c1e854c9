"""Cut links: who has to go when members say whom they cannot reach. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def to_drop(
    accusations: Mapping[Name, Sequence[Name]], by_age: Sequence[Name], holders: Collection[Name]
) -> list[Name]:
    """A small set of workers without whom everybody left reaches everybody left.

    A cut link is symmetric here: whoever of the two noticed, one of them goes. Greedy, the most accused first, since
    the smallest such set (a vertex cover) is hard to find in general; for one bad node or one bad link it is exact.

    Args:
        accusations: worker -> whom it cannot reach.
        by_age: all workers concerned, the oldest first; of equals the youngest goes.
        holders: those who have the state; one of them always stays.
    """
    age = {worker: number for number, worker in enumerate(by_age)}
    cut = {frozenset((a, b)) for a, others in accusations.items() for b in others if a in age and b in age and a != b}
    dropped: list[Name] = []
    while cut:
        degree = Counter(worker for pair in cut for worker in pair)
        left = [worker for worker in holders if worker not in dropped]
        free = [worker for worker in degree if left != [worker]]
        worst = max(free, key=lambda worker: (degree[worker], age[worker]))
        dropped.append(worst)
        cut = {pair for pair in cut if worst not in pair}
    return dropped
