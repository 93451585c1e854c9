"""A training of two loops in which members lose each other at the places where they do something together.

usage: ending_training.py --folder FOLDER [--harm NAME]

HARM `links`: at each of them n1's group breaks just when the others have the result (as if somebody else had died in
that moment), and n2 dies in one. `late`: the main member raises after the loops, while n1 has not heard yet that they
are over.
"""

import argparse
import gc
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fallow
from fallow.worker.loop.exchange import Kind
from fallow.worker.loop.meeting import Meeting
from fallow.worker.reduction.reduction import Reduction
from fallow.worker.transport.waits import Interrupted

WORKER = os.environ.get("FALLOW_WORKER", "")


CUTS: list[int] = []
"""Steps at which this member has lost its group on purpose."""


def place(name: str, act: Callable[[], object]) -> None:
    """Have `act` called each time that this process comes to a place, of which the engine itself knows nothing.

    `certain`: it has the sums of a step, and has told nobody. `told`: it has heard that all members have them; the
    script has not. `joint`: it has the answer of a `run.mean` or the end of a call, which nobody else may have.
    """
    if name == "joint":
        plain_hear = Meeting.collect_openings

        def hear(self: Meeting, kind: Kind) -> Any:
            heard = plain_hear(self, kind)
            if kind in (Kind.END, Kind.MEAN):
                act()
            return heard

        Meeting.collect_openings = hear
        return
    plain = Reduction.finish

    def finish(self: Reduction, tell: Callable[[Any], Any], **how: Any) -> Any:
        def telling(sums: Any) -> Any:
            if name == "certain":
                act()
            joined = tell(sums)
            if name == "told":
                act()
            return joined

        return plain(self, telling, **how)

    Reduction.finish = finish


def once(act: Callable[[], object], when: Callable[[], bool], count: int = 1) -> Callable[[], object]:
    """`act`, the `count`-th time that `when` holds."""
    times = itertools.count(1)
    return lambda: act() if when() and next(times) == count else None


def cut_off(run: Any) -> NoReturn:
    """The connection to the others breaks just now, as if somebody else had died."""
    run._member.group.interrupt("cut on purpose")
    raise Interrupted("cut on purpose")


def harm(run: Any) -> None:
    """Set the traps: in two steps, and in each thing that the members do together."""

    def cut() -> None:
        CUTS.append(run.step)
        cut_off(run)

    if WORKER == "n2":
        place("certain", once(lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: run.step == 3))
    if WORKER != "n1":
        return
    for step in (5, 9):
        place("told", once(cut, lambda step=step: run.step == step))
    for answer in (1, 3):  # of the first mean, and of the second call's end
        place("joint", once(cut, lambda: True, answer))


def hear_late(run: Any) -> None:
    """n1 loses its group in the moment in which it would hear that the last loop is over; n0 has heard it."""

    def wait_and_break() -> None:
        wait_until(lambda: run._member.group.broken is not None)
        cut_off(run)

    place("joint", once(wait_and_break, lambda: True, 3))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


def main() -> None:
    """Train, and have each member write what it was told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--harm", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = fallow.init()
    if args.harm == "links":
        harm(run)
    if args.harm == "late" and WORKER == "n1":
        hear_late(run)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.5)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs), batch_size=4)
    model, optimizer, schedule, loader = run.prepare(
        model, optimizer, schedule, loader, global_batch=16, reproducible=True
    )
    told: list[float] = []
    for loop in range(2):
        for update in run.updates(loader):  # 6 steps
            for (x,) in update:
                loss = model(x).square().mean()
                loss.backward()
                update.note(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(update.mean("loss"))
        if loop == 0:
            told.append(run.mean(0.25 * (1 + run.rank)))
    if args.harm == "late" and run.is_main:
        # After all that the script has registered: the run has failed when this process ends.
        gc.freeze = lambda: wait_until((args.folder / "told-n1").exists)
        raise ValueError("the disk is full, say")
    words = {"told": told, "main": bool(run.is_main), "rate": optimizer.param_groups[0]["lr"], "step": run.step}
    (args.folder / f"told-{WORKER}").write_text(json.dumps(words | {"cuts": CUTS}))
    if run.is_main:
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        (args.folder / "result.json").write_text(json.dumps({"rate": words["rate"], "weights": weights}))


if __name__ == "__main__":
    main()
