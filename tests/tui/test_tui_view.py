"""The reduction of the stream, without a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from tui_rig import START, event, member, node_view, run_view, snapshot

from fallow.model import AllocationKind, MemberPhase, NodeOwner, Snapshot
from fallow_tui.palette import glyph
from fallow_tui.view import KEEP_S, Cell, View


def seen(*snapshots: Snapshot) -> View:
    """What has become of these, each shown as many seconds after START as it is old."""
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
    view = seen(snapshot(nodes=nodes, runs=[run_view(members=members)]))
    assert glyphs(view, view.cells.values()) == "Aa+-·▒×+◇-!"


def test_timeline_shows_when_a_node_was_ours_and_the_gap_of_an_outage() -> None:
    idle, ours = [node_view("n1")], [node_view("n1", NodeOwner.OURS, "digits-1")]
    runs = [run_view(members=[member("n1")])]
    view = seen(snapshot(START, nodes=idle, runs=[]), snapshot(START + 2, nodes=ours, runs=runs))
    view.lost("gone", START + 4)
    view.apply(snapshot(START + 6, nodes=ours, runs=runs), 6.0)
    # The outage counts from the last data.
    assert glyphs(view, view.timeline(8, 1.0)["n1"]) == " ··    a"
    view.apply(snapshot(START + 8, nodes=idle, runs=[]), 8.0)
    assert glyphs(view, view.timeline(3, 1.0)["n1"]) == "aa·"
    assert view.timeline(1, 1.0) == {}


def test_history_is_bounded_but_still_knows_what_was_at_the_horizon() -> None:
    owners = [NodeOwner.IDLE, NodeOwner.OTHERS] * 5
    polls = ((START + number * KEEP_S / 4, node_view("n1", owner)) for number, owner in enumerate(owners))
    marks = seen(*(snapshot(at, nodes=[shown], runs=[]) for at, shown in polls)).history["n1"]
    assert len(marks) <= 6
    assert marks[0][0] <= START + 9 * KEEP_S / 4 - KEEP_S


def test_events_are_taken_once_and_start_anew_with_another_state_folder() -> None:
    view = View()
    for seq in (1, 2, 2, 1):
        view.apply(event(seq), 0.0)
    assert [item.seq for item in view.events] == [1, 2]
    view.lost("gone", START)
    view.apply(snapshot(last_event=0), 1.0)
    view.apply(event(1, text="new"), 1.0)
    assert [item.text for item in view.events] == ["new"]
