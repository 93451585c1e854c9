"""What a source archive holds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_source_archive_can_be_set_up_and_has_all_that_the_readme_points_at() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    there = set(project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    linked = re.findall(r"\]\(([^):#]+)[^)]*\)", (ROOT / "README.md").read_text())
    assert linked
    assert {"Makefile", "constraints.txt", *(link.split("/")[0] for link in linked)} - there == set()
