"""Jobs that run and whose agents do not come: in all likelihood their nodes do not reach the head. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fallow.core.allocations import Allocation
from fallow.model import AllocationState

PATIENCE_S = 30.0
"""From the start of a job until somebody is told: scripts load modules and prepare their data before `fallow run`."""

_NAMED = 3
"""Nodes that are named at most."""


def missing_agents(allocation: Allocation, now: float) -> list[str]:
    """Nodes of a running job on which no agent has come in time. Args: now: Unix time."""
    if allocation.state is not AllocationState.RUNNING or allocation.start_at is None:
        return []
    if now - allocation.start_at <= PATIENCE_S:
        return []
    return [node for node in allocation.nodes if node not in allocation.agents]


def note(allocation: Allocation, nodes: Sequence[str], now: float, endpoint: str, output: str) -> str:
    """What the user is told.

    Args:
        allocation: the job.
        nodes: those of its nodes on which no agent has come.
        now: Unix time.
        endpoint: of the head.
        output: of the job, as a path or as a command that shows it.
    """
    since_s = now - (allocation.start_at or now)
    names = ", ".join(nodes[:_NAMED]) + (f" and {len(nodes) - _NAMED} more nodes" if len(nodes) > _NAMED else "")
    node = nodes[0] if len(nodes) == 1 else "these nodes"
    return (
        f"job {allocation.job_id or allocation.token} runs on {names} since {since_s:.0f} s, no agent has come: check "
        f"that {node} can reach {endpoint} ([head] address, [head] port, firewall); its output: {output}"
    )
