"""How the head's work grows with the cluster, up to 10,000 nodes and 1,000 runs: `fallow simulate --scale`.

What is decided for a poll is the head's own code on made-up data; heartbeats come to a real head from played agents
(`bench.head`). All is in processor time of this machine, so that what else runs does not count much. One head in one
process does all of it but reading polls, for which it has a thread.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence

from fallow.bench import head, scale_cluster, scale_poll
from fallow.config import Slurm
from fallow.core.quantile import quantile
from fallow.model import Struct

SIZES = ((100, 10, 1800.0), (1_000, 100, 1800.0), (3_000, 300, 600.0), (10_000, 1_000, 120.0))
"""(nodes, runs, virtual seconds that are played)."""

FULL = 0.5
"""Of a core, or of the time between two polls: more than that leaves no room for bad moments."""

COLUMNS = (
    "NODES", "RUNS", "POLL P50 S", "P95", "MAX", "DECIDING", "READ S", "POLLS/MIN", "RPCS/MIN", "SUBMITS/MIN", "QUEUE",
    "FULL AFTER", "HELD", "CORES", "RSS MB",
)  # fmt: skip

PACE_TIMES = 3
REST_S = 10.0
"""For so long heartbeats are counted."""


class Scale(Struct, frozen=True, kw_only=True):
    """One size."""

    nodes: int
    runs: int
    polls: int
    "that were taken in and timed"
    poll_p50_s: float
    poll_p95_s: float
    poll_max_s: float
    "processor time from the state of the cluster to what is asked for"
    busy_share: float
    "of one core, for all that is decided while runs begin one after the other: each begin is planned for at once"
    read_s: float
    "from the text that Slurm's commands print to that state"
    polls_per_min: float
    rpcs_per_min: float
    submits_per_min: float
    longest_queue: int
    "submissions that waited for their turn"
    full_after_s: float | None
    "from the begin until nine in ten of the idle nodes trained; None: never"
    idle_nodes: float
    held: int
    "nodes that train once others leave all of them idle that they do in the long run"
    cores: float
    "that their heartbeats and the ticks take; the head has one"
    rss_mb: float
    "of the head then"


def run(tell: Callable[[str], None]) -> list[Scale]:
    """Measure all sizes. Args: tell: told what is measured now."""
    found = []
    for nodes, runs, lasts_s in SIZES:
        tell(f"{nodes} nodes, {runs} runs")
        found.append(measure(nodes, runs, lasts_s))
    return found


def measure(nodes: int, runs: int, lasts_s: float, rest_s: float = REST_S) -> Scale:
    """One size.

    Args:
        nodes, runs: of the made-up cluster.
        lasts_s: virtual seconds that are played.
        rest_s: for so long heartbeats are counted.
    """
    polls = scale_cluster.measure(runs, nodes, lasts_s)
    gc.collect()
    read_s = min(scale_poll.measure(nodes) for _ in range(PACE_TIMES))
    held = max(runs, round((1 - scale_cluster.USED) * nodes))
    loop = asyncio.run(head.measure(held, head.SLOTS, 0, runs=runs, rest_s=rest_s))
    return Scale(
        nodes=nodes,
        runs=runs,
        polls=len(polls.poll_s),
        poll_p50_s=quantile(polls.poll_s, 0.5) or 0.0,
        poll_p95_s=quantile(polls.poll_s, 0.95) or 0.0,
        poll_max_s=max(polls.poll_s),
        busy_share=polls.busy_share,
        read_s=read_s,
        polls_per_min=polls.polls_per_min,
        rpcs_per_min=polls.rpcs_per_min,
        submits_per_min=polls.submits_per_min,
        longest_queue=polls.longest_queue,
        full_after_s=polls.full_after_s,
        idle_nodes=polls.idle_nodes,
        held=held,
        cores=loop.rest_cores,
        rss_mb=loop.rss_mb,
    )


def rows(found: Sequence[Scale]) -> list[list[str]]:
    """Cells under `COLUMNS`."""
    return [
        [
            *(str(each.nodes), str(each.runs)),
            *(f"{each.poll_p50_s:.3f}", f"{each.poll_p95_s:.3f}", f"{each.poll_max_s:.3f}"),
            *(f"{each.busy_share:.2f}", f"{each.read_s:.3f}"),
            *(f"{each.polls_per_min:.1f}", f"{each.rpcs_per_min:.1f}", f"{each.submits_per_min:.1f}"),
            str(each.longest_queue),
            "-" if each.full_after_s is None else f"{each.full_after_s / 60:.1f} min",
            *(str(each.held), f"{each.cores:.2f}", f"{each.rss_mb:.0f}"),
        ]
        for each in found
    ]


def findings(found: Sequence[Scale]) -> list[str]:
    """What it means, in lines."""
    interval_s, per_min = Slurm().poll_interval_s, Slurm().submits_per_min
    lines = []
    for each in found:
        parts = [
            f"a poll takes {(each.poll_p95_s + each.read_s) / interval_s:.1%} of the {interval_s:g} s between two",
            f"while runs begin, deciding takes {each.busy_share:.2f} cores",
            f"{each.held} idle nodes need {each.held / per_min:.0f} min of submissions",
            f"heartbeats of {each.held} agents take {each.cores:.2f} cores",
        ]
        if max(each.cores, each.busy_share) > FULL:
            parts.append("too much for the one core that a head has")
        lines.append(f"{each.nodes} nodes: {'; '.join(parts)}")
    return lines
