"""For how long an agent has heard no head, and what it says about that in the job's output.

A head that cannot be reached, and one that refuses to talk, are silent alike: the workers train on.
"""

from __future__ import annotations

import logging
import time

from fallow.text import clean

log = logging.getLogger("fallow.agent")

SAY_S = 3.0
"Without a first connection to the head for so long the agent says so; then after three times as long each time."
SAY_LATER_S = 30.0
"The same once it has been connected: a head that is started again is back sooner."


class HeadSilence:
    """Since when there is no head.

    Args:
        source: name and address of this node.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._heard_at = self._connected_at = time.monotonic()
        self._say_at_s = SAY_S
        self._is_refused = False

    @property
    def silent_s(self) -> float:
        """Seconds since the head last said something that counts; at first, since the agent began."""
        return time.monotonic() - self._heard_at

    def hear(self) -> None:
        """The head has said something that counts."""
        self._heard_at, self._is_refused = time.monotonic(), False

    def was_stopped(self, for_s: float) -> None:
        """This agent heard nobody for so long: it was stopped, or its machine was."""
        self._heard_at = min(time.monotonic(), self._heard_at + for_s)

    def hear_refusal(self, words: str) -> None:
        """The head will not talk to this agent, whose workers train. Said once."""
        if not self._is_refused:
            log.error("%s; the workers of this node train on as without a head", clean(words))
        self._is_refused = True

    def look(self, is_connected: bool, endpoint: str) -> None:
        """Is the head connected? If not, say so, ever less often: it may be all that tells why a job does nothing."""
        now = time.monotonic()
        away_s = now - self._connected_at
        if is_connected:
            self._connected_at, self._say_at_s = now, SAY_LATER_S
        if is_connected or away_s < self._say_at_s:
            return
        self._say_at_s *= 3
        log.warning(
            "no connection from %s to the head at %s for %.0f s; trying on. If it stays so: [head] address, [head] "
            "port and [network] head_ports in the head's configuration, and firewalls between the two",
            self._source,
            endpoint,
            away_s,
        )
