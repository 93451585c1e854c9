"""The tiny training of `test_faults.py`, which does itself harm at a named place: no test has to hit a moment.

usage: faulty_training.py --folder FOLDER [--steps N] [HARM ...]; a HARM is KIND:WORKER:PLACE, WORKER a name or `all`.

KIND: kill, stop, segfault, raise, hang (gives the GIL up), spin (keeps it). PLACE: a step's number (in its body),
optNUMBER (inside the optimizer's step of that step), donate (while it exports its state for somebody), load (while it
takes over a state). Each worker does itself harm once.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fallow

WORKER = os.environ.get("FALLOW_WORKER", "")


class Harms:
    """What this worker still has to do to itself."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder = folder
        self.left = {place: kind for kind, worker, place in (w.split(":") for w in words) if worker in (WORKER, "all")}

    def at(self, place: str) -> None:
        kind = self.left.pop(place, None)
        if kind is None:
            return
        (self.folder / f"{kind}-{WORKER}").write_text(str(time.time()))
        match kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "segfault":
                ctypes.string_at(0)
            case "raise":
                raise ValueError(f"{WORKER} raises on purpose")
            case "hang":
                threading.Event().wait()
            case "spin":
                # One call into C that never gives the interpreter's lock back.
                ctypes.PyDLL(None).usleep(3_000_000_000)
                ctypes.PyDLL(None).pause()


class Optimizer(torch.optim.SGD):
    """Harms itself when half of the parameters have moved."""

    harms: Harms
    run: Any

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        first = groups[0]["params"]
        half = len(first) // 2
        groups[0]["params"] = first[:half]
        super().step()
        if not self.run.rehearsing:
            self.harms.at(f"opt{self.run.step}")
        groups[0]["params"] = first[half:]
        super().step()
        groups[0]["params"] = first


class Guest:
    """A prepared object, whose state travels with the rest."""

    def __init__(self, harms: Harms, run: Any) -> None:
        self.harms, self.run, self.value = harms, run, 0

    def state_dict(self) -> dict[str, Any]:
        if self.run.step and not self.run.rehearsing:
            self.harms.at("donate")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.run.rehearsing:
            self.harms.at("load")
        self.value = state["value"]


def main() -> None:
    """Train, note when each step ends, and have the main member write what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--pace", type=float, default=0.01)
    parser.add_argument("harms", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    run = fallow.init()
    harms = Harms(args.folder, args.harms)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = Optimizer(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.harms, optimizer.run = harms, run
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
    loader = run.prepare(model, optimizer, Guest(harms, run), loader, global_batch=32)[-1]
    times = (args.folder / f"steps-{WORKER}").open("a", buffering=1)
    mean = 0.0
    for update in run.updates(loader, epochs=args.steps, max_steps=args.steps):
        for x, y in update:
            if not run.rehearsing:
                harms.at(str(update.step))
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            update.note(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = update.mean("loss")
        if not run.rehearsing:
            times.write(f"{update.step} {time.time()}\n")
        time.sleep(args.pace)
    if run.is_main:
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        (args.folder / "result.json").write_text(json.dumps({"steps": run.step, "loss": mean, "weights": weights}))


if __name__ == "__main__":
    main()
