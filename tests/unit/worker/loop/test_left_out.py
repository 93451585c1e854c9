"""A script that had met the members, and finds them somewhere else: they trained without it for a while."""

from __future__ import annotations

import pytest

from fallow.model import Exit, FallowError
from fallow.worker.loop.place import Place, Position


def in_call(number: int, *, in_sync: bool = True) -> Place:
    """A script without run.epochs, in its run.updates call of that number."""
    place = Place(in_sync=False)
    place.joined, place.in_sync = True, in_sync
    for _ in range(number + 1):
        place.begin_call()
    place.position = Position(call=number)
    return place


def test_in_the_same_call_it_goes_on() -> None:
    place = in_call(2)
    place.position = Position(call=2, step=40)
    place.trained_without()
    assert not place.elsewhere(2)
    assert place.in_sync


def test_to_a_later_call_it_comes_as_a_newcomer_does() -> None:
    place = in_call(2)
    place.position = Position(call=4, step=40)
    place.trained_without()
    assert place.elsewhere(2)
    assert not place.in_sync
    assert [place.behind(place.begin_call()) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("position", [Position(call=1, step=9), Position(call=0, loop=1, inside=True, step=9)])
def test_where_it_does_not_come_any_more_it_ends_for_another_process(position: Position) -> None:
    place = in_call(2)
    place.position = position
    place.trained_without()
    with pytest.raises(FallowError, match=r"the members are at step 9, in a part of the script") as caught:
        place.elsewhere(2)
    assert caught.value.code is Exit.TEMPFAIL


@pytest.mark.parametrize("epoch", [3, 4])
def test_one_that_was_still_on_its_way_looks_whether_its_epoch_is_theirs(epoch: int) -> None:
    place = in_call(0, in_sync=False)
    place.epoch_entered = 0, 3
    place.position = Position(inside=True, loop_epoch=epoch)
    place.trained_without()
    assert not place.elsewhere(0)
    assert place.wrong_epoch is (epoch != 3)
