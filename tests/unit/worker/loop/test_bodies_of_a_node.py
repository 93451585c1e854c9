"""Workers of one node go the same way, as a model needs it whose collectives run among them.

Fallow gives the control to the script's code on all workers of a node, or on none: else one of them would wait in the
model's collective for another, which waits in Fallow for the next generation. In threads of one process, by histories
that are forced exactly; `tests/elastic/test_siblings.py` has processes.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_meeting import STEPS, Training, check, history
from torch.utils.data import DataLoader

from fallow.worker.api.run import Run
from fallow.worker.handover import transfer as handover
from fallow.worker.loop import meeting
from fallow.worker.loop.pace import Pace
from fallow.worker.transport.waits import Interrupted
from scripted_group import Break, Generation, Killed
from small_training import GLOBAL_BATCH, points

DEADLINE_S = 5.0
NODES = {"a": "ab", "b": "ab", "c": "cd", "d": "cd", "e": "e"}
"Workers on the node of each one."


class Collectives:
    """Of the workers of each node. A worker's first one meets the first ones of its siblings, as in a process group."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[str, list[tuple[Any, ...]]] = defaultdict(list)

    def meet(self, worker: str, *place: Any) -> None:
        """Wait until all workers of the node are there."""
        with self._changed:
            number = len(self._calls[worker])
            self._calls[worker].append(place)
            self._changed.notify_all()
            siblings = NODES[worker]
            alone = not self._changed.wait_for(
                lambda: all(len(self._calls[one]) > number for one in siblings), DEADLINE_S
            )
            assert not alone, f"{worker} hangs alone at {place}"
            assert {self._calls[one][number] for one in siblings} == {place}, "the workers of a node are apart"


@dataclass
class Loss:
    """The group of one worker breaks, and no other worker hears of that."""

    worker: str
    place: str
    step: int
    number: int = 0
    "which one of the calls at that place of that step"


class Sharded(Training):
    """Its model has collectives: in each body, in front of the inner loop, between sums and step, behind a mean."""

    def __init__(self, run: Run, collectives: Collectives, loss: Loss | None = None) -> None:
        self.worker = run._member.session.worker  # type: ignore[union-attr]
        self._collectives, self._loss = collectives, loss
        self._counts: dict[tuple[str, int], int] = {}
        super().__init__(run)

    def meet(self, place: str) -> None:
        step = self.run._place.position.step
        number = self._counts[place, step] = self._counts.get((place, step), -1) + 1
        self._collectives.meet(self.worker, place, step, self.run.rehearsing)
        if self._loss == Loss(self.worker, place, step, number) and not self.run.rehearsing:
            self.run._member.group.interrupt("its connection is lost")

    def loss(self, batch: Any) -> torch.Tensor:
        self.meet("body")
        return super().loss(batch)

    def act(self) -> None:
        self.meet("clip")
        super().act()

    def run_through(self, front: Callable[[Any], object] = lambda _: None, backwards: int = 1) -> "Sharded":
        self.run.on_resize(lambda: self.meet("resize"))
        super().run_through(lambda _: self.meet("front"), backwards)
        self.meet("end")
        return self


def sharded(loss: Loss | None = None) -> Callable[[Run], Sharded]:
    collectives = Collectives()
    return lambda run: Sharded(run, collectives, loss).run_through()


def nodes(members: str, **more: Any) -> Generation:
    """With two workers on a node: a and b, c and d; e has none beside it."""
    return Generation(members, workers_per_node=2, **more)


@pytest.mark.parametrize("certain", ["", "a", "b", "ab", "abe"])
@pytest.mark.parametrize("wait", range(1, 14))
def test_another_node_is_lost_at_each_place_of_the_first_two_steps(wait: int, certain: str) -> None:
    _, found = history(nodes("abe", breaks=Break(wait, certain, "e")), nodes("ab"), train=sharded())
    check(found, {"e": Killed})
    assert found["a"].concluded_in == found["b"].concluded_in


@pytest.mark.parametrize("worker", ["a", "b"])
@pytest.mark.parametrize("place", ["body", "second body", "clip", "front"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_one_worker_loses_its_group_and_its_sibling_goes_no_further_alone(worker: str, place: str, step: int) -> None:
    """Four shards among three workers: the two on one node have two bodies each."""
    loss = Loss(worker, place.removeprefix("second "), step, number=place.startswith("second"))
    _, found = history(nodes("abe"), nodes("abe"), train=sharded(loss))
    check(found, {})
    assert found["a"].concluded_in == found["b"].concluded_in


@pytest.mark.parametrize("certain", ["", "a", "b", "ab"])
@pytest.mark.parametrize("wait", [1, 2, 3])
def test_one_worker_misses_the_outcome_that_its_sibling_is_told(wait: int, certain: str) -> None:
    """The first generation breaks when only e has heard all parts. In the second one e tells the outcome."""
    _, found = history(
        nodes("abe", breaks=Break(5, "e")), nodes("abe", breaks=Break(wait, certain)), nodes("abe"), train=sharded()
    )
    check(found, {})


@pytest.mark.parametrize("worker", ["a", "b"])
def test_one_donor_loses_its_group_when_its_sibling_has_given_all(worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sibling would call what the script has given to `run.on_resize`, and begin."""

    def transfer(group: Any, *arguments: Any, **more: Any) -> Any:
        plain = handover.transfer(group, *arguments, **more)
        if group.node.size > 1 and (group._name, group.generation) == (worker, 2):
            group.interrupt("its connection is lost")
            raise Interrupted(group.broken)
        return plain

    monkeypatch.setattr(meeting, "transfer", transfer)
    _, found = history(nodes("ab"), nodes("abcd", at_step=2), nodes("abcd"), train=sharded())
    check(found, {})


def test_siblings_have_equally_many_bodies_however_fast_each_of_them_is() -> None:
    """The shards of a node are divided evenly, and who has one less than its sibling computes a copy for nothing."""
    collectives, bodies = Collectives(), defaultdict[str, list[int]](list)

    class Known(Pace):
        value = 1.0

    class Counting(Sharded):
        def loss(self, batch: Any) -> torch.Tensor:
            bodies[self.worker].append(self.run.step)
            return super().loss(batch)

    def train(run: Run) -> Sharded:
        training = Counting(run, collectives)
        run._member.pace = Known(torch.device("cpu"))
        run._member.pace.value = {"a": 1.0, "b": 2.5, "e": 1.0}[training.worker]
        training.loader = run.prepare(DataLoader(points(), 1), global_batch=GLOBAL_BATCH)
        return training.run_through()

    _, found = history(nodes("abe"), train=train)
    check(found, {})
    assert {name: len(steps) // STEPS for name, steps in bodies.items()} == {"a": 4, "b": 4, "e": 9}
