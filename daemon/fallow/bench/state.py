"""How does a newcomer get the state, and how long does training wait for it?

Ours: the part of a planned pause that moves state, per absorb. The peer is what a design that restarts does in that
place, at its best: `torch.distributed.checkpoint` saves to this machine's own disk and loads again, in warm processes.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator

from fallow.bench import pause, rows, session
from fallow.bench.rows import Peer, Progress, Row, Settings
from fallow.core.quantile import quantile
from fallow.model import ChangeKind

CHANGES = 16
SAVES = 5


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """One row per world and model."""
    for params in settings.params:
        progress(f"state: {params / 1e6:g} M parameters, torch.distributed.checkpoint")
        peer = save_and_load(params, settings.device)
        for members in settings.members:
            progress(f"state: {members} members, {params / 1e6:g} M parameters")
            yield measure(members, params, settings.n or CHANGES, peer, settings.device)


def measure(members: int, params: int, changes: int, peer: list[float], device: str = "cpu") -> Row:
    """Absorbs of one run beside saves and loads."""
    steps = pause.FIRST_STEP + 6 * changes + 10
    with session.folder() as scratch:
        items = pause.schedule(members, changes)
        done = session.train(scratch, params, steps, members, items, most=members + 1, device=device)
    absorbs = [g for g in done.report.generations if g.kind is ChangeKind.ABSORB]
    measured, middle = rows.ours([g.parts.state for g in absorbs]), quantile(peer, 0.5)
    note = f"ours is the time that training waits; {12 if device == 'cpu' else 14} bytes a parameter"
    assert middle is not None
    return Row(
        name="state to a newcomer",
        members=members,
        params=params,
        unit="s",
        ours=measured,
        peer=Peer(name="save and load", p50=middle),
        ratio=middle / max(measured.p50, 1e-4),
        note=f"{note}; {done.sums}" if done.sums else note,
    )


def save_and_load(params: int, device: str = "cpu") -> list[float]:
    """Seconds for saving model and optimizer to a folder and loading them into another process's equal objects."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from fallow.bench import workload
    from fallow.bench.device import synchronize, take

    place = take(device, 1)
    model, optimizer = workload.make(params, place, workload.dtype_for(place))
    tokens, targets = workload.Text(model.context)[0]
    workload.loss_of(model, tokens[None], targets[None]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    times = []
    for _ in range(SAVES):
        with tempfile.TemporaryDirectory(prefix="fallow-bench-") as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            synchronize(place)
            began = time.monotonic()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is one process is what we want
                save(state, checkpoint_id=folder, no_dist=True)
                load(state, checkpoint_id=folder, no_dist=True)
            synchronize(place)  # values were loaded into the live tensors
            times.append(time.monotonic() - began)
    return times
