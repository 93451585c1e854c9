"""Members that are interrupted come together again: nobody acts twice or never, and all conclude the same.

Nor does a loss touch buffers, sums that are made again, or state on its way. In threads of one process, by histories
that are forced exactly.
"""

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fallow.core.membership.messages import Outcome
from fallow.worker.api.run import Run
from fallow.worker.handover import supply
from fallow.worker.loop.generations import Released
from scripted_group import Break, Generation, Killed
from scripted_world import DEADLINE_S, World
from small_training import GLOBAL_BATCH, SAMPLES, Script, alone, assert_close, assert_equal, filled, net, plain, points

STEPS = 4


class Training(Script):
    """What a member does, and what it has seen of it."""

    def __init__(self, run: Run | None = None, model: nn.Module | None = None, *, reproducible: bool = False) -> None:
        super().__init__(run, model)
        self.acted: list[int] = []
        self.means: list[float] = []
        self.joint: list[float] = []
        self.concluded_in: list[int] = []
        self.state: dict[str, Any] = {"steps": 0, "norms": torch.zeros(())}
        self.prepare(self.state, reproducible=reproducible)

    def run_through(self, front: Callable[[Any], object] = lambda _: None, backwards: int = 1) -> "Training":
        """Two epochs of two steps, with something that all do together behind each and at the end.

        A second backward voids the first attempt at the first sum; what was learned in one that broke off does not
        count.
        """
        for update in self.run.updates(self.loader, epochs=2):
            front(update)
            for batch in update:
                for _ in range(backwards):
                    loss = self.loss(batch)
                    loss.backward()
                update.note(loss=loss)
            self.act()
            if self.run.rehearsing:
                continue
            self.acted.append(update.step)
            self.means.append(update.mean("loss"))
            self.concluded_in.append(self.run.generation)
            self.state["steps"] += 1
            self.state["norms"] += self.model[0].weight.detach().norm()
            self.joint.append(self.run.mean(float(update.step)))
        self.joint.append(self.run.mean(7.0))
        return self


def large(wide: int = 8) -> nn.Module:
    """A model with statistics; if it is wide, the state of its first layer comes late."""
    layers = [nn.Linear(5, wide), nn.Tanh(), nn.Linear(wide, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)]
    return filled(nn.Sequential(*layers))


def rich(run: Run | None, *, reproducible: bool) -> Training:
    """Buffers, and sums that are made again."""
    return Training(run, large(), reproducible=reproducible).run_through(backwards=2)


def short(run: Run | None) -> Script:
    """The end of a step is inside the last body's backward."""
    script = Script(run)
    schedule = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
    script.prepare(schedule)
    for batch in script.run.steps(script.loader, epochs=2):
        script.loss(batch).backward()
        script.act()
        schedule.step()
    return script


WAYS: dict[str, Callable[[Run | None], Script]] = {
    "usual": lambda run: Training(run).run_through(),
    "rich": lambda run: rich(run, reproducible=False),
    "rich, reproducible": lambda run: rich(run, reproducible=True),
    "short": short,
}


@cache
def undisturbed(way: str) -> Any:
    """In a world of one."""
    return WAYS[way](None)


def reference() -> torch.nn.Module:
    model = net()
    plain(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 2)
    return model


def history(*generations: Generation, train: Callable[[Run], Any] = WAYS["usual"]) -> tuple[World, dict[str, Any]]:
    """Train by it; the world knows what the ledgers say."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), *generations)
        found = world.train(train)
        for one in found.values():
            if isinstance(one, BaseException) and not isinstance(one, Killed | Released):
                raise one
        report = world.samples(STEPS, GLOBAL_BATCH)
        assert (report.consumed, report.lost, report.duplicated) == (2 * SAMPLES, 0, 0)
    return world, found


def check(found: dict[str, Any], ends: dict[str, type]) -> None:
    """Whoever came to the end has acted once in each of its steps, and all are equal to plain PyTorch."""
    wanted = undisturbed("usual")
    for name, one in found.items():
        if name in ends:
            assert isinstance(one, ends[name]), f"{name}: {one!r}"
            continue
        if isinstance(one, BaseException):
            raise one
        first = STEPS - len(one.acted)
        assert one.acted == list(range(first, STEPS)), name
        assert one.state["steps"] == STEPS
        torch.testing.assert_close(one.state["norms"], wanted.state["norms"])
        assert one.means == pytest.approx(wanted.means[first:])
        assert one.joint == pytest.approx(wanted.joint[-len(one.joint) :])
        assert_close(one.model, reference())
        whole = [other.model for other in found.values() if isinstance(other, Training)]
        assert_equal(one.model, whole[0])


def assert_alike(found: dict[str, Any], wanted: Script | None = None) -> None:
    """All have the same bits, which are about (or, of a reproducible training, exactly) the wanted ones."""
    scripts = [one for one in found.values() if isinstance(one, Script)]
    assert len(scripts) == len(found), found
    assert_equal(*(script.model for script in scripts))
    if wanted is None:
        return
    assert len({script.optimizer.param_groups[0]["lr"] for script in (*scripts, wanted)}) == 1
    if wanted.run._prepared.reproducible:
        assert_equal(scripts[0].model, wanted.model)
    for name, value in wanted.model.state_dict().items():
        torch.testing.assert_close(scripts[0].model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("certain", ["", "a", "b", "ab", "abc"])
@pytest.mark.parametrize("wait", range(1, 14))
def test_a_member_is_killed_at_each_place_of_the_first_two_steps(wait: int, certain: str) -> None:
    """A step counts in the generation that computed it."""
    _, found = history(Generation("abc", breaks=Break(wait, certain, "c")), Generation("ab"))
    check(found, {"c": Killed})
    assert all(len(found[name].acted) == STEPS for name in "ab")


@pytest.mark.parametrize("way", list(WAYS)[1:])
@pytest.mark.parametrize("certain", ["", "a", "b"])
@pytest.mark.parametrize("wait", range(2, 14))
def test_buffers_sums_that_are_made_again_and_the_short_loop_are_as_if_nobody_was_lost(
    wait: int, certain: str, way: str
) -> None:
    _, found = history(Generation("abc", breaks=Break(wait, certain, "c")), Generation("ab"), train=WAYS[way])
    assert isinstance(found.pop("c"), Killed)
    assert_alike(found, undisturbed(way))


def concluded_in(wait: int, workers_per_node: int) -> tuple[list[int], list[int]]:
    """By step, the generations in which two members conclude, when the second one does not hear the last answer."""
    generations = Generation("abc", breaks=Break(wait, "a", "c")), Generation("ab")
    _, found = history(*(replace(one, workers_per_node=workers_per_node) for one in generations))
    check(found, {"c": Killed})
    return found["a"].concluded_in, found["b"].concluded_in


def test_workers_of_one_node_conclude_each_step_in_the_same_generation() -> None:
    unlike = 0
    for wait in range(1, 12):
        first, second = concluded_in(wait, 2)
        assert first == second, wait
        first, second = concluded_in(wait, 1)
        unlike += first != second
    assert unlike, "else it proves nothing"


def test_who_hears_from_the_head_what_a_lost_member_had_heard_goes_on_with_that() -> None:
    """In the next generation, where it is alone, the mean would be another one."""
    heard = Outcome(generation=1, agreed=2, answer=41.5)  # of the first step's inner loop and of the mean behind it
    _, found = history(Generation("ab", breaks=Break(6, "b", "b")), Generation("a", outcome=heard))
    assert isinstance(found["b"], Killed)
    assert found["a"].acted == list(range(STEPS))
    assert found["a"].joint == [41.5, *undisturbed("usual").joint[1:]]


def test_who_waits_for_scripts_that_have_ended_gets_what_their_last_call_gave() -> None:
    """The first exchange is a wait, four are in a step, one is in each mean and at the end of the loop."""
    last = 1 + 5 * STEPS + 1 + 1
    _, found = history(Generation("ab", breaks=Break(last, "b")), Generation("ab"))
    check(found, {})
    assert found["a"].joint[-1] == 7.0


class Stream(IterableDataset[Any]):
    """So many of the samples, as batches of four."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        return iter([points()[n] for n in range(self._size)])


def test_streams_of_unlike_length_are_told_before_sums_of_unlike_length_travel(tmp_path: Path) -> None:
    """In the second step, which only one of two members cuts into four shards."""

    def train(run: Run) -> Script:
        script = Script(run)
        script.loader = DataLoader(Stream(32 if run._member.session.worker == "a" else 20), 4)  # type: ignore[union-attr]
        script.prepare(reproducible=True).train()
        return script

    found = World(tmp_path, Generation("ab")).train(train)
    assert any("step 1: the members cut it into 1 and 4 shards" in str(one) for one in found.values()), found


def test_a_later_loop_that_members_cut_unlike_is_told_before_sums_of_unlike_length_travel(tmp_path: Path) -> None:
    """They have compared how they cut the loop before, in the same generation: that says nothing of this one."""

    def train(run: Run) -> Script:
        script = Script(run)
        batch_size = 4 if run._member.session.worker == "a" else GLOBAL_BATCH  # type: ignore[union-attr]
        later = run.prepare(DataLoader(points(), batch_size), global_batch=GLOBAL_BATCH)
        script.prepare(reproducible=True).train()
        script.loader = later
        script.train()
        return script

    found = World(tmp_path, Generation("ab")).train(train)
    assert any("rank 1 cuts a step into 1 shards of 16 samples" in str(one) for one in found.values()), found


def test_who_lacks_a_part_of_the_state_and_an_answer_gets_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others heard the answer; the newcomer lost its group before, and its state has not come."""
    breaks = Break(2, "a")
    world = World(tmp_path, Generation("ab"), Generation("abc", at_step=2, breaks=breaks), Generation("abc"))

    def is_broken() -> bool:
        first = world.sessions["a"]
        return first.generation == 3 or (first.group is not None and first.group.broken is not None)

    send, parts, lock = supply.send_piece, Counter[Any](), threading.Lock()

    def hold(line: Any, memory: Any, number: int, pieces: int) -> None:
        with lock:
            part = parts[line]
            parts[line] += 1
        end, wake = time.monotonic() + DEADLINE_S, threading.Event()
        while part == supply.LATE_PART and memory and not is_broken() and time.monotonic() < end:
            wake.wait(0.005)
        send(line, memory, number, pieces)

    monkeypatch.setattr(supply, "send_piece", hold)
    answers: dict[str, list[float]] = {"a": [], "b": [], "c": []}

    def train(run: Run) -> Training:
        training = Training(run, large(4096))
        worker = run._member.session.worker  # type: ignore[union-attr]

        def front(update: Any) -> None:
            mean = run.mean(float("abc".index(worker)))
            if not run.rehearsing:
                answers[worker].append(mean)

        return training.run_through(front)

    assert_alike(world.train(train))
    assert answers == {"a": [0.5, 0.5, 1.0, 1.0], "b": [0.5, 0.5, 1.0, 1.0], "c": [1.0, 1.0]}


def test_a_newcomer_has_frozen_what_the_others_have_though_one_of_them_has_its_model_in_eval(tmp_path: Path) -> None:
    """Its script has not come by the lines that froze the layer."""
    world = World(tmp_path, Generation("ab"), Generation("abc", at_step=2))

    def train(run: Run) -> Training:
        training = Training(run)
        for update in run.updates(training.loader, epochs=2):
            training.model.train()
            training.inner(update)
            training.act()
            if update.step == 0 and not run.rehearsing:
                training.model[0].requires_grad_(False)
            training.model.train(run._member.session.worker != "a")  # type: ignore[union-attr]
        return training

    found = world.train(train)
    assert_alike(found)
    assert not any(parameter.requires_grad for parameter in found["c"].model[0].parameters())


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_loss_in_the_first_step_leaves_all_with_the_same_buckets_whatever_is_frozen(
    reproducible: bool, tmp_path: Path
) -> None:
    """A member that gets the state again lays out its buckets once more, behind the line that froze the layer."""

    def train(run: Run) -> Training:
        training = Training(run, reproducible=reproducible)
        return training.run_through(lambda update: training.model[0].requires_grad_(update.step >= 2))

    world = World(tmp_path, Generation("abc", breaks=Break(2, "", "c")), Generation("ab", forgotten="b"))
    found = world.train(train)
    assert isinstance(found.pop("c"), Killed)
    assert_alike(found, train(Script().run))


def test_batches_that_differ_in_structure_on_members_are_no_sign_of_a_mistake(tmp_path: Path) -> None:
    """Two tasks take turns in the data: two members only ever see pairs, the others dicts with a key more."""
    kinds: dict[str, set[type]] = {}

    def collate(samples: list[Any]) -> Any:
        x, y = (torch.stack(tensors) for tensors in zip(*samples, strict=True))
        is_pair = any(torch.equal(x[0], first) for first in points().tensors[0][::8])
        return (x, y) if is_pair else {"x": x, "y": y.double(), "weight": torch.full((), 0.5)}

    def train(run: Run, name: str) -> Script:
        script = Script(run)
        script.loader = DataLoader(points(), 4, collate_fn=collate)
        script.prepare(reproducible=True)

        def body(batch: Any) -> None:
            kinds.setdefault(name, set()).add(type(batch))
            if isinstance(batch, tuple):
                script.loss(batch).backward()
            else:
                (batch["weight"] * script.loss((batch["x"], batch["y"].float()))).backward()

        script.train(body, epochs=2)
        return script

    found = World(tmp_path, Generation("abcd")).train(lambda run: train(run, run._member.session.worker))  # type: ignore[union-attr]
    assert kinds == {"a": {tuple}, "b": {dict}, "c": {tuple}, "d": {dict}}
    assert_alike(found, train(alone(), "alone"))
    assert kinds["alone"] == {tuple, dict}
