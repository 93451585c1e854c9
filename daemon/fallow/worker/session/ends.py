"""Why a worker waits no longer for a generation."""

from __future__ import annotations

from fallow.core.membership.messages import End, Finish, Outcome
from fallow.model import Exit, FallowError


class Dismissed(Exception):
    """The head has told this worker to end."""

    def __init__(self, end: End) -> None:
        super().__init__(end.reason)
        self.code = end.code
        self.reason = end.reason


class Answered(Exception):
    """What this worker waits for was complete on a member that is gone."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("complete on a member that is gone")
        self.agreed = outcome.agreed
        self.answer = outcome.answer


class OthersEnded(FallowError):
    """The others' scripts have ended, and this one waits for them: for the last time, or wrongly."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(
            f"the other members' scripts have ended at step {finish.steps} while this one waits for them; every "
            "member has to make the same run.updates, run.mean and run.barrier calls: no `if run.is_main` around them",
            Exit.DATA,
        )
        self.agreed = finish.agreed
        self.answer = finish.answer


def exit_code(code: int) -> Exit:
    """The documented exit code of that number, or that of a mistake in the software."""
    try:
        return Exit(code)
    except ValueError:
        return Exit.SOFTWARE
