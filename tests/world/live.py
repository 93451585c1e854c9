"""A run whose members finish step after step, and a head that is well, stands still or is cut off from nodes."""

import dataclasses
from collections.abc import Callable

from fallow.core.membership import events as ev
from fallow.model import Doing, MemberPhase
from world.rig import TIMING, logs, started

BEAT_S, TICK_S = 0.5, 0.25


class Live:
    """Nodes report twice a second, the head ticks four times.

    Nodes that are `cut` train on, and the head does not hear them. Nodes that are `dead` do nothing, and the other
    members wait for them.

    Args:
        members: their number. They are nodes 1 to `members`.
        standbys: nodes beside them, for which there is no place.
        step_s: what a step takes.
    """

    def __init__(self, members: int, standbys: int = 0, step_s: float = BEAT_S) -> None:
        self.rig = started(members, timing=dataclasses.replace(TIMING, progress_s=300.0))
        self.rig.limit(members)
        for number in range(standbys):
            self.rig.join(f"s{number}")
        self.step_s = step_s
        self.cut: set[int] = set()
        self.dead: set[int] = set()
        self.told: list[ev.Instruction] = []
        self._died_at: float | None = None

    def die(self, *nodes: int) -> None:
        self.dead |= set(nodes)
        self._died_at = self.rig.at

    def live(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """Until the condition holds, for so long at most. Returns how long it took."""
        rig, began_at = self.rig, self.rig.at
        while rig.at - began_at < seconds and not until():
            rig.at += TICK_S
            if int(rig.at / TICK_S) % int(BEAT_S / TICK_S) == 0:
                self._beat()
            self._put(ev.Ticked(at=rig.at))
        return rig.at - began_at

    def stall(self, seconds: float) -> None:
        """The head's loop stands still, as when it waits for its store. Reports come in all the while."""
        for _ in range(int(seconds / BEAT_S)):
            self.rig.at += BEAT_S
            self._beat()
        self._put(ev.Ticked(at=self.rig.at))

    def freeze(self, seconds: float) -> None:
        """The head's process stands still (SIGSTOP). When it wakes up, its clock is heard before its sockets are."""
        self.rig.at += seconds
        self._put(ev.Ticked(at=self.rig.at))

    def nobody_is_lost(self) -> None:
        turn = self.told
        assert not [text for kind in ("eject", "lost", "abort", "probe") for text in logs(turn, kind)]
        root, nodes = self.rig.r.root, self.rig.r.nodes.values()
        assert (root.generation, root.highest) == (1, 1)
        assert all(node.phase in (MemberPhase.MEMBER, MemberPhase.READY) for node in nodes)

    def _beat(self) -> None:
        rig = self.rig
        stopped_at = rig.at if self._died_at is None else self._died_at
        for n in [n for n in rig.r.nodes if n not in self.cut | self.dead]:
            if n in rig.r.members and self._died_at is not None:
                how = {"doing": Doing.WAITING, "stalled_s": rig.at - stopped_at}
            elif n in rig.r.members:
                how = {"doing": Doing.WORKING, "stalled_s": rig.at % self.step_s}
            else:
                how = {"doing": Doing.OUTSIDE, "stalled_s": rig.at}
            step = int(stopped_at / self.step_s) if n in rig.r.members else 0
            self.told += rig.say(n, step=step, **how)

    def _put(self, event: ev.Event) -> None:
        self.told += self.rig.put(event)
