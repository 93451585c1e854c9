"""What README and docs name is there, and what a user can say is named there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fallow.cli.main import COMMANDS
from fallow.config import SECTIONS
from fallow.core.script import _KEYS

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
TEXTS = ("README.md", *PAGES, "bench/README.md", "contrib/systemd/README.md")


def _code(text: str) -> str:
    """What is between backticks, and in blocks of code."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))


def _code_of(*names: str) -> str:
    return "\n".join(_code((ROOT / name).read_text()) for name in names)


def test_the_pages_name_every_command_and_every_key_of_a_script() -> None:
    code = _code_of("README.md", *PAGES)
    missing = [name for name in COMMANDS if not re.search(rf"(?<![\w-]){name}(?![\w-])", code)]
    missing += [key for key in _KEYS if f"{key}=" not in code]
    assert missing == []


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_of_settings_names_every_one(section: str) -> None:
    """Each section has a part of the page, whose heading names it."""
    text = (ROOT / "docs" / "settings.md").read_text()
    (part,) = re.findall(rf"^## `\[{section}\]`.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    code = _code(part)
    missing = [key for key in SECTIONS[section].__struct_fields__ if not re.search(rf"(?<![\w-]){key}(?![\w-])", code)]
    assert missing == []


@pytest.mark.parametrize(
    ("module", "name", "word"), [("api/run.py", "Run", "run"), ("loop/update.py", "Update", "update")]
)
def test_a_page_names_all_that_a_script_can_ask_of_a_run(module: str, name: str, word: str) -> None:
    """Read from the source: torch is not needed for that."""
    tree = ast.parse((ROOT / "daemon" / "fallow" / "worker" / module).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    names = [each.name for each in found.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
    names = [each for each in names if each not in _OF_THE_ENGINE]
    assert {"prepare", "updates"} <= set(names) or {"phase", "note"} <= set(names)
    code = _code_of("docs/training.md")
    assert [each for each in names if not re.search(rf"\b{word}\.{each}\b", code)] == []


_OF_THE_ENGINE = ("close",)
"""Methods of an update that are not for scripts."""


def test_the_readme_is_short() -> None:
    """Whoever wants more has the pages."""
    assert len((ROOT / "README.md").read_text().split()) <= 900


@pytest.mark.parametrize("name", TEXTS)
def test_links_and_modules_that_a_text_names_are_there(name: str) -> None:
    text, here = (ROOT / name).read_text(), (ROOT / name).parent
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        file, _, anchor = link.partition("#")
        target = here / file if file else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target.read_text()), link
    modules = {path for path in re.findall(r"`([\w/-]+\.py)", text) if "/" in path}
    places = (ROOT, ROOT / "daemon" / "fallow")
    assert [path for path in sorted(modules) if not any((place / path).exists() for place in places)] == []


def _anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
