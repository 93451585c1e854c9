"""Slow links: which node's link makes the whole run slower than the run would be without that node. Pure.

In each step all members wait for the slowest link. Two questions decide. Whose link is it? That node's connections are
busy most of the time, while the connections among the other nodes are not. Does the node pay? The step time is compared
to what was measured with the other nodes alone, or to an estimate from the members' compute times. A member that
computes slowly is no case for this module: its connections are idle, and `shards` gives that member fewer shards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fallow.core.training.shards import divide, step_time

BUSY = 0.5
"""A link that is busy for this part of the time may be the one that all wait for ..."""

TIMES_BUSIER = 2.0
"""... if it is so many times as busy as every link among the other nodes."""

GAIN = 0.1
"""The run must be faster by this part without the node."""

SUSTAINED_S = 60.0
"""Seconds for which a finding must hold, over at least `STRETCHES` measurements, without a change of the membership."""

STRETCHES = 2

REMEMBERED = 32
"""Maximum sets of nodes whose step time is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What the head knows of one member."""

    node: str
    index: int
    "its arrival number"
    harvested: bool
    pace_s: float
    "seconds per shard; 0: not measured"
    busy_links: Mapping[str, float]
    "other node -> part of the time (0..1) for which the connection to it was busy; missing: idle"


class Suspect(NamedTuple):
    """The node whose link all may wait for."""

    node: str
    busy: float
    "part of the time for which its links are busy"
    others_busy: float
    "part of the time for which the busiest link among the other nodes is busy"


class Finding(NamedTuple):
    """The run is faster without this node."""

    node: str
    step_s: float
    without_s: float
    "seconds per step without it, measured or estimated"


class SlowLinks:
    """Watches one run. Call `observe` for each stretch of undisturbed training."""

    def __init__(self) -> None:
        self._step_s: dict[frozenset[str], float] = {}
        "nodes -> seconds per step, as last measured"
        self._blame = 0, ""
        "generation, and the node that the newest stretches in a row speak against; empty: none"
        self._stretches_s: list[float] = []
        "lengths of these stretches"

    def observe(
        self, members: Sequence[Member], *, generation: int, shards: int, step_s: float, lasted_s: float
    ) -> Finding | None:
        """Add the measurements of a stretch.

        Args:
            members: present during the whole stretch.
            generation: that they form.
            shards: in a full step.
            step_s: mean seconds per step.
            lasted_s: seconds of the stretch.

        Returns:
            A finding that has held for long enough; None: there is none.
        """
        nodes = frozenset(member.node for member in members)
        self._step_s.pop(nodes, None)
        self._step_s[nodes] = step_s
        if len(self._step_s) > REMEMBERED:
            del self._step_s[next(iter(self._step_s))]
        suspect = find_suspect(members)
        finding = None
        if suspect is not None:
            measured_s = self._step_s.get(nodes - {suspect.node})
            without_s = estimate_step_s(members, suspect, shards, step_s) if measured_s is None else measured_s
            if without_s is not None and without_s * (1 + GAIN) <= step_s:
                finding = Finding(suspect.node, step_s, without_s)
        blame = generation, "" if finding is None else finding.node
        if blame != self._blame:
            self._blame, self._stretches_s = blame, []
        self._stretches_s.append(lasted_s)
        is_sustained = len(self._stretches_s) >= STRETCHES and sum(self._stretches_s) >= SUSTAINED_S
        return finding if is_sustained else None


def find_suspect(members: Sequence[Member]) -> Suspect | None:
    """The one node whose links are busy while all others are not; None: there is no such node.

    A reduction in a ring uses two links of each node, so the second busiest counts. Two nodes share their only link:
    the harvested one that came last is suspected then.
    """
    nodes = sorted({member.node for member in members})
    shares: dict[str, dict[str, float]] = {node: {} for node in nodes}
    "node -> other node -> share of their link; a large run has few links, and all other pairs are idle"
    for member in members:
        for other, share in member.busy_links.items():
            if other in shares and other != member.node:
                busier = max(share, shares[member.node].get(other, 0.0))
                shares[member.node][other] = shares[other][member.node] = busier
    busiest_first = sorted(
        ((share, node, other) for node in nodes for other, share in shares[node].items()), reverse=True
    )
    if len(nodes) == 2:
        harvested = [member for member in members if member.harvested]
        youngest = max(harvested, key=lambda member: member.index, default=None)
        share = busiest_first[0][0] if busiest_first else 0.0
        return None if youngest is None or share < BUSY else Suspect(youngest.node, share, 0.0)
    for node in nodes:
        node_busy = sorted(shares[node].values())[-2:]
        others_busy = next((share for share, *pair in busiest_first if node not in pair), 0.0)
        if len(node_busy) == 2 and node_busy[0] >= max(BUSY, TIMES_BUSIER * others_busy):
            return Suspect(node, node_busy[0], others_busy)
    return None


def estimate_step_s(members: Sequence[Member], suspect: Suspect, shards: int, step_s: float) -> float | None:
    """Estimate the seconds per step without the suspect.

    The others compute its shards, and the links among them are as busy as now. What is neither computation nor the
    suspect's link takes as long as now.

    Returns:
        None if a pace is not known, or if one node alone would be left: no link shows what is the network's part then.
    """
    other_paces = [member.pace_s for member in members if member.node != suspect.node]
    paces = [member.pace_s for member in members]
    if min(paces) <= 0 or len({member.node for member in members}) < 3 or shards < 1:
        return None
    computes_s = step_time(divide(shards, paces), paces)
    rest_s = max(0.0, (1 - suspect.busy) * step_s - computes_s)
    return step_time(divide(shards, other_paces), other_paces) + suspect.others_busy * step_s + rest_s
