"""A worker's output: to its log (bounded), the end of its standard error for the head, and to our own on demand."""

import contextlib
import logging
import os
import re
import selectors
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from fallow.files import append_private
from fallow.model import HIDDEN, SHOWN
from fallow.text import tail

log = logging.getLogger("fallow.agent")

TAIL_LINES = 40
LOG_LIMIT = 50 * 1024 * 1024
"A log is renamed to .1 at this size, so a worker's logs take twice as much at most."
_CHUNK = 65536
_LINE_LIMIT = 4096
_MARKS = re.compile(b"(" + re.escape(SHOWN) + b"|" + re.escape(HIDDEN) + b")")


class LogFile:
    """Append-only log of one worker, private, in two pieces of bounded size."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._size = 0
        self._has_complained = False
        self.write(b"")

    def write(self, data: bytes) -> None:
        """Append. A disk that is full or away loses the lines of that time, never the worker."""
        try:
            if self._size + len(data) > LOG_LIMIT:
                self.close()
                os.replace(self._path, self._path.with_name(self._path.name + ".1"))
            if self._descriptor is None:
                self._descriptor = append_private(self._path)
                self._size = os.fstat(self._descriptor).st_size
            self._size += os.write(self._descriptor, data)
        except OSError as error:
            self.close()
            if not self._has_complained:
                self._has_complained = True
                words = "%s: cannot be written (%s); as long as that is so, output is not kept"
                log.error(words, self._path, error.strerror)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            descriptor, self._descriptor, self._size = self._descriptor, None, 0
            with contextlib.suppress(OSError):  # NFS may say only now that its disk is full
                os.close(descriptor)


class Marked:
    """One stream of a worker, cut where the worker says that it becomes the main member, or is it no more."""

    def __init__(self) -> None:
        self.speaks: bool | None = None
        "what the worker has last said; None: nothing yet"
        self._rest = b""
        "what may be the beginning of a mark"

    def cut(self, data: bytes) -> list[tuple[bool | None, bytes]]:
        """The output without marks, in pieces, each with what `speaks` was when the worker wrote it."""
        *before, data = _MARKS.split(self._rest + data)  # pieces and marks in turn
        pieces = []
        for piece, mark in zip(before[::2], before[1::2], strict=True):
            pieces.append((self.speaks, piece))
            self.speaks = mark == SHOWN
        kept = next(n for n in range(len(SHOWN) - 1, -1, -1) if data.endswith((SHOWN[:n], HIDDEN[:n])))
        data, self._rest = data[: len(data) - kept], data[len(data) - kept :]
        pieces.append((self.speaks, data))
        return [piece for piece in pieces if piece[1]]

    def end(self) -> bytes:
        """What was held back, now that nothing follows."""
        rest, self._rest = self._rest, b""
        return rest


class Pump(threading.Thread):
    """Moves what a worker writes. A thread of its own: a slow log or terminal holds up this worker and no other.

    It makes the two pipes, and ends when the worker has closed both, or at `finish`.

    Args:
        worker: its name.
        log: the file that takes all of it.
        drained: called at the end, in this thread.
        shown: copy to our own output, too, as long as the worker itself has not said whether.
    """

    def __init__(self, worker: str, log: Path, drained: Callable[[], None], *, shown: bool) -> None:
        super().__init__(name=f"output-{worker}", daemon=True)
        self.shown = shown
        "Set by the agent at any time."
        stdout, out_end = os.pipe()
        self._stderr, error_end = os.pipe()
        self.ends = out_end, error_end
        "what the worker writes to; closed here by `start`"
        self._drained = drained
        self._log_path = log
        self._sources = {stdout: sys.stdout, self._stderr: sys.stderr}
        self._marked = {source: Marked() for source in self._sources}
        self._mid_line = dict.fromkeys(self._sources, False)
        "what was copied last is a line without its end"
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._part = b""
        self._stop_read, self._stop_write = os.pipe()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin, now that the worker has its ends."""
        for end in self.ends:
            os.close(end)
        super().start()

    def run(self) -> None:
        log = LogFile(self._log_path)
        with selectors.DefaultSelector() as selector:
            for source in (*self._sources, self._stop_read):
                selector.register(source, selectors.EVENT_READ)
            open_ends = set(self._sources)
            while open_ends:
                ready = [key.fd for key, _ in selector.select()]
                for source in open_ends.intersection(ready):
                    data = os.read(source, _CHUNK)
                    if data:
                        for speaks, piece in self._marked[source].cut(data):
                            self._move(log, source, speaks, piece)
                    else:
                        selector.unregister(source)
                        open_ends.discard(source)
                # Only when nothing more is there to read: what the worker wrote before its end counts.
                if ready == [self._stop_read]:
                    break
        for source, marked in self._marked.items():
            self._move(log, source, marked.speaks, marked.end())
        for descriptor in (*self._sources, self._stop_read):
            os.close(descriptor)
        log.close()
        self._drained()

    def _move(self, log: LogFile, source: int, speaks: bool | None, data: bytes) -> None:
        shown = self.shown if speaks is None else speaks
        log.write(data)
        if source == self._stderr:
            self._keep(data)
        if not shown and self._mid_line[source]:
            data, shown = b"\n", True  # another worker's output follows
        if shown and data:
            self._mid_line[source] = not data.endswith(b"\n")
            own = self._sources[source]
            with contextlib.suppress(OSError, ValueError):
                own.buffer.write(data)
                own.flush()

    def _keep(self, data: bytes) -> None:
        *lines, part = (self._part + data).split(b"\n")
        with self._lock:
            self._lines.extend(line[:_LINE_LIMIT].decode("utf-8", "replace") for line in lines)
            self._part = part[:_LINE_LIMIT]

    def tail(self) -> str:
        """The last lines of standard error, safe to show."""
        with self._lock:
            lines = [*self._lines, self._part.decode("utf-8", "replace")]
        return tail([line for line in lines if line.strip()], TAIL_LINES)

    def finish(self) -> None:
        """The worker has ended: stop when its output is read, even if some child of its keeps the pipe open."""
        os.close(self._stop_write)
