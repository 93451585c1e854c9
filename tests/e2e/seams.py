"""Places inside a step where tests do harm: around public methods of the engine, so the engine has no code for it.

`place("told", act)` has `act` called each time that this process comes to the place. In one step a member comes by:

`launch`: a part of the sums is about to leave
`wait`: all parts have left, and the member is about to wait for them
`certain`: it has the sums, and has told nobody
`told`: it has heard that all members have them; the script has not
`joint`: it has the answer of a `run.mean`, a `run.barrier` or the end of a call, which nobody else may have
`hand-over`: it is about to give, or to take over, the run's state
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from fallow.worker.loop import meeting
from fallow.worker.loop.exchange import Kind
from fallow.worker.loop.meeting import Meeting
from fallow.worker.reduction.reduction import Reduction
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Interrupted

PLACES = ("launch", "wait", "certain", "told", "joint", "hand-over")
_JOINT = (Kind.END, Kind.MEAN, Kind.BARRIER)

Act = Callable[[], object]


def place(name: str, act: Act) -> None:
    """Call `act` at that place, from now on."""
    match name:
        case "launch":
            for method in ("sum", "exchange"):
                _around(Group, method, before=act)
        case "wait":
            _around(Group, "wait_and_verify", before=act)
        case "certain" | "told":
            _around_telling(act, behind=name == "told")
        case "joint":
            _around_joint(act)
        case "hand-over":
            _around(meeting, "transfer", before=act)
        case _:
            raise ValueError(name)


def die() -> NoReturn:
    """Without a word, as in the out-of-memory killer's hands."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def cut_off(run: Any) -> NoReturn:
    """The connection to the others breaks just now, as if somebody else had died."""
    run._member.group.interrupt("cut on purpose")
    raise Interrupted("cut on purpose")


def once(act: Act, when: Callable[[], bool], count: int = 1) -> Act:
    """`act`, the `count`-th time that `when` holds."""
    times = 0

    def perhaps() -> None:
        nonlocal times
        if when():
            times += 1
            if times == count:
                act()

    return perhaps


def _around(owner: Any, name: str, before: Act) -> None:
    plain = getattr(owner, name)

    def seen(*args: Any, **kwargs: Any) -> Any:
        before()
        return plain(*args, **kwargs)

    setattr(owner, name, seen)


def _around_telling(act: Act, *, behind: bool) -> None:
    plain = Reduction.finish

    def finish(self: Reduction, tell: Callable[[Any], Any], **how: Any) -> Any:
        def telling(sums: Any) -> Any:
            if not behind:
                act()
            joined = tell(sums)
            if behind:
                act()
            return joined

        return plain(self, telling, **how)

    Reduction.finish = finish  # type: ignore[method-assign]


def _around_joint(act: Act) -> None:
    plain, kinds = Meeting.hear, {}

    def opened(self: Meeting, kind: Kind, **how: Any) -> None:
        kinds[self] = kind
        plain_open(self, kind, **how)

    def hear(self: Meeting) -> Any:
        heard = plain(self)
        if kinds[self] in _JOINT:
            act()
        return heard

    plain_open = Meeting.open
    Meeting.open, Meeting.hear = opened, hear  # type: ignore[method-assign]
