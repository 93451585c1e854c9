"""An agent's conversation with the head: unanswered messages, heartbeats, and the time since the head's last message.

The agent repeats `Hello` and `Ended` until the head has answered (`Enrolment.unanswered`). A heartbeat carries the
state of the workers; an urgent change is sent at once. A head that cannot be reached and a head that refuses the agent
both count as silent, and the workers train on.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from fallow.agent.merge import needs_no_beat
from fallow.core.protocol import Beat, Ended, EndNoted, Hello, Progress
from fallow.text import clean

log = logging.getLogger("fallow.agent")

COALESCE_S = 0.01
"Minimum time between two heartbeats."
SAY_S = 3.0
"The agent warns after this time without a first connection. Each further warning waits three times as long."
SAY_LATER_S = 30.0
"The agent warns after this time without a connection, once it has had one. A restarted head is back sooner."


class Enrolment:
    """Registration of this node's workers with the head, from the first hello until the head has noted their end. Pure.

    Args:
        hello: hello for the first start of workers.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        "hello for the current start; its `node` is set once the head has admitted the workers"
        self.was_admitted = False
        "the head has admitted a start of this node's workers at least once"
        self._is_greeted = False
        "the head has answered the hello"
        self._end: Ended | None = None
        "end of the workers of the current start; None: they have not ended"
        self._unnoted: dict[tuple[int, int], Ended] = {}

    def unanswered(self) -> list[Hello | Ended]:
        """Messages that the head has not answered."""
        greeting = [] if self._is_greeted else [self.hello]
        return [*greeting, *self._unnoted.values()]

    @property
    def has_unnoted_end(self) -> bool:
        return bool(self._unnoted)

    def greet_again(self) -> None:
        """Repeat the hello: the connection is new, or the head has lost its record of the workers."""
        self._is_greeted = False

    def admit(self, node: int) -> None:
        """The head has numbered the workers of this start."""
        self.hello = msgspec.structs.replace(self.hello, node=node)
        self._is_greeted = self.was_admitted = True
        if self._end is not None and (self._end.node, self._end.boot) not in self._unnoted:
            # The head noted the end and then lost its record of the workers. The end must not count twice.
            self.end(msgspec.structs.replace(self._end, node=node, report=None, is_ordered=True))

    def end(self, ended: Ended) -> None:
        """All workers of this start have ended."""
        self._end = ended
        self._unnoted[ended.node, ended.boot] = ended

    def note_end(self, noted: EndNoted) -> None:
        """The head has noted the end of a start of workers."""
        self._unnoted.pop((noted.node, noted.boot), None)

    def want(self, boot: int) -> bool:
        """Take the start of workers that the head wants. Returns True if it is newer and no earlier start runs."""
        if boot <= self.hello.boot or (self.hello.node and self._end is None):
            return False
        self.hello = msgspec.structs.replace(self.hello, boot=boot, node=0)
        self._is_greeted = False
        self._end = None
        return True


class Reporter:
    """Sends heartbeats. Create it in the agent's event loop.

    Args:
        beat: returns a heartbeat with the current state.
        send: sends a heartbeat.
    """

    def __init__(self, beat: Callable[[], Beat], send: Callable[[Beat], None]) -> None:
        self._make, self._send = beat, send
        self._loop = asyncio.get_running_loop()
        self._sent_beat = Beat()
        "last heartbeat, without the fields that can wait for the next one (`needs_no_beat`)"
        self._sent_at = 0.0
        self._pids: tuple[int, ...] = ()
        "process ids of the workers in the last full heartbeat"
        self._timer: asyncio.TimerHandle | None = None

    def tell(self) -> None:
        """Send a heartbeat with the current state now."""
        self._tell(self._make())

    def _tell(self, beat: Beat) -> None:
        self._sent_beat, self._sent_at = needs_no_beat(beat), self._loop.time()
        if not beat.brief:
            self._pids = beat.progress.pids
        self._send(beat)

    def note_change(self) -> None:
        """Send a heartbeat soon, unless the change can wait for the next regular one."""
        if self._timer is None:
            self._timer = self._loop.call_at(self._sent_at + COALESCE_S, self._tell_change)

    def _tell_change(self) -> None:
        self._timer = None
        beat = self._make()
        if needs_no_beat(beat) == self._sent_beat:
            return
        if beat.progress.pids == self._pids:
            # All members report each change at the same moment, so the progress waits for the next heartbeat.
            beat = msgspec.structs.replace(beat, progress=Progress(), brief=True)
        self._tell(beat)


class HeadContact:
    """Time since the head's last message, and the warnings about it in the job's output.

    Args:
        source: name and address of this node, for the warnings.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._heard_at = self._connected_at = time.monotonic()
        self._say_at_s = SAY_S
        self._is_refused = False

    @property
    def silent_s(self) -> float:
        """Seconds since the head's last message that was no refusal; before the first one, since the agent's start."""
        return time.monotonic() - self._heard_at

    def hear(self) -> None:
        """Note a message from the head that is no refusal."""
        self._heard_at, self._is_refused = time.monotonic(), False

    def was_stopped(self, for_s: float) -> None:
        """Do not count `for_s` seconds in which this agent or its machine was stopped."""
        self._heard_at = min(time.monotonic(), self._heard_at + for_s)

    def hear_refusal(self, words: str) -> None:
        """Log, once, that the head refuses this agent while its workers train."""
        if not self._is_refused:
            log.error("%s; the workers of this node train on as without a head", clean(words))
        self._is_refused = True

    def look(self, is_connected: bool, endpoint: str) -> None:
        """Warn, less and less often, while the head is not connected. The warning explains why a job does nothing."""
        now = time.monotonic()
        away_s = now - self._connected_at
        if is_connected:
            self._connected_at, self._say_at_s = now, SAY_LATER_S
        elif away_s >= self._say_at_s:
            self._say_at_s *= 3
            log.warning(
                "no connection from %s to the head at %s for %.0f s; trying on. If it stays so: [head] address, [head] "
                "port and [network] head_ports in the head's configuration, and firewalls between the two",
                self._source,
                endpoint,
                away_s,
            )
