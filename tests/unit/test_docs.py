"""What the documentation says is so: its code runs, its commands parse, its names and links are there, it is short.

A block of code that cannot be tested has a comment `<!-- not run: why -->` in front of it.
"""

import ast
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from bench import __main__ as bench
from fallow.cli.main import COMMANDS, cli
from fallow.cli.submit import prepare
from fallow.config import load_config
from fallow.core.submission.sbatch_line import split
from fallow.core.submission.sbatch_table import FALLOW_KEYS
from fallow.core.submission.schedule import parse_schedule
from fallow.core.submission.script import parse_script

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
FRONT = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
OURS = (*FRONT, *PAGES)
TEXTS = (*OURS, "CHANGELOG.md", "bench/README.md", "contrib/systemd/README.md")
LIMITS = {"README.md": 800, "CONTRIBUTING.md": 600} | dict.fromkeys(PAGES, 1500)
"""Text -> words."""
LANGUAGES = {"python", "bash", "toml", "text"}


class Block(NamedTuple):
    """A fenced block of code."""

    where: str
    "file and line"
    language: str
    code: str
    excuse: str
    "why it is not run"


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _blocks(name: str) -> list[Block]:
    text = _read(name)
    fence = re.compile(
        r"(?:<!-- not run: (?P<excuse>.+?) -->\n)?^```(?P<language>\S*)\n(?P<code>.*?)^```$", re.M | re.S
    )
    found = [(text[: each.start("code")].count("\n"), each) for each in fence.finditer(text)]
    assert {each["language"] for _, each in found} <= LANGUAGES, name
    return [Block(f"{name}:{line}", each["language"], each["code"], each["excuse"] or "") for line, each in found]


BLOCKS = [block for name in OURS for block in _blocks(name)]


def _in(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and not block.excuse]


def _inline(name: str) -> list[str]:
    """What is between single backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", _read(name), flags=re.M | re.S))


def _code(*names: str) -> str:
    return "\n".join("\n".join(re.findall(r"```.*?```|`[^`\n]+`", _read(name), re.DOTALL)) for name in names)


# Length and form.


@pytest.mark.parametrize("name", LIMITS)
def test_a_text_is_short(name: str) -> None:
    assert len(_read(name).split()) <= LIMITS[name]


def test_the_changelog_has_one_short_line_a_change() -> None:
    changes = [line for line in _read("CHANGELOG.md").partition("\n## ")[2].splitlines()[1:] if line]
    assert [line for line in changes if not line.startswith(("- ", "#")) or len(line.split()) > 26] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_answers_one_question(name: str) -> None:
    (title,) = re.findall(r"^# (.+)$", re.sub(r"^```.*?^```$", "", _read(name), flags=re.M | re.S), re.M)
    assert title.endswith("?") or name == "docs/index.md"


# Names and links.


@pytest.mark.parametrize("name", TEXTS)
def test_links_and_modules_that_a_text_names_are_there(name: str) -> None:
    text, here = _read(name), (ROOT / name).parent
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        file, _, anchor = link.partition("#")
        target = here / file if file else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target.read_text()), link
    modules = set(re.findall(r"`([\w/-]+\.py)\b", text)) - {"train.py", "evaluate.py"}
    assert [
        module for module in sorted(modules) if not any(f"/{path}".endswith(f"/{module}") for path in _MODULES)
    ] == []


_MODULES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("daemon", "tui", "tests", "contrib")
    for path in (ROOT / folder).rglob("*.py")
]


def _anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_a_source_archive_can_be_set_up_and_has_all_that_the_readme_points_at() -> None:
    project = tomllib.loads(_read("pyproject.toml"))
    there = set(project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    linked = re.findall(r"\]\(([^):#]+)[^)]*\)", _read("README.md"))
    assert linked
    assert {"Makefile", "constraints.txt", *(link.split("/")[0] for link in linked)} - there == set()


def test_the_pages_name_every_key_of_a_script() -> None:
    code = _code("README.md", *PAGES)
    assert [key for key, form in FALLOW_KEYS.items() if f"{key}{'=' if form else ''}" not in code] == []


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
    code = _code("docs/calls.md")
    assert [each for each in names if not re.search(rf"\b{word}\.{each}\b", code)] == []


_OF_THE_ENGINE = ("has_begun", "close", "depends_on_step")
"""Methods of an update that are not for scripts."""


def test_the_texts_that_refuse_a_script_are_said_somewhere() -> None:
    rows = [[cell.strip() for cell in line.split("|")] for line in _read("docs/refused.md").splitlines()]
    told = [text for row in rows if len(row) > 3 for text in re.findall(r"`([^`]+)`", row[2]) if row[2][0] == "`"]
    assert len(told) > 20
    files = (ROOT / "daemon" / "fallow" / "worker").rglob("*.py")
    said = "".join(path.read_text() for path in [*files, *(ROOT / "tests").rglob("test_*.py")])
    assert [text for text in told if text not in said] == []


# Pages and the picture that commands make.


def test_the_pages_that_are_made_from_the_code_are_up_to_date(tmp_path: Path) -> None:
    """In a process of their own: what other tests have asked of the commands shows in their help."""
    subprocess.run([sys.executable, str(ROOT / "contrib" / "docs" / "reference.py"), str(tmp_path)], check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(made) == ["commands-head.md", "commands-without-cluster.md", "commands.md", "settings.md"]
    for file, text in made.items():
        assert text == _read(f"docs/{file}"), f"{file}: run make reference"


async def test_the_picture_is_up_to_date_and_asks_nobody_for_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("textual")
    monkeypatch.setenv("TZ", "UTC")
    made = await runpy.run_path(str(ROOT / "contrib" / "docs" / "picture.py"))["draw"]()
    assert made == _read("docs/images/top.svg"), "run: make picture"
    assert re.findall(r"url\((?!#)[^)]*\)|href=|@import", made) == []


# Code.


@pytest.mark.parametrize("block", _in("toml"), ids=lambda block: block.where)
def test_a_configuration_loads(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(block.code)
    if "[site]" in block.code:
        load_config({"HOME": str(tmp_path)}, system_file=file)
    else:
        load_config({"FALLOW_CONFIG": str(file)}, system_file=tmp_path / "none")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands of the documentation name."""
    for name in ("train.sbatch", "train.py", "jobs.txt"):
        (tmp_path / name).write_text("#!/bin/sh\nfallow run -- python train.py\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FALLOW_CONFIG", os.devnull)
    monkeypatch.setenv("FALLOW_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


@pytest.mark.parametrize("block", _in("bash"), ids=lambda block: block.where)
def test_a_command_is_one_that_there_is(block: Block, desk: Path) -> None:
    if block.code.startswith("#!"):
        assert parse_script(block.code, "script").settings
    for line in block.code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line.partition(" > ")[0], comments=True):
            _parse(words)


def _parse(words: list[str]) -> None:
    """Raises unless the command and its options exist."""
    program, *rest = words
    if re.match(r"[A-Z_]+=", program):
        if rest:
            _parse(rest)
    elif program == "eval":
        _parse(shlex.split(rest[0].removeprefix("$(").removesuffix(")")))
    elif Path(program).name == "fallow":
        _parse_fallow(rest)
    elif program == "make":
        _parse_make(rest)
    elif program == "salloc":
        _parse(rest[next(at for at, word in enumerate(rest) if not word.startswith("-")) :])
    elif program == "pip":
        wanted = re.findall(r"\[([\w,]+)\]", " ".join(rest))
        extras = re.findall(r"^(\w+) = \[", _read("pyproject.toml"), re.M)
        assert set(",".join(wanted).split(",")) <= set(extras), words
    elif Path(program).name == "python" and rest[:2] == ["-m", "bench"]:
        bench.parse(rest[2:])
    elif words[:2] == ["python", "-m"]:
        package, *below = rest[1].split(".")
        spec = importlib.util.find_spec(package)  # of the package alone: nothing is imported for that
        assert spec is not None, words
        assert spec.origin is not None, words
        assert Path(spec.origin).parent.joinpath(*below).with_suffix(".py").exists(), words
    else:
        assert program in ("source", "python"), f"{words}: no parser for this; give the block a reason not to be tested"


def _parse_fallow(args: list[str]) -> None:
    command: click.Command = cli
    context = click.Context(cli, info_name="fallow")
    while isinstance(command, click.Group):
        name, *args = args
        found = command.get_command(context, name)
        assert found is not None, name
        command, parent = found, context
        if not isinstance(command, click.Group):
            context = command.make_context(name, list(args), parent=parent)
    given = context.params
    if command.name == "submit":
        prepare(split(given["argv"]))
    elif command.name == "local":
        parse_schedule(given["schedule"], given["members"], given["workers_per_node"])
    elif command.name == "run":
        assert not str(given["command"][0]).startswith("-"), given


def _parse_make(words: list[str]) -> None:
    makefile = _read("Makefile") + "".join(path.read_text() for path in (ROOT / "contrib" / "setup").glob("*.sh"))
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    named = [word for word in words if "=" not in word]
    assert named
    assert set(named) <= targets, words
    for variable, value in (word.split("=", 1) for word in words if "=" in word):
        assert re.search(rf"\b{variable}\b", makefile), variable
        if variable == "ARGS" and named[0] == "demo":
            _parse_fallow([*named, *shlex.split(value)])
        if variable == "ARGS" and named[0] == "bench" and not value.isupper():
            bench.parse(shlex.split(value))


@pytest.mark.parametrize("name", OURS)
def test_a_command_in_the_text_is_one_that_there_is(name: str) -> None:
    """Words in capitals stand for something; options are looked up, arguments need not be complete."""
    for code in _inline(name):
        words = code.split()
        if words[0] == "make" and len(words) > 1:
            _parse_make(shlex.split(code)[1:])
        if words[0] != "fallow" or len(words) < 2 or words[1].isupper() or words[1].startswith("-"):
            continue
        assert words[1] in COMMANDS, code
        command = cli.get_command(click.Context(cli), words[1])
        assert command is not None
        if isinstance(command, click.Group) and len(words) > 2:
            command = command.get_command(click.Context(command), words[2].rstrip(","))
            assert command is not None, code
        known = {option for each in command.params for option in each.opts} | {"--help"}
        if command.name == "submit":
            known |= set(re.findall(r"--[a-z-]+", command.get_help(click.Context(command)))) | {"--json"}
        before = code.partition(" -- ")[0]
        assert set(re.findall(r"(?<=[ \[])--[a-z][a-z-]*", before)) <= known, code


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Where a block of Python is -> its traceback, empty if it ran to its end. All run in forks of one process."""
    pytest.importorskip("torch")
    blocks = {block.where: block.code for block in _in("python")}
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "FALLOW_REPRODUCIBLE"):
        environ.pop(name, None)
    command, told = [sys.executable, "-c", RUN_ALL], json.dumps(blocks)
    done = subprocess.run(command, input=told, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("block", _in("python"), ids=lambda block: block.where)
def test_python_runs_in_small(block: Block, outcomes: dict[str, str]) -> None:
    assert outcomes[block.where] == ""


RUN_ALL = '''
import json, os, sys, tempfile, traceback
import torch

PREPARED = {"model", "opt", "schedule", "loader", "train_loader", "state", "opt_judge", "opt_make", "judge", "make"}


def names(code):
    """What the reader has already: a model, data, an optimizer, and functions of the script."""
    import fallow
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class GPT(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, y):
            return (self.layer(x) - y).square().mean()

    torch.manual_seed(0)
    model, judge, make = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt_judge, opt_make = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (judge, make))
    samples = torch.rand(16, 4)
    data = TensorDataset(samples) if "(real,)" in code else list(samples)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    found = dict(
        torch=torch, fallow=fallow, model=model, judge=judge, make=make, opt=opt, opt_judge=opt_judge,
        opt_make=opt_make, loader=loader, train_loader=loader,
        state={"losses": []},
        loss_fn=lambda output, scale=1.0: output.square().mean() * scale,
        judge_loss=lambda real: judge(real).mean() + judge(make(real).detach()).mean(),
        make_loss=lambda real: -judge(make(real)).mean(),
        evaluate=lambda model: 0.0, schedule_of_beta=lambda step: 0.5 + step,
        GPT=GPT, config=None, make_optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        get_batch=lambda part: (torch.rand(2, 4), torch.rand(2, 4)), get_lr=lambda step: 0.1,
        estimate_loss=lambda: {"val": 1.0}, gradient_accumulation_steps=2, max_iters=3, tokens_per_step=8,
    )
    if "schedule." in code:
        found["schedule"] = torch.optim.lr_scheduler.StepLR(opt, 1)
    if "fallow.init(" not in code:
        found["run"] = run = fallow.init()
        if "run.prepare(" not in code:
            wanted = [name for name in PREPARED if name in found]
            found.update(zip(wanted, run.prepare(*(found[name] for name in wanted))))
    return found


# Once for all forks: the first optimizer imports torch's compiler.
import fallow.worker.api.run
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

outcomes = {}
for where, code in json.load(sys.stdin).items():
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        os.dup2(2, 1)
        os.chdir(tempfile.mkdtemp())
        said = ""
        try:
            exec(compile(code, where, "exec"), names(code))
        except BaseException:
            said = traceback.format_exc()
        with open(into, "w") as report:
            report.write(said)
        os._exit(0)
    os.close(into)
    with open(out) as report:
        outcomes[where] = report.read()
    _, status = os.waitpid(child, 0)
    if status:
        outcomes[where] = f"ended with status {status}"
print(json.dumps(outcomes))
'''
"""Run by a Python of its own: reads blocks from its input, prints what came of each."""


TESTS_FOLDER = Path(__file__).parents[1]
TABLE = (TESTS_FOLDER / "elastic" / "README.md").read_text()
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
        name: kinds.get(path.relative_to(TESTS_FOLDER).parts[0], "processes")
        for path in TESTS_FOLDER.rglob("test_*.py")
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
