"""Where a newcomer's script meets the members, in the order in which `Loop` asks; no process groups."""

from collections.abc import Callable, Iterator

import msgspec
import pytest

from fallow.core.membership.failures import Stranger
from fallow.model import FallowError
from fallow.worker.api.run import Run
from fallow.worker.loop.place import Place, Position
from fallow.worker.transport.group import Group


class Script:
    """A member's side of the loops; each call of `steps` is one step long.

    Args:
        members: whose position a newcomer takes over in its first call; None: it is the first member.
        hint: epoch that the head tells it.
    """

    def __init__(self, members: Place | None = None, hint: int = 0) -> None:
        self.place = Place(in_sync=False)
        self._members = members
        self._hint = hint
        self.made: list[str] = []

    def epochs(self, n: int) -> Iterator[int]:
        return self.place.epochs(n, lambda: self._hint, self.place.finish_left_loop)

    def steps(self, name: str) -> Iterator[str]:
        place = self.place
        place.finish_left_loop()
        call = place.begin_call()
        if not place.has_joined:
            if self._members is not None:
                place.position = msgspec.structs.replace(self._members.position)
            place.has_joined = True
        if place.members_are_past(call):
            return
        place.begin_call_with_members()
        entered = f" {place.mark.loop, place.mark.epoch}" if place.mark.inside else ""
        self.made.append(f"{name}{entered}")
        place.position.call_steps = 1
        yield self.made[-1]
        place.position.finish_operation(b"", 1)
        place.position.finish_call()


def several(script: Script) -> Iterator[str]:
    for _ in script.epochs(2):
        yield from script.steps("a")
    for _ in script.epochs(3):
        yield from script.steps("b")
        yield from script.steps("c")
    for name in "defg":
        yield from script.steps(name)


def left(script: Script) -> Iterator[str]:
    for _ in script.epochs(2):
        yield from script.steps("f")
        break
    for epoch in script.epochs(5):
        yield from script.steps("a")
        if epoch == 1:
            break
    yield from script.steps("b")
    yield from script.steps("c")
    for _ in script.epochs(3):
        yield from script.steps("d")
    yield from script.steps("e")


def held(script: Script) -> Iterator[str]:
    kept = script.epochs(5)  # as a progress bar does
    for epoch in kept:
        yield from script.steps("a")
        if epoch == 1:
            break
    for _ in script.epochs(3):
        yield from script.steps("b")
    yield from script.steps("c")
    kept.close()  # type: ignore[attr-defined]
    yield from script.steps("d")


@pytest.mark.parametrize("way", [several, left, held])
@pytest.mark.parametrize("stale", [False, True])
def test_a_newcomer_begins_with_the_call_that_the_members_are_in(
    way: Callable[[Script], Iterator[str]], stale: bool
) -> None:
    whole = list(way(Script()))
    for number, there in enumerate(whole):
        first = Script()
        members = way(first)
        for _ in range(number + 1):
            at = next(members)
        assert at == there
        newcomer = Script(first.place, 0 if stale else first.place.epoch)
        assert list(way(newcomer)) == whole[number:]
        assert list(members) == whole[number + 1 :]
        assert newcomer.place.position == first.place.position


def test_a_newcomer_that_leaves_a_loop_by_what_is_another_thing_now_is_a_stranger() -> None:
    """As `while run.step < n` is: it has passed the members' place without reaching it."""

    def trains(script: Script, rounds: int) -> Iterator[str]:
        for _ in range(rounds):
            yield from script.steps("a")

    first = Script()
    members = trains(first, 3)
    for _ in range(3):
        next(members)
    newcomer = Script(first.place)
    assert list(trains(newcomer, 1)) == []
    assert newcomer.place.is_astray
    arrived = Script(first.place)
    assert list(trains(arrived, 3)) == ["a"]
    assert not arrived.place.is_astray
    with pytest.raises(Stranger, match="passed the members' place"):
        list(newcomer.epochs(2))


def test_loops_over_epochs_are_not_nested() -> None:
    script = Script()
    outer = script.epochs(2)
    next(outer)
    assert list(script.epochs(3)) == [0, 1, 2]
    with pytest.raises(FallowError, match=r"run\.epochs inside of a run\.epochs loop"):
        next(outer)


def test_who_ends_without_having_come_to_the_members_has_not_finished_the_training() -> None:
    run = Run(None, Group(0, 0, 1, None))
    place = run._place
    place.has_joined, place.in_sync = True, False
    place.position.call_steps = 1
    with pytest.raises(Stranger):
        run._finish()


def test_a_checkpoint_of_an_older_version_counts_calls_from_the_scripts_beginning() -> None:
    saved = msgspec.structs.asdict(Position(step=7, loop=1, inside=True, loop_epoch=3, call=2))
    older = {**saved, "call": 9, "loop_call": 7}
    assert Position.of(older) == Position.of(saved)
