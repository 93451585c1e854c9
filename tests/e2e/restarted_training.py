"""A training as torchrun runs it, which knows nothing of Fallow; for `--restart`: FOLDER [--ddp] [--told]

It saves its step in FOLDER, goes on from there, writes a line for each start, and ends some steps after it has been
left alone; with --told as soon as a file `hurry` is in FOLDER. With --ddp it trains with DistributedDataParallel;
without, each step is a sleep, which starts at once.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

STEPS_ALONE = 20


def sleeper() -> Callable[[], None]:
    """A step that does nothing; the store in which the processes would meet is there."""
    socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
    return lambda: time.sleep(0.02)


def ddp(saved: Path) -> Callable[[], None]:
    """A step of a tiny model, which rank 0 saves."""
    import torch
    from torch import nn

    torch.distributed.init_process_group("gloo")
    model = nn.Linear(4, 1)
    if saved.exists():
        model.load_state_dict(torch.load(saved))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            part = saved.with_suffix(".part")
            torch.save(model.state_dict(), part)
            part.replace(saved)
        time.sleep(0.02)

    return step


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    at = folder / "step"
    began = step = int(at.read_text()) if at.exists() else 0
    act = ddp(folder / "model") if "--ddp" in sys.argv else sleeper()
    with (folder / "starts").open("a") as starts:
        starts.write(f"{rank} {size} {step}\n")
    told = "--told" in sys.argv
    while not (folder / "hurry").exists() if told else size > 1 or step < began + STEPS_ALONE:
        act()
        step += 1
        if rank == 0:
            part = folder / "step.part"
            part.write_text(str(step))
            part.replace(at)


if __name__ == "__main__":
    main()
