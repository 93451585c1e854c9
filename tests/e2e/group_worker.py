"""The script that `fake_head.py` starts: a small training whose pace the test controls through files.

usage: group_worker.py CONFIG.json
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fallow.wire.frames import AgentChannel
from fallow.worker.api import run as run_module
from fallow.worker.api.lazy_imports import put_off_compiler
from fallow.worker.handover import supply
from fallow.worker.session.session import Session

put_off_compiler()  # as `import fallow` does in a worker


class Points(Dataset):
    def __init__(self, size: int, augment: bool) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 6, generator=generator)
        self.y = (self.x.sum(1) > 0).long()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        x = self.x[index]
        if self.augment:
            x = x + 0.1 * torch.randn(6)
        return x, self.y[index], index


def wait_for(path: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(str(path))
        time.sleep(0.002)


def stall_late_part(folder: Path, generation: int) -> None:
    """Hold up this worker's late pieces of one generation until the test says go."""
    real = supply.send_piece
    begun: list[socket.socket] = []

    def send_piece(line, memory, number, pieces):
        if begun.count(line) == supply.LATE and threading.current_thread().name == f"stream-{generation}":
            assert sum(array.size for array in memory) > 1 << 16
            (folder / f"late-{generation}").touch()
            wait_for(folder / f"go-late-{generation}")
        begun.append(line)
        return real(line, memory, number, pieces)

    supply.send_piece = send_piece


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(config["folder"])
    worker = os.environ.get("TEST_WORKER", "single")
    torch.set_num_threads(1)
    torch.manual_seed(0 if worker in ("single", "w0") else 99)  # newcomers must not rely on their own weights

    width = config.get("width", 16)
    model = nn.Sequential(
        nn.Linear(6, width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(config.get("dropout", 0.2)),
        nn.Linear(width, 2),
    )
    compiled_in: list[int] = []
    net = model
    if config.get("compile"):

        def backend(graph, inputs):
            compiled_in.append(run.generation)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        net = torch.compile(model, backend=backend)
    if worker in config.get("stall_late", {}):
        stall_late_part(folder, config["stall_late"][worker])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    loader = DataLoader(
        Points(config["samples"], config.get("augment", True)),
        batch_size=config["batch_size"],
        shuffle=True,
        num_workers=config.get("num_workers", 0),
    )
    if worker == "single":
        os.environ.pop("FALLOW_WORKER", None)
        run = run_module.init()
    else:
        descriptor = int(os.environ["TEST_FD"])
        run = run_module.attach(Session(partial(AgentChannel, descriptor)))
    model, optimizer, schedule, loader = run.prepare(
        model, optimizer, schedule, loader, global_batch=config["global_batch"]
    )
    stops = {int(step): who for step, who in config.get("stops", {}).items()}
    seen: list[tuple[int, int]] = []
    epochs_seen: list[int] = []

    def pause(step: int) -> None:
        if stops.get(step) in ("all", worker) and worker != "single" and not run.rehearsing:
            (folder / f"at-{step}-{worker}").touch()
            wait_for(folder / f"go-{step}")

    def train(update) -> None:
        for x, y, _index in update:
            if not run.rehearsing and update.step == config.get("fail_at"):
                raise ValueError("on purpose")
            pause(update.step)
            nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not run.rehearsing:
            seen.append((run.generation, update.step))

    style = config.get("style", "epochs")
    if style == "epochs":
        for epoch in run.epochs(config["epochs"]):
            epochs_seen.append(epoch)
            for update in run.updates(loader):
                train(update)
            schedule.step()
    elif style == "range":
        for _ in range(config["epochs"]):
            for update in run.updates(loader):
                train(update)
            schedule.step()
    else:
        for update in run.updates(loader, epochs=config["epochs"]):
            train(update)
    state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    (folder / f"{worker}.json").write_text(
        json.dumps(
            {
                "state": state,
                "steps": run.step,
                "lr": schedule.get_last_lr(),
                "rank": run.rank,
                "seen": seen,
                "epochs": epochs_seen,
                "compiled_in": compiled_in,
            }
        )
    )


if __name__ == "__main__":
    main()
