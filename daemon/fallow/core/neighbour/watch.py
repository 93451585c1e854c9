"""From poll to poll: for which jobs nodes are kept no more, and how soon the next poll comes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fallow.core.neighbour.needs import ExternalDemand

LEAVE_S = 3.5
"""From seeing that somebody waits until workers that have not left are killed; their node must be idle after 6 s."""

END_S = 1.5
"""From then until the job is cancelled, too."""

WATCHFUL_S, LONGEST_WATCHFUL_S = 5.0, 15.0
"""Polls are at most so far apart while we hold nodes that nobody but us would give back, and while they get no
answer."""

CYCLES = 3
"""Slurm has looked at a job so often without starting it before we believe that it will not."""

AGAIN = 10
"""A job is passed over for so many times as long as it took to find out."""


def poll_interval_s(
    usual: float, *, watchful: bool, alert: bool = False, least: float = 0.0, failures: int = 0
) -> float:
    """From the begin of one poll to that of the next.

    Args:
        usual: as configured.
        watchful: others' jobs may wait for what only we give back.
        alert: Slurm has just taken a node from us, or a run trains for the first time.
        least: what Slurm's load allows for; a tenth of the polls that are wanted come in any case.
        failures: polls in a row without an answer; each doubles the interval.
    """
    wanted = min(usual, WATCHFUL_S) if watchful or alert else usual
    longest = LONGEST_WATCHFUL_S if watchful else 10 * usual
    possible = min(max(wanted, least), 10 * wanted)
    return max(possible, min(possible * 2.0 ** min(failures, 4), longest))


@dataclass(frozen=True, slots=True)
class Memory:
    """Which jobs could have started in earlier polls, and did not."""

    at: float = 0.0
    "Unix time of the last poll"
    offered: Mapping[tuple[str, str], float] = field(default_factory=dict)
    "(job, node) -> Unix time since which the job could start there"
    passed_over: Mapping[str, float] = field(default_factory=dict)
    "job that does not start -> Unix time until which nothing is kept free or given back for it"


def remember(memory: Memory, at: float, demand: ExternalDemand, looks_again_s: float) -> Memory:
    """Add a poll to the memory.

    A poll does not show all that keeps a job from starting: licences, excluded nodes before 24.05, another head that is
    dead. So nodes are kept for a job until Slurm has looked at it `CYCLES` times, and then not for `AGAIN` times as
    long.
    """
    # While nobody saw anything, Slurm may have been away.
    away_s = max(0.0, at - memory.at - looks_again_s)
    before = {pair: since + away_s for pair, since in memory.offered.items()}
    pairs = ((job.job_id, node) for job, nodes in demand.offers for node in nodes)
    offered = {pair: before.get(pair, at) for pair in pairs}
    patience_s = CYCLES * looks_again_s
    passed_over = {job: until for job, until in memory.passed_over.items() if until > at}
    passed_over |= {job: at + AGAIN * patience_s for (job, _), since in offered.items() if at - since >= patience_s}
    return Memory(at, offered, passed_over)
