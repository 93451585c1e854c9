"""How often Slurm is asked. Pure."""

from __future__ import annotations

WATCHFUL_S = 5.0
"""Polls are at most so far apart while we hold nodes that nobody but us would give back."""

LONGEST_WATCHFUL_S = 15.0
"""The same between polls that get no answer."""


def interval_s(usual: float, watchful: bool) -> float:
    """From one poll to the next that is wanted. Args: usual: as configured."""
    return min(usual, WATCHFUL_S) if watchful else usual


def longest_interval_s(usual: float, watchful: bool) -> float:
    """Between polls that get no answer: others' jobs may wait for what only we give back."""
    return LONGEST_WATCHFUL_S if watchful else 10 * usual


def poll_interval_s(wanted: float, least: float, failures: int, longest: float) -> float:
    """From the begin of one poll to that of the next.

    Args:
        wanted: where Slurm answers at once.
        least: what its load allows for; a tenth of the polls that are wanted come in any case.
        failures: polls in a row without an answer; each doubles it.
        longest: up to which they do.
    """
    usual = min(max(wanted, least), 10 * wanted)
    return max(usual, min(usual * 2.0 ** min(failures, 4), longest))
