"""What tests of the planner share."""

from __future__ import annotations

from typing import Any

from fallow.core.planning.asking import Ask
from fallow.core.planning.plan import Action, plan


def actions(*situation: Any, **more: Any) -> list[Action]:
    """Of the plan, in the order in which they are carried out. Args: as for `plan`."""
    return list(plan(*situation, **more).actions)


def asks(wishes: list[Action]) -> list[Ask]:
    return [wish for wish in wishes if isinstance(wish, Ask)]
