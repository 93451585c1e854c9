"""What the head keeps of a run's membership stays the same, however long the run lasts and however many come and go."""

from __future__ import annotations

import pickle

import pytest

from fallow.core.membership import events as ev
from fallow.core.membership.gather import Gathers
from fallow.core.membership.messages import Gather
from world.rig import Rig

MEMBERS, HOUR_S, CHANGE_S, TICK_S = 100, 3600, 30, 5
MARGIN = 1.1
"""Numbers and texts grow by a digit or two."""


class Day:
    """A run of a hundred nodes. Twice a minute one of them is lost or leaves, and another comes in its place."""

    def __init__(self) -> None:
        self.rig = Rig(minimum=MEMBERS, shards=MEMBERS, maximum=MEMBERS, limit=MEMBERS, validate=False)
        self.gathers = Gathers()
        self.came = 0
        for _ in range(MEMBERS):
            self.come()
        self.rig.change(0)

    def come(self) -> None:
        self.came += 1
        self.rig.join(f"h{self.came % (2 * MEMBERS)}", token=f"t{self.came}")

    def hour(self) -> None:
        rig = self.rig
        for second in range(0, HOUR_S, TICK_S):
            rig.at += TICK_S
            for n in rig.r.present():
                rig.say(n, step=int(rig.at))
            rig.put(ev.Ticked(at=rig.at))
            if second % CHANGE_S == 0:
                self.change(is_loss=second % (2 * CHANGE_S) == 0)

    def change(self, *, is_loss: bool) -> None:
        rig, oldest = self.rig, self.rig.r.members[0]
        if is_loss:
            rig.gone(oldest, signal=9)
        else:
            rig.release(oldest)
        self.build()
        if not is_loss:
            rig.gone(oldest, code=0)
        for n in [n for n in rig.said if n not in rig.r.nodes]:
            del rig.said[n], rig.orders[n]
        rig.completed.clear()
        self.come()
        self.build()
        assert len(rig.r.present()) == MEMBERS

    def build(self) -> None:
        ballot, step = self.rig.ballot, int(self.rig.at)
        self.gathers.open(ballot.change.generation, ballot.members)
        for n in ballot.members:
            part = Gather(node=n, generation=ballot.change.generation, key="addresses", part=b"a" * 100)
            self.gathers.take(part)
        self.rig.change(step)

    def memory_bytes(self) -> int:
        return len(pickle.dumps((self.rig.m.state, self.gathers)))

    def durable_bytes(self) -> int:
        return sum(map(len, self.rig.store.values()))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hours", [2, pytest.param(24, marks=pytest.mark.soak)])
def test_memory_and_store_are_as_large_after_a_day_as_after_an_hour(hours: int) -> None:
    day = Day()
    day.hour()  # in which all members have been replaced
    memory, durable = day.memory_bytes(), day.durable_bytes()
    for _ in range(hours - 1):
        day.hour()
    assert day.memory_bytes() <= memory * MARGIN
    assert day.durable_bytes() <= durable * MARGIN
    assert day.came == MEMBERS + hours * HOUR_S // CHANGE_S
