"""A node with two workers: they end together, are reported of as one, and gather through their agent."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from agent_head import DEADLINE_S, Head, gone, until
from fallow.core.membership.messages import End, Finish, Gather, Gathered
from fallow.core.protocol.agents import Beat, EndAgent, Ended, EndNoted

FINISH = Finish(generation=1, steps=9, digest="d")
TELL_FINISH = f"say(finish=Finish(**{msgspec.to_builtins(FINISH)!r}));"


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[Head]:
    made = Head(tmp_path)
    await made.start()
    yield made
    await made.close()


async def test_a_worker_that_crashes_takes_its_sibling_with_it_and_one_end_is_told(head: Head) -> None:
    await head.launch_two()
    head.order(noted="if slot == 1: sys.stderr.write('out of memory'); sys.exit(3)")
    ended = await head.hear(Ended)
    assert (ended.node, ended.code, ended.signal, ended.tail) == (1, 3, None, "out of memory")
    assert not ended.is_ordered
    assert head.workers() == []
    head.send(EndNoted(node=1, boot=1))
    assert (await head.hear(Beat)).report is None
    assert [said for said in head.heard if isinstance(said, Ended)] == [ended]


async def test_the_end_is_told_when_both_have_finished_and_how_the_first_one_did(head: Head) -> None:
    await head.launch_two()
    first, second = await head.pids()
    await head.obeyed(head.order(noted="if slot == 0: say(has_state=True)"))
    head.order(noted=f"if slot == 0: {TELL_FINISH} sys.exit(0)")
    await until(lambda: gone(first))
    beat = await head.hear(Beat, lambda _: head.progress.pids == (second,))
    assert beat.report is not None
    assert beat.report.finish is None, "the other one has not"
    head.order(noted=f"{TELL_FINISH} sys.exit(0)")
    ended = await head.hear(Ended)
    assert (ended.code, ended.is_ordered) == (0, False)
    assert ended.report is not None
    assert ended.report.finish == FINISH


async def test_a_failure_after_the_training_counts_for_more_than_anothers_success(head: Head) -> None:
    await head.launch_two()
    first, _ = await head.pids()
    head.order(noted=f"if slot == 0: {TELL_FINISH} sys.exit(0)")
    await until(lambda: gone(first))
    head.order(noted=f"{TELL_FINISH} sys.exit(5)")
    assert (await head.hear(Ended)).code == 5


async def test_one_that_has_left_leaves_time_to_the_other(head: Head) -> None:
    await head.launch_two()
    first, second = await head.pids()
    head.order(noted="if slot == 0: say(left=2); sys.exit(0)")
    await until(lambda: gone(first))
    head.order(noted="say(left=2)")
    await head.report(lambda report: report.left == 2)
    assert not gone(second)
    head.order(noted="sys.exit(0)")
    ended = await head.hear(Ended)
    assert ended.report is not None
    assert (ended.code, ended.report.left) == (0, 2)


async def test_a_node_is_stopped_when_one_of_its_workers_is(head: Head) -> None:
    await head.launch_two()
    _, second = await head.pids()
    head.admit(beat_s=10 * DEADLINE_S)
    await head.beats(1)
    os.kill(second, signal.SIGSTOP)
    await head.report(lambda report: report.stopped_s > 0)
    head.order(end=End(code=75, reason="stopped", kill=True))
    ended = await head.hear(Ended)
    assert (ended.signal, ended.is_ordered) == (signal.SIGKILL, True)


async def test_a_node_reports_what_both_have_done(head: Head) -> None:
    await head.launch_two()
    await head.obeyed(head.order(noted="say(generation=3 + slot, given_up=1, prepared=4, healed=slot)"))
    order = head.order(noted="if slot == 0: say(generation=4); sys.stdout.flush()")
    report = await head.obeyed(order)
    assert (report.generation, report.prepared, report.given_up, report.healed) == (4, 4, 1, 1)


async def test_the_output_of_the_first_worker_is_the_nodes(head: Head) -> None:
    await head.launch_two()
    await head.obeyed(head.order(is_main=True, noted="print('worker', slot, flush=True)"))
    head.send(EndAgent(term=1, code=0, reason="test", kill_after_s=0.0))
    assert (await head.ended())[1] == "worker 0\n"


async def test_a_gather_within_the_node_needs_no_head(head: Head) -> None:
    await head.launch_two()
    part = "channel.send(Part(generation=1, key='node', part=b'of %d' % slot, within_node=True))"
    await head.obeyed(head.order(noted=part))
    for name in ("n0.0", "n0.1"):
        assert await head.printed(name, "node of 0 of 1\n") == "node of 0 of 1\n"
    await head.obeyed(head.order(noted=f"if slot == 1: {part}"))
    assert await head.printed("n0.1", 2 * "node of 0 of 1\n") == 2 * "node of 0 of 1\n", "it asked again"
    assert await head.printed("n0.0", "node of 0 of 1\n") == "node of 0 of 1\n"
    assert not [said for said in head.heard if isinstance(said, Gather)]


async def test_a_gather_of_all_nodes_goes_through_the_head(head: Head) -> None:
    await head.launch_two()
    part = "channel.send(Part(generation=2, key='all', part=b'%d' % slot))"
    await head.obeyed(head.order(noted=f"if slot == 1: {part}"))
    assert not [said for said in head.heard if isinstance(said, Gather)], "the other part is missing"
    head.order(noted=f"if slot == 0: {part}")
    gather = await head.hear(Gather)
    assert (gather.node, gather.generation, gather.key) == (1, 2, "all")
    assert msgspec.msgpack.decode(gather.part) == [b"0", b"1"]
    assert await head.hear(Gather) == gather, "said again until it is answered"
    others = msgspec.msgpack.encode([b"x", b"y"])
    head.send(Gathered(generation=2, key="all", parts=(others, gather.part)))
    for name in ("n0.0", "n0.1"):
        assert await head.printed(name, "all x y 0 1\n") == "all x y 0 1\n"
    heard = len(head.heard)
    await head.obeyed(head.order(noted=f"if slot == 0: {part}"))
    assert await head.printed("n0.0", 2 * "all x y 0 1\n") == 2 * "all x y 0 1\n", "from memory"
    await head.beats(15)
    assert not [said for said in head.heard[heard:] if isinstance(said, Gather)]
