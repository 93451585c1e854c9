"""Histories of the simulated world: nothing that must not happen does, whatever fails.

The seeds of the soak are those of `FALLOW_SOAK_SEEDS=FIRST:COUNT`; one seed plays one history again.
"""

import itertools
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import pytest

from fallow.core.membership import events as ev
from fallow.core.membership.tables import NODE, RUN
from history import check_history
from world.faults import FAULTS
from world.rig import notices
from world.world import OF_MESSAGES, World, play

CHUNK = 100
"""Seeds of one test: enough for every kind of fault to fire."""
SOAK = "1000000:50000"


class Played(NamedTuple):
    """What came of some histories."""

    fired: Counter[str]
    "faults"
    rows: Counter[str]
    "of the machine's tables"
    violations: list[str]

    def told(self) -> str:
        faults = ", ".join(f"{name} {count}" for name, count in self.fired.most_common())
        unused = sorted(all_rows() - self.rows.keys())
        return f"faults that fired: {faults}\nrows that were never carried out: {', '.join(unused) or 'none'}"


def all_rows() -> set[str]:
    return {fact.name for fact in NODE} | {f"{phase}: {rule.name}" for phase, rules in RUN.items() for rule in rules}


def histories(first: int, count: int) -> Played:
    found = Played(Counter(), Counter(), [])
    for seed in range(first, first + count):
        try:
            world = play(seed)
        except Exception as error:
            found.violations.append(str(error) or f"seed {seed}: {error!r}")
        else:
            found.fired.update(world.fired)
            found.rows.update(world.rules)
    return found


@pytest.mark.parametrize("chunk", range(20))
def test_nothing_forbidden_happens_and_everybody_trains_in_the_end(
    chunk: int, record_property: Callable[[str, object], None]
) -> None:
    played = histories(chunk * CHUNK, CHUNK)
    assert not played.violations, played.violations[0]
    record_property("fired", dict(played.fired))  # `conftest` tells of all chunks together
    assert FAULTS.keys() | OF_MESSAGES <= played.fired.keys()


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_nothing_forbidden_happens_in_fifty_thousand_histories(capsys: pytest.CaptureFixture[str]) -> None:
    """On all processors."""
    first, count = map(int, os.environ.get("FALLOW_SOAK_SEEDS", SOAK).split(":"))
    starts = range(first, first + count, CHUNK)
    counts = [min(CHUNK, first + count - start) for start in starts]
    all_played = Played(Counter(), Counter(), [])
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for played in pool.map(histories, starts, counts):
            all_played.fired.update(played.fired)
            all_played.rows.update(played.rows)
            all_played.violations.extend(played.violations)
    with capsys.disabled():
        print(f"\n{count} histories from seed {first}: {len(all_played.violations)} violations\n{all_played.told()}")
    assert not all_played.violations, "\n".join(told.partition("\n")[0] for told in all_played.violations)
    assert count < CHUNK or FAULTS.keys() | OF_MESSAGES <= all_played.fired.keys()


def test_a_history_is_the_same_each_time() -> None:
    one, other = play(5), play(5)
    assert (one.logs, one.fired, one.counts, one.rules) == (other.logs, other.fired, other.counts, other.rules)


def undisturbed() -> World:
    """All train, and nothing happens."""
    w = World(3, faults_s=0.0)
    w.loss = w.poison = 0.0
    w.total = 10_000
    w.run_until(w.t + 15)
    assert len(w.head.machine.roster.present()) == len(w.hosts) > 2
    return w


def release(w: World, *nodes: int) -> None:
    w.head.receive(("event", lambda at: ev.Release(at=at, nodes=nodes, limit=8, reason="asked")))


def loses_its_head(w: World, order: int) -> None:
    """The head dies for good behind so many further orders."""
    deliver, left = w.to_agent, itertools.count(order, -1)

    def to_agent(name: str, message: tuple[Any, ...]) -> None:
        w.head.alive = w.head.alive and (message[0] != "order" or next(left) > 0)
        if w.head.alive:
            deliver(name, message)

    w.to_agent = to_agent  # type: ignore[method-assign]


@notices("members hear of a commit before its newcomers", False)
@pytest.mark.parametrize("releases", [False, True])
def test_a_head_that_dies_between_any_two_orders_of_a_change_holds_nobody_up(releases: bool) -> None:
    """Members go over to a generation all of whose members have heard of it, or train on in the old one."""
    for order in itertools.count():
        w = undisturbed()
        loses_its_head(w, order)
        w.add_host()
        release(w, *((2,) if releases else ()))
        w.run_until(w.t + 20)
        steps = w.counts["steps"]
        w.run_until(w.t + 10)
        assert w.counts["steps"] > steps + 5, f"it dies behind order {order}"
        if w.head.alive:
            assert len(w.head.machine.roster.present()) == 7 - releases, "nothing has changed"
            return


def dies_at_write(w: World, number: int, *, is_written: bool) -> None:
    """The head dies at that further write, which takes effect or not; another one comes."""
    save, left = w.head._save, itertools.count(number, -1)

    def save_unless_last(writes: dict[str, bytes | None], logs: list[ev.Log]) -> bool:
        if next(left):
            return save(writes, logs)
        if is_written:
            save(writes, logs)
        return False

    w.head._save = save_unless_last  # type: ignore[method-assign]


def absorb(w: World) -> None:
    w.add_host()


def let_go(w: World) -> None:
    release(w, 2)


def lose(w: World) -> None:
    w.hosts["h1"].lose_power()


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("change", [absorb, let_go, lose])
def test_a_head_that_dies_at_any_write_of_a_change_leaves_it_to_the_next_one(
    change: Callable[[World], None], is_written: bool
) -> None:
    """Nobody knows whether the write took effect."""
    for number in itertools.count():
        w = undisturbed()
        release(w)
        w.run_until(w.t + 1)
        head, before = w.head, w.store.root.generation
        dies_at_write(w, number, is_written=is_written)
        change(w)
        w.run_until(w.t + 10)
        if change is let_go and w.store.root.generation == before:
            change(w)  # whoever asked had no answer, and asks again
        w.run_until(w.t + 20)
        root, steps = w.store.root, w.counts["steps"]
        assert (root.generation > before, root.change) == (True, None), f"it dies at write {number}"
        assert sorted(w.head.machine.roster.present()) == sorted(host.node for host in w.running() if host.workers)
        w.run_until(w.t + 10)
        assert w.counts["steps"] > steps + 5, f"it dies at write {number}"
        assert check_history(w.store.events) == []
        if w.head is head:
            assert number > 3, "number, votes, commit and end of the change are written"
            return


def test_a_node_on_which_every_group_breaks_for_good_costs_the_others_little() -> None:
    """It comes back with new processes, again and again."""
    w = undisturbed()
    steps, bad = w.counts["steps"], w.hosts["h1"]
    bad.breaks_until = w.t + 1000
    w.run_until(w.t + 60)
    assert w.counts["steps"] > steps + 60
    roster = w.head.machine.roster
    assert {failure.host for failure in roster.failures.failures} == {bad.name}
    assert roster.root.highest < 30


def test_an_agent_that_lies_about_the_head_ends_neither_it_nor_the_training() -> None:
    """Its reports count for nothing, but the others' steps show that its node is well."""
    w = undisturbed()
    head, steps, members = w.head, w.counts["steps"], w.head.machine.roster.present()
    w.hosts["h1"].lies_until = w.t + 1000
    w.run_until(w.t + 40)
    assert (w.head, head.alive, head.machine.roster.present()) == (head, True, members)
    assert w.counts["steps"] > steps + 20
