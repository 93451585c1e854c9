"""The table of scenarios names tests that exist and leaves no scenario out."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "elastic" / "README.md").read_text()
SCENARIOS = {"H": 14, "T": 10, "E": 10, "N": 11, "R": 4, "D": 6, "P": 2, "O": 2, "S": 9}


ROWS = [line for line in TABLE.splitlines() if line.startswith("| ")]
NAMING = [(line, named) for line in ROWS if (named := re.findall(r"`(test_\w+)`", line))]


def test_every_scenario_has_a_row() -> None:
    rows = "\n".join(line.split("|")[1] for line in ROWS)
    wanted = {f"{letter}{number}" for letter, last in SCENARIOS.items() for number in range(1, last + 1)}
    assert wanted - set(re.findall(r"\b[A-Z]\d+\b", rows)) == set()


def test_the_table_says_how_each_scenario_is_tested() -> None:
    """Real processes, one part against its contract, or pure: by the folder of the tests that are named."""
    kinds = {"unit": "pure", "world": "pure", "contract": "contract"}
    known = {
        name: kinds.get(path.relative_to(TESTS).parts[0], "processes")
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    for line, named in NAMING:
        told = set(line.split("|")[3].strip().split(", "))
        here = {"processes"} if re.search(r"every (run|absorb) here", line) else set()
        assert told == {known[name] for name in named} | here, line


def test_a_test_of_each_scenario_is_named_after_it() -> None:
    """Rows that name none say which other row it is, or why there is none."""
    for line, named in NAMING:
        for scenario in re.findall(r"\b[A-Z]\d+\b", line.split("|")[1]):
            words = {word for name in named for word in name.split("_")}
            assert scenario.lower() in words or "every run here" in line or "there is no" in line, line
