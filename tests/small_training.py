"""Small trainings for tests of the loop, and the same ones in plain PyTorch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from fallow.worker.api.run import Run
from fallow.worker.loop.exchange import Part
from fallow.worker.loop.update import Update
from fallow.worker.reduction.buckets import Sums
from fallow.worker.transport.group import Group

torch.set_num_threads(1)

SAMPLES, GLOBAL_BATCH = 32, 16


def alone() -> Run:
    """A run in a world of one."""
    return Run(None, Group(0, 0, 1, None))


def points(size: int = SAMPLES) -> TensorDataset:
    """Samples of five features, with labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 5, generator=generator)
    return TensorDataset(x, (x.sum(1, keepdim=True) > 0).float())


def net() -> nn.Module:
    """A model whose weights are the same each time, on every thread."""
    return filled(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))


def filled(model: nn.Module, seed: int = 3) -> nn.Module:
    """The same model with weights that are no function of torch's own generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


class Scaled(nn.Linear):
    """Keeps scales as FP8 layers do: not in buffers."""

    def __init__(self, wide: int, scales: Any) -> None:
        super().__init__(wide, wide, bias=False)
        self.scales = scales

    def get_extra_state(self) -> Any:
        return self.scales

    def set_extra_state(self, state: Any) -> None:
        self.scales = state


def loss_of(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean over the batch."""
    return F.mse_loss(model(batch[0]), batch[1])


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: int = 1,
    act: Callable[[], Any] = lambda: None,
    batch_size: int = GLOBAL_BATCH,
) -> None:
    """Train on global batches, `batch_size` samples at a time; `act` is called in front of each optimizer step."""
    for _ in range(epochs):
        for x, y in DataLoader(points(), GLOBAL_BATCH):
            optimizer.zero_grad()
            for batch in zip(x.split(batch_size), y.split(batch_size), strict=True):
                (loss_of(model, batch) * (len(batch[0]) / GLOBAL_BATCH)).backward()
            act()
            optimizer.step()


def assert_close(one: nn.Module, other: nn.Module, atol: float = 1e-6) -> None:
    """Their weights are equal up to the order of float32 sums."""
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=atol)


def assert_equal(first: nn.Module, *others: nn.Module) -> None:
    """They hold the same bits."""
    for other in others:
        for a, b in zip(first.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b)


class Script:
    """A model, an optimizer and a loader: four shards of a step, two steps of an epoch."""

    def __init__(self, run: Run | None = None, model: nn.Module | None = None, batch_size: int = 4) -> None:
        self.run = run or alone()
        self.model: Any = model or net()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader: Any = DataLoader(points(), batch_size)

    def prepare(self, *others: Any, optimizer: bool = True, reproducible: bool = False) -> "Script":
        """Prepare the script's objects and further ones."""
        things = [self.model, *([self.optimizer] if optimizer else []), *others, self.loader]
        found = self.run.prepare(*things, global_batch=GLOBAL_BATCH, reproducible=reproducible)
        self.loader = found[-1]
        return self

    def loss(self, batch: Any) -> torch.Tensor:
        """Of one shard."""
        return loss_of(self.model, batch)

    def inner(self, update: Update, phase: str = "") -> None:
        """The usual inner loop."""
        for batch in update.phase(phase):
            loss = self.loss(batch)
            loss.backward()
            update.note(loss=loss)

    def act(self) -> None:
        """The usual end of a step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(
        self,
        body: Callable[[Any], Any] | None = None,
        behind: Callable[[Update], Any] | None = None,
        front: Callable[[Update], Any] = lambda _: None,
        **how: Any,
    ) -> None:
        """Train with another body of the inner loop, or with something else behind or in front of it."""
        for update in self.run.updates(self.loader, **how):
            front(update)
            if body is None:
                self.inner(update)
            else:
                for batch in update:
                    body(batch)
            if behind is None:
                self.act()
            else:
                behind(update)


SUMS = Sums(is_void=False, touched=b"")


def part(**fields: Any) -> Part:
    """Of one member; the same but for `fields`."""
    usual = {
        "place": (4, 3, ""),
        "samples": 4,
        "crc": 7,
        "switch": 0,
        "checkpoint": 0.0,
        "checkpoints_asked": 0,
        "pace": 0.0,
        "weight_checksum": 5,
        "agreement": 6,
        "acts": 1,
        "sums": SUMS,
        "notes": {},
    }
    return Part(**{**usual, **fields})
