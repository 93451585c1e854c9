"""The command line as a whole: help, errors, exit codes, speed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command_line import Fallow
from fallow.cli.main import wants_json
from fallow.model import Exit


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALLOW_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("FALLOW_DEBUG", raising=False)


def test_exit_codes_are_documented(fallow: Fallow) -> None:
    output = fallow("--help").out
    for code in Exit:
        assert f"    {int(code):<4}" in output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["statsu"], Exit.USAGE, "No such command 'statsu'. Did you mean status?"),
        (["grow", "r", "--by", "0"], Exit.USAGE, "--by"),
        (["completion"], Exit.USAGE, "Choose from: bash, zsh, fish"),
        (["status"], Exit.UNAVAILABLE, "start one with: fallow daemon"),
        (["drain", "r", "n[1-"], Exit.USAGE, "is no node list"),
        (["drain", "r", "n[1-100000000]"], Exit.USAGE, "names more than 100000 nodes"),
        (["drain", "r", "n[1000001-1000004,7],m3"], Exit.UNAVAILABLE, "no head is running"),
        (["shrink", "r", "--member", "n0", "--by", "1"], Exit.USAGE, "give one of the two"),
        (["status", ""], Exit.USAGE, "the name of the run is empty"),
        (["events", "--since", "9" * 20], Exit.USAGE, "--since"),
        (["usage", "--since", "yesterday"], Exit.USAGE, "give a day as 2026-01-31, or 7d"),
        (["testbed", "load", "--mean", "inf"], Exit.USAGE, "--mean"),
        (["prune", "--older-than", "1e308"], Exit.USAGE, "--older-than"),
        (["testbed", "up", "/proc/none"], Exit.CANTCREAT, "/proc/none cannot be made"),
        (["local", "--members", "1000000", "--", "true"], Exit.USAGE, "at most 512"),
        (["local", "--members", "2", "--schedule", "+1@x", "--", "true"], Exit.USAGE, "item 1 ('+1@x')"),
        (["local", "--members", "2", "--scheduel", "+1@3", "true", "--x"], Exit.USAGE, "--schedule"),
        (["run", "--", "true"], Exit.USAGE, "fallow submit"),
    ],
)
def test_errors_are_one_clear_line(words: list[str], code: Exit, message: str, fallow: Fallow) -> None:
    result = fallow(*words)
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1)
    assert result.err.startswith("fallow: ")
    assert message in result.err


def test_a_folder_that_is_gone_is_named_as_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallow: Fallow
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = fallow("local", "--members", "1", "--report", "r.json", "--", "true")
    assert (result.code, result.err) == (
        Exit.NOINPUT,
        "fallow: the current folder has been removed; cd to one that exists\n",
    )


@pytest.mark.parametrize("words", [["submit", "job.sh"], ["status"], ["events", "--follow"]], ids=" ".join)
def test_a_wrong_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], fallow: Fallow
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text("#!/bin/sh\n#FALLOW nodes=1:4\nfallow run -- python t.py\n")
    monkeypatch.setenv("FALLOW_CONFIG", str(tmp_path / "config.toml"))
    result = fallow(*words)
    assert (result.code, result.err.count("\n"), "(FALLOW_CONFIG names it)" in result.err) == (Exit.CONFIG, 1, True)


def test_no_testbed(fallow: Fallow) -> None:
    assert "fallow testbed up" in fallow("testbed", "status").out
    assert fallow("testbed", "status", "--json").json == []
    assert fallow("testbed", "down", "--all", "--json").json == {"down": []}


@pytest.mark.parametrize(("words", "code"), [([], Exit.UNAVAILABLE), (["--nonsense"], Exit.USAGE)])
def test_with_json_the_error_is_the_value(words: list[str], code: Exit, fallow: Fallow) -> None:
    result = fallow("status", "--json", *words)
    assert (result.code, result.json["error"]["code"], result.err) == (code, code, "")
    assert not wants_json(["local", "--", "x", "--json"]), "the script's own"


def test_a_bug_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch, fallow: Fallow) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("\x1b[31moops")

    monkeypatch.setattr("fallow.cli.operate.ask", broken)
    result = fallow("cancel", "r")
    assert result.code == Exit.SOFTWARE
    assert r"ZeroDivisionError: \x1b[31moops" in result.err
    assert "FALLOW_DEBUG=1" in result.err
    monkeypatch.setenv("FALLOW_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        fallow("cancel", "r")


def test_operator_commands_ask_the_head(monkeypatch: pytest.MonkeyPatch, fallow: Fallow) -> None:
    requests: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr("fallow.cli.operate.ask", lambda method, *_, **params: requests.append((method, params)) or 5)
    for words, method, params in (
        (["grow", "r", "--by", "2"], "grow", {"by": 2}),
        (["shrink", "r"], "shrink", {"by": 1}),
        (["shrink", "r", "--member", "n1", "--member", "n2"], "release", {"members": ["n1", "n2"]}),
        (["drain", "r", "n[01-02]", "x7"], "drain", {"nodes": ["n01", "n02", "x7"]}),
        *(([name, "r"], name, {}) for name in ("pause", "resume", "checkpoint", "cancel")),
        (["rollback", "r", "--to", "40"], "rollback", {"step": 40}),
    ):
        assert fallow(*words, "--json").json["run"] == "r"
        assert requests.pop() == (method, {"run": "r", **params})


def test_top_is_not_drawn_where_its_signs_cannot_be_seen_and_needs_textual(
    monkeypatch: pytest.MonkeyPatch, fallow: Fallow
) -> None:
    def stream(is_terminal: bool, encoding: str = "utf-8") -> Any:
        return SimpleNamespace(isatty=lambda: is_terminal, encoding=encoding)

    yes = stream(True)
    for errors, message in ((stream(False), "needs a terminal"), (stream(True, "iso8859-1"), "LC_ALL=C.UTF-8")):
        monkeypatch.setattr("fallow.cli.start.sys", SimpleNamespace(stdin=yes, stdout=yes, stderr=errors))
        result = fallow("top", "--demo")
        assert (result.code, message in result.err) == (Exit.USAGE, True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = fallow("top")
    assert (result.code, "pip install 'fallow[tui]'" in result.err) == (Exit.UNAVAILABLE, True)


def test_a_folder_beside_all_takes_nothing_down(monkeypatch: pytest.MonkeyPatch, fallow: Fallow) -> None:
    monkeypatch.setattr("fallow.testbed.cluster.Testbed.all", lambda: pytest.fail("all would go"))
    assert fallow("testbed", "down", "--all", "/nowhere").code == Exit.USAGE
