"""The monitor's parts: the reduction of the stream, its sources, and formats."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tui_rig import START, event, member, node_view, run_view, snapshot

import builders
from fallow.control.server import ControlServer
from fallow.files import Paths, write_struct
from fallow.model import AllocationKind, EventRecord, Exit, FallowError, MemberPhase, NodeOwner, Snapshot
from fallow_tui.app import HeadSource
from fallow_tui.demo import DemoCluster, DemoSource
from fallow_tui.palette import glyph
from fallow_tui.text import clean_item, figure
from fallow_tui.view import KEEP_S, Cell, View


def view_of(*snapshots: Snapshot) -> View:
    """A view with these snapshots, each applied as many seconds after START as its `at`."""
    view = View()
    for each in snapshots:
        view.apply(each, each.at - START)
    return view


def glyphs(view: View, cells: Iterable[Cell]) -> str:
    return "".join(glyph(view, cell)[0] for cell in cells)


def test_cells_tell_base_harvest_starting_and_others_apart() -> None:
    members = [
        member("n1", allocation=AllocationKind.BASE),
        member("n2", 1),
        member("n3", None, MemberPhase.STARTING),
        member("n4", 2, MemberPhase.LEAVING),
        member("n5", None, MemberPhase.GONE),
        member("x2", None, MemberPhase.SILENT),
    ]
    nodes = [node_view(f"n{number}", NodeOwner.OURS, "digits-1") for number in range(1, 5)]
    nodes += [node_view("n5"), node_view("n6", NodeOwner.OTHERS), node_view("n7", NodeOwner.DOWN)]
    nodes += [node_view("n8", NodeOwner.OURS, "digits-1"), node_view("n9", NodeOwner.PLANNED)]
    nodes.append(node_view("x1", NodeOwner.OURS, "digits-1", ending=True))
    nodes.append(node_view("x2", NodeOwner.OURS, "digits-1"))
    view = view_of(snapshot(nodes=nodes, runs=[run_view(members=members)]))
    assert glyphs(view, view.cells.values()) == "Aa+-·▒×+◇-!"


def test_timeline_shows_when_a_node_was_ours_and_the_gap_of_an_outage() -> None:
    idle, our_snapshot = [node_view("n1")], [node_view("n1", NodeOwner.OURS, "digits-1")]
    runs = [run_view(members=[member("n1")])]
    view = view_of(snapshot(START, nodes=idle, runs=[]), snapshot(START + 2, nodes=our_snapshot, runs=runs))
    view.apply_disconnect("gone", START + 4)
    view.apply(snapshot(START + 6, nodes=our_snapshot, runs=runs), 6.0)
    # The outage counts from the last data.
    assert glyphs(view, view.timeline(8, 1.0)["n1"]) == " ··    a"
    view.apply(snapshot(START + 8, nodes=idle, runs=[]), 8.0)
    assert glyphs(view, view.timeline(3, 1.0)["n1"]) == "aa·"
    assert view.timeline(1, 1.0) == {}


def test_history_is_bounded_but_still_knows_what_was_at_the_horizon() -> None:
    owners = [NodeOwner.IDLE, NodeOwner.OTHERS] * 5
    polls = ((START + number * KEEP_S / 4, node_view("n1", owner)) for number, owner in enumerate(owners))
    marks = view_of(*(snapshot(at, nodes=[rows], runs=[]) for at, rows in polls)).history["n1"]
    assert len(marks) <= 6
    assert marks[0][0] <= START + 9 * KEEP_S / 4 - KEEP_S


def test_events_are_taken_once_and_start_anew_with_another_state_folder() -> None:
    view = View()
    for seq in (1, 2, 2, 1):
        view.apply(event(seq), 0.0)
    assert [item.seq for item in view.events] == [1, 2]
    view.apply_disconnect("gone", START)
    view.apply(snapshot(last_event=0), 1.0)
    view.apply(event(1, text="new"), 1.0)
    assert [item.text for item in view.events] == ["new"]


def _play_demo(seed: int, seconds: int) -> tuple[View, list[EventRecord]]:
    cluster, view, events = DemoCluster(seed), View(), []
    for _ in range(seconds):
        events += cluster.advance()
        view.apply(cluster.snapshot(), cluster.at)
    return view, events


def test_the_story_has_growth_and_shrinkage_on_nodes_that_are_idle() -> None:
    view, events = _play_demo(7, 300)
    assert {"start", "absorb", "release"} <= {event.kind for event in events}
    rows = view.timeline(100, 2.0)
    assert any(len({cell.owner for cell in cells}) >= 3 for cells in rows.values())


async def test_the_source_streams_and_takes_no_requests() -> None:
    source = DemoSource(tick_s=0.0, wall=lambda: 1000.0)
    async for item in source.subscribe():
        if isinstance(item, Snapshot) and item.at > 1000.0:
            break
    with pytest.raises(FallowError, match="simulated"):
        await source.call("shrink", run=item.runs[0].run, by=1)


class Head:
    """Answers like a head."""

    async def handle(self, method: str, params: dict[str, Any]) -> Any:
        match method:
            case "status":
                return snapshot(last_event=1)
            case "events":
                return [event(1)]
            case "grow":
                raise FallowError(f"run {params['run']} is at its most", Exit.USAGE)
        return None


async def test_stream_and_calls_through_the_control_socket(tmp_path: Path) -> None:
    paths = Paths(state=tmp_path / "state", runtime=tmp_path / "runtime").create()
    server = ControlServer(paths.control, Head().handle)
    await server.start()
    try:
        local_paths = {"host": socket.gethostname(), "pid": os.getpid(), "control": str(paths.control)}
        write_struct(paths.head_file, builders.head_file(**local_paths))
        source = HeadSource(paths)
        items = source.subscribe()
        assert [await anext(items) for _ in range(2)] == [snapshot(last_event=1), event(1)]
        assert await source.call("cancel", run="digits-1") is None
        with pytest.raises(FallowError, match="digits-1 is at its most"):
            await source.call("grow", run="digits-1", by=1)
    finally:
        await server.close()


def test_clean_item_escapes_what_a_terminal_would_obey_and_keeps_the_rest() -> None:
    hostile = event(1, text="\x1b]52;c;AAAA\x07\x1b[2Jnode\u202e [red]x[/red]\nü\x9b1m", run=None)
    assert clean_item(hostile).text == r"\x1b]52;c;AAAA\x07\x1b[2Jnode\u202e [red]x[/red] ü\x9b1m"
    assert clean_item(snapshot()) == snapshot()
    dirty = EventRecord(seq=1, at=0.0, run=None, kind="k", text="t", data={"a\x1b[1m": ["\x07b", 3]})
    assert clean_item(dirty).data == {r"a\x1b[1m": [r"\x07b", 3]}


def test_a_figure_that_does_not_fit_loses_digits_but_never_its_exponent() -> None:
    figures = {2.2481: "2.248", 0.0012345: "0.0012", -1.754e-05: "-2e-05", 123456.7: "1e+05", float("-inf"): "-inf"}
    assert {value: figure(value) for value in figures} == figures
    assert figure(None) == "-"
