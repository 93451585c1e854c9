"""The checker of histories finds what is wrong in broken logs, and nothing in whole ones."""

from typing import Any

import pytest

from fallow.model import EventRecord
from history import check_history


def log(*told: tuple[str, dict[str, Any]]) -> list[EventRecord]:
    return [
        EventRecord(seq=number, at=float(number), run="r", kind=kind, text="", data=data)
        for number, (kind, data) in enumerate(told, 1)
    ]


def change(
    kind: str, generation: int, members: int, step: int | None, joined: str = "", left: str = ""
) -> tuple[str, dict[str, Any]]:
    """`joined`, `left`: a digit for each member."""
    data = {"generation": generation, "members": members, "first_step": step}
    return kind, data | {"joined": {f"n{n}": f"h{n}" for n in joined}, "left": [f"n{n}" for n in left]}


START = change("start", 1, 2, 0, "01")
SAVED = "checkpoint", {"step": 9, "generation": 1}
WHOLE = log(
    ("node", {}),
    START,
    change("absorb", 3, 3, 4, "2"),
    ("eject", {"member": "n1"}),
    change("eject", 4, 2, 6, "", "1"),
    SAVED,
    change("mixed", 5, 2, 9, "3", "0"),
    ("rollback", {"step": 4, "from_step": 12, "generation": 2}),
    change("start", 6, 2, 4),
    change("release", 8, 1, 6, "", "2"),
    ("lost", {}),
    change("start", 9, 1, 9, "4", "3"),
    change("suspend", 10, 0, None, "", "4"),
    change("start", 11, 2, 9, "14"),
    ("failed", {"member": "n1"}),
    ("lost", {}),
    ("back", {"member": "n1", "phase": "member"}),
    change("eject", 12, 1, 9, "", "4"),
    ("finished", {}),
    ("node", {}),
)


def test_nothing_is_wrong_in_a_whole_log() -> None:
    assert check_history(WHOLE) == []


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([START, change("absorb", 1, 3, 4, "2")], "generation 1 comes behind 1"),
        ([START, change("release", 2, 2, 4, "", "5")], "n5 left and was no member"),
        (
            [START, SAVED, change("eject", 2, 1, 7, "", "1")],
            "it begins at step 7, though a member had the state of step 8",
        ),
        ([START, ("lost", {}), change("start", 2, 1, 5, "2", "01")], "step 5 is neither the beginning"),
        (
            [START, ("rollback", {"step": 4, "generation": 1}), change("start", 2, 2, 5)],
            "step 5 comes behind a rollback to step 4",
        ),
        ([START, ("finished", {}), change("release", 2, 1, 4, "", "1")], "the run is over: it was finished"),
    ],
)
def test_what_is_wrong_is_told(told: list[tuple[str, dict[str, Any]]], words: str) -> None:
    (problem,) = check_history(log(*told))
    assert problem.startswith(f"run r, event {len(told)} ({told[-1][0]}): ")
    assert words in problem
