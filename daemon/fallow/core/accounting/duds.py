"""Duds: jobs that end before an agent of theirs comes. Whether it is the node or the run, and when to stop. Pure.

A node on which two in a row end so is barred from the run, as for other failures. Where it is not one node, the next
job is put off, each time for twice as long; then one is tried, not all at once; and after a few such rounds without
any agent nothing is asked for until somebody has had a look. (HyperQueue pauses a queue after 3 jobs that failed so.)
"""

import msgspec

DUDS = 3
"""Jobs in a row that come to nothing (no agent, or no worker that gets ready) before the next one is put off."""

ON_NODE = 2
"""In a row on one node before that is barred."""

ROUNDS = 5
"""Times that jobs are put off before nothing is asked for any more."""


class Duds(msgspec.Struct, kw_only=True):
    """Those of a run."""

    in_a_row: int = 0
    "that have no other explanation, since an agent came"
    rounds: int = 0
    "times that the next job was put off since then"
    on: dict[str, int] = {}
    "node -> in a row on it"
    barred: list[str] = []
    "nodes that were barred for it"
    last: str = ""
    "the newest, in words"


def ended(duds: Duds, node: str, text: str, *, trains: bool, suspect: bool) -> str:
    """A job has ended before an agent of its own came.

    Args:
        duds: of the run, changed in place.
        node: its only one; empty: nobody knows, or it had several.
        text: what happened, in words.
        trains: the run has members, so its script works somewhere.
        suspect: the node was barred before.

    Returns:
        Why the node is to be barred, in words; empty: it is not.
    """
    duds.last = text
    times = 0
    if node:
        times = duds.on[node] = duds.on.get(node, 0) + 1
    explained = trains and duds.in_a_row < DUDS and (suspect or times >= ON_NODE)
    if not explained:
        duds.in_a_row += 1
    if times < ON_NODE:
        return ""
    del duds.on[node]
    duds.barred = sorted({*duds.barred, node})
    return f"{times} jobs in a row came to nothing there, the last: {text}"


def came(duds: Duds, node: str) -> None:
    """An agent has come: the script works there. What ended on other nodes counts against those still."""
    duds.in_a_row = 0
    duds.on.pop(node, None)
