"""The head's queue of submissions: one sbatch at a time, and no more in a minute than slurmctld is asked to take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from fallow.slurm.paced import Bucket


class RequestsQueue:
    """In the order in which `head.slurm.calls` and `slurm.paced` do it: a token first, then the oldest that is still
    wanted, then sbatch.

    Args:
        per_min: submissions in a minute; infinity: as many as there are, at once.
        sbatch_s: what sbatch takes.
        at: Unix time.
    """

    def __init__(self, per_min: float, sbatch_s: float, at: float) -> None:
        self._at = at
        self._bucket = None if per_min == inf else Bucket(per_min, lambda: self._at)
        self._sbatch_s = sbatch_s
        self._waiting: deque[tuple[str, float]] = deque()
        "(token, since when)"
        self._sending: tuple[float, str] | None = None
        "when its sbatch ends, and the token"
        self._free_at = at
        self._pause(at)

    def __len__(self) -> int:
        """Those that wait, and the one that is being sent."""
        return len(self._waiting) + (self._sending is not None)

    def put(self, token: str, at: float) -> None:
        self._waiting.append((token, at))

    def next_at(self) -> float:
        """When the next begins or ends; infinity: nothing waits."""
        if self._sending is not None:
            return self._sending[0]
        return max(self._free_at, self._waiting[0][1]) if self._waiting else inf

    def play(self, at: float, wanted: Callable[[str, float], bool], send: Callable[[str, float], None]) -> int:
        """Everything that is due by `at`; how many were submitted?

        Args:
            at: Unix time.
            wanted: its turn has come: is it to be submitted still?
            send: its sbatch ends.
        """
        sent = 0
        while (due := self.next_at()) <= at:
            if self._sending is not None:
                token, self._sending = self._sending[1], None
                send(token, due)
                self._pause(due)
                sent += 1
                continue
            token, _ = self._waiting.popleft()
            if wanted(token, due):
                self._sending = due + self._sbatch_s, token
        return sent

    def _pause(self, at: float) -> None:
        """Wait for the next turn, whether or not somebody waits for it."""
        self._at = at
        self._free_at = at + (0.0 if self._bucket is None else self._bucket.take())
