"""What the head last said of the run, and for how long the head has been silent."""

import time

from fallow.core.protocol import BeatReply

HEAD_SILENT_S = 5.0
"""After this silence the worker does not expect the head to release it in time."""


class HeadStatus:
    """Set by the channel's thread, and read by the others: single assignments only.

    Attributes:
        last_reply: the newest reply of the head.
        rehearsal_reply: by which a newcomer rehearses: the newest reply. With siblings the first one, which the agent
            has sent to all of them, so that they rehearse together or not at all.
        has_siblings: the agent starts several workers.
        is_known: the head has sent a first reply.
        checkpoint_due_at: when the next periodic one is due, on the monotonic clock; None: the head has not said.
    """

    def __init__(self) -> None:
        self.last_reply = self.rehearsal_reply = BeatReply(term=0)
        self.has_siblings = False
        self.is_known = False
        self.checkpoint_due_at: float | None = None
        self._heard_at = time.monotonic()
        self._ends_at: float | None = None
        self._warned = False
        self._checkpoints_made = 0
        "number of requests by hand for which a checkpoint was made"

    def take(self, reply: BeatReply) -> None:
        """Take a reply of the head. A reply of a replaced head (older term) is ignored."""
        if self.is_known and reply.term < self.last_reply.term:
            return
        if not self.is_known:
            self._checkpoints_made = reply.checkpoints_asked  # earlier requests concern the members before this worker
        if not (self.is_known and self.has_siblings):
            self.rehearsal_reply = reply
        # A head that lost its store may have lost the count, too.
        self._checkpoints_made = min(self._checkpoints_made, reply.checkpoints_asked)
        now = time.monotonic()
        if reply.ends_in_s is not None:
            self._ends_at = now + reply.ends_in_s
        if reply.checkpoint_in_s is not None:
            self.checkpoint_due_at = now + reply.checkpoint_in_s
        self.last_reply, self.is_known = reply, True

    def note_silence(self, silent_s: float) -> None:
        """Note for how long the agent has heard nothing from the head."""
        self._heard_at = time.monotonic() - silent_s

    @property
    def silent_s(self) -> float:
        """For how long the head has been silent. An agent that says nothing does not hear the head either."""
        return time.monotonic() - self._heard_at

    # ----------------------------------------------------------------------------------------- end of the node

    @property
    def ends_in_s(self) -> float | None:
        """Seconds until this node's job ends, as the head last said; None: not known."""
        return None if self._ends_at is None else self._ends_at - time.monotonic()

    def warn(self) -> None:
        """Note Slurm's warning that this node's job ends. Safe in a signal handler."""
        self._warned = True

    def leaves_alone(self, margin_s: float) -> bool:
        """True if this node's job ends soon and the head is silent, so that this worker must leave without an order.

        Args:
            margin_s: without a warning of Slurm, the worker leaves this long before the end that the head last gave.
        """
        if self.silent_s < HEAD_SILENT_S:
            return False
        left_s = self.ends_in_s
        return self._warned or (left_s is not None and left_s < margin_s)

    # --------------------------------------------------------------------------------- checkpoints asked for by hand

    @property
    def checkpoints_asked(self) -> int:
        """Number of requests by hand, as far as this worker knows; 0: a checkpoint was made for all of them."""
        requests = self.last_reply.checkpoints_asked
        return requests if requests > self._checkpoints_made else 0

    def note_checkpoint(self, requests: int) -> None:
        """Note that the members have begun a checkpoint that serves this number of requests."""
        self._checkpoints_made = max(self._checkpoints_made, requests)
