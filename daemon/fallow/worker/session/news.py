"""What the head says of the run, and for how long it has been silent."""

import time

from fallow.core.protocol import BeatReply

HEAD_SILENT_S = 5.0
"""A head that has said nothing for so long will not release this worker in time."""


class HeadNews:
    """Set by the channel's thread, and read by the others: single assignments only.

    Attributes:
        newest: as the head sent it.
        is_known: it has said something.
        checkpoint_due_at: when the next periodic one is due, on the monotonic clock; None: the head has not said.
    """

    def __init__(self) -> None:
        self.newest = BeatReply(term=0)
        self.is_known = False
        self.checkpoint_due_at: float | None = None
        self._heard_at = time.monotonic()
        self._ends_at: float | None = None
        self._warned = False
        self._checkpoints_made = 0
        "of those that somebody has asked for by hand"

    def take(self, news: BeatReply) -> None:
        """Take what the head says; a head that was replaced does not count."""
        if self.is_known and news.term < self.newest.term:
            return
        if not self.is_known:
            self._checkpoints_made = news.checkpoints_asked  # those before are the members' affair
        # A store that was lost may have lost the count, too.
        self._checkpoints_made = min(self._checkpoints_made, news.checkpoints_asked)
        now = time.monotonic()
        if news.ends_in_s is not None:
            self._ends_at = now + news.ends_in_s
        if news.checkpoint_in_s is not None:
            self.checkpoint_due_at = now + news.checkpoint_in_s
        self.newest, self.is_known = news, True

    def hear(self, silent_s: float) -> None:
        """The agent says for how long it has heard nothing from the head."""
        self._heard_at = time.monotonic() - silent_s

    @property
    def silent_s(self) -> float:
        """For how long the head has been silent. An agent that says nothing does not hear the head either."""
        return time.monotonic() - self._heard_at

    # ----------------------------------------------------------------------------------------- end of the node

    @property
    def ends_in_s(self) -> float | None:
        """Seconds until this node goes away, as the head last said; None: not known."""
        return None if self._ends_at is None else self._ends_at - time.monotonic()

    def warn(self) -> None:
        """Slurm says that this node goes away. Safe in a signal's handler."""
        self._warned = True

    def leaves_alone(self, margin_s: float) -> bool:
        """True if this node goes away and no head is there to release this worker.

        Args:
            margin_s: without a warning by Slurm the worker leaves so long before the end that the head last told.
        """
        if self.silent_s < HEAD_SILENT_S:
            return False
        left_s = self.ends_in_s
        return self._warned or (left_s is not None and left_s < margin_s)

    # --------------------------------------------------------------------------------- checkpoints asked for by hand

    @property
    def checkpoints_asked(self) -> int:
        """How many somebody has asked for, as far as this worker has heard, if one of them was not made; else 0."""
        asked = self.newest.checkpoints_asked
        return asked if asked > self._checkpoints_made else 0

    def note_checkpoint(self, asked: int) -> None:
        """The members have begun one, for as many requests as one of them had heard of."""
        self._checkpoints_made = max(self._checkpoints_made, asked)
