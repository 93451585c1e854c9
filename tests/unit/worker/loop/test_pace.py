"""A member's own speed."""

import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from builders import Clock
from fallow.worker.loop import pace
from fallow.worker.loop.pace import MIN_STEPS, Pace, node_paces
from fallow.worker.transport import device as devices


class Event:
    """In the place of `torch.Event`, on a device whose own clock runs behind: it reaches an event when told to."""

    reached = 0.0
    "all that the device has done by now"
    made = 0.0
    "all that it was given to do"
    at: float
    kept: ClassVar["weakref.WeakSet[Event]"] = weakref.WeakSet()

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing
        assert device.type == "cuda"
        Event.kept.add(self)

    def query(self) -> bool:
        return Event.reached >= self.at

    def elapsed_time(self, end: "Event") -> float:
        assert self.query()
        assert end.query(), "torch raises then"
        return (end.at - self.at) * 1000


class Stream:
    """A device's current stream. The thread's current device may be another one: nobody asks for that one's stream."""

    def __init__(self, device: torch.device) -> None:
        assert device == torch.device("cuda:1")

    def record_event(self, event: Event) -> Event:
        event.at = Event.made
        return event


class Bodies:
    """Steps whose bodies take as long as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
        self.clock = Clock(100.0)
        self.device = device
        self.pace = Pace(torch.device(device))
        monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=self.clock))
        Event.reached = Event.made = 0.0
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(devices, "current_stream", lambda device: None if device.type == "cpu" else Stream(device))

    def spend(self, seconds: float) -> None:
        self.clock.now += seconds if self.device == "cpu" else 0.001
        Event.made += seconds

    def step(self, *bodies: float, load_s: float = 0.0, processes: int = 0, tail: float = 0.0) -> float:
        self.pace.begin_step()
        for seconds in bodies:
            self.pace.begin_body(is_full=True)
            self.spend(7.0 if processes else load_s)
            self.pace.note_load(load_s, processes)
            self.spend(seconds)
            self.pace.end_body()
            self.spend(5.0)  # waiting for others
        self.spend(tail)
        self.pace.end_step()
        return self.pace.value


def test_a_pace_is_told_after_some_steps_and_outliers_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bodies(monkeypatch)
    assert [run.step(9.0)] + [run.step(1.0, 2.0, 3.0) for _ in range(MIN_STEPS - 1)] == [0.0] * (MIN_STEPS - 1) + [2.0]
    assert run.step(2.0, 2.0) == run.step(50.0) == run.step(2.0) == 2.0


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
@pytest.mark.parametrize(("processes", "seconds"), [(0, 4.0), (1, 3.0), (2, 1.5), (4, 1.0)])
def test_loading_counts_where_it_holds_bodies_up(
    monkeypatch: pytest.MonkeyPatch, processes: int, seconds: float, device: str
) -> None:
    run = Bodies(monkeypatch, device)
    for _ in range(MIN_STEPS):
        run.step(1.0, 1.0, load_s=3.0, processes=processes)
    Event.reached = Event.made
    assert run.pace.value == pytest.approx(seconds)


def test_smaller_shards_and_unfinished_steps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bodies(monkeypatch)
    for _ in range(MIN_STEPS):
        run.pace.begin_step()
        run.pace.begin_body(is_full=True)
        run.spend(40.0)
        run.pace.end_body()  # and then the group breaks
        run.step(2.0)
        run.pace.begin_step()
        run.pace.begin_body(is_full=True)  # here it breaks in the body
        run.spend(40.0)
        run.step(2.0)
        run.pace.begin_step()
        run.pace.begin_body(is_full=False)
        run.spend(0.1)
        run.pace.end_body()
        run.pace.end_step()
    assert run.pace.value == 2.0


def test_on_a_device_bodies_are_measured_there_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bodies(monkeypatch, "cuda:1")
    assert [run.step(2.0, 4.0, tail=9.0) for _ in range(MIN_STEPS)] == [0.0] * MIN_STEPS, "it has not reached them"
    Event.reached = Event.made
    assert run.pace.value == 3.0
    for _ in range(100):
        run.step(6.0)
    assert run.pace.value == 3.0
    assert len(Event.kept) < 40, "events of a device that is far behind pile up"
    Event.reached = Event.made
    assert run.pace.value == 6.0


def test_the_slowest_worker_of_a_node_sets_the_pace_of_all_its_workers() -> None:
    assert node_paces([1.0, 3.0, 2.0, 0.0, 5.0], [4, 4, 7, 9, 9]) == (3.0, 3.0, 2.0, 5.0, 5.0)
    assert node_paces([1.0, 0.0, 3.0], range(3)) == (1.0, 0.0, 3.0)
