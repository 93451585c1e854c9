"""Output of `status`, `events`, `report` and `usage`."""

import errno
import shlex
from pathlib import Path
from typing import Any

import pytest
from click import unstyle

import views
from command_line import Fallow
from fallow.cli import follow, show
from fallow.cli import usage as usage_command
from fallow.cli.common import new_file, show_table
from fallow.cli.usage import first_day
from fallow.model import (
    PRUNED,
    Amount,
    ChangeKind,
    CheckpointState,
    CheckpointView,
    DelayReport,
    EventRecord,
    Exit,
    FallowError,
    GenerationReport,
    LimitView,
    NodeOwner,
    NodeView,
    OwnerView,
    Parts,
    PauseReport,
    PriorityView,
    Quantiles,
    ShareView,
    Source,
    SpeedView,
    UsageReport,
    UsageRow,
)


def checkpoint(step: int, state: CheckpointState, *, asked: bool = False, problem: str = "") -> CheckpointView:
    return CheckpointView(
        step=step,
        generation=1,
        epoch=0,
        written_at=0.0,
        nbytes=1536,
        path=f"/c/{step}",
        state=state,
        asked=asked,
        problem=problem,
    )


RUN = views.run(
    name="[bold]evil[/]\x1b]52;c;x\x07",
    members=[views.member(shards=6, pace_s=0.01234)],
    change="absorbing n2",
    scalars={"accuracy": 0.98765, "lr\n": 1e-5, "norm": None},
    speeds=[
        SpeedView(nodes=1, steps_per_s=0.5, measured=True),
        SpeedView(nodes=4, steps_per_s=1.75, measured=False),
    ],
    target=3,
    deadline_at=1_000_000.0,
    ahead_s=-3661.0,
    checkpoints=[
        checkpoint(4, CheckpointState.DAMAGED, problem="torn"),
        checkpoint(3, CheckpointState.USABLE, asked=True),
    ],
)
SNAPSHOT = views.snapshot(RUN, head=views.head(slurm_error="hung \x1b[31m"), at=8.0)
EVENTS = [EventRecord(seq=n, at=0.0, run="r1", kind="absorb", text=f"n{n}\njoined") for n in (8, 9)]
START = GenerationReport(
    generation=1, kind=ChangeKind.START, members=["n3"], first_step=0, pause_s=None, parts=Parts(), reason="start"
)
REPORT = views.report(
    generations=[START],
    pause_s=PauseReport(planned=Quantiles(p50=0.01, p95=0.02), unplanned=views.NONE),
)


@pytest.fixture(autouse=True)
def head(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    requests: list[tuple[str, dict[str, Any]]] = []

    def ask(method: str, *_: Any, **params: Any) -> Any:
        requests.append((method, params))
        return {"status": SNAPSHOT, "events": EVENTS, "report": REPORT, "usage": USAGE}[method]

    for module in (show, follow):
        monkeypatch.setattr(module, "ask", ask)
    return requests


def test_runs(fallow: Fallow) -> None:
    lines = fallow("status").out.splitlines()
    assert lines[0] == "head 1 on login1, pid 7, up 1-01:01:01; Slurm 22.05.8 (c); polled 3 s ago"
    assert lines[1] == r"Slurm does not answer: hung \x1b[31m"
    assert lines[2].split() == shlex.split("RUN NAME STATUS NODES MEMBERS GEN STEP LOSS SAMPLES/S NOTE")
    row = lines[3].replace(r"[bold]evil[/]\x1b]52;c;x\x07", "EVIL").split()
    assert row == shlex.split("r1 EVIL training 1:8 1/8 3 5/100 0.25 1234 absorbing n2")
    assert len(lines) == 4


def test_why_idle_nodes_are_not_used(monkeypatch: pytest.MonkeyPatch, fallow: Fallow) -> None:
    def node(name: str, unused: str) -> NodeView:
        return NodeView(node=name, partitions=["gpu"], state="IDLE", owner=NodeOwner.IDLE, unused=unused)

    nodes = [node("n1", "too short: 60 s"), *(node(f"n{n}", "not needed: no run\x1b[2J") for n in (3, 4, 5))]
    nodes += [node(f"x{n}", f"limited: {n}") for n in range(10)]
    snapshot = views.changed(SNAPSHOT, nodes=[*nodes, node("used", "")])
    monkeypatch.setattr(show, "ask", lambda *_, **__: snapshot)
    lines = fallow("status").out.splitlines()
    table = [line.split() for line in lines[lines.index("") + 1 :]]
    assert table[:3] == [
        ["IDLE", "WHY", "NOT", "USED", "NODELIST"],
        ["3", "not", "needed:", "no", r"run\x1b[2J", "n[3-5]"],
        ["1", "too", "short:", "60", "s", "n1"],
    ]
    assert (len(table), table[-1][:3]) == (12, ["2", "nodes", "more"])


def test_one_run(fallow: Fallow, head: list[tuple[str, dict[str, Any]]]) -> None:
    lines = [line.split() for line in fallow("status", "r1").out.splitlines()]
    for line in (
        "n3 n1 base member 0-3 5 6 0.01234 01:01:01 0.2s",
        "accuracy 0.9877 lr 1e-05 norm -",
        "r1.0 base running 77 gpu n1 01:01:01",
        "1 0.5 measured",
        "4 1.75 predicted",
        "harvested nodes, requested ones included: 3",
    ):
        assert line.split() in lines
    assert ["01:01:01", "behind", "schedule"] in [line[-3:] for line in lines]
    assert lines[-1][:3] == ["step", "3", "usable"] and "00:00:08" in lines[-1], "by the head's clock"
    assert lines[-1][-5:] == shlex.split("1.5 kB by hand /c/3")
    assert lines[-2][-4:] == ["1.5", "kB", "/c/4", "(torn)"]
    assert head == [("status", {"run": "r1"})]


def test_a_report_as_a_page(fallow: Fallow, head: list[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    file = tmp_path / "é.html"
    assert fallow("report", "r", "--html", str(file)) == (0, "", "")
    assert [(method, params["run"]) for method, params in head] == [
        ("report", "r"),
        *((method, "r1") for method in ("status", "usage", "events")),
    ]
    page = file.read_text()
    assert page == fallow("report", "r", "--html", "-").out
    assert page.isascii(), "right in whatever encoding standard output has"
    assert "[bold]evil[/]" in page


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["report.html"], Exit.CANTCREAT, "report.html: cannot be made (File exists); name a new file"),
        (["."], Exit.CANTCREAT, ".: cannot be made (File exists); name a new file"),
        (["none/report.html"], Exit.CANTCREAT, "none/report.html: cannot be made (No such file or directory)"),
        ([""], Exit.CANTCREAT, ".: cannot be made (File exists)"),
        (["new.html", "--json"], Exit.USAGE, "give one of them"),
    ],
)
def test_a_page_that_is_not_written(
    words: list[str], code: Exit, text: str, fallow: Fallow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("report.html").write_text("mine")
    result = fallow("report", "r1", "--html", *words)
    assert (result.code, text in result.err + result.out) == (code, True)
    assert ([file.name for file in tmp_path.iterdir()], Path("report.html").read_text()) == (["report.html"], "mine")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_half_written_file_is_removed(error: BaseException, tmp_path: Path) -> None:
    def write() -> None:
        with new_file(tmp_path / "a.html", "--html") as file:
            file.write(b"half")
            raise error

    with pytest.raises((FallowError, KeyboardInterrupt)) as raised:
        write()
    text = "" if raised.type is KeyboardInterrupt else f"{tmp_path}/a.html: cannot be written (No space left on device)"
    assert (str(raised.value), list(tmp_path.iterdir())) == (text, [])


def test_one_event_is_one_line(fallow: Fallow, head: list[tuple[str, dict[str, Any]]]) -> None:
    lines = fallow("events", "r1", "--since", "7", "--limit", "5").out.splitlines()
    assert [line.split()[0] for line in lines] == ["8", "9"]
    assert lines[0].endswith("n8 joined")
    assert head == [("events", {"since": 7, "limit": 5, "run": "r1"})]


# -- `fallow usage` ---------------------------------------------------------------------------------------------------


NOW = 1_000_000.0


def amount(hours: float, cost: float | None = None) -> Amount:
    return Amount(node_s=hours * 3600, gpu_s=hours * 4 * 3600, cost=cost)


ROW = UsageRow(
    key="train-1",
    allocated=amount(10, 20),
    base=amount(4, 8),
    harvested=amount(5.5, 11),
    wasted=amount(0.5, 1),
    causes={Source.START_UP: amount(0.125, 0.25), Source.DRAINED: amount(0.375, 0.75)},
    jobs=12,
    useless_jobs=1,
    budget_node_s=20 * 3600,
    budget_left_s=14.5 * 3600,
)
USAGE = UsageReport(
    at=NOW,
    by="run",
    since="2026-01-02",
    currency="EUR",
    rows=[ROW, views.changed(ROW, key=PRUNED)],
    total=ROW,
    others_delayed=DelayReport(jobs=2, p95_s=3.25, max_s=4.0),
    owner=OwnerView(
        user="ann",
        at=NOW,
        limits=[LimitView(of="account lab", name="GrpJobs", limit=40, used=11)],
        shares=[ShareView(account="lab", partition="", shares=0.25, usage=0.4, factor=0.33)],
        priorities=[PriorityView(job_id="4711", priority=1063, factors={"age": 13})],
        notes=["no\x1b[31m more"],
    ),
)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    questions: list[dict[str, Any]] = []

    def ask(method: str, *_: Any, **params: Any) -> UsageReport:
        assert method == "usage"
        questions.append(params)
        return USAGE

    monkeypatch.setattr(usage_command, "ask", ask)
    return questions


def test_usage_for_people(requests: list[dict[str, Any]], fallow: Fallow) -> None:
    lines = [line.split() for line in fallow("usage", "--since", "2026-01-02").out.splitlines()]
    for line in (
        "node-hours by run, since 2026-01-02 (UTC)",
        "train-1 10.000 4.000 5.500 0.500 (5%) 40.000 12 1 20.00 20.000 14.500",
        "pruned runs 10.000 4.000 5.500 0.500 (5%) 40.000 12 1 20.00 20.000 14.500",
        "other users' jobs that waited for a node to be returned: 2, p95 3.2 s, longest 4.0 s",
        "account lab GrpJobs 40 11",
        "fair share of account lab: 0.25 of the machine, used 0.4; factor 0.33 of 1",
        "job 4711 waits with priority 1063 (age 13)",
    ):
        assert line.split() in lines
    causes = [line[0] for line in lines if line and line[0] in ("drained", "start-up")]
    assert causes == ["drained", "start-up"], "most first"
    assert requests == [{"by": "run", "run": None, "since": "2026-01-02"}]


@pytest.mark.parametrize(
    ("text", "day"), [("2026-01-31", "2026-01-31"), ("1d", "1970-01-12"), ("7d", "1970-01-06"), ("0d", "1970-01-12")]
)
def test_since(text: str, day: str) -> None:
    assert first_day(text, NOW) == day


COLUMNS = ["RUN", "STATUS", "STEP", "NOTE"]
ROWS = [["train.sbatch-730aec", "failed", "1757/1000000", "n0 (n3): the script ended without reaching the loop"]]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200, None])
def test_on_every_terminal_all_that_a_person_looks_for_is_in_one_piece(
    width: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if width is not None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
    show_table(COLUMNS, ROWS)
    text = unstyle(capsys.readouterr().out)
    for word in ("RUN", "train.sbatch-730aec", "STATUS", "failed", "STEP", "1757/1000000", "NOTE", "without"):
        assert word in text.replace("\n  ", " ")
    lines = text.splitlines()
    assert (len(lines) == 2) == (width in (200, None))
    assert all(len(line) <= max(width or 4000, len("RUN train.sbatch-730aec")) for line in lines)
    assert ("  STATUS failed" in lines) == (width == 20)
    assert ("  STATUS failed  STEP 1757/1000000" in lines) == (width == 40), "no name without its cell"
