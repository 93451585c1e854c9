"""Reservations that a run names (`--reservation`): the run harvests their nodes, and no other run does. Pure."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from fallow.model import ClusterState

_FLAGS = frozenset(("RES", "RESERVED"))


def within(cluster: ClusterState, names: Collection[str]) -> ClusterState:
    """Return the poll as runs see it that name these reservations.

    Nodes of such a reservation are open for as long as the reservation lasts, to those runs alone (`Kind.suits`).

    Args:
        cluster: one poll.
        names: of reservations, separated by commas where a run names several.
    """
    named = {name for some in names for name in some.split(",")} - {""}
    own = [r for r in cluster.reservations if r.reservation in named and r.start_at <= cluster.at < r.end_at]
    if not own:
        return cluster
    inside = {node: reservation.reservation for reservation in own for node in reservation.nodes}
    return replace(
        cluster,
        nodes=[
            replace(node, reservation=inside[node.node], flags=[flag for flag in node.flags if flag not in _FLAGS])
            if node.node in inside
            else node
            for node in cluster.nodes
        ],
        reservations=[replace(r, own=True) if r in own else r for r in cluster.reservations],
    )
