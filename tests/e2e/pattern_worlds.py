"""Gradients in unusual patterns: trainings by Fallow in worlds of any size, and by plain torch in one process.

usage: pattern_worlds.py PATTERN

Prints a line of JSON for each world: its size, whether it was reproducible, and how its result differs from the plain
one's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset
from worlds import world

from fallow.core.training.shards import Division, mix
from fallow.worker.api.lazy_imports import put_off_compiler
from fallow.worker.api.run import Run
from fallow.worker.data import rng
from fallow.worker.data.loader import ElasticLoader
from fallow.worker.data.source import Key
from fallow.worker.prepared.state import digest
from fallow.worker.reduction import buckets

SAMPLES, BATCH, GLOBAL, STEPS = 203, 5, 20, 36
"""Four shards in a step; the last step of an epoch has one, of three samples."""

Backward = Callable[..., None]


class Result(NamedTuple):
    """Of one training."""

    tensors: list[torch.Tensor]
    untouched: list[list[str]]
    "parameters without a gradient, by step"
    scale: float
    digest: str


class Pattern:
    """A training; subclasses say what is unusual."""

    infinite = -1
    "step with a loss that is infinite"

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model: Any = self.make()
        self.optimizer: torch.optim.Optimizer = self.make_optimizer()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5, enabled=self.infinite >= 0)

    def make(self) -> nn.Module:
        return Parts()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)

    def between(self, step: int) -> None:
        """In front of each step."""

    def body(self, step: int, x: torch.Tensor, y: torch.Tensor, backward: Backward) -> None:
        """Of one shard."""
        backward(F.cross_entropy(self.model(x), y))

    def act(self) -> None:
        """With whole gradients."""
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()
        self.scaler.update()

    def untouched(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if parameter.grad is None]

    def result(self, untouched: list[list[str]]) -> Result:
        state = self.model.state_dict()
        return Result(list(state.values()), untouched, self.scaler.get_scale(), digest([state]))


class Parts(nn.Module):
    """Layers that a body may use or not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(12, 12) for _ in range(4))
        self.seldom, self.late, self.never, self.out = (nn.Linear(12, n) for n in (12, 12, 12, 3))
        self.large = nn.Linear(12, 1200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 12) -> (n, 3)."""
        y: torch.Tensor = self.out(torch.relu(self.a(x)))
        return y


class Ways(Pattern):
    """Other layers by step and by shard, several backwards in a body, shards that are left out by `continue`."""

    def body(self, step: int, x: torch.Tensor, y: torch.Tensor, backward: Backward) -> None:
        m, total = self.model, float(x.sum())
        if total > 3:
            return
        h = (m.b, m.c, m.d)[step % 3](torch.relu(m.a(x)))
        if step >= 20:  # a large one, from then on
            h = h + 0.01 * m.large(h)[:, :12]
        if step % 5 == 4:  # a second one, through layers that the first one has used
            backward(0.1 * m.out(h).square().mean(), retain_graph=True)
        if step % 7 == 6:  # and through others
            backward(0.5 * F.cross_entropy(m.out(torch.relu(m.late(h))), y), retain_graph=True)
        backward(F.cross_entropy(m.out(m.seldom(h) if total > 0 else h), y))


class Symbols(nn.Module):
    """An embedding whose weight is tied, a convolution, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(7, 6), nn.Conv1d(6, 8, 3, bias=False)
        self.norm, self.wide = nn.BatchNorm1d(8), nn.Linear(80, 6)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 12) -> (n, 7)."""
        h = torch.tanh(self.norm(self.conv(self.embed((x > 0).long()).transpose(1, 2))))
        y: torch.Tensor = self.out(self.wide(F.dropout(h.flatten(1), 0.2, self.training)))
        return y


class Rich(Pattern):
    """AdamW, clipping, a schedule, and a loss scale that falls with an infinite loss, and grows."""

    infinite = 7

    def make(self) -> nn.Module:
        return Symbols()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), 1e-3)

    def between(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 1e-3 * 0.98**step

    def body(self, step: int, x: torch.Tensor, y: torch.Tensor, backward: Backward) -> None:
        loss = F.cross_entropy(self.model(x), y)
        backward(loss * torch.inf if step == self.infinite and float(x.sum()) > 0 else loss)

    def act(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        super().act()


PATTERNS = {one.__name__: one for one in (Ways, Rich)}


def data() -> DataLoader[Any]:
    x = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(9))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), BATCH, shuffle=True)


def elastic(run: Run, name: str, reproducible: bool) -> Result:
    """By Fallow."""
    pattern = PATTERNS[name]()
    objects = (pattern.model, pattern.optimizer, pattern.scaler, data())
    *_, loader = run.prepare(*objects, global_batch=GLOBAL, reproducible=reproducible)
    untouched = []

    def backward(loss: torch.Tensor, **how: bool) -> None:
        pattern.scaler.scale(loss).backward(**how)

    for update in run.updates(loader, epochs=STEPS, max_steps=STEPS):
        pattern.between(update.step)
        for x, y in update:
            pattern.body(update.step, x, y, backward)
        untouched.append(pattern.untouched())
        pattern.act()
    return pattern.result(untouched)


def plain(run: Run, name: str) -> Result:
    """By plain torch: gradients accumulate, each shard from the step's own buffers and random numbers of its own."""
    pattern = PATTERNS[name]()
    untouched = []
    for step, shards in enumerate(batches(run.seed)):
        pattern.between(step)
        total = sum(len(x) for x, _ in shards)
        own = [buffer.clone() for buffer in pattern.model.buffers()]
        kept = own
        for number, (x, y) in enumerate(shards):
            set_buffers(pattern.model, own)
            rng.seed_everything(mix(run.seed, "body", step, "", number))

            def backward(loss: torch.Tensor, weight: float = len(x) / total, **how: bool) -> None:
                pattern.scaler.scale(loss * weight).backward(**how)

            pattern.body(step, x, y, backward)
            if number == 0:
                kept = [buffer.clone() for buffer in pattern.model.buffers()]
        set_buffers(pattern.model, kept)
        untouched.append(pattern.untouched())
        pattern.act()
    return pattern.result(untouched)


def batches(seed: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The shards of each step."""
    loader = data()
    order = ElasticLoader(loader, seed, GLOBAL)
    for step in range(STEPS):
        epoch, index = divmod(step, len(order))
        numbers = [order.indices(Key(epoch, index, shard)) for shard in range(order.layout.shards_in(index))]
        yield [loader.dataset[indices] for indices in numbers]


def set_buffers(model: nn.Module, values: list[torch.Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def difference(ours: Result, wanted: Result) -> float:
    """The largest one, as a part of the largest value."""
    pairs = [(a, b) for a, b in zip(ours.tensors, wanted.tensors, strict=True) if b.is_floating_point()]
    return max(float((a - b).abs().max()) for a, b in pairs) / max(float(b.abs().max()) for _, b in pairs)


def main() -> None:
    """Compare."""
    name = sys.argv[1]
    torch.set_num_threads(1)
    put_off_compiler()  # as `import fallow` does in a worker
    # Shares follow the noise of a machine, and with them the order in which a sum is rounded. Here they are uneven.
    Division.revised = lambda _, __, paces, step: Division(tuple(range(1, 1 + len(paces))), 0)  # type: ignore
    vars(buckets).update(_FIRST_BYTES=700, BUCKET_BYTES=700)  # several of them
    (wanted,) = world(1, lambda run: plain(run, name))
    for reproducible in (False, True):
        for size in (1, 2, 5):
            results = world(size, lambda run: elastic(run, name, reproducible))  # noqa: B023
            told = {
                "size": size,
                "reproducible": reproducible,
                "refused": [one for one in results if isinstance(one, str)],
            }
            if not told["refused"]:
                told |= {
                    "digests": sorted({one.digest for one in results}),
                    "untouched": all(one.untouched == wanted.untouched for one in results),
                    "scale": all(one.scale == wanted.scale for one in results),
                    "difference": max(difference(one, wanted) for one in results),
                }
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
