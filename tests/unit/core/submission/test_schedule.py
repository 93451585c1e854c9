"""The schedule of `fallow local`."""

from __future__ import annotations

import pytest

from fallow.core.submission.schedule import Action, parse_schedule
from fallow.model import Exit, FallowError


def test_all_kinds_of_items_in_order_of_step() -> None:
    items = parse_schedule("store-kill@9,+2@1, -1@2,-m0@3,kill:1@4,stop:3@5,cont:3@6,+1@4,head-kill@8", 3)
    assert [(i.action, i.step, i.count, i.member) for i in items] == [
        (Action.ADD, 1, 2, None),
        (Action.RELEASE, 2, 1, None),
        (Action.RELEASE_MEMBER, 3, 0, 0),
        (Action.KILL, 4, 0, 1),
        (Action.ADD, 4, 1, None),
        (Action.STOP, 5, 0, 3),
        (Action.CONT, 6, 0, 3),
        (Action.HEAD_KILL, 8, 0, None),
        (Action.STORE_KILL, 9, 0, None),
    ]
    assert parse_schedule("", 1) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("+1@1,jump@2", r"item 2 \('jump@2'\) is none of"),
        ("+0@3", "changes nothing"),
        ("+1@1,+1@" + "9" * 5000, r"item 2 \('\+1@9{60}…'\) has a number of more than 18 digits"),
        ("-3@1", "only 2 of the members are left at step 1"),
        ("kill:2@1", "no member 2 by step 1; .* 0 to 1"),
        ("kill:0@1,-m0@2", "member 0 has left before step 2"),
    ],
)
def test_errors_point_at_the_bad_item(text: str, message: str) -> None:
    with pytest.raises(FallowError, match=message) as caught:
        parse_schedule(text, 2)
    assert caught.value.code is Exit.USAGE
