"""When the next periodic checkpoint is due. The age of the unsaved work decides, whoever the members are. Pure."""

import msgspec

RETRY_S = 10.0
"""Seconds until the next try after a failed checkpoint; doubled after each further failure."""


class Saving(msgspec.Struct, kw_only=True):
    """Times of a run's checkpoints. All times are the head's, in Unix seconds."""

    safe_at: float = 0.0
    "time until which all work is on disk, or until which there was none"
    took_s: float = 0.0
    "seconds from the snapshot of the newest checkpoint until it was complete"
    failures: int = 0
    "failed checkpoints in a row"
    failed_at: float = 0.0

    def note_begin(self, now: float) -> None:
        """Note that a generation begins, from a checkpoint or from nothing: there is no unsaved work."""
        self.safe_at = max(self.safe_at, now)

    def note_written(self, taken_at: float, took_s: float) -> None:
        """Note a complete checkpoint whose snapshot was taken at `taken_at`."""
        self.safe_at, self.took_s = max(self.safe_at, taken_at), took_s
        self.failures = 0

    def note_failure(self, now: float) -> None:
        """Note a checkpoint that could not be written."""
        self.failures, self.failed_at = self.failures + 1, now

    def due_in_s(self, every_s: float, now: float) -> float:
        """Seconds until the next checkpoint must begin to be complete when the interval ends; negative: overdue."""
        due_at = self.safe_at + every_s - min(self.took_s, every_s / 2)
        if self.failures:
            wait_s = min(every_s, RETRY_S * 2.0 ** min(self.failures - 1, 20))
            due_at = max(due_at, self.failed_at + wait_s)
        return due_at - now
