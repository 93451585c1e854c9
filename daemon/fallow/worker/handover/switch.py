"""The first exchange of a generation: who has the state, and its way to those who have not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import msgspec
import torch

from fallow.model import Exit, FallowError
from fallow.worker.handover import extra_state, state
from fallow.worker.handover.intake import Changed, Intake
from fallow.worker.handover.standing import FRESH, HOLDS, TORN, Standing
from fallow.worker.handover.stream import sources
from fallow.worker.handover.supply import Supply
from fallow.worker.loop.position import Position
from fallow.worker.loop.together import NOTHING_TOLD, Kind, Told, conclude
from fallow.worker.prepared.modes import fingerprint as modes_fingerprint
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport.group import Group


class View(NamedTuple):
    """What members tell each other."""

    generation: int
    standing: int
    progress: int
    "twice `Position.progress`, and one less if the last step is doubtful"
    call: int
    "number of its run.steps call"
    fingerprint: int
    "of the weights; 0 unless it holds the state"
    pace: int
    "nanoseconds per shard; 0: not measured"
    whole: int = 0
    "see `Standing.whole`"
    modes: int = 0
    "fingerprint of what is frozen and what rests"
    extra: int = 0
    "1: its modules have extra state"
    agreed: int = 0
    "this and the rest: see `together.Told`"
    answer: int = 0
    kind: int = 0
    value: int = 0
    holds: int = 0


class Verdict(NamedTuple):
    """What all members conclude from all views."""

    donors: list[int]
    "ranks; empty if nobody has the state"
    level: list[int]
    "ranks that are as far as the donors, but still in the run.steps call that those have left"
    healed: list[int]
    "ranks that are as far but whose weights are not those of the majority"


Restore = Callable[[], dict[str, object] | None]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What the exchange did and where its time went (seconds)."""

    position: Position
    intake: Intake | None
    "what this member received; a part may be on its way still, see `Standing`"
    healed: list[int]
    drain_s: float
    "until every member had finished its last step"
    group_s: float
    state_s: float
    paces: list[float]
    "seconds per shard that the members bring along, by rank; 0: not measured"
    agreed: int
    "exchanges outside of bodies that are complete"
    answer: float
    "what the last of them gave"
    over: int | None
    "run.steps call whose end became complete by this exchange"


def export_state(prepared: Prepared, position: Position) -> dict[str, object]:
    """Everything that a newcomer needs, as a tree; the modules' tensors come first."""
    return {"objects": prepared.export(), "position": position.export()}


def load_state(prepared: Prepared, tree: dict[str, object]) -> Position:
    """Put an exported state into the live objects; returns the position that belongs to it."""
    objects, modes = tree["objects"], tree.get("modes")
    assert isinstance(objects, dict)
    prepared.load(objects)
    if isinstance(modes, list):
        prepared.modes.load(modes)
    if "extra" in tree:
        extra_state.write(prepared.modules, cast("dict[str, object]", tree["extra"]))
    prepared.order = msgspec.convert(tree.get("order", prepared.order), list[int])
    return msgspec.convert(tree["position"], Position)


def exchange(
    group: Group,
    prepared: Prepared,
    position: Position,
    standing: Standing,
    restore: Restore,
    pace: float,
    part: Told = NOTHING_TOLD,
    *,
    doubtful: bool = False,
) -> Exchanged:
    """Compare all members' states in a new group and bring everybody to the newest one.

    Args:
        group: the new generation's group.
        prepared: live objects; changed in place on those who receive.
        position: this member's position.
        standing: what its state is worth; set to what it is worth afterwards, and what is on its way.
        restore: gives the state of the newest checkpoint, None: there is none; used by one if nobody has the state.
        pace: this member's seconds per shard; 0: not measured.
        part: this member's in what the script waits for outside of bodies.
        doubtful: others that are as far have something of the last step that this member has not: theirs counts.

    Raises:
        Interrupted: the group broke. Who held the state still does.
        FallowError: members that should be equal differ and there is no majority, or the state does not fit.
    """
    started = time.monotonic()
    here = torch.zeros(1)
    group.all_reduce(here)
    total = state.fingerprint(prepared.weights()) if standing.holds else 0
    group.wait()
    met = time.monotonic()
    own = prepared.modes.export()
    modes: object = own
    known = modes_fingerprint(own)
    has_extra = bool(extra_state.holders(prepared.modules))
    mine = _view(group, standing, position, total, known, pace, part, doubtful=doubtful, extra=has_extra)
    views = _views(group, mine)
    agreed = time.monotonic()
    told = [Told(*view[-len(Told._fields) :]) for view in views]
    complete, answer = conclude(told)
    over = [view.call for view, one in zip(views, told, strict=True) if one.kind == Kind.END and one.agreed < complete]
    donors, level, healed = judge(group.generation, views, drift=not prepared.reproducible)
    begun = bool(donors)
    if not begun:
        if standing.value == TORN:
            raise FallowError(
                "every member that had the state is gone, and this one had not received all of it yet; "
                "the run goes on from its newest checkpoint",
                Exit.TEMPFAIL,
            )
        donors = [next(rank for rank, view in enumerate(views) if view.standing == FRESH)]
        saved = restore() if group.rank == donors[0] else None
        if saved is not None:
            position = load_state(prepared, saved)
            modes = saved.get("modes")  # not those that it had before
    there = {*donors, *level}
    receivers = [rank for rank, view in enumerate(views) if rank not in there and (begun or view.standing == FRESH)]
    standing.whole = any(view.whole for view in views)
    # Who trains on with the old state if the new one does not come is not torn, but gets none of it in place.
    whole = standing.whole or not begun or any(views[rank].standing == HOLDS for rank in receivers)
    plan = sources(donors, receivers)
    extra = extra_state.share(group, prepared.modules, donors[0]) if any(view.extra for view in views) else {}
    intake: Intake | None = None
    if group.rank in plan:
        total = views[donors[0]].fingerprint
        intake, position = _receive(group, plan[group.rank], prepared, standing, total, begun=begun)
        extra_state.write(prepared.modules, extra)
    else:
        pieces = sum(row.count(group.rank) for row in plan.values())
        if pieces:
            tree = export_state(prepared, position)
            # Where they differ, bodies begin by switching them: this is what the receivers' do, too.
            agree = len({views[rank].modes for rank in donors}) == 1
            tree["modes"] = modes if agree else None
            tree["order"] = prepared.order
            standing.supply = Supply(group, prepared, tree, pieces, whole=whole)
            standing.supply.wait_early()
        else:
            group.end_transfers()
        standing.value = HOLDS
    return Exchanged(
        position=position,
        intake=intake,
        healed=healed,
        drain_s=met - started,
        group_s=agreed - met,
        state_s=time.monotonic() - agreed,
        paces=[view.pace / 1e9 for view in views],
        agreed=complete,
        answer=answer,
        over=over[0] if over else None,
    )


def _view(
    group: Group,
    standing: Standing,
    position: Position,
    fingerprint: int,
    modes: int,
    pace: float,
    part: Told,
    *,
    doubtful: bool,
    extra: bool = False,
) -> View:
    return View(
        generation=group.generation,
        standing=standing.value,
        progress=2 * position.progress - doubtful,
        call=position.call,
        fingerprint=fingerprint,
        pace=round(pace * 1e9),
        whole=standing.whole,
        modes=modes,
        extra=extra,
        **part._asdict(),
    )


def _views(group: Group, mine: View) -> list[View]:
    gathered = group.all_gather(torch.tensor(mine, dtype=torch.int64))
    group.wait()
    return [View(*(int(value) for value in row)) for row in gathered]


def judge(generation: int, views: Sequence[View], *, drift: bool = False) -> Verdict:
    """Who gives the state to the others: those who are furthest.

    A member can have left its run.steps call, and have done what the script does between two calls, while another was
    held up in the exchange at that call's last step. That one will do the same by itself, so it receives nothing; but
    what it holds is not what a newcomer needs.

    Where donors' weights differ, more than half of them must agree; the others receive the state anew. With `drift`,
    where unlike kernels may be the reason, the largest side counts, of equal ones that with the first rank.

    Raises:
        FallowError: a stale process answered, or weights differ and no side is the majority.
    """
    for rank, view in enumerate(views):
        if view.generation != generation:
            raise FallowError(f"rank {rank} is in generation {view.generation}, not {generation}: a stale process")
    holders = [rank for rank, view in enumerate(views) if view.standing == HOLDS]
    if not holders:
        return Verdict([], [], [])
    most = max(views[rank].progress for rank in holders)
    furthest = [rank for rank in holders if views[rank].progress == most]
    call = max(views[rank].call for rank in furthest)
    newest = [rank for rank in furthest if views[rank].call == call]
    (usual, count), *_ = Counter(views[rank].fingerprint for rank in newest).most_common(1)
    if 2 * count <= len(newest) and not drift:
        sums = ", ".join(f"rank {rank}: {views[rank].fingerprint:x}" for rank in newest)
        raise FallowError(
            f"generation {generation}: members that are equally far hold different weights ({sums}) and none are the "
            "majority; the script changes weights outside the prepared optimizers, or the nodes compute differently "
            "(processor, torch version)"
        )
    donors = [rank for rank in newest if views[rank].fingerprint == usual]
    level = [rank for rank in furthest if rank not in newest]
    return Verdict(donors, level, [rank for rank in newest if rank not in donors])


def _receive(
    group: Group, donors: Sequence[int], prepared: Prepared, standing: Standing, fingerprint: int, *, begun: bool
) -> tuple[Intake, Position]:
    """Take the state; late tensors are left to come where nothing is lost if they do not."""
    # An old state, or the very first one, is worth something until a whole new one is here.
    at_once = standing.holds or not begun
    if not at_once:
        standing.value = TORN
    intake = Intake(group, prepared, donors, in_place=not at_once)
    try:
        tree = intake.wait_weights()
        if at_once:
            intake.settle()
        position = load_state(prepared, tree)
        intake.check(fingerprint)
    except Changed:
        standing.whole = True
        raise
    if not at_once:
        intake.adopt()
    standing.intake = intake
    if intake.complete:
        standing.complete()
    return intake, position
