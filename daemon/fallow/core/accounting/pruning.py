"""Which ended runs are old enough that their logs and ledgers go. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def outdated(ended_at: Mapping[str, float], now: float, keep: int, older_than_s: float) -> list[str]:
    """Return the runs to prune, the oldest first.

    Args:
        ended_at: run -> Unix time of its end, for every run that has ended.
        now: Unix time.
        keep: so many of the newest stay, however old they are.
        older_than_s: no run that ended later than that ago is pruned.
    """
    newest_first = sorted(ended_at, key=lambda run: (-ended_at[run], run))
    return [run for run in reversed(newest_first[keep:]) if now - ended_at[run] >= older_than_s]
