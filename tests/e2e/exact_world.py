"""Trainings in fixed worlds, forked from one process that has torch loaded: prints a digest for each.

The argument is a JSON list of cases; each is a dictionary with `world` (number of ranks), `optimizers` and what
`train_with` knows.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset
from worlds import forked

from fallow.core.training.shards import Duty
from fallow.worker.api.lazy_imports import put_off_compiler
from fallow.worker.api.run import Run
from fallow.worker.handover.transfer import export_state
from fallow.worker.loop.member import Member
from fallow.worker.prepared.state import digest
from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group

SAMPLES, BATCH, GLOBAL = 90, 4, 36
"""Nine shards in a step; the third step of an epoch has five, the last of them with two samples."""


class Net(nn.Module):
    """Dropout, batch norm, a convolution, an embedding, a tied weight, and a layer that some shards do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.wide = nn.Linear(48, 400)
        self.back = nn.Linear(400, 6)
        self.seldom = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 8) symbols -> (n, 11)."""
        h = torch.relu(self.norm(self.conv(self.embed(x).transpose(1, 2))))
        h = F.dropout(torch.relu(self.wide(h.flatten(1))), 0.2, self.training)
        h = self.back(h)
        if int(x[0, 0]) % 2:
            h = h + self.seldom(h)
        return self.out(h)


def optimizer_named(name: str, params: Any) -> torch.optim.Optimizer:
    """From torch.optim, with settings under which it does something."""
    extra = {"lr": 0.05, "momentum": 0.9} if name == "SGD" else {"lr": 0.01}
    if name == "Muon":
        params = [parameter for parameter in params if parameter.ndim == 2]  # it takes no others
    made: torch.optim.Optimizer = getattr(torch.optim, name)(params, **extra)
    return made


def train(groups: Callable[[], Group], optimizers: list[str], **case: Any) -> dict[str, Any]:
    """Trainings one after the other, by optimizer."""
    return {name: train_with(groups, name, **case) for name in optimizers}


def train_with(
    groups: Callable[[], Group],
    optimizer: str,
    steps: int = 6,
    shares: int | None = None,
    autocast: bool = True,
    scaler: bool = False,
    backwards: int = 1,
    spoil: int | None = None,
    reproducible: bool = True,
    dtype: str = "float32",
    reborn: bool = False,
) -> dict[str, Any]:
    """Train on the group, in two calls of run.updates.

    Args:
        groups: makes a new group of all ranks, since each serves one first exchange.
        optimizer: name in torch.optim.
        steps: in both calls together.
        shares: seed of uneven shares.
        autocast: compute in bfloat16.
        scaler: with a GradScaler that does something.
        backwards: per body, of different magnitude.
        spoil: step in which some shards' losses are infinite.
        reproducible: as in `run.prepare`.
        dtype: of the parameters.
        reborn: between the calls all ranks begin anew from rank 0's state, as newcomers do.
    """
    torch.set_default_dtype(getattr(torch, dtype))
    x = torch.randint(0, 11, (SAMPLES, 8), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1) % 11)

    def begin() -> tuple[Run, Any]:
        run = Run(None, groups())
        if shares is not None:
            run._member.duties = functools.partial(uneven, run._member, shares)  # type: ignore[method-assign]
        torch.manual_seed(0)
        model = Net()
        opt = optimizer_named(optimizer, model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
        scale = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2, enabled=scaler)
        average = torch.optim.swa_utils.AveragedModel(model)
        source = DataLoader(data, BATCH, shuffle=True)
        objects = (model, opt, schedule, scale, average, source)
        return run, run.prepare(*objects, global_batch=GLOBAL, reproducible=reproducible)

    run, objects = begin()
    last = 0.0
    for half in range(2):
        if half and reborn:
            state = copy.deepcopy(export_state(run._prepared, run._member.plain()))
            run, objects = begin()
            if run.rank == 0:
                run._loop.meeting.load(state)
            assert not list(run.updates(objects[-1])), "the others are past the first call"
        model, opt, schedule, scale, average, loader = objects
        for update in run.updates(loader, epochs=9, max_steps=steps // 2):
            for x, y in update:
                for number in range(backwards):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        loss = F.cross_entropy(model(x).float(), y) / 1000**number
                    if spoil == update.step and int(x[0, 0]) < 3:
                        loss = loss * torch.inf
                    scale.scale(loss).backward()
                update.note(loss=loss)
            scale.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scale.step(opt)
            scale.update()
            model.zero_grad()
            schedule.step()
            average.update_parameters(model)
            last = update.mean("loss")
    return {
        "digest": digest([model.state_dict(), average.state_dict()]),
        "finite": all(bool(torch.isfinite(p).all()) for p in model.parameters()),
        "loss": run._place.position.loss,
        "mean": last,
        "steps": run.step,
        "scale": scale.get_scale(),
        "repeated": run._prepared.arithmetic.repeated,
    }


def uneven(member: Member, seed: int, shards: int) -> list[Duty]:
    """Contiguous shares of random size, other ones in every step; members without one compute a copy."""
    rank, size = member.group.rank, member.group.size
    rng = random.Random(f"{seed} {member.place.position.step}")
    if shards < size:
        return [Duty(rank % shards, rank < shards)]
    cuts = [0, *sorted(rng.sample(range(1, shards), size - 1)), shards]
    return [Duty(shard, True) for shard in range(cuts[rank], cuts[rank + 1])]


def world(size: int, case: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's result; all ranks must have the same digest."""
    with tempfile.TemporaryDirectory() as folder:

        def rank_of(rank: int) -> None:
            store = torch.distributed.FileStore(f"{folder}/store", size)
            numbers = itertools.count(1)

            def groups() -> Group:
                number = next(numbers)
                prefixed = torch.distributed.PrefixStore(str(number), store)
                return build_group(number, rank, size, prefixed, "127.0.0.1", 60)

            Path(folder, f"{rank}.json").write_text(json.dumps(train(groups, **case)))

        forked(rank_of, size)
        results = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    if any(result != results[0] for result in results):
        raise SystemExit(f"members of one world of {size} differ: {results}")
    return dict(results[0])


def main() -> None:
    """One result per case, a line of JSON each."""
    torch.set_num_threads(1)
    put_off_compiler()  # as `import fallow` does in a worker
    for case in json.loads(sys.argv[1]):
        print(json.dumps(world(case.pop("world"), case)), flush=True)


if __name__ == "__main__":
    main()
