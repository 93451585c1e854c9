"""Launch failures: jobs that end before one of their agents connects. Is it the node or the run? Pure.

Two failures in a row on one node bar the node from the run. If it is not one node, the next job is put off, each time
for twice as long, and then one job is tried instead of many. After `MAX_ROUNDS` such rounds without an agent, nothing
is requested until somebody has had a look. (HyperQueue pauses a queue after 3 jobs that failed like this.)
"""

import msgspec

MAX_LAUNCH_FAILURES = 3
"""Failed jobs in a row (no agent, or no worker that becomes ready) before the next job is put off."""

MAX_ON_NODE = 2
"""Failed jobs in a row on one node before the node is barred."""

MAX_ROUNDS = 5
"""Times that jobs are put off before nothing is requested any more."""


class LaunchFailures(msgspec.Struct, kw_only=True):
    """Launch failures of one run."""

    in_a_row: int = 0
    "failures without another explanation since the last agent connected"
    rounds: int = 0
    "times that the next job was put off since the last agent connected"
    failures_by_node: dict[str, int] = msgspec.field(default_factory=dict, name="on")
    "node -> failures in a row on this node"
    barred: list[str] = []
    "nodes barred because of launch failures"
    last: str = ""
    "text of the newest failure"


def note_launch_failure(failures: LaunchFailures, node: str, text: str, *, trains: bool, suspect: bool) -> str:
    """Note a job that ended before one of its agents connected.

    Args:
        failures: of the run, changed in place.
        node: the job's only node; empty: not known, or several.
        text: what happened.
        trains: True if the run has members, so its script works somewhere.
        suspect: True if the node was barred before.

    Returns:
        Why the node must be barred; empty: it is not barred.
    """
    failures.last = text
    times = 0
    if node:
        times = failures.failures_by_node[node] = failures.failures_by_node.get(node, 0) + 1
    has_explanation = trains and failures.in_a_row < MAX_LAUNCH_FAILURES and (suspect or times >= MAX_ON_NODE)
    if not has_explanation:
        failures.in_a_row += 1
    if times < MAX_ON_NODE:
        return ""
    del failures.failures_by_node[node]
    failures.barred = sorted({*failures.barred, node})
    return f"{times} jobs in a row failed to start there; the last: {text}"


def note_agent_arrival(failures: LaunchFailures, node: str) -> None:
    """Note that an agent connected: the script works on its node. Failures on other nodes still count."""
    failures.in_a_row = 0
    failures.failures_by_node.pop(node, None)
