"""A small data-parallel training by the rules of a GPU. `FAULTS` are the same training with one rule broken."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.nn import functional

import accelerator
from accelerator.collectives import Communicator
from accelerator.crew import Member

STEPS = 3
WORDS, WIDTH = 16, 8


class Bucket:
    """Gradients of some parameters in one piece of memory."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.flat = torch.zeros(sum(p.numel() for p in parameters), device="fake")
        self.views, begin = {}, 0
        for p in parameters:
            self.views[p] = self.flat[begin : begin + p.numel()].view(p.shape)
            begin += p.numel()
        self.missing = len(parameters)


class Training:
    """Buckets leave while backward still runs; the optimizer's stream waits for them, the host for nothing."""

    def __init__(self, member: Member) -> None:
        torch.manual_seed(0)
        self.member = member
        self.group = Communicator(member.store, member.rank, member.size, timedelta(seconds=60))
        self.model = nn.Sequential(
            *(nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU()),
            nn.Linear(2 * WIDTH, WORDS),
        ).to("fake")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.works: list[Any] = []
        parameters = [*self.model.parameters()][::-1]
        self.buckets = [Bucket(parameters[:2]), Bucket(parameters[2:])]
        for bucket in self.buckets:
            for parameter in bucket.views:
                parameter.register_post_accumulate_grad_hook(lambda p, b=bucket: self.collect(b, p))

    def run(self) -> list[float]:
        """Train. Returns the losses of the steps, and the sum of the weights."""
        generator = torch.Generator().manual_seed(self.member.rank)
        losses = []
        for _ in range(STEPS):
            numbers = torch.randint(0, WORDS, (4, 6), generator=generator).pin_memory().to("fake", non_blocking=True)
            accelerator.report_syncs("raise")
            loss = functional.cross_entropy(self.model(numbers).flatten(0, 1), numbers.flatten())
            loss.backward()
            self.look_at(loss.detach())
            self.wait_for_sums()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(self.to_host(loss.detach()))
            torch.accelerator.synchronize()
            accelerator.report_syncs("off")
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()]).double().sum().item()
        return [*(loss.item() for loss in losses), weights]

    def collect(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        bucket.views[parameter].copy_(parameter.grad)
        parameter.grad = bucket.views[parameter]
        bucket.missing -= 1
        if not bucket.missing:
            bucket.missing = len(bucket.views)
            self.launch(bucket)

    def launch(self, bucket: Bucket) -> None:
        self.works.append(self.group.allreduce([bucket.flat]))

    def look_at(self, loss: torch.Tensor) -> None:
        pass

    def wait_for_sums(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()

    def to_host(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.empty((), pin_memory=True).copy_(loss, non_blocking=True)

    def host_group(self) -> ProcessGroupGloo:
        return ProcessGroupGloo(self.member.store, self.member.rank, self.member.size, timedelta(seconds=60))


class NoWait(Training):
    def wait_for_sums(self) -> None:
        pass


class HostReadsTooEarly(Training):
    def to_host(self, loss: torch.Tensor) -> torch.Tensor:
        copied = super().to_host(loss)
        assert not copied.isnan(), "NaN: the host reads before it has waited for the copy"
        return copied


class HostTensorInCollective(Training):
    def look_at(self, loss: torch.Tensor) -> None:
        self.group.allreduce([torch.zeros(4)])


class DeviceTensorInHostCollective(Training):
    def look_at(self, loss: torch.Tensor) -> None:
        self.host_group().allreduce([torch.zeros(4, device="fake")])


class LeakedDefaultDevice(Training):
    def look_at(self, loss: torch.Tensor) -> None:
        torch.set_default_device("fake")
        try:
            self.host_group().allreduce([torch.zeros(4)])
        finally:
            torch.set_default_device(None)


class Item(Training):
    def look_at(self, loss: torch.Tensor) -> None:
        loss.item()


class Truth(Training):
    def look_at(self, loss: torch.Tensor) -> None:
        assert loss > 0


class Cpu(Training):
    def look_at(self, loss: torch.Tensor) -> None:
        loss.cpu()


class Nonzero(Training):
    def look_at(self, loss: torch.Tensor) -> None:
        (loss.reshape(1) > 0).nonzero()


class Mask(Training):
    def look_at(self, loss: torch.Tensor) -> None:
        loss.reshape(1)[loss.reshape(1) > 0]


class Pageable(Training):
    def look_at(self, loss: torch.Tensor) -> None:
        torch.zeros(4).to("fake", non_blocking=True)


class Reused(Training):
    def launch(self, bucket: Bucket) -> None:
        super().launch(bucket)
        bucket.flat.zero_()


class Freed(Training):
    def launch(self, bucket: Bucket) -> None:
        super().launch(bucket)
        side, copied = torch.Stream(device="fake"), bucket.views[next(iter(bucket.views))].new_zeros(4)
        side.wait_event(torch.accelerator.current_stream().record_event())
        with side:
            copied.add_(1)
        del copied


class OtherOrder(Training):
    def launch(self, bucket: Bucket) -> None:
        pass

    def wait_for_sums(self) -> None:
        for bucket in self.buckets[:: -1 if self.member.rank else 1]:
            super().launch(bucket)
        super().wait_for_sums()


class AbortedElsewhere(Training):
    """One member is lost before its last bucket leaves; the other's communicator is aborted meanwhile."""

    def launch(self, bucket: Bucket) -> None:
        if not (self.member.rank and bucket is self.buckets[-1]):
            super().launch(bucket)

    def wait_for_sums(self) -> None:
        assert not self.member.rank, "lost"
        super().wait_for_sums()
        threading.Timer(0.05, self.group.abort).start()


class NoGuard(Training):
    """Gradients are collected on one stream, and the collective is launched while another one is current."""

    def launch(self, bucket: Bucket) -> None:
        side = torch.Stream(device="fake")
        side.wait_event(torch.accelerator.current_stream().record_event())
        with side:
            bucket.flat.copy_(bucket.flat.clone())
        super().launch(bucket)


_RACE_WITH_SUM = r"race: .* on stream \d+ (reads|writes) what all_reduce on stream \d+ writes"
_SYNC = "called a synchronizing operation: "

FAULTS: dict[type[Training], str] = {
    NoWait: _RACE_WITH_SUM,
    HostReadsTooEarly: "NaN: the host reads before",
    HostTensorInCollective: "tensors must be on the device, got one on cpu",
    DeviceTensorInHostCollective: "unsupported device type fake",
    LeakedDefaultDevice: "unsupported device type fake",
    Item: _SYNC + "aten::_local_scalar_dense",
    Truth: _SYNC + "aten::_local_scalar_dense",
    Cpu: _SYNC + "copy_ D2H",
    Nonzero: _SYNC + "aten::nonzero",
    Mask: _SYNC + "aten::nonzero",
    Pageable: _SYNC + "copy_ H2D from pageable memory",
    Reused: _RACE_WITH_SUM,
    Freed: r"was freed and is reused while aten::add on stream \d+ may still use it",
    OtherOrder: "ranks launched unlike collectives",
    AbortedElsewhere: r"reads garbage of #[12] all_reduce SUM \(aborted\)",
    NoGuard: r"race: all_reduce on stream \d+ (reads|writes) what copy_ D2D on stream \d+ writes",
}
"""Each fault, and the message that finds it."""
