"""What members do unalike, in a fixed world of any size: loop_cases.py RESULT.json. Each case is a short training."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fallow.model import FallowError
from fallow.worker.api import fixed
from fallow.worker.api.run import Run
from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group

SHARDS = 3
"""Per step: of two members one has one body, the other two."""


class Stream(IterableDataset[Any]):
    """The first `length` samples of a data set, without numbers; the first `turned` of them come last."""

    def __init__(self, data: TensorDataset, length: int, turned: int) -> None:
        self.data, self.length, self.turned = data, length, turned

    def __iter__(self) -> Iterator[Any]:
        return (self.data[(number + self.turned) % self.length] for number in range(self.length))


class Case:
    """A training of four steps; `behind` is called behind each inner loop, `skip` in front of each forward."""

    def __init__(self, group: Group) -> None:
        self.run = Run(None, group)
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.bodies = 0
        self.means: list[float] = []

    def train(
        self,
        behind: Callable[[Case], Any] = lambda case: None,
        skip: Callable[[Case, torch.Tensor], bool] = lambda case, index: False,
        stream: int | None = None,
        turned: int = 0,
        leave: Callable[[Case], bool] = lambda case: False,
        after: Callable[[Run], Any] = Run.barrier,
    ) -> Any:
        """`stream`: the samples come as a stream of that length; the first `turned` of them come last.

        `leave` decides behind each step whether to break; `after` comes after the loop.
        """
        x = torch.randn(8 * SHARDS, 4, generator=torch.Generator().manual_seed(1)).double()
        data = TensorDataset(torch.arange(len(x)), x)
        loader: DataLoader[Any] = DataLoader(data if stream is None else Stream(data, stream, turned), 2)
        run = self.run
        _, _, _, _, loader = run.prepare(
            self.model, self.optimizer, self.schedule, self.average, loader, global_batch=2 * SHARDS
        )
        try:
            for update in run.updates(loader):
                for index, batch in update:
                    self.bodies += 1
                    update.note(sum=batch.sum())
                    if skip(self, index):
                        continue
                    self.model(batch).square().mean().backward()
                self.means.append(update.mean("sum"))
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
                behind(self)
                self.schedule.step()
                self.average.update_parameters(self.model)
                if leave(self):
                    break
            after(run)
        except FallowError as error:
            return error.message
        return [*self.model.weight.tolist()[0], self.optimizer.param_groups[0]["lr"], *self.means]

    def step(self, *, when: bool = True) -> None:
        if when:
            self.optimizer.step()
            self.optimizer.zero_grad()


def main() -> None:
    """Run all cases, each in a group of its own."""
    torch.set_num_threads(1)
    rank, size = fixed.world_from_environment()
    store = next(iter(rendezvous("env://")))[0] if size > 1 else None
    groups: list[Group] = []

    def case() -> Case:
        own = PrefixStore(str(len(groups)), store) if store is not None else None
        groups.append(build_group(len(groups), rank, size, own, "127.0.0.1", 60.0))
        return Case(groups[-1])

    def decays(case: Case) -> None:
        case.step()
        for options in case.optimizer.param_groups:
            options["lr"] *= 0.9 if case.run.is_main else 0.8

    def freezes(case: Case) -> None:
        case.step()
        case.model.bias.requires_grad_(not case.run.is_main)

    def rests(case: Case) -> None:
        case.step()
        if case.run.is_main:
            case.model.eval()

    def drifts(case: Case) -> None:
        case.step()
        with torch.no_grad():
            case.model.weight += case.run.rank

    def skips(case: Case, index: torch.Tensor) -> bool:
        # Sample 10 is in the last shard of the second step, 12 in the first of the third.
        return bool({10, 12} & set(index.tolist()))

    def at_step(own: Case, step: int) -> bool:
        return own.run.step == step

    def evaluates(case: Case) -> None:
        case.step()
        case.means.append(case.run.mean(10.0))

    found = {
        "usual": case().train(Case.step),
        "counts bodies": case().train(lambda own: own.step(when=own.bodies % 2 == 0)),
        "is_main": case().train(lambda own: own.step(when=own.run.is_main)),
        "own rate": case().train(decays),
        "own freezing": case().train(freezes),
        "own evaluation": case().train(rests),
        "own weights": case().train(drifts),
        "skips": case().train(Case.step, skips),
        "left": case().train(Case.step, leave=lambda own: at_step(own, 1)),
        "left by one": case().train(Case.step, leave=lambda own: own.run.is_main and at_step(own, 1)),
        "mean of one": case().train(Case.step, after=lambda run: run.mean(run.rank) if run.is_main else run.barrier()),
        "evaluation": case().train(evaluates),
        "stream": case().train(Case.step, stream=8 * SHARDS),
        **{
            f"{name} on rank 1": case().train(Case.step, stream=6 * SHARDS + more * (rank == 1))
            for name, more in [("one sample more", 1), ("two steps more", 4 * SHARDS), ("one batch less", -2)]
        },
        "another order on rank 1": case().train(Case.step, stream=6 * SHARDS, turned=int(rank == 1)),
    }
    # What one is told, all are told.
    told = [isinstance(result, str) for result in found.values()]
    assert set(groups[0].gather(bytes(told))) == {bytes(told)}, told
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    for group in groups:
        group.destroy()


if __name__ == "__main__":
    main()
