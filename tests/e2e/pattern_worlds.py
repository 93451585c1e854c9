"""A training with all that scripts have: by Fallow in worlds of several sizes, and by plain torch in one process.

Prints a line of JSON for each world: its size, whether it was reproducible, and how its result differs from the plain
one's.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset
from worlds import world

from fallow.core.training.shards import Division, mix
from fallow.worker.api.lazy_imports import defer_compiler_import
from fallow.worker.api.run import Run
from fallow.worker.data import rng
from fallow.worker.data.loader import ElasticLoader
from fallow.worker.data.source import Key
from fallow.worker.prepared.state import digest
from fallow.worker.reduction import buckets

SAMPLES, BATCH, GLOBAL, STEPS = 203, 5, 20, 36
"""Four shards in a step; the last step of an epoch has one, of three samples."""

INFINITE = 7
"""Step with a loss that is infinite."""


class Result(NamedTuple):
    """Of one training."""

    tensors: list[torch.Tensor]
    untouched: list[list[str]]
    "parameters without a gradient, by step"
    scale: float
    digest: str


class Symbols(nn.Module):
    """An embedding whose weight is tied, a convolution, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(7, 6), nn.Conv1d(6, 8, 3, bias=False)
        self.norm, self.wide = nn.BatchNorm1d(8), nn.Linear(80, 6)
        self.seldom = nn.Linear(6, 6)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        """(n, 12) -> (n, 7)."""
        h = torch.tanh(self.norm(self.conv(self.embed((x > 0).long()).transpose(1, 2))))
        h = self.wide(F.dropout(h.flatten(1), 0.2, self.training))
        y: torch.Tensor = self.out(self.seldom(h) if seldom else h)
        return y


class Training:
    """AdamW, clipping, a schedule, and a loss scale that falls with an infinite loss, and grows.

    Some shards are left out by `continue`, of one of five members all those of the first step: its scaler has scaled
    nothing when it acts. Only some shards use the layer `seldom`, and some have a second backward. The layer `wide` is
    frozen in some steps. In a first phase a probe learns from what the model makes.
    """

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = Symbols()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
        self.probe = nn.Linear(7, 1)
        self.probing = torch.optim.SGD(self.probe.parameters(), 0.1)
        self.untouched: list[list[str]] = []

    def begin(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 1e-3 * 0.98**step
        self.model.wide.requires_grad_(step % 9 < 6)

    def learn(self, step: int, x: torch.Tensor, y: torch.Tensor, weight: float = 1.0) -> None:
        """The probe, of one shard."""
        (self.probe(self.model(x, False).detach()).square().mean() * weight).backward()

    def end_learning(self) -> None:
        self.probing.step()
        self.probing.zero_grad()

    def body(self, step: int, x: torch.Tensor, y: torch.Tensor, weight: float = 1.0) -> None:
        """Of one shard."""
        total = float(x.sum())
        if total > 10:
            return
        loss = F.cross_entropy(self.model(x, total > 3), y) * weight
        self.scaler.scale(loss * torch.inf if step == INFINITE and total > 0 else loss).backward()
        if total < -3:
            self.scaler.scale(self.model.embed.weight.square().mean() * weight).backward()

    def act(self) -> None:
        """With whole gradients."""
        self.untouched.append([name for name, one in self.model.named_parameters() if one.grad is None])
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()
        self.scaler.update()

    def result(self) -> Result:
        states = [self.model.state_dict(), self.probe.state_dict()]
        tensors = [tensor for state in states for tensor in state.values()]
        return Result(tensors, self.untouched, self.scaler.get_scale(), digest(states))


def data() -> DataLoader[Any]:
    x = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(9))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), BATCH, shuffle=True)


def elastic(run: Run, reproducible: bool) -> Result:
    """By Fallow."""
    training = Training()
    objects = (training.model, training.optimizer, training.scaler, training.probe, training.probing, data())
    *_, loader = run.prepare(*objects, global_batch=GLOBAL, reproducible=reproducible)
    for update in run.updates(loader, epochs=STEPS, max_steps=STEPS):
        training.begin(update.step)
        for x, y in update.phase("probe"):
            training.learn(update.step, x, y)
        training.end_learning()
        for x, y in update.phase("model"):
            training.body(update.step, x, y)
        training.act()
    return training.result()


def plain(run: Run) -> Result:
    """By plain torch: gradients accumulate, each shard from the step's own buffers and random numbers of its own."""
    training = Training()
    for step, shards in enumerate(batches(run.seed)):
        training.begin(step)
        total = sum(len(x) for x, _ in shards)
        phases = ("probe", training.learn, training.end_learning), ("model", training.body, training.act)
        for phase, body, act in phases:
            kept = own = [buffer.clone() for buffer in training.model.buffers()]
            for number, (x, y) in enumerate(shards):
                set_buffers(training.model, own)
                rng.seed_everything(mix(run.seed, "body", step, phase, number))
                body(step, x, y, len(x) / total)
                if number == 0:
                    kept = [buffer.clone() for buffer in training.model.buffers()]
            set_buffers(training.model, kept)
            act()
    return training.result()


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
    torch.set_num_threads(1)
    defer_compiler_import()  # as `import fallow` does in a worker
    # Shares follow the noise of a machine, and with them the order in which a sum is rounded. Here they are uneven.
    Division.revised = lambda _, __, paces, step: Division(tuple(range(1, 1 + len(paces))), 0)  # type: ignore
    vars(buckets).update(_FIRST_BYTES=700, BUCKET_BYTES=700)  # several of them
    (wanted,) = world(1, plain)
    for reproducible in (False, True):
        for size in (1, 2, 5):
            results = world(size, lambda run: elastic(run, reproducible))  # noqa: B023
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
