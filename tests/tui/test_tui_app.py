"""The monitor as a person uses it."""

import re
from typing import Any

import pytest
from textual.widgets import Input
from tui_rig import START, event, member, node_view, opened, run_view, snapshot

from fallow.control.client import START_ADVICE
from fallow.model import AllocationKind, Exit, FallowError, NodeOwner, RunStatus
from fallow_tui.screens.dialogs import Confirm, Help
from fallow_tui.screens.pages import OverviewScreen, RunScreen
from fallow_tui.text import clock
from fallow_tui.view import RED_S
from fallow_tui.widgets.nodes import NodeMap


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_shows_head_nodes_runs_membership_and_events(size: tuple[int, int]) -> None:
    async with opened(snapshot(), event(1, text="+n2 joined because it was idle"), size=size) as rig:
        lines = rig.screen()
        for word in ("meadow", "● head", "poll 2s/10s"):
            assert word in lines[0]
        assert "A1 a2 ▒3 ·4" in rig.text()
        row = next(line for line in lines if "digits " in line)
        for word in ("▶ training", "2/1-4", "120/1000", "0.731", "1.2k", "5:00"):
            assert word in row
        assert any(line.lstrip().startswith("n2 ") and line.count("a") for line in lines)
        assert "+n2 joined because it was idle" in rig.text()
        assert "Quit" in lines[-1]
        assert ("Last changes" in rig.text()) == (size[0] >= 100)


async def test_a_number_that_does_not_fit_is_not_cut_to_another_one() -> None:
    run = run_view(step=123_456, total_steps=1_000_000, min_nodes=16, max_nodes=1000, generation=12_345)
    async with opened(snapshot(runs=[run]), size=(80, 24)) as rig:
        row = next(line for line in rig.screen() if "digits " in line)
        assert row.split("training")[1].split()[:4] == ["2", "12k", "123456", "12%"]


async def test_small_screens_and_large_clusters_do_not_crash() -> None:
    nodes = [node_view(f"node{number:05}", NodeOwner.OTHERS) for number in range(800)]
    runs = [run_view(f"run-{number}", status=status) for number, status in enumerate(RunStatus)]
    async with opened(snapshot(nodes=nodes, runs=runs), size=(20, 5)) as rig:
        await rig.press("1", "j", "j", "l", "k", "h", "3", "j", "minus", "plus", "k", "2", "enter")
        assert isinstance(rig.app.screen, RunScreen)
        await rig.press("escape")
        await rig.send(snapshot(START + 1, nodes=[node_view("n1")], runs=[]))
        assert rig.app.screen.query_one(NodeMap).selected == "n1"


async def test_runs_that_have_ended_do_not_hide_those_that_go_on() -> None:
    ended = [run_view(f"old{number}-1", status=RunStatus.FAILED, members=[]) for number in range(20)]
    async with opened(snapshot(runs=[*ended, run_view()]), size=(80, 24)) as rig:
        rows = [line for line in rig.screen() if "✗ failed" in line or "▶ training" in line]
        assert [row.split()[:2] for row in rows[:2]] == [["A", "digits"], ["U", "old19"]]
        assert "A1 a2" in rig.text()


async def test_before_a_head_is_there_it_says_what_to_do() -> None:
    async with opened(size=(60, 20)) as rig:
        await rig.press("enter", "g", "d", "1", "right")
        assert "asking the head" in rig.screen()[0]
        none = f"no head is running for /home/somebody/.local/state/fallow; {START_ADVICE}"
        await rig.send(FallowError(none, Exit.UNAVAILABLE))
        assert "✗ no head" in rig.screen()[0] and START_ADVICE in rig.text()
        await rig.send(snapshot(nodes=[], runs=[]))
        assert "no nodes known yet" in rig.text()
        await rig.send(snapshot(START + 1, nodes=[node_view("n1", unused="too short: 60 s")], runs=[]))
        assert "n1  idle  idle  too short: 60 s" in rig.text()
        await rig.pilot.press("q")
    assert rig.app.return_code == 0


async def test_the_newest_events_stay_in_sight_unless_somebody_has_gone_up_to_read() -> None:
    async with opened(snapshot(), *(event(n, text=f"story {n}.") for n in range(1, 60)), size=(120, 60)) as rig:
        await rig.pilot.resize_terminal(80, 24)
        await rig.settle()
        assert "story 59." in rig.text()
        await rig.press("4", "home")
        assert "story 1." in rig.text()
        await rig.send(event(60, text="story 60."))
        assert "story 1." in rig.text()
        await rig.press("end")
        await rig.send(event(61, text="story 61."))
        assert "story 61." in rig.text()


async def test_filter_narrows_the_events_until_escape() -> None:
    async with opened(snapshot(), event(1, "absorb", "alpha"), event(2, "release", "beta"), size=(80, 24)) as rig:
        await rig.press("slash", *"REL")
        assert rig.app.screen.query_one(Input).value == "REL"
        assert "beta" in rig.text()
        assert "alpha" not in rig.text()
        await rig.send(event(3, "release", "gamma"), event(4, "absorb", "delta"))
        assert "gamma" in rig.text()
        assert "delta" not in rig.text()
        await rig.press("enter", "escape")
        for word in ("alpha", "beta", "gamma", "delta"):
            assert word in rig.text()


@pytest.mark.parametrize(
    ("keys", "call"),
    [
        (["g", "up", "up", "down", "y"], ("grow", {"run": "digits-1", "by": 2})),
        (["1", "l", "d", "y"], ("drain", {"run": "digits-1", "nodes": ["n2"]})),
        (["enter", "j", "d", "y"], ("drain", {"run": "digits-1", "nodes": ["n2"]})),
        (["enter", "c", "right", "tab", "enter"], ("cancel", {"run": "digits-1"})),
    ],
)
async def test_actions_ask_back_and_then_ask_the_head(keys: list[str], call: tuple[str, dict[str, Any]]) -> None:
    async with opened(snapshot()) as rig:
        for key in keys[:-1]:
            await rig.press(key)
        assert isinstance(rig.app.screen, Confirm)
        assert "(digits-1)" in rig.text()
        assert rig.source.calls == []
        await rig.press(keys[-1])
        await rig.source.was_asked()
        assert rig.source.calls == [call]


@pytest.mark.parametrize(
    "state", [{"paused": "Slurm refused it"}, {"drained": ["n3", "n4"]}], ids=["paused", "drained"]
)
async def test_a_run_that_is_paused_or_does_without_nodes_is_resumed(state: dict[str, Any]) -> None:
    async with opened(snapshot(runs=[run_view(**state)])) as rig:
        await rig.press("p" if "paused" in state else "enter")
        assert isinstance(rig.app.screen, OverviewScreen) is ("paused" in state)
        assert "r Resume" in rig.text()
        assert ("drained n3,n4" in rig.text()) is ("drained" in state)
        await rig.press("r")
        await rig.press("y")
        await rig.source.was_asked()
        assert rig.source.calls == [("resume", {"run": "digits-1"})]


async def test_a_stray_key_does_not_cancel_a_run() -> None:
    async with opened(snapshot()) as rig:
        for no in ("n", "escape", "enter"):
            await rig.press("c")
            assert isinstance(rig.app.screen, Confirm)
            await rig.press(no)
            assert isinstance(rig.app.screen, OverviewScreen)
        assert rig.source.calls == []
        await rig.send(snapshot(START + 1, runs=[run_view(members=[], status=RunStatus.FINISHED)]))
        assert "✓ finished" in rig.text()
        assert "Cancel" not in rig.screen()[-1], "of a run that has ended"


async def test_what_the_head_refuses_is_shown() -> None:
    async with opened(snapshot(), notifications=True) as rig:
        rig.source.refuse = FallowError("run digits-1 is at its most: [bold]4 nodes", Exit.USAGE)
        await rig.press("g")
        await rig.press("y")
        assert [note.severity for note in rig.app._notifications] == ["error"]
        assert "[bold]4 nodes" in rig.text()


async def test_read_only_hides_and_disables_actions() -> None:
    async with opened(snapshot(), read_only=True) as rig:
        assert "read only" in rig.screen()[0]
        for keys in (("g", "s", "c", "1", "l", "d"), ("2", "enter", "g", "s", "d", "c")):
            await rig.press(*keys)
            assert not isinstance(rig.app.screen, Confirm)
            assert not {"Grow", "Shrink", "Drain", "Cancel"} & set(rig.screen()[-1].split())
        await rig.press("question_mark")
        assert isinstance(rig.app.screen, Help)
        assert "member of that run" in rig.text() and "Shrink" not in rig.text()
        assert rig.source.calls == []


async def test_head_away_keeps_the_last_data_and_comes_back() -> None:
    async with opened(snapshot(), FallowError("the head is gone", Exit.UNAVAILABLE)) as rig:
        for word in (f"✗ head away since {clock(START)}", "AGING", "the head is gone"):
            assert word in rig.screen()[0]
        assert "▶ training" in rig.text()
        await rig.send(ValueError("not even an error of ours"))
        assert "not even" in rig.screen()[0]
        await rig.send(snapshot(START + 5))
        assert "● head" in rig.screen()[0]
        rig.monotonic.now += RED_S
        rig.app.draw()
        await rig.settle()
        assert "updated 20s ago STALE" in rig.screen()[0]


async def test_details_of_a_run_and_back() -> None:
    base = member("n1", allocation=AllocationKind.BASE, ends_in_s=7200.0, workers=2)
    members = [member("n2", 2, workers=2), base]
    other = run_view("other-2", members=[])
    output = run_view(members=members, change="absorbing n3", scalars={"lr": 0.125, "norm": None})
    stories = event(1, text="of this one"), event(2, text="of another", run="other-2")
    async with opened(snapshot(runs=[output, other]), *stories) as rig:
        await rig.press("enter")
        text = rig.text()
        for word in ("absorbing n3", "lr 0.125", "norm -", "generation 7", "m-n1", "base", "2h00m", "of this one"):
            assert word in text
        assert "1 Members" in text and "2 Events" in text
        assert "workers 4" in text
        assert re.findall(r"(\S+) +m-n\d ", text) == ["0-1", "2-3"]
        assert "of another" not in text
        await rig.send(snapshot(runs=[other]))
        assert "no longer knows run digits-1" in rig.text()
        await rig.press("escape")
        assert isinstance(rig.app.screen, OverviewScreen)


async def test_hostile_names_are_shown_as_they_are() -> None:
    evil = "[red]x[/] \x1b]0;t\x07[@click=app.quit]y"
    run = run_view(name=evil, change=evil, message=evil, members=[member(evil)])
    poll = snapshot(nodes=[node_view(evil, NodeOwner.OURS, "digits-1")], runs=[run])
    async with opened(poll, event(1, text=evil), FallowError(evil), size=(160, 50)) as rig:
        output = rig.text()
        assert output.count("[red]x[/]") >= 4
        assert "\x1b" not in output
        assert "\x07" not in output
        await rig.press("enter")
        assert r"[red]x[/] \x1b]0;t\x07[@click=app.quit]y" in rig.text()
        await rig.press("d")
        assert "Drain node [red]x[/]" in rig.text()
