"""What README and docs name is there, and what a user can say is named there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fallow.cli.main import COMMANDS
from fallow.core.script import _KEYS

ROOT = Path(__file__).parents[2]
TEXTS = ("README.md", "docs/architecture.md", "contrib/bench/README.md", "contrib/systemd/README.md")


def _code(text: str) -> str:
    """What is between backticks, and in blocks of code."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))


def test_the_readme_names_every_command_and_every_key_of_a_script() -> None:
    code = _code((ROOT / "README.md").read_text())
    missing = [name for name in COMMANDS if not re.search(rf"(?<![\w-]){name}(?![\w-])", code)]
    missing += [key for key in _KEYS if f"{key}=" not in code]
    assert missing == []


def test_the_readme_names_all_that_a_script_can_ask_of_a_run() -> None:
    """Read from the source: torch is not needed for that."""
    tree = ast.parse((ROOT / "daemon" / "fallow" / "worker" / "api" / "run.py").read_text())
    (run,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Run")
    names = [each.name for each in run.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
    assert {"prepare", "steps", "epochs"} <= set(names)
    code = _code((ROOT / "README.md").read_text())
    assert [name for name in names if not re.search(rf"\brun\.{name}\b", code)] == []


@pytest.mark.parametrize("name", TEXTS)
def test_links_and_modules_that_a_text_names_are_there(name: str) -> None:
    text, here = (ROOT / name).read_text(), (ROOT / name).parent
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (here / link).exists()] == []
    modules = {path for path in re.findall(r"`([\w/-]+\.py)", text) if "/" in path}
    places = (ROOT, ROOT / "daemon" / "fallow")
    assert [path for path in sorted(modules) if not any((place / path).exists() for place in places)] == []
