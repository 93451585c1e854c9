"""Glyphs and colours. Every colour goes with a glyph, so that the screen reads without colours too."""

from rich.style import Style
from rich.text import Text

from fallow.model import AllocationKind, ChangeKind, MemberPhase, NodeOwner, RunStatus
from fallow_tui.view import Cell, Freshness, View

RUN_COLOURS = ("#5fd7af", "#ffaf5f", "#87afff", "#d787ff", "#ffd75f", "#ff87af", "#5fd7ff", "#afd75f")
_MUTED = "#8a8a8a"

MUTED = Style(color=_MUTED)
LABEL = Style(bold=True)
GOOD = Style(color="#5faf5f", bold=True)
WARN = Style(color="#d7af00", bold=True)
BAD = Style(color="#ff5f5f", bold=True)
_LEAVE = Style(color="#d787ff", bold=True)

OWNERS: dict[NodeOwner | None, tuple[str, Style]] = {
    NodeOwner.IDLE: ("·", Style(color="#5faf5f")),
    NodeOwner.OTHERS: ("▒", Style(color="#767676")),
    NodeOwner.PLANNED: ("◇", Style(color="#d7af00")),
    NodeOwner.DOWN: ("×", Style(color="#d75f5f")),
    NodeOwner.OURS: ("?", Style(color="#ffffff")),
    None: (" ", Style()),
}

STATUSES: dict[RunStatus, tuple[str, Style]] = {
    RunStatus.WAITING: ("…", WARN),
    RunStatus.TRAINING: ("▶", GOOD),
    RunStatus.SUSPENDED: ("‖", _LEAVE),
    RunStatus.FINISHED: ("✓", Style(color="#5fafff")),
    RunStatus.FAILED: ("✗", BAD),
    RunStatus.CANCELLED: ("⊘", MUTED),
}

PHASES: dict[MemberPhase, Style] = {
    MemberPhase.STARTING: WARN,
    MemberPhase.READY: WARN,
    MemberPhase.MEMBER: GOOD,
    MemberPhase.LEAVING: _LEAVE,
    MemberPhase.SILENT: BAD,
    MemberPhase.GONE: MUTED,
}

EVENTS: dict[str, Style] = {
    ChangeKind.START: GOOD,
    ChangeKind.ABSORB: GOOD,
    ChangeKind.RELEASE: _LEAVE,
    ChangeKind.MIXED: WARN,
    ChangeKind.EJECT: BAD,
    **{status: style for status, (_, style) in STATUSES.items()},
    "suspend": _LEAVE,
    "abort": WARN,
    "diverged": BAD,
    "lost": BAD,
    "refuse": WARN,
    "refused": WARN,
    "slurm": WARN,
}

FRESHNESS: dict[Freshness, Style] = {Freshness.FRESH: GOOD, Freshness.AGING: WARN, Freshness.STALE: BAD}


def run_colour(view: View, run: str) -> str:
    return RUN_COLOURS[view.number(run) % len(RUN_COLOURS)]


def run_letter(view: View, run: str) -> str:
    """The run's letter, A to Z."""
    return chr(ord("A") + view.number(run) % 26)


def run_badge(view: View, run: str) -> Text:
    """The run's letter on its colour."""
    return Text(run_letter(view, run), Style(color="#000000", bgcolor=run_colour(view, run), bold=True))


def glyph(view: View, cell: Cell) -> tuple[str, Style]:
    """A node's character: `A` member on a base node, `a` on a harvested node, `+` starting, `-` leaving, `!` silent.

    A node that is not ours has the character of its owner.
    """
    if cell.owner is not NodeOwner.OURS or cell.run is None:
        return OWNERS[cell.owner]
    colour = run_colour(view, cell.run)
    letter = run_letter(view, cell.run)
    if cell.phase is MemberPhase.LEAVING:
        return "-", Style(color=colour, bold=True)
    if cell.phase is MemberPhase.SILENT:
        return "!", Style(color=colour, bold=True)
    if cell.phase is not MemberPhase.MEMBER:
        return "+", Style(color=colour, bold=True)
    if cell.kind is AllocationKind.BASE:
        return letter, Style(color="#000000", bgcolor=colour, bold=True)
    return letter.lower(), Style(color=colour, bgcolor="#303030", bold=True)
