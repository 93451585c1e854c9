"""What `fallow usage` shows."""

from __future__ import annotations

from typing import Any

import pytest

import views
from command_line import Fallow
from fallow.cli import usage as usage_command
from fallow.cli.usage import first_day
from fallow.model import (
    PRUNED,
    Amount,
    DelayReport,
    LimitView,
    OwnerView,
    PriorityView,
    ShareView,
    Source,
    UsageReport,
    UsageRow,
)

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
REPORT = UsageReport(
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
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    questions: list[dict[str, Any]] = []

    def ask(method: str, *_: Any, **params: Any) -> UsageReport:
        assert method == "usage"
        questions.append(params)
        return REPORT

    monkeypatch.setattr(usage_command, "ask", ask)
    return questions


def test_usage_for_people(asked: list[dict[str, Any]], fallow: Fallow) -> None:
    shown = [line.split() for line in fallow("usage", "--since", "2026-01-02").out.splitlines()]
    for line in (
        "node-hours by run, since 2026-01-02 (UTC)",
        "train-1 10.000 4.000 5.500 0.500 (5%) 40.000 12 1 20.00 20.000 14.500",
        "pruned runs 10.000 4.000 5.500 0.500 (5%) 40.000 12 1 20.00 20.000 14.500",
        "others' jobs that waited because a node was still ours: 2, p95 3.2 s, longest 4.0 s",
        "account lab GrpJobs 40 11",
        "fair share of account lab: 0.25 of the machine, used 0.4; factor 0.33 of 1",
        "job 4711 waits with priority 1063 (age 13)",
    ):
        assert line.split() in shown
    causes = [line[0] for line in shown if line and line[0] in ("drained", "start-up")]
    assert causes == ["drained", "start-up"], "most first"
    assert asked == [{"by": "run", "run": None, "since": "2026-01-02"}]


@pytest.mark.parametrize(
    ("text", "day"), [("2026-01-31", "2026-01-31"), ("1d", "1970-01-12"), ("7d", "1970-01-06"), ("0d", "1970-01-12")]
)
def test_since(text: str, day: str) -> None:
    assert first_day(text, NOW) == day
