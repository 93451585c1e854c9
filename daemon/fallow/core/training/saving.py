"""When the next periodic checkpoint is due: the age of what would be lost decides, whoever the members are. Pure."""

import msgspec

RETRY_S = 10.0
"""After one that could not be written the next is due so soon, and twice as late after each further one."""


class Saving(msgspec.Struct, kw_only=True):
    """What is known of a run's checkpoints in time. All times are the head's, in Unix seconds."""

    safe_at: float = 0.0
    "what was computed until then is on disk, or nothing was"
    took_s: float = 0.0
    "from the snapshot of the newest one until it was complete"
    failures: int = 0
    "in a row"
    failed_at: float = 0.0

    def began(self, now: float) -> None:
        """A generation has begun from a checkpoint, or from the beginning: there is nothing to lose yet."""
        self.safe_at = max(self.safe_at, now)

    def written(self, taken_at: float, took_s: float) -> None:
        """One is complete whose snapshot was taken then."""
        self.safe_at, self.took_s = max(self.safe_at, taken_at), took_s
        self.failures = 0

    def failed(self, now: float) -> None:
        """One could not be written."""
        self.failures, self.failed_at = self.failures + 1, now

    def due_in_s(self, every_s: float, now: float) -> float:
        """Seconds until the next one has to be begun, to be complete when the interval is over; below 0: it is late."""
        due_at = self.safe_at + every_s - min(self.took_s, every_s / 2)
        if self.failures:
            wait_s = min(every_s, RETRY_S * 2.0 ** min(self.failures - 1, 20))
            due_at = max(due_at, self.failed_at + wait_s)
        return due_at - now
