"""How an agent stands with the head: what it has to say again, when it reports, and since when it hears nobody.

What is said is said again until the head has answered it (`Enrolment.unanswered`). How the workers stand is told with
each heartbeat, and at once when that cannot wait for the next. A head that cannot be reached, and one that refuses to
talk, are silent alike: the workers train on.
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
"Between two reports at least, however much happens."
SAY_S = 3.0
"Without a first connection to the head for so long the agent says so; then after three times as long each time."
SAY_LATER_S = 30.0
"The same once it has been connected: a head that is started again is back sooner."


class Enrolment:
    """How the head comes to know the workers of this node, from the first hello until their end is noted. Pure.

    Args:
        hello: for the first start of workers.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        "of the start that goes on; it has the number of its workers once they are to be started"
        self.was_admitted = False
        "the head has admitted workers of this node, ever"
        self._is_greeted = False
        "the head has answered the hello"
        self._end: Ended | None = None
        "how the workers of this start have ended"
        self._unnoted: dict[tuple[int, int], Ended] = {}

    def unanswered(self) -> list[Hello | Ended]:
        """What the head has not answered."""
        greeting = [] if self._is_greeted else [self.hello]
        return [*greeting, *self._unnoted.values()]

    @property
    def has_unnoted_end(self) -> bool:
        return bool(self._unnoted)

    def greet_again(self) -> None:
        """The head does not know this agent's workers: a connection is new, or it has forgotten them."""
        self._is_greeted = False

    def admit(self, node: int) -> None:
        """The head has numbered the workers of this start."""
        self.hello = msgspec.structs.replace(self.hello, node=node)
        self._is_greeted = self.was_admitted = True
        if self._end is not None and (self._end.node, self._end.boot) not in self._unnoted:
            # It has forgotten them since it noted their end, which must not count twice.
            self.end(msgspec.structs.replace(self._end, node=node, report=None, is_ordered=True))

    def end(self, ended: Ended) -> None:
        """All workers of this start have ended."""
        self._end = ended
        self._unnoted[ended.node, ended.boot] = ended

    def note_end(self, noted: EndNoted) -> None:
        """The head has noted the end of a start of workers."""
        self._unnoted.pop((noted.node, noted.boot), None)

    def want(self, boot: int) -> bool:
        """The head wants that start of workers. True: no earlier one runs, so it is that one from now on."""
        if boot <= self.hello.boot or (self.hello.node and self._end is None):
            return False
        self.hello = msgspec.structs.replace(self.hello, boot=boot, node=0)
        self._is_greeted = False
        self._end = None
        return True


class Reporter:
    """Makes and sends heartbeats. To be made in the agent's loop.

    Args:
        beat: makes one of how things stand now.
        send: sends it.
    """

    def __init__(self, beat: Callable[[], Beat], send: Callable[[Beat], None]) -> None:
        self._make, self._send = beat, send
        self._loop = asyncio.get_running_loop()
        self._told = Beat()
        "what was told last, without what needs no beat"
        self._told_at = 0.0
        self._pids: tuple[int, ...] = ()
        "those of workers that were told last"
        self._telling: asyncio.TimerHandle | None = None

    def tell(self) -> None:
        """Send a heartbeat of how things stand now."""
        self._tell(self._make())

    def _tell(self, beat: Beat) -> None:
        self._told, self._told_at = needs_no_beat(beat), self._loop.time()
        if not beat.brief:
            self._pids = beat.progress.pids
        self._send(beat)

    def note_change(self) -> None:
        """Something has changed: tell it at once, unless it can wait for the next heartbeat."""
        if self._telling is None:
            self._telling = self._loop.call_at(self._told_at + COALESCE_S, self._tell_change)

    def _tell_change(self) -> None:
        self._telling = None
        beat = self._make()
        if needs_no_beat(beat) == self._told:
            return
        if beat.progress.pids == self._pids:
            # All members report each change at the same moment. How the training gets on can wait.
            beat = msgspec.structs.replace(beat, progress=Progress(), brief=True)
        self._tell(beat)


class HeadSilence:
    """Since when there is no head, and what is said about that in the job's output.

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
        elif away_s >= self._say_at_s:
            self._say_at_s *= 3
            log.warning(
                "no connection from %s to the head at %s for %.0f s; trying on. If it stays so: [head] address, [head] "
                "port and [network] head_ports in the head's configuration, and firewalls between the two",
                self._source,
                endpoint,
                away_s,
            )
