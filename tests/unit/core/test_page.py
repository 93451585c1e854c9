"""The page of `fallow report --html`: strictly parsed, escaped, complete, small."""

import re
from collections.abc import Iterable
from datetime import timedelta, timezone
from time import thread_time
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

import views
from fallow.core.page.drawing import BEGIN_X, END_X, span
from fallow.core.page.page import page_of
from fallow.model import (
    AllocationKind,
    Amount,
    ChangeKind,
    DelayReport,
    EventRecord,
    GenerationReport,
    Parts,
    PauseReport,
    Quantiles,
    RunReport,
    RunStatus,
    UsageReport,
    UsageRow,
)

ZONE = timezone(timedelta(hours=2))
DAY = 1_800_000_000.0
EVIL = "<script>alert('x')</script>&\"\x1b[2J\u202e"
SPENT, NOTHING = Amount(node_s=1e6, gpu_s=0.0), Amount(node_s=0.0, gpu_s=0.0)


def usage(*, harvested_s: float = 0.0, base_s: float = 0.0) -> UsageReport:
    base, harvested = Amount(node_s=base_s, gpu_s=0.0), Amount(node_s=harvested_s, gpu_s=0.0)
    row = UsageRow(
        key="total", allocated=SPENT, base=base, harvested=harvested, wasted=NOTHING, causes={}, jobs=1, useless_jobs=0
    )
    delays = DelayReport(jobs=3, p95_s=4.0, max_s=5.0)
    return UsageReport(
        at=DAY, by="run", since=None, currency="", rows=[row], total=row, others_delayed=delays, owner=None
    )


class Story:
    """The generations and events of a run, as a head records them. Each change comes 100 s after the one before it."""

    def __init__(self) -> None:
        self.members: dict[str, str] = {}
        self.generations: list[GenerationReport] = []
        self.events: list[EventRecord] = []
        self.at = DAY

    def tell(self, kind: str, text: str, **data: Any) -> None:
        self.events.append(EventRecord(seq=len(self.events), at=self.at, run="r1", kind=kind, text=text, data=data))

    def change(self, kind: ChangeKind, joined: dict[str, str], *departed: str, reason: str = "") -> None:
        """`joined`: member -> host; hosts that begin with h are harvested."""
        self.at += 100
        self.members = {name: host for name, host in (self.members | joined).items() if name not in departed}
        tokens = {name: f"fallow-r1-{host[0]}{n}-{n:06x}" for n, (name, host) in enumerate(joined.items())}
        number = len(self.generations) + 1
        data = {"generation": number, "joined": joined, "left": departed, "tokens": tokens}
        self.tell(kind.value, f"generation {number}", **data)
        one = GenerationReport(
            generation=number,
            kind=kind,
            members=[*self.members],
            first_step=10 * (number - 1),
            pause_s=None if kind is ChangeKind.START else 0.05 * number,
            parts=Parts(),
            reason=reason or f"reason {number}",
            at=self.at,
            took_s=20.0,
        )
        self.generations.append(one)

    def page(self, *, status: RunStatus = RunStatus.FINISHED, **changes: Any) -> Element:
        name = changes.pop("name", "train")
        return page(self.report(status=status, **changes), self, name=name)

    def report(self, **changes: Any) -> RunReport:
        some = PauseReport(planned=Quantiles(p50=0.1, p95=0.15, max=0.2), unplanned=views.NONE)
        return views.report(generations=self.generations, pause_s=some, **changes)


def page(report: RunReport, story: Story, name: str = "train", spent: UsageReport | None = None) -> Element:
    view = views.run(name=name, status=report.status, members=[], created_at=DAY)
    snapshot = views.snapshot(view, at=DAY + 1000)
    html = page_of(report, snapshot, usage() if spent is None else spent, story.events, ZONE)
    assert html.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(html)


@pytest.fixture
def story() -> Story:
    """n0 on a base node all the time; n1 comes and is given back, n2 comes on the same node and is lost."""
    made = Story()
    made.change(ChangeKind.START, {"n0": "b1"})
    made.change(ChangeKind.ABSORB, {"n1": "h1"})
    made.change(ChangeKind.RELEASE, {}, "n1")
    made.change(ChangeKind.ABSORB, {"n2": "h1"})
    made.tell("eject", "n2 (h1) is gone: killed by signal 9", member="n2")
    made.change(ChangeKind.EJECT, {}, "n2", reason="n2 (h1) is gone: killed by signal 9")
    made.at += 100
    made.tell("finished", "run r1 is finished")
    return made


def drawing(root: Element, label: str) -> Element:
    (found,) = [svg for svg in root.iter("svg") if svg.get("aria-label", "").startswith(label)]
    return found


def bars(root: Element) -> list[tuple[str, str, float, float]]:
    """(member, kind, x, width) of each bar of the timeline."""
    rects = list(drawing(root, "Each").iter("rect"))
    return [
        (
            "".join(one.itertext()).split()[0],
            one.get("class", "").split()[1],
            *map(float, (one.get("x", ""), one.get("width", ""))),
        )
        for one in rects
    ]


def marks(svg: Element) -> list[tuple[str, str]]:
    marked = [one for one in svg.iter("path") if (one.get("class") or "").startswith("mark ")]
    return [((one.get("class") or "").split()[1], "".join(one.itertext())) for one in marked]


def text_of(parts: Iterable[Element]) -> str:
    return "\n".join("".join(part.itertext()) for part in parts)


def cells(root: Element) -> list[list[str]]:
    return [["".join(cell.itertext()) for cell in row.iter("td")] for row in [*root.iter("tbody")][-1].iter("tr")]


def test_bars_are_as_long_as_the_nodes_were_members(story: Story) -> None:
    second = (END_X - BEGIN_X) / 600
    expected = [("n0", "base", 100, 500), ("n1", "harvest", 200, 100), ("n2", "harvest", 400, 80)]
    found = bars(story.page())
    assert [(name, kind) for name, kind, _, _ in found] == [(name, kind) for name, kind, _, _ in expected]
    for (_, _, x, width), (_, _, at, seconds) in zip(found, expected, strict=True):
        assert (x, width) == (pytest.approx(BEGIN_X + at * second, abs=0.1), pytest.approx(seconds * second, abs=0.1))


def test_each_change_has_a_mark_with_its_reason_and_a_row(story: Story) -> None:
    root = story.page()
    assert marks(drawing(root, "Each")) == [
        ("absorb", "n0 joined: reason 1"),
        ("absorb", "n1 joined: reason 2"),
        ("release", "n1 left: reason 3"),
        ("absorb", "n2 joined: reason 4"),
        ("eject", "n2 left: n2 (h1) is gone: killed by signal 9"),
    ]
    rows = cells(root)
    assert rows[1] == ["2", "absorb", "2", "n1", "", "10", "100 ms", "2027-01-15 10:03:20 +0200", "reason 2"]
    assert rows[4][1:5] == ["eject", "1", "", "n2"]
    assert len(rows) == 5
    assert [kind for kind, _ in marks(drawing(root, "Length"))] == ["release", "release", "release", "eject"]
    assert "at most 2" in drawing(root, "Number").get("aria-label", "")


def test_a_sentence_and_figures_for_everybody(story: Story) -> None:
    spent = usage(base_s=3600.0, harvested_s=7200.0)
    words = text_of(page(story.report(), story, spent=spent).iter("p")) + text_of(story.page().iter("dl"))
    for part in (
        "This training used 3.0 node-hours, 2.0 of them on nodes that would have been idle; it was never restarted.",
        "r1, from 2027-01-15 10:00:00 +0200 (08:00:00 UTC) to 2027-01-15 10:10:00 +0200, 10 min 0 s",
        "0 lost, 0 duplicated",
        "ab" * 32,
        "by all runs of this user, up to 5.0 s",
        "11.3",  # node-minutes of all members, which Slurm has not accounted yet
    ):
        assert part in words


def test_restarts_are_told_and_unknown_ones_are_not(story: Story) -> None:
    def sentence(**changes: Any) -> str:
        return text_of(one for one in story.page(**changes).iter("p") if one.get("class") == "lead")

    assert "restarted" not in sentence(steps=0), "a script for torchrun is restarted at each change"
    story.tell("suspend", "nobody is left")
    story.change(ChangeKind.START, {"n3": "b1"})
    assert "it was restarted 1 time." in sentence()
    story.generations.pop(0)
    assert "restarted" not in sentence(), "the first generation is no longer on record"


def test_a_suspended_run_has_no_bars(story: Story) -> None:
    story.events.pop()
    story.tell("suspend", "generation 6: the last node leaves")
    story.at += 200
    root = story.page(status=RunStatus.SUSPENDED)
    (n0, *_) = bars(root)
    assert n0[3] == pytest.approx((END_X - BEGIN_X) * 500 / 1000, abs=0.1)
    assert cells(root)[-1][:5] == ["-", "suspend", "0", "", "n0"]


def test_whatever_people_write_is_text(story: Story) -> None:
    story.change(ChangeKind.ABSORB, {EVIL: f"h{EVIL}"}, reason=EVIL)
    root = story.page(name=EVIL, run=EVIL, final_digest=EVIL, message=EVIL)
    assert not [one for one in root.iter() if one.tag in ("script", "img", "link", "iframe", "a")]
    assert "<script>alert('x')</script>&\"\\x1b[2J\\u202e" in text_of(root.iter("h1"))
    assert sum("<script>" in text for text in root.itertext()) >= 6
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", "".join(root.itertext()))
    names = {name for one in root.iter() for name in one.attrib}
    assert not [name for name in names if name.startswith("on") or name in ("href", "src")]


@pytest.mark.parametrize("status", [RunStatus.WAITING, RunStatus.FAILED])
def test_a_run_without_members(status: RunStatus) -> None:
    words = text_of([Story().page(status=status, steps=0, final_loss=None, final_digest=None)])
    assert "No node has been a member yet." in words
    assert status.value in words


def test_a_running_run_ends_now(story: Story) -> None:
    story.events = [event for event in story.events if event.kind != "finished"]
    root = story.page(status=RunStatus.TRAINING)
    (n0, *_) = bars(root)
    assert n0[2] + n0[3] == pytest.approx(END_X, abs=0.1)
    assert "until now, 2027-01-15 10:16:40 +0200" in text_of(root.iter("p"))


def test_what_is_not_on_record_is_not_guessed(story: Story) -> None:
    """The head has dropped all events."""
    story.events.clear()
    root = story.page()
    assert "an unknown part of them on nodes that would have been idle" in text_of(root.iter("p"))
    assert [(name, kind) for name, kind, _, _ in bars(root)] == [("n0", "other"), ("n1", "other"), ("n2", "other")]
    assert len(cells(root)) == 5


def test_nothing_harvested_according_to_slurm_is_nothing(story: Story) -> None:
    words = text_of(page(story.report(), story, spent=usage(base_s=7200.0)).iter("p"))
    assert "2.0 node-hours, 0.0 of them on nodes that would have been idle" in words


def test_members_that_came_together_are_in_order() -> None:
    story = Story()
    story.change(ChangeKind.START, {"n10": "b3", "n2": "b2", "n1": "b1"})
    assert [name for name, *_ in bars(story.page())] == ["n1", "n2", "n10"]


def test_one_host_of_several_members_has_several_rows() -> None:
    story = Story()
    story.change(ChangeKind.START, {"n0": "b1", "n1": "b1"})
    story.at += 100
    story.tell("finished", "run r1 is finished")
    assert len({one.get("y") for one in drawing(story.page(), "Each").iter("rect")}) == 2


def test_a_large_run_makes_a_small_page_fast() -> None:
    story = Story()
    hosts = [f"h{n:03}" for n in range(200)]
    story.change(ChangeKind.START, {f"n{n}": host for n, host in enumerate(hosts)})
    for n in range(999):
        kind = (ChangeKind.RELEASE, ChangeKind.ABSORB)[n % 2]
        joined = {f"n{200 + n}-{k}": hosts[k] for k in range(150)} if n % 2 else {}
        story.change(kind, joined, *(() if n % 2 else [name for name, host in story.members.items() if host < "h150"]))
    view = views.run(members=[], created_at=DAY, status=RunStatus.FINISHED)
    began_at = thread_time()
    html = page_of(story.report(), views.snapshot(view), usage(), story.events, ZONE)
    assert thread_time() - began_at < 5
    assert len(html) < 3_000_000
    root = ElementTree.fromstring(html)
    words = text_of(root.iter())
    assert "Only a part is drawn: the 80 rows with most time of 200, and the 2000 longest stays of " in words
    assert {name for name, *_ in bars(root)} >= {f"n{n}" for n in range(150, 200)}, "those stay all the time"
    assert "700 changes are left out; see: fallow report r1" in words
    assert cells(root)[-1][0] == "1000"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0854, "85 ms"),
        (4.21, "4.2 s"),
        (59.96, "1 min 0 s"),
        (192, "3 min 12 s"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations_are_for_people(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


def test_kinds_are_told_by_tokens() -> None:
    story = Story()
    story.change(ChangeKind.START, {"n0": "b1", "n1": "h1", "n2": "n1"})
    assert [kind for _, kind, _, _ in bars(story.page())] == [AllocationKind.BASE, "harvest", "harvest"]
