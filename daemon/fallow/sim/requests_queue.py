"""The head's queue of submissions: one sbatch at a time, and no more in a minute than slurmctld is asked to take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from fallow.slurm.paced import Bucket

SBATCH_S = 0.1
"""What sbatch takes."""


class RequestsQueue:
    """In the order in which `head.slurm.calls` and `slurm.paced` do it: a token first, then the oldest request that is
    still wanted, then sbatch.

    Args:
        per_min: submissions in a minute.
        at: Unix time.
    """

    def __init__(self, per_min: float, at: float) -> None:
        self._at = at
        self._bucket = Bucket(per_min, lambda: self._at)
        self._waiting: deque[tuple[str, float]] = deque()
        "(token, since when)"
        self._sending: tuple[float, str] | None = None
        "when its sbatch ends, and the token"
        self._pause(at)

    def put(self, token: str, at: float) -> None:
        self._waiting.append((token, at))

    def next_at(self) -> float:
        """When the next begins or ends; infinity: nothing waits."""
        if self._sending is not None:
            return self._sending[0]
        return max(self._free_at, self._waiting[0][1]) if self._waiting else inf

    def play(self, at: float, wanted: Callable[[str, float], bool], send: Callable[[str, float], None]) -> bool:
        """Everything that is due by `at`; was anything submitted?

        Args:
            at: Unix time.
            wanted: its turn has come: is it to be submitted still?
            send: its sbatch ends.
        """
        has_sent = False
        while (due := self.next_at()) <= at:
            if self._sending is not None:
                token, self._sending, has_sent = self._sending[1], None, True
                send(token, due)
                self._pause(due)
                continue
            token, _ = self._waiting.popleft()
            if wanted(token, due):
                self._sending = due + SBATCH_S, token
        return has_sent

    def _pause(self, at: float) -> None:
        """Wait for the next turn, whether or not somebody waits for it."""
        self._at = at
        self._free_at = at + self._bucket.take()
