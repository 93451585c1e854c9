"""`events`, `wait`, `logs` and `why`."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import views
from command_line import Fallow
from fallow.cli import follow
from fallow.files import Paths
from fallow.model import EventRecord, Exit, FallowError, NodeOwner, NodeView, RunStatus, Snapshot

RUN = views.run(change="absorbing n2")
SNAPSHOT = views.snapshot(RUN)


class Desk:
    """Answers like a head: with one status after the other, and from then on with the last one."""

    def __init__(self) -> None:
        self.statuses: list[Snapshot | FallowError] = [SNAPSHOT]
        self.count = 0
        "number of events; two more with each request"
        self.requests: list[dict[str, Any]] = []
        "parameters of the requests for events"
        self.absences = 0
        "number of further requests for events that find no head"
        self.now = 0.0

    def ask(self, method: str, *_: Any, **params: Any) -> Any:
        if method == "report":
            return views.report()
        if method == "events":
            if self.count and self.absences:
                self.absences -= 1
                raise FallowError("the head is gone", Exit.UNAVAILABLE)
            self.count += 2
            self.requests.append(params)
            if self.count > 6:
                raise FallowError("the folder is somebody else's by now", Exit.NOPERM)
            seqs = range(params["since"] + 1, self.count + 1)
            answer = [EventRecord(seq=seq, at=0.0, run=f"r{seq % 2}", kind="k", text="") for seq in seqs]
            return [event for event in answer if params.get("run") in (None, event.run)]
        answer = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if isinstance(answer, FallowError):
            raise answer
        if params.get("run", "r1") not in ("r1", "train"):
            raise FallowError("no such run", Exit.NOINPUT)
        return answer


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk()
    monkeypatch.setattr(follow, "ask", desk.ask)

    def sleep(seconds: float) -> None:
        desk.now += seconds

    # A clock of its own: threads that other tests have left behind go on by the usual one.
    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: desk.now, time=time.time)
    monkeypatch.setattr(follow, "time", clock)
    return desk


def of(status: RunStatus, **more: Any) -> Snapshot:
    return views.snapshot(views.changed(RUN, status=status, **more))


@pytest.mark.parametrize("absences", [0, 100])
def test_following_misses_and_repeats_nothing_also_across_a_restart_of_the_head(
    desk: Desk, fallow: Fallow, absences: int
) -> None:
    desk.absences = absences
    result = fallow("events", "--follow", "--json", "--since", "1")
    assert result.code == Exit.NOPERM
    lines = result.out.splitlines()
    assert [json.loads(line)["seq"] for line in lines if "seq" in line] == [2, 3, 4, 5, 6]


def test_a_head_that_does_not_come_back_is_not_followed_for_ever(desk: Desk, fallow: Fallow) -> None:
    desk.absences = 1000
    assert fallow("events", "--follow").code == Exit.UNAVAILABLE


def test_who_follows_one_run_asks_for_what_is_new_of_all(desk: Desk, fallow: Fallow) -> None:
    desk.statuses = [views.snapshot(RUN, last_event=2)]
    result = fallow("events", "train", "--follow", "--json")
    assert [json.loads(line)["seq"] for line in result.out.splitlines() if "seq" in line] == [1, 3, 5]
    assert [(each.get("run"), each["since"]) for each in desk.requests] == [("r1", 0), (None, 2), (None, 4), (None, 6)]


@pytest.mark.parametrize(
    ("status", "code"), [(RunStatus.FINISHED, 0), (RunStatus.FAILED, 70), (RunStatus.CANCELLED, 93)]
)
def test_wait_ends_as_the_run_does_also_across_an_absence_of_the_head(
    desk: Desk, fallow: Fallow, status: RunStatus, code: int
) -> None:
    absence = FallowError("the head is gone", Exit.UNAVAILABLE)
    desk.statuses = [SNAPSHOT, SNAPSHOT, absence, absence, SNAPSHOT, of(status)]
    result = fallow("wait", "r1", "--json")
    assert (result.code, result.json["run"]) == (code, "r1")


def test_wait_gives_up_when_its_time_is_over_and_when_no_head_comes_back(desk: Desk, fallow: Fallow) -> None:
    result = fallow("wait", "r1", "--timeout", "0.001")
    assert result.code == Exit.TEMPFAIL
    assert "run r1 is training at step 5" in result.err
    assert fallow("wait", "r1", "--timeout", "nan").code == Exit.USAGE
    desk.statuses = [SNAPSHOT, FallowError("the head is gone", Exit.UNAVAILABLE)]
    assert fallow("wait", "r1").code == Exit.UNAVAILABLE


@pytest.fixture
def folder(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FALLOW_STATE_DIR", str(tmp_path / "state"))
    logs = Paths.default().run("r1").logs
    logs.mkdir(parents=True)
    return logs


def test_logs_are_those_of_the_main_member_or_of_one_that_is_named(folder: Path, fallow: Fallow) -> None:
    for name in ("n3.0", "n3.1", "n4"):
        (folder / f"{name}.log").write_text(f"of {name}\x1b[2J\n")
    assert fallow("logs", "r1").out == "of n3.0\n"
    for member, text in (("n3", "of n3.0"), ("n3.1", "of n3.1"), ("n4", "of n4")):
        assert fallow("logs", "r1", "--member", member)[:2] == (0, f"{text}\n")
    result = fallow("logs", "r1", "--member", "../n4")
    assert result.code == Exit.NOINPUT
    assert "there is: n3.0, n3.1, n4" in result.err


def test_logs_without_a_run_are_those_of_the_newest_active_run_else_of_the_newest(
    desk: Desk, folder: Path, fallow: Fallow
) -> None:
    for name in ("old", "new", "ended"):
        Paths.default().run(name).logs.mkdir(parents=True)
        (Paths.default().run(name).logs / "n3.log").write_text(f"of {name}\n")
    runs = [
        views.changed(RUN, run="old", created_at=1.0),
        views.changed(RUN, run="new", created_at=2.0),
        views.changed(RUN, run="ended", created_at=3.0, status=RunStatus.FINISHED),
    ]
    for several, name in ((runs, "new"), (runs[2:], "ended")):
        desk.statuses = [views.changed(SNAPSHOT, runs=several)]
        assert fallow("logs") == (Exit.OK, f"of {name}\n", f"fallow: output of run {name}\n")
    desk.statuses = [views.changed(SNAPSHOT, runs=[])]
    result = fallow("logs")
    assert (result.code, "there is no run" in result.err) == (Exit.NOINPUT, True)


def test_logs_begin_with_the_older_piece_also_where_the_log_becomes_it_meanwhile(
    folder: Path, fallow: Fallow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent renames a full log, and begins a new log."""
    log, older = folder / "n3.0.log", folder / "n3.0.log.1"
    older.write_bytes(b"one\ngr" + "ö".encode()[:1])
    log.write_bytes("ö".encode()[1:] + "ße\n".encode())
    assert fallow("logs", "r1").out == "one\ngröße\n"
    opened = Path.open

    def rename_first(path: Path, *mode: str) -> Any:
        if path == older and log.exists():
            log.rename(older)
        return opened(path, *mode)

    log.write_text("two\n")
    monkeypatch.setattr(Path, "open", rename_first)
    assert fallow("logs", "r1").out == "two\n"


def test_logs_of_a_run_that_failed_before_it_trained_are_what_was_written(
    desk: Desk, folder: Path, fallow: Fallow
) -> None:
    desk.statuses = [of(RunStatus.FAILED, members=[])]
    assert "there is: none" in fallow("logs", "r1").err
    (folder / "n0.0.log").write_text("Traceback\n")
    assert fallow("logs", "r1").out == "Traceback\n"


def test_output_is_shown_whole_though_signs_of_it_are_spelled_out_or_lie_across_two_reads(
    folder: Path, fallow: Fallow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_CHUNK", 1)
    (folder / "n3.0.log").write_text("done\x07\ngröße\n")
    assert fallow("logs", "r1").out == "done\\x07\ngröße\n"


def test_logs_follow_until_the_run_has_ended_also_into_a_new_file(
    desk: Desk, folder: Path, fallow: Fallow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent renames a full log, and begins a new log."""
    log = folder / "n3.0.log"
    log.write_text("one\n")
    absence = FallowError("the head is gone", Exit.UNAVAILABLE)
    desk.statuses = [SNAPSHOT, SNAPSHOT, absence, SNAPSHOT, SNAPSHOT, of(RunStatus.FINISHED)]

    def write_more(seconds: float) -> None:
        if not log.exists():
            log.write_text("four\n")
        elif "two" not in log.read_text():
            log.write_text("one\ntwo\n")
        else:
            log.write_text("one\ntwo\nthree\n")
            log.rename(folder / "n3.0.log.1")

    monkeypatch.setattr(follow.time, "sleep", write_more)
    assert fallow("logs", "r1", "--follow")[:2] == (0, "one\ntwo\nthree\nfour\n")


def node(name: str, owner: NodeOwner, unused: str = "", **more: Any) -> NodeView:
    return NodeView(node=name, partitions=["p"], state="idle", owner=owner, unused=unused, **more)


def test_why_tells_what_keeps_a_run_from_growing_and_a_node_from_being_used(desk: Desk, fallow: Fallow) -> None:
    nodes = [
        node("n01", NodeOwner.IDLE, "its hole is too short"),
        node("n02", NodeOwner.IDLE, "its hole is too short"),
        node("n03", NodeOwner.OURS, run="r1", ends_in_s=60.0),
        node("n04", NodeOwner.OTHERS),
    ]
    barred = of(RunStatus.TRAINING, useful=8, barred={"n09": "3 failures on it"})
    desk.statuses = [views.changed(barred, nodes=nodes)]
    message = fallow("why", "r1").out
    for words in ("with 1 of at most 8 nodes", "absorbing n2", "n09 is barred", "2 idle (n[01-02]): its hole is too"):
        assert words in message
    for limit, words in ((1, "`fallow grow` moves the limit"), (8, "")):
        desk.statuses = [views.changed(of(RunStatus.TRAINING, limit=limit, max_nodes=8), nodes=nodes)]
        assert ("fallow grow" in fallow("why", "r1").out) == bool(words)
    desk.statuses = [views.changed(barred, nodes=nodes)]
    for name, words in (("n01", "its hole is too short"), ("n03", "used by run r1"), ("n04", "somebody else")):
        (reason,) = fallow("why", name, "--json").json["reasons"]
        assert words in reason
    result = fallow("why", "x")
    assert result.code == Exit.NOINPUT
    assert "neither a run" in result.err
