"""The training of `tests/elastic`: tiny, reproducible, with all that makes a step depend on where it is computed.

Batch norm (buffers), dropout (random numbers), momentum (optimizer state), a scheduler and a last step of an epoch that
is smaller than the others. In the folder `--gates` the tests say what happens when:

`ACTION-STEP-WORKER`: in its last body of that step this worker does what `ACTIONS` says
`fast`: steps take no longer than they must, from now on
`late-WORKER`: this worker waits at the end of the script until the file is gone
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fallow

WORKER = os.environ.get("FALLOW_WORKER", "alone")


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--samples", type=int, default=250)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds that a step takes at least")
    parser.add_argument("--gates", type=Path, required=True)
    parser.add_argument("--own-seed", action="store_true", help="each worker begins with other weights")
    parser.add_argument("--drift", help="STEP-WORKER whose weights change by themselves in that step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(int(WORKER[1:]) if args.own_seed else 0)
    run = fallow.init()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
    inputs = torch.randn(args.samples, 8, generator=torch.Generator().manual_seed(1))
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=args.batch, shuffle=True)
    model, optimizer, scheduler, loader = run.prepare(
        model, optimizer, scheduler, loader, global_batch=args.global_batch, reproducible=True
    )
    for x, y in run.steps(loader, epochs=args.steps, max_steps=args.steps):
        loss = nn.functional.cross_entropy(model(x), y)
        if run.final_shard and run.generation:
            gates(args.gates, run.step)
            if args.drift == f"{run.step}-{WORKER}":
                with torch.no_grad():
                    model[0].weight.add_(1e-3)
        loss.backward()
        run.mean(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if run.final_shard and not (args.gates / "fast").exists():
            # On a busy machine the end must not come before the tests are done with it.
            time.sleep(args.pace if not args.pace or run.step < 0.6 * args.steps else 0.5)
    place = {name: os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    (args.gates / f"place-{WORKER}").write_text(json.dumps({**place, "rank": run.rank, "size": run.size}))
    while (args.gates / f"late-{WORKER}").exists():
        time.sleep(0.01)


def hold(gate: Path) -> None:
    """Wait until the file is gone; `held-…` says so."""
    gate.with_name(gate.name.replace("hold", "held", 1)).touch()
    while gate.exists():
        time.sleep(0.005)


def fail(gate: Path) -> None:
    """Raise, as a bad sample would."""
    raise ValueError(f"{gate.name}: a sample is broken")


def leave(gate: Path) -> None:
    """End by the script's own will, though not in order."""
    sys.exit(5)


def interrupt(gate: Path) -> None:
    """Ctrl-C of somebody at this process."""
    raise KeyboardInterrupt


def vanish(gate: Path) -> None:
    """End without any ceremony."""
    os._exit(3)


def crash(gate: Path) -> None:
    """A bug in native code."""
    os.kill(os.getpid(), signal.SIGSEGV)


def freeze(gate: Path) -> None:
    """Native code that never gives the interpreter's lock back: no other thread runs either."""
    ctypes.PyDLL(None).sleep(1000)


ACTIONS = {action.__name__: action for action in (hold, fail, leave, interrupt, vanish, crash, freeze)}


def gates(folder: Path, step: int) -> None:
    """What the tests want of this worker in this step."""
    end = f"-{step}-{WORKER}"
    for name in os.listdir(folder):
        action = ACTIONS.get(name.removesuffix(end)) if name.endswith(end) else None
        if action is not None:
            action(folder / name)


if __name__ == "__main__":
    main()
