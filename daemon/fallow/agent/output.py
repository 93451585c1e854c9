"""A worker's output: copy it to the worker's log, keep the end of standard error, show the main worker's output."""

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
from fallow.model import HIDE_MARK, SHOW_MARK
from fallow.text import tail

log = logging.getLogger("fallow.agent")

TAIL_LINES = 40
LOG_LIMIT = 50 * 1024 * 1024
"Size in bytes at which a log is renamed to .1. A worker's logs take at most twice as much."
_CHUNK = 65536
_LINE_LIMIT = 4096
_MARKS = re.compile(b"(" + re.escape(SHOW_MARK) + b"|" + re.escape(HIDE_MARK) + b")")


class LogFile:
    """Append-only private log of one worker: the current file and the previous one, both of bounded size."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._size = 0
        self._has_complained = False
        self.write(b"")

    def write(self, data: bytes) -> None:
        """Append. If the disk is full or unreachable, these lines are lost and the worker goes on."""
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
                words = "%s: cannot be written (%s); until it can, the worker's output is not logged"
                log.error(words, self._path, error.strerror)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            descriptor, self._descriptor, self._size = self._descriptor, None, 0
            with contextlib.suppress(OSError):  # NFS may say only now that its disk is full
                os.close(descriptor)


class MarkedStream:
    """Splits a worker's output at the marks by which the worker says whether its output is to be shown."""

    def __init__(self) -> None:
        self.speaks: bool | None = None
        "the worker's last mark: True shows the output, False hides it; None: no mark yet"
        self._pending = b""
        "last bytes, which may be the beginning of a mark"

    def cut(self, data: bytes) -> list[tuple[bool | None, bytes]]:
        """Return the output without marks, in pieces of (value of `speaks` for this piece, bytes)."""
        *before, data = _MARKS.split(self._pending + data)  # pieces and marks in turn
        pieces = []
        for piece, mark in zip(before[::2], before[1::2], strict=True):
            pieces.append((self.speaks, piece))
            self.speaks = mark == SHOW_MARK
        mark_bytes = next(n for n in range(len(SHOW_MARK) - 1, -1, -1) if data.endswith((SHOW_MARK[:n], HIDE_MARK[:n])))
        data, self._pending = data[: len(data) - mark_bytes], data[len(data) - mark_bytes :]
        pieces.append((self.speaks, data))
        return [piece for piece in pieces if piece[1]]

    def end(self) -> bytes:
        """Return the bytes that were held back. Call it at the end of the stream."""
        pending, self._pending = self._pending, b""
        return pending


class Pump(threading.Thread):
    """Thread that copies a worker's output, so that a slow log or terminal delays this worker only.

    It makes the two pipes. It ends when the worker has closed both, or after `finish`.

    Args:
        worker: name of the worker.
        log: path of the log, which takes all output.
        on_drained: called at the end, in this thread.
        is_shown: copy the output to the agent's output, too, until the worker's first mark.
    """

    def __init__(self, worker: str, log: Path, on_drained: Callable[[], None], *, is_shown: bool) -> None:
        super().__init__(name=f"output-{worker}", daemon=True)
        self.is_shown = is_shown
        "may be set by the agent at any time"
        stdout, out_end = os.pipe()
        self._stderr, error_end = os.pipe()
        self.ends = out_end, error_end
        "the worker's ends of the pipes; `start` closes them in this process"
        self._on_drained = on_drained
        self._log_path = log
        self._sources = {stdout: sys.stdout, self._stderr: sys.stderr}
        self._marked = {source: MarkedStream() for source in self._sources}
        self._mid_line = dict.fromkeys(self._sources, False)
        "source -> the last copied line has no end yet"
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._part = b""
        self._stop_read, self._stop_write = os.pipe()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Close the worker's ends, which the worker has inherited, and begin to read."""
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
                # Stop only when the pipes are empty: everything that the worker wrote must be read.
                if ready == [self._stop_read]:
                    break
        for source, marked in self._marked.items():
            self._move(log, source, marked.speaks, marked.end())
        for descriptor in (*self._sources, self._stop_read):
            os.close(descriptor)
        log.close()
        self._on_drained()

    def _move(self, log: LogFile, source: int, speaks: bool | None, data: bytes) -> None:
        is_shown = self.is_shown if speaks is None else speaks
        log.write(data)
        if source == self._stderr:
            self._keep(data)
        if not is_shown and self._mid_line[source]:
            data, is_shown = b"\n", True  # another worker's output follows
        if is_shown and data:
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
        """The worker has ended: stop when its output is read, even if one of its children keeps the pipe open."""
        os.close(self._stop_write)
