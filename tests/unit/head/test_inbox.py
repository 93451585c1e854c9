"""What the head's loop takes at once, and what it need not hear."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.core.membership.messages import Report
from fallow.core.protocol import AgentLeft, Beat, FromAgent
from fallow.head.app import HEARD_AT_ONCE, Head
from fallow.head.loop.inbox import AgentMessage, Inbox, Tick
from fallow.head.peers import agents
from head_in_process import serving
from waiting import WITHIN_S


def beat(step: int) -> Beat:
    return Beat(report=Report(node=1, boot=1, seq=step, term=0, edition=0, step=step))


def heard(peer: str, message: FromAgent | None = None) -> AgentMessage:
    return AgentMessage(peer, message or Beat(), 0.0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()) | st.none()))
def test_of_each_peer_all_is_heard_in_order_but_beats_that_a_later_one_follows(
    steps: list[tuple[str, bool] | None],
) -> None:
    """None: an item is taken. Every message bears its number."""
    inbox, taken, waiting = Inbox(), list[AgentMessage](), list[AgentMessage]()
    expected: dict[str, list[FromAgent]] = {"a": [], "b": []}
    for number, step in enumerate(steps):
        if step is None:
            if not inbox.empty():
                taken.append(inbox.get_nowait())  # type: ignore[arg-type]
            continue
        peer, is_beat = step
        item = heard(peer, beat(number) if is_beat else AgentLeft(code=number))
        waiting = [one for one in waiting if one not in taken]
        last = next((one for one in reversed(waiting) if one.peer == peer), None)
        if is_beat and last is not None and isinstance(last.message, Beat):
            waiting.remove(last)
            expected[peer].pop()
        waiting.append(item)
        expected[peer].append(item.message)
        inbox.put_nowait(item)
    while not inbox.empty():
        taken.append(inbox.get_nowait())  # type: ignore[arg-type]
    for peer, messages in expected.items():
        assert [one.message for one in taken if one.peer == peer] == messages


async def test_what_lies_in_the_socket_is_heard_before_a_tick_judges_who_is_silent() -> None:
    """Each message is received as soon as there is time, but a head that was stopped had none."""
    inbox, drained = Inbox(), 0

    async def drain() -> None:
        nonlocal drained
        drained += 1
        inbox.put_nowait(heard("late"))

    inbox.put_nowait(Tick())
    async with asyncio.timeout(WITHIN_S):
        assert await inbox.take(drain) == [heard("late")]
        assert await inbox.take(drain) == [Tick()]
        assert drained == 1, "it would never be its turn"
        inbox.put_nowait(heard("another"))
        assert await inbox.take(drain) == [heard("another")]
        assert drained == 1


async def test_a_message_counts_from_its_receipt_not_from_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard_at: list[float] = []
    monkeypatch.setattr(agents, "hear", lambda turn, peer, message, at: heard_at.append(at))
    async with serving(tmp_path) as head:
        await head.take(AgentMessage("a", Beat(), 3.0), AgentMessage("b", Beat(), 5.0))
    assert heard_at == [3.0, 5.0]


async def test_the_loop_has_its_turns_however_much_is_there_to_be_heard() -> None:
    count, inbox = 0, Inbox()

    async def recv() -> tuple[str, FromAgent]:
        nonlocal count
        count += 1
        if count > 100 * HEARD_AT_ONCE:
            raise ConnectionError
        return "a", beat(count)

    def receive(peer: str, message: FromAgent) -> None:
        inbox.put_nowait(heard(peer, message))

    head = SimpleNamespace(_router=SimpleNamespace(recv=recv), _receive=receive)
    hearing = asyncio.create_task(Head._hear(head))  # type: ignore[arg-type]
    async with asyncio.timeout(WITHIN_S):
        taken = [await inbox.take() for _ in range(10)]
    assert count <= 20 * HEARD_AT_ONCE
    assert all(len(items) == 1 for items in taken), "the newest beat"
    with pytest.raises(ConnectionError):
        await hearing
