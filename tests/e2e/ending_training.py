"""A training of two loops in which members lose each other at the places where they do something together.

usage: ending_training.py --folder FOLDER [--harm NAME]

HARM `links`: at each of them w1's group breaks just when the others have the result (as if somebody else had died in
that moment), and w2 dies in one. `break`: the main member alone leaves the loop, behind a step after which the shards
are divided anew. `late`: it raises after the loop. `late alone`: likewise, while w1 has not heard yet that the loop is
over. `late break`: likewise, and all have left the loop by break.
`between`: the main member raises between the loops, while w1 has not heard yet that the first one is over.
`exit0`: all leave the second loop at step 9 by `sys.exit(0)`. `exit3`: the main member ends by SystemExit(3) after the
loop, w1 by SystemExit(4). `mean before`, `mean after`: the main member alone asks for one in a body.
`hang`: the main member's process does not end. `desert`: w1's script ends in the loop. `linger`: so it does, and its
process takes its time to end. `last`: w2 dies in the step in which the others leave the loop for good.
`behind`: all leave the loop by break behind a step that w1 has to receive,
since its group breaks just when the others have the step's mean.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fallow
from fallow.core.shares import Division
from fallow.worker.loop.loop import loop
from fallow.worker.loop.together import Kind
from fallow.worker.transport.group import Interrupted

WORKER = os.environ.get("FALLOW_WORKER", "")
LINGERS_S = 12.0


def cut_off(run: Any) -> None:
    """Lose the group."""
    run._member.group.interrupt("cut on purpose")


def harm(run: Any) -> list[int]:
    """Set the traps; returns the steps at whose mean something happens."""
    ends: list[Kind] = []
    plain_ask = loop.ask_all
    plain_gather: Callable[[Any], Any] = type(run)._gathered

    def ask(group: Any, kind: Kind, value: float) -> float:
        ends.append(kind)
        result = plain_ask(group, kind, value)
        if WORKER == "w1" and (kind is Kind.MEAN or ends.count(Kind.END) == 2):
            cut_off(run)
            raise Interrupted("cut on purpose")
        return result

    def gathered(cells: Any) -> Any:
        if WORKER == "w2" and run.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        result = plain_gather(run, cells)
        if WORKER == "w1" and run.step in (5, 9) and run.step not in seen:
            seen.append(run.step)
            cut_off(run)
            return None
        return result

    seen: list[int] = []
    loop.ask_all = ask
    run._gathered = gathered
    return seen


def fall_behind(run: Any, past: Path) -> None:
    """w1 does not get the mean of step 3, once w0 has it."""
    plain, cut = type(run)._gathered, []

    def gathered(cells: Any) -> Any:
        result = plain(run, cells)
        if run.step != 3 or cut:
            return result
        cut.append(run.step)
        if WORKER == "w0":
            past.touch()
            return result
        deadline = time.monotonic() + 30
        while not past.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        cut_off(run)
        return None

    run._gathered = gathered


def hear_late(loops: int) -> None:
    """w1 loses its group in the moment in which it would hear that so many loops are over; w0 has heard it."""
    plain_ask, ends = loop.ask_all, []

    def ask(group: Any, kind: Kind, value: float) -> float:
        result = plain_ask(group, kind, value)
        ends.append(kind)
        if ends.count(Kind.END) != loops:
            return result
        deadline = time.monotonic() + 60
        while group.broken is None and time.monotonic() < deadline:
            time.sleep(0.001)
        raise Interrupted("cut on purpose")

    loop.ask_all = ask


def divide_anew(after: int) -> None:
    """After so many steps w1 is found to be slow, as it may be by itself on a busy machine."""
    plain = Division.revised

    def revised(old: Division, shards: int, paces: Sequence[float], step: int) -> Division:
        return Division((0.01, 0.03), step) if step == after else plain(old, shards, paces, step)

    Division.revised = revised


def main() -> None:
    """Train, and have each member write what it was told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--harm", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.harm == "linger" and WORKER == "w1":
        atexit.register(time.sleep, LINGERS_S)  # runs behind what Fallow has registered
    run = fallow.init()
    if args.harm == "links":
        harm(run)
    if args.harm in ("late alone", "between") and WORKER == "w1":
        hear_late(loops=1 if args.harm == "between" else 2)
    if args.harm == "break":
        divide_anew(after=4)
    if args.harm == "behind" and WORKER:
        fall_behind(run, args.folder / "past")
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.5)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs), batch_size=4)
    model, optimizer, schedule, loader = run.prepare(
        model, optimizer, schedule, loader, global_batch=16, reproducible=True
    )
    told: list[float] = []
    for (x,) in run.steps(loader):  # 6 steps
        loss = model(x).square().mean()
        if args.harm == "mean before" and run.is_main and run.step == 3:
            run.mean(loss)
        loss.backward()
        mean = run.mean(loss)
        if args.harm == "mean after" and run.is_main and run.final_shard and run.step == 3:
            run.barrier()
        optimizer.step()
        optimizer.zero_grad()
        if run.final_shard:
            schedule.step(mean)
        if args.harm == "break" and run.is_main and run.final_shard and run.step == 3:
            break
        if args.harm == "behind" and run.final_shard and run.step == 3:
            break
    if args.harm == "behind":
        schedule.step(1e9)  # acts once, on w1 too, which has it done by the others when they give it their state
    if args.harm == "between" and run.is_main:
        (args.folder / f"between-{WORKER}").touch()
        raise ValueError("the disk is full, say")
    told.append(run.mean(0.25 * (1 + run.rank)))
    for (x,) in run.steps(loader):
        loss = model(x).square().mean()
        final = run.final_shard  # before the backward in which the others learn that w2 is gone
        if args.harm == "last" and run.step == 9 and WORKER == "w2":
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.harm in ("last", "late break") and run.step == 9 and final:
            break
        mean = run.mean(loss)  # something has acted by now
        if run.final_shard:
            schedule.step(mean)
            if (args.harm == "exit0" and run.step == 9) or (args.harm in ("desert", "linger") and WORKER == "w1"):
                sys.exit(0)
    if args.harm == "exit3":
        raise SystemExit(3 if run.is_main else 4)
    if args.harm == "hang" and run.is_main:
        gc.freeze = threading.Event().wait  # what comes after all that the script has registered
    if args.harm.startswith("late") and run.is_main:
        raise ValueError("the disk is full, say")
    words = {"told": told, "main": bool(run.is_main), "rate": optimizer.param_groups[0]["lr"], "step": run.step}
    (args.folder / f"told-{WORKER}").write_text(json.dumps(words))
    if run.is_main:
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        (args.folder / "result.json").write_text(json.dumps({"rate": words["rate"], "weights": weights}))


if __name__ == "__main__":
    main()
