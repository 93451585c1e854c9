"""The pace of this member: seconds of its own work per shard, without waiting for other members."""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fallow.worker.transport import device as devices

WINDOW = 5
"""Number of steps whose median is the pace; two outliers in a row do not change it."""

MIN_STEPS = 3
"""Number of measured steps before there is a pace; the first steps of a process are slow."""

_MOST_UNREAD = 8
"Number of steps whose events the device may not have reached yet; older steps are dropped."


class Pace:
    """A stopwatch for the bodies of the inner loop, read once per step.

    A body is measured from before its batch is loaded to its end. If processes load in the background, it is measured
    from when its batch is loaded, and the pace is the larger of body time and loading time per process. The time that
    a body waits for a batch does not count: a member with few shards never waits, and would get more shards than its
    processes can load.

    On a device both ends are events on the current stream. They are read when the device has reached them, perhaps
    some steps later, so that nothing waits for the device here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        "seconds per shard of the last measured steps"
        self._unread: deque[_Step] = deque(maxlen=_MOST_UNREAD)
        self._step = _Step()
        self._began: _Mark | None = None
        "beginning of the current body; None if it does not count"

    @property
    def value(self) -> float:
        """Seconds per shard; 0: not known yet."""
        while self._unread and self._unread[0].is_over():
            self._seconds.append(self._unread.popleft().seconds_per_shard())
        return statistics.median(self._seconds) if len(self._seconds) >= MIN_STEPS else 0.0

    def begin_step(self) -> None:
        """Begin a step. A step that has not ended is dropped."""
        self._step = _Step()

    def begin_body(self, *, is_full: bool) -> None:
        """Begin a body; call it before its batch is loaded.

        Args:
            is_full: its shard has the full number of samples. Other shards are not measured.
        """
        self._began = _mark(self._device) if is_full else None

    def note_load(self, load_s: float, processes: int) -> None:
        """Note that the batch is loaded.

        Args:
            load_s: seconds that loading took, in whichever process.
            processes: number of processes that load in the background; 0: this process loads.
        """
        if processes and self._began is not None:
            self._step.background_s += load_s / processes
            self._began = _mark(self._device)

    def end_body(self) -> None:
        """End a body; call it before anything waits for other members."""
        if self._began is not None:
            self._step.bodies.append((self._began, _mark(self._device)))
            self._began = None

    def end_step(self) -> None:
        """End the step: its measurement counts."""
        if self._step.bodies:
            self._unread.append(self._step)
        self.begin_step()


def node_paces(paces: Sequence[float], nodes: Sequence[int]) -> tuple[float, ...]:
    """Give each worker the pace of the slowest of its node, since siblings begin bodies together. All are by rank."""
    slowest: dict[int, float] = {}
    for node, pace in zip(nodes, paces, strict=True):
        slowest[node] = max(pace, slowest.get(node, 0.0))
    return tuple(slowest[node] for node in nodes)


_Mark = float | torch.Event
"""A point in time: on the monotonic clock, or an event on a device's stream."""


@dataclass(slots=True)
class _Step:
    """The bodies of one step."""

    bodies: list[tuple[_Mark, _Mark]] = field(default_factory=list)
    background_s: float = 0.0

    def is_over(self) -> bool:
        end = self.bodies[-1][1]
        return not isinstance(end, torch.Event) or end.query()

    def seconds_per_shard(self) -> float:
        work_s = sum(_seconds(began, end) for began, end in self.bodies)
        return max(work_s, self.background_s) / len(self.bodies)


def _mark(device: torch.device) -> _Mark:
    return devices.event(device, timed=True) or time.monotonic()


def _seconds(began: _Mark, end: _Mark) -> float:
    if isinstance(began, float) and isinstance(end, float):
        return end - began
    return float(began.elapsed_time(end)) / 1000  # type: ignore[union-attr, arg-type]
