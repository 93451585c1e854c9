"""A large run: all members answer one by one, and what each says costs no look at all the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fallow.core.nodes import events as ev
from fallow.core.nodes.roster import Roster
from world.rig import Rig

MANY, FEW = 200, 12


def many() -> Rig:
    return Rig(MANY, maximum=MANY + 1, limit=MANY + 1, shards=MANY + 1, validate=False)


class Looks:
    """Counts goings through all members, or through all nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        for name in ("present", "standbys", "generations_that_may_step", "fitting"):
            monkeypatch.setattr(Roster, name, self._counted(name, getattr(Roster, name)))

    def _counted(self, name: str, look: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.counts[name] += 1
            return look(*args)

        return counted

    def take(self) -> int:
        count = self.counts.total()
        self.counts.clear()
        return count


@pytest.mark.parametrize("order", [list, lambda nodes: nodes[::-1], lambda nodes: nodes[1::2] + nodes[::2]])
def test_what_one_says_costs_no_look_at_all(
    order: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = many()
    looks = Looks(monkeypatch)
    for number in range(MANY):
        rig.expect(f"h{number}")
    assert looks.take() <= FEW, "nobody is a member by being on the way"
    for n in order(list(rig.r.nodes)):
        rig.say(n, ready=rig.contract)
    assert looks.take() <= 6 * MANY, "who is ready may be the last one that was missing"
    for generation in (1, 2):
        nodes = order(rig.ballot.members)
        for n in nodes:
            assert rig.r.root.generation < generation
            rig.say(n, prepared=generation, given_up=generation - 1)
        assert looks.take() <= FEW
        for n in nodes:
            rig.arrive(n, generation, 5)
        assert looks.take() <= FEW
        assert len(rig.completed[-1].members) == MANY + 1 - generation
        for n in nodes:
            rig.say(n, step=6)
        assert looks.take() == 0
        rig.gone(7, signal=9)
        looks.take()


def test_a_change_writes_what_it_changes_and_tells_each_once() -> None:
    rig = many()
    for number in range(MANY):
        rig.join(f"h{number}")
    rig.change()
    n = rig.join("one more")
    turn = rig.vote()
    assert set(turn.writes) == {"root", f"node/{n}"}
    assert len([i for i in turn.then if isinstance(i, ev.Send)]) == MANY + 1
