"""What does a durable checkpoint cost the training?

One run, in blocks of equally many steps: nothing, a checkpoint of ours, nothing, a `torch.save` by the main member
while the others wait. The hold-up of a checkpoint is what its block took longer than the blocks beside it. So copying,
waiting and the writer's share of the processors all count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fallow.bench import rows, session, steplog
from fallow.bench.rows import Peer, Progress, Row, Settings
from fallow.bench.steplog import Finished
from fallow.core.quantile import quantile

ROUNDS = 8
BLOCK = 24
"""Steps in a block; a checkpoint is asked for in its first one."""

INTERVAL_S = 600.0
"""Between two checkpoints by default: what the hold-up is compared with in the note."""


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """One row per world and model: seconds that one checkpoint holds training up."""
    for params, members in settings.worlds:
        progress(f"checkpoint: {members} members, {params / 1e6:g} M parameters")
        yield measure(members, params, settings.n or ROUNDS, settings.device)


def measure(members: int, params: int, rounds: int, device: str = "cpu") -> Row:
    """One run with `rounds` checkpoints of each kind."""
    steps = BLOCK * (4 * rounds + 1)
    options = ["--checkpoint-blocks", str(BLOCK)]
    _, finished = session.train_noting(params, steps, members, most=members, device=device, options=options)
    mine, theirs = holdups(finished, 1), holdups(finished, 3)
    measured, middle = rows.ours(mine), quantile(theirs, 0.5)
    assert middle is not None
    block = BLOCK * steplog.usual_gap(finished)
    return Row(
        name="checkpoint hold-up",
        members=members,
        params=params,
        unit="s",
        ours=measured,
        peer=Peer(name="torch.save", p50=middle),
        ratio=middle / measured.p50 if measured.p50 > 0 else None,
        note=f"{measured.p50 / INTERVAL_S:.4%} of training with one every {INTERVAL_S:g} s; a block is {block:.2f} s",
    )


def holdups(finished: Sequence[Finished], arm: int) -> list[float]:
    """Seconds by which blocks of that kind (number modulo 4) took longer than the mean of the two beside them."""
    ends = {one.step: one.at for one in steplog.progress(list(finished))}
    took: dict[int, float] = {}
    for number in range(1, 1 + max(ends) // BLOCK):
        first, last = BLOCK * number - 1, BLOCK * (number + 1) - 1
        if first in ends and last in ends:
            took[number] = ends[last] - ends[first]
    return [
        took[number] - (took[number - 1] + took[number + 1]) / 2
        for number in took
        if number % 4 == arm and number - 1 in took and number + 1 in took
    ]
