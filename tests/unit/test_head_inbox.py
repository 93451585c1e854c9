"""What the head's loop takes at once."""

from __future__ import annotations

import asyncio

from fallow.head.inbox import TOGETHER, Heard, Intake, Item, Tick
from fallow.model import AgentBeat


def test_messages_that_wait_are_taken_together_and_nothing_changes_its_place() -> None:
    inbox: asyncio.Queue[Item] = asyncio.Queue()
    messages = [Heard(f"peer {number}", AgentBeat(alive=[])) for number in range(TOGETHER + 3)]
    first, second = Tick(), Tick()
    for item in (*messages, first, second, messages[0]):
        inbox.put_nowait(item)
    intake = Intake(inbox)

    async def all_of_them() -> list[list[Item]]:
        return [await intake.take() for _ in range(5)]

    assert asyncio.run(all_of_them()) == [
        messages[:TOGETHER],
        messages[TOGETHER:],
        [first],
        [second],
        messages[:1],
    ]
