"""Who was a member of a run from when to when, and which changes made it so. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from fallow.core.tokens import kind_of
from fallow.model import AllocationKind, ChangeKind, EventRecord, GenerationReport, RunReport, RunView


class Stay(NamedTuple):
    """The time of one node as a member. `host` is empty and `kind` None if the head has dropped the event."""

    member: str
    host: str
    kind: AllocationKind | None
    joined_at: float
    left_at: float
    joining: str
    leaving: str = ""
    end: str = ""
    "release or eject; empty: no change took the node out until now, or until the end of the run"


Turn = GenerationReport | EventRecord
Change = tuple[Turn, int, list[str], list[str]]
"""A generation, or an event by which members were lost or heard again; number of members, who joined and who left."""


def history_of(
    report: RunReport, view: RunView, events: Sequence[EventRecord], now: float
) -> tuple[float, list[Stay], list[Change]]:
    """Return the end of the run (`now` while it goes on), all stays by their begin, and all changes."""
    hosts = {member.member: member.node for member in view.members}
    kinds: dict[str, AllocationKind | None] = {member.member: member.allocation for member in view.members}
    turns: list[Turn] = [*report.generations]
    end_at = max([view.created_at, *(generation.at for generation in report.generations)])
    for event in events:
        hosts |= event.data.get("joined", {})
        kinds |= {member: kind_of(token) for member, token in event.data.get("tokens", {}).items()}
        # A node that still computes may be heard again without a new generation.
        if event.kind in ("suspend", "lost") or event.data.get("phase") in ("member", "leaving"):
            turns.append(event)
        if event.kind == report.status.value and "member" not in event.data:
            end_at = max(end_at, event.at)
    end_at = end_at if report.status.ended else now
    ejected = {event.data.get("member") for event in events if event.kind == ChangeKind.EJECT}
    present: dict[str, tuple[float, str]] = {}
    "member -> when and why it joined"
    stays: list[Stay] = []
    changes: list[Change] = []

    def close(member: str, at: float, reason: str = "", end: str = "") -> None:
        since, why = present.pop(member)
        stays.append(Stay(member, hosts.get(member, ""), kinds.get(member), since, max(since, at), why, reason, end))

    for turn in sorted(turns, key=lambda turn: turn.at):
        reason, took_s = (turn.text, 0.0) if isinstance(turn, EventRecord) else (turn.reason, turn.took_s or 0.0)
        members = [] if isinstance(turn, EventRecord) else turn.members
        if isinstance(turn, EventRecord) and turn.kind == "back":
            members = [*present, turn.data["member"]]
        joined = [member for member in dict.fromkeys(members) if member not in present]
        departed = sorted(present.keys() - set(members))
        for member in departed:
            if member in ejected or turn.kind in (ChangeKind.EJECT, "lost"):
                close(member, turn.at - took_s, reason, "eject")  # the others computed again `took_s` after the loss
            else:
                close(member, turn.at, reason, "release")
        present |= dict.fromkeys(joined, (turn.at, reason))
        if joined or departed or isinstance(turn, GenerationReport):
            changes.append((turn, len(present), joined, departed))
    for member in [*present]:
        close(member, end_at)
    return end_at, sorted(stays, key=lambda stay: (stay.joined_at, len(stay.member), stay.member)), changes
