"""How the head's work grows with the cluster, up to 10,000 nodes and 1,000 runs: `fallow simulate --scale`.

Everything is the head's own code on made-up data, in processor time of this machine, so that what else runs does not
count much. One head in one process does all of it but reading polls, for which it has a thread.
"""

from __future__ import annotations

import gc
import resource
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fallow.bench import scale_cluster, scale_head, scale_poll
from fallow.config import Membership, Slurm
from fallow.core.quantile import quantile
from fallow.model import Struct

SIZES = ((100, 10, 1800.0), (1_000, 100, 1800.0), (3_000, 300, 600.0), (10_000, 1_000, 120.0))
"""(nodes, runs, virtual seconds that are played)."""

SLOTS = 8
"""Workers on a node: one per GPU."""

FULL = 0.5
"""Of a core, or of the time between two polls: more than that leaves no room for bad moments."""

COLUMNS = (
    "NODES", "RUNS", "POLL P50 S", "P95", "MAX", "DECIDING", "READ S", "POLLS/MIN", "RPCS/MIN", "SUBMITS/MIN", "QUEUE",
    "FULL AFTER", "WORKERS", "BEAT US", "TICK MS", "CORES", "RECORD KB", "RSS MB",
)  # fmt: skip

TICKS_PER_S = 4
PACE_TIMES = 3


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
    workers: int
    "once all nodes train that others leave idle in the long run"
    beat_s: float
    "to hear a heartbeat and to answer it, the socket included"
    tick_s: float
    "to look at all deadlines, four times a second"
    cores: float
    "that heartbeats and ticks take; the head has one"
    record_bytes: int
    "of one run, written at each of its changes"
    rss_mb: float
    "of this process, so far"


def run(tell: Callable[[str], None]) -> list[Scale]:
    """Measure all sizes. Args: tell: told what is measured now."""
    with tempfile.TemporaryDirectory() as folder:
        by_socket_s = scale_head.socket_s(Path(folder))
    found = []
    for nodes, runs, lasts_s in SIZES:
        tell(f"{nodes} nodes, {runs} runs")
        found.append(measure(nodes, runs, lasts_s, by_socket_s))
    return found


def measure(nodes: int, runs: int, lasts_s: float, by_socket_s: float) -> Scale:
    """One size.

    Args:
        nodes, runs: of the made-up cluster.
        lasts_s: virtual seconds that are played.
        by_socket_s: what a beat costs by the socket in a small run (`scale_head.socket_s`).
    """
    polls = scale_cluster.measure(runs, nodes, lasts_s)
    gc.collect()
    read_s = min(scale_poll.measure(nodes) for _ in range(PACE_TIMES))
    held = max(runs, round((1 - scale_cluster.USED) * nodes))
    small = scale_head.measure(1, scale_head.SOCKETS, 1)
    loop = scale_head.measure(runs, held, SLOTS)
    beat_s = loop.beat_s + max(0.0, by_socket_s - small.beat_s)
    workers = held * SLOTS
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
        workers=workers,
        beat_s=beat_s,
        tick_s=loop.tick_s,
        cores=workers / Membership().beat_s * beat_s + TICKS_PER_S * loop.tick_s,
        record_bytes=loop.record_bytes,
        rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
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
            *(str(each.workers), f"{each.beat_s * 1e6:.0f}", f"{each.tick_s * 1e3:.1f}", f"{each.cores:.2f}"),
            *(f"{each.record_bytes / 1000:.0f}", f"{each.rss_mb:.0f}"),
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
            f"{each.workers // SLOTS} idle nodes need {each.workers / SLOTS / per_min:.0f} min of submissions",
            f"heartbeats of {each.workers} workers take {each.cores:.2f} cores",
        ]
        if max(each.cores, each.busy_share) > FULL:
            parts.append("too much for the one core that a head has")
        lines.append(f"{each.nodes} nodes: {'; '.join(parts)}")
    return lines
