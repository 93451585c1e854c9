"""A name is a noun for what it holds, or a verb for what it does."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

BARE = frozenset(
    [
        "again",
        "ahead",
        "alone",
        "apart",
        "away",
        "back",
        "beside",
        "done",
        "due",
        "else",
        "gone",
        "here",
        "late",
        "likewise",
        "mostly",
        "off",
        "once",
        "out",
        "soon",
        "still",
        "such",
        "there",
        "whole",
        "yet",
        "both",
        "mine",
        "others",
        "ours",
        "same",
        "theirs",
        "these",
        "those",
        "allowed",
        "asked",
        "brought",
        "called",
        "came",
        "declined",
        "found",
        "given",
        "got",
        "granted",
        "heard",
        "held",
        "hurried",
        "kept",
        "known",
        "left",
        "lost",
        "made",
        "meant",
        "missed",
        "needed",
        "owed",
        "refused",
        "said",
        "seen",
        "sent",
        "shown",
        "spent",
        "taken",
        "told",
        "unstarted",
        "used",
        "wanted",
        "went",
        "written",
        "asking",
        "book",
        "deaf",
        "dud",
        "news",
        "prospect",
        "rest",
        "room",
        "standing",
        "story",
        "taboo",
        "wish",
    ]
)
"""Adverbs, pronouns and participles that say nothing alone, and everyday words that once had a private meaning here."""

CONTRACT = frozenset(
    (
        "BaseStart.refused",
        "CheckpointView.asked",
        "LimitView.used",
        "LoadResult.refused",
        "Row.ours",
        "SampleReport.lost",
    )
)
"""Fields of JSON that people and scripts read by these names."""


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Qualified name and line of everything that a module defines: classes, functions, arguments, variables."""

    def inside(node: ast.AST, scope: tuple[str, ...], owner: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            below, its_owner = scope, owner
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                below = (*scope, child.name)
                yield ".".join(below), child.lineno
                if isinstance(child, ast.ClassDef):
                    its_owner = child.name
                    if any("Enum" in ast.unparse(base) or "Flag" in ast.unparse(base) for base in child.bases):
                        continue  # states are named by participles
            elif isinstance(child, ast.arg):
                yield ".".join((*scope, child.arg)), child.lineno
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                yield ".".join((*scope, child.id)), child.lineno
            elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
                yield f"{owner}.{child.attr}", child.lineno
            yield from inside(child, below, its_owner)

    return inside(tree, (), "")


def test_no_name_is_a_bare_adverb_participle_or_pronoun() -> None:
    bare = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in ("daemon", "tui", "bench")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, line in names(ast.parse(path.read_text()))
        if name.rpartition(".")[2].strip("_").lower() in BARE and name not in CONTRACT
    ]
    assert not bare, "name what these hold or do:\n" + "\n".join(bare)
