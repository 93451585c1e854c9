"""Where the time went that Slurm allocated to a run's jobs: trained, or wasted and why. Pure.

Slurm says how long jobs held each node (`spans`). The head knows when the node's workers were members (`Use`). Every
node-second of a span goes to exactly one source: what the head measured is cut to what Slurm allocated.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date

import msgspec

from fallow.core.accounting.spans import Use
from fallow.core.allocations import Allocation
from fallow.model import Exit, Source

DAY_S = 86_400.0
_EPOCH = date(1970, 1, 1).toordinal()

CUT_SHORT = frozenset(("PREEMPTED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"))
"""Final job states that Slurm caused."""


class Tally(msgspec.Struct, kw_only=True):
    """Sums of one run, one day and one partition."""

    node_s: dict[Source, float] = {}
    gpu_s: dict[Source, float] = {}
    jobs: int = 0
    useless: int = 0
    "jobs in which nothing was ever trained"

    def add(self, source: Source, node_s: float, gpu_s: float) -> None:
        self.node_s[source] = self.node_s.get(source, 0.0) + node_s
        self.gpu_s[source] = self.gpu_s.get(source, 0.0) + gpu_s

    def merge(self, other: "Tally") -> None:
        for source, seconds in other.node_s.items():
            self.add(source, seconds, other.gpu_s.get(source, 0.0))
        self.jobs += other.jobs
        self.useless += other.useless


Tallies = dict[str, Tally]
"""`DAY PARTITION` -> sums; days older than `DAYS_KEPT` become `MONTH PARTITION` (`by_month`)."""

DAYS_KEPT = 400
"""Days older than this are shown as months."""


def day_of(at: float) -> str:
    """UTC day of a Unix time."""
    return date.fromordinal(_EPOCH + int(at // DAY_S)).isoformat()


def merge(sums: Tallies, other_sums: Tallies) -> None:
    """Add `other_sums` to `sums`."""
    for place, tally in other_sums.items():
        sums.setdefault(place, Tally()).merge(tally)


def by_month(sums: Tallies, now: float) -> Tallies:
    """Merge days older than `DAYS_KEPT` into months, so that sums over years stay small.

    Args:
        sums: by day and by month.
        now: Unix time.
    """
    first_month = day_of(now - DAYS_KEPT * DAY_S)[:7]
    result: Tallies = {}
    for place, tally in sums.items():
        day, _, partition = place.partition(" ")
        # Only whole months, else one month would be shown as days and as a month.
        period = day if day[:7] >= first_month else day[:7]
        result.setdefault(f"{period} {partition}", Tally()).merge(tally)
    return result


def is_since(day: str, since: str | None) -> bool:
    """Return True if a day counts. A month counts as a whole as soon as one of its days counts."""
    return since is None or day >= since[: len(day)]


# -- what the head measures ---------------------------------------------------------------------------------------


def note_members(allocations: Iterable[Allocation], members: Collection[tuple[str, str]], now: float) -> None:
    """Note which nodes have a member now.

    Args:
        allocations: of the run; changed in place.
        members: (token, node) of every living member of the current generation.
        now: Unix time.
    """
    places: dict[str, set[str]] = {}
    for token, node in members:
        places.setdefault(token, set()).add(node)
    for allocation in allocations:
        member_nodes = places.get(allocation.token, set())
        for node in member_nodes:
            use = allocation.uses.setdefault(node, Use(first_at=now))
            use.since = now if use.since is None else use.since
        for node, use in allocation.uses.items():
            if use.since is not None and node not in member_nodes:
                use.member_s += max(0.0, now - use.since)
                use.since, use.last_at = None, now


def note_pause(
    allocations: Iterable[Allocation], places: Collection[tuple[str, str]], pause_s: float, discarded_s: float
) -> None:
    """Note a training pause, and steps that must be repeated, for the nodes that took part."""
    for allocation in allocations:
        for node, use in allocation.uses.items():
            if (allocation.token, node) in places:
                use.pause_s += pause_s
                use.discarded_s += discarded_s


# -- sums ---------------------------------------------------------------------------------------------------------


def tally(tallies: Tallies, allocation: Allocation, now: float) -> None:
    """Add what an allocation's jobs have held until `now`, each node-second once.

    A settled allocation is added to the stored sums, one that is not settled to a copy.
    """
    for span in allocation.spans.values():
        end = span.start_at + span.held_s(now)
        for node, gpus in span.nodes.items():
            for start, until, shares in _stretches(allocation, node, span.start_at, end):
                _add(tallies, span.partition, start, until, shares, gpus)
    first = min(allocation.spans.values(), key=lambda span: span.start_at, default=None)
    began, partition = (allocation.requested_at, "") if first is None else (first.start_at, first.partition)
    first_day = tallies.setdefault(f"{day_of(began)} {partition or allocation.partition}", Tally())
    if allocation.job_id is None and first is None and not allocation.is_live:
        return  # Slurm refused it
    first_day.jobs += 1
    first_day.useless += not allocation.uses and not allocation.is_live


def _add(tallies: Tallies, partition: str, start: float, end: float, shares: Mapping[Source, float], gpus: int) -> None:
    """Add seconds by source to their days, in proportion to each day's part of the period."""
    duration_s = end - start
    while start < end:
        day_end = min(end, (start // DAY_S + 1) * DAY_S)
        if day_end <= start:
            # A float cannot tell these times apart. No clock returns such times.
            day_end = end
        for source, seconds in shares.items():
            if seconds > 0:
                node_s = seconds * (day_end - start) / duration_s
                tallies.setdefault(f"{day_of(start)} {partition}", Tally()).add(source, node_s, node_s * gpus)
        start = day_end


def _stretches(
    allocation: Allocation, node: str, start: float, end: float
) -> Iterator[tuple[float, float, dict[Source, float]]]:
    """(begin, end, source -> seconds) of one node, in order and without gaps."""
    use = allocation.uses.get(node)
    useful = Source.HARVESTED if allocation.is_harvested else Source.BASE
    if use is None:
        yield start, end, {_without_use(allocation): end - start}
        return
    first = _clip(use.first_at, start, end)
    last = end if use.since is not None else _clip(use.last_at, first, end)
    yield start, first, {Source.START_UP: first - start}
    open_s = 0.0 if use.since is None else last - _clip(use.since, first, last)
    member_s = min(use.member_s + open_s, last - first)
    pause_s = min(use.pause_s, member_s)
    discarded_s = min(use.discarded_s, member_s - pause_s)
    yield (
        first,
        last,
        {
            useful: member_s - pause_s - discarded_s,
            Source.HAND_OVER: pause_s,
            Source.DISCARDED: discarded_s,
            Source.STANDBY: last - first - member_s,
        },
    )
    # The rest of the batch script is the user's own work. It runs in one allocation only.
    was_elected = allocation.end_code is not None and allocation.end_code != Exit.NO_RESTART
    yield last, end, {useful if was_elected else Source.DRAINED: end - last}


def _without_use(allocation: Allocation) -> Source:
    if allocation.is_live:
        return Source.START_UP
    return Source.CUT_SHORT if allocation.slurm_state in CUT_SHORT else Source.NOTHING


def _clip(at: float, low: float, high: float) -> float:
    return min(max(at, low), high)


# -- money --------------------------------------------------------------------------------------------------------

ANY_PARTITION = "*"
"""Key of the price of every partition that has no price of its own."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per hour. A partition with both prices costs their sum."""

    node_hour: Mapping[str, float] = field(default_factory=dict)
    gpu_hour: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.node_hour or self.gpu_hour)

    def cost(self, partition: str, node_s: float, gpu_s: float) -> float:
        prices = ((self.node_hour, node_s), (self.gpu_hour, gpu_s))
        return sum(table.get(partition, table.get(ANY_PARTITION, 0.0)) * seconds for table, seconds in prices) / 3600.0
