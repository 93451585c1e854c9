"""State goes from device to device through pinned rings: bounded memory, and nothing waits that need not."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fallow.worker.data import rng
from fallow.worker.handover import pieces, supply
from fallow.worker.handover.snapshot import Snapshot
from fallow.worker.handover.standing import HOLDS
from fallow.worker.prepared import checksum
from fallow.worker.transport import device as devices
from fallow.worker.transport.stream import DONORS
from gpu import DEVICE, Member, on_device, on_two_devices, test_handover
from gpu.test_handover import Script, connected, hand_over, supply_of

RING_BYTES = 2 * pieces.CHUNK
SUMS_BYTES = 8 << 10
"Of the weights' sums, which come to the host as well."
DEADLINE_S = 30.0


class PlainAdam(torch.optim.Optimizer):
    """Keeps float32 state for bfloat16 parameters."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad.float()
            if not state:
                for key, value in (("master", parameter.float()), ("mean", grad * 0), ("square", grad * 0)):
                    state[key] = value
            state["mean"].lerp_(grad, 0.1)
            state["square"].lerp_(grad * grad, 0.05)
            state["master"].addcdiv_(state["mean"], state["square"].sqrt() + 1e-8, value=-0.01)
            parameter.copy_(state["master"])


class Mixed(Script):
    """bfloat16 weights and float32 state: 34 MB, several times what the rings hold."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 2300)).to(DEVICE.kind).bfloat16()
        self.model.append(nn.Identity()).append(nn.Identity())
        self.model[4].amax = torch.zeros(1, device=DEVICE.kind)
        self.optimizer = PlainAdam(self.model.parameters())
        self.prepared = type(self.prepared)()
        for thing in (self.model, self.optimizer, self.values):
            self.prepared.add(thing)

    def backward(self) -> None:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(self.values["seen"]))
        self.model(x.pin_memory().to(DEVICE.kind, non_blocking=True).bfloat16()).square().mean().backward()


@contextmanager
def pinned_bytes() -> Iterator[list[int]]:
    """The largest amount of pinned memory that was in use at once, complete when the block is left."""
    guard, peak, now = threading.Lock(), [0], [0]

    def count(tensor: torch.Tensor, sign: int) -> torch.Tensor:
        if sign and tensor.is_pinned():
            size = tensor.untyped_storage().nbytes()
            with guard:
                now[0] += size
                peak[0] = max(peak[0], now[0])
            weakref.finalize(tensor, forget, size)
        return tensor

    def forget(size: int) -> None:
        now[0] -= size

    empty, pin = torch.empty, torch.Tensor.pin_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **known: count(empty(*args, **known), known.get("pin_memory", 0)))
        patch.setattr(torch.Tensor, "pin_memory", lambda self, *args: count(pin(self, *args), 1))
        yield peak


class _Casts(TorchDispatchMode):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self._sizes = sizes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self._sizes.append(result.nbytes)
        return result


@contextmanager
def casts_in_transfer() -> Iterator[list[int]]:
    """Sizes in bytes of the copies in another type or place that the training thread makes in a transfer."""
    sizes, plain = [0], test_handover.transfer

    def transfer(*args: Any, **known: Any) -> Any:
        with _Casts(sizes):
            return plain(*args, **known)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_handover, "transfer", transfer)
        yield sizes


@contextmanager
def late_part_after(gate: threading.Event, script: Script) -> Iterator[None]:
    """A donor sends the late part when the gate opens."""
    plain = pieces.send_piece

    def send(line: Any, memory: Any, number: int, count: int) -> None:
        if memory is supply_of(script)[supply.LATE]:
            assert gate.wait(DEADLINE_S)
        plain(line, memory, number, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supply, "send_piece", send)
        yield


@on_two_devices
def test_bfloat16_weights_and_float32_state_pass_rings_and_nobody_reads_what_has_not_come(member: Member) -> None:
    script = Mixed(member.rank)
    script.train(2)
    torch.accelerator.synchronize()
    if member.rank == 0:
        script.standing.value = HOLDS
    else:
        script.optimizer.state.clear()
    gate = threading.Event()
    with connected(member, DEVICE.here()) as group, late_part_after(gate, script):
        with DEVICE.hidden_syncs_raise(), pinned_bytes() as peak, casts_in_transfer() as casts:
            hand_over(group, script, [0])
            script.backward()
            group.gather(b"")
            gate.set()
            assert script.standing.settle()
        assert max(casts) < RING_BYTES, "state that has not come is not copied"
        assert 0 < peak[0] <= DONORS * RING_BYTES + SUMS_BYTES
        if member.rank == 1:
            latest = script.standing.latest
            assert latest is not None
            assert latest.bytes_behind > 3 * DONORS * RING_BYTES
        assert {t.dtype for t in script.prepared.optimizer_tensors()} == {torch.float32}
        for _ in range(2):
            one, other = group.gather(repr(script.seen()).encode())
            assert one == other
            script.step()
            script.backward()


@on_two_devices
def test_one_donor_sends_over_several_lines(member: Member) -> None:
    script = Script(member.rank)
    if member.rank == 0:
        script.train(2)
        script.standing.value = HOLDS
    sent: list[int] = []
    plain = pieces.cut

    def cut(memory: Any, number: int, count: int) -> Iterator[list[torch.Tensor]]:
        for chunk in plain(memory, number, count):
            sent.append(number)
            yield chunk

    with connected(member, DEVICE.here()) as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "cut", cut)
        hand_over(group, script, [0])
        assert script.standing.settle()
        assert set(sent) == set(range(DONORS))
        one, other = group.gather(repr(script.seen()).encode())
        assert one == other


@on_device
@pytest.mark.parametrize("count", [1, 3])
def test_many_small_tensors_of_a_device_and_of_the_host_pass_a_ring(count: int) -> None:
    sizes = [4, 0, 1000, 7, pieces.CHUNK + 13, *range(1, 300), 2 * pieces.CHUNK]
    places = ["cpu" if number % 5 == 0 else DEVICE.kind for number in range(len(sizes))]
    given = [
        torch.randint(256, (size,), dtype=torch.uint8).to(place) for size, place in zip(sizes, places, strict=True)
    ]
    taken = [torch.zeros_like(part) for part in given]
    moves: list[int] = []

    def move(work: Callable[[int], object]) -> None:
        devices.enter(DEVICE.here())
        with devices.side_stream(DEVICE.here(), ready):
            for number in range(count):
                work(number)

    ready = devices.event(DEVICE.here())
    here, there = socket.socketpair()
    here.settimeout(DEADLINE_S)
    there.settimeout(DEADLINE_S)
    with here, there, DEVICE.hidden_syncs_raise():
        donor = threading.Thread(
            target=move, args=(lambda number: pieces.send_piece(here, given, number, count),), daemon=True
        )
        donor.start()
        move(lambda number: pieces.receive_piece(there, taken, number, count, lambda: moves.append(1)))
        donor.join(DEADLINE_S)
    assert moves
    assert all(map(torch.equal, [part.cpu() for part in given], [part.cpu() for part in taken]))


@on_device
def test_what_is_kept_for_a_rehearsal_is_not_pinned() -> None:
    script = Mixed(0)
    for _ in range(2):  # without state of the optimizer, and with it
        before = script.seen()
        with DEVICE.hidden_syncs_raise(), pinned_bytes() as peak:
            snapshot = Snapshot(script.prepared)
            script.train(1)
            snapshot.restore()
        assert 0 < peak[0] <= RING_BYTES + SUMS_BYTES
        assert script.seen() == before
        script.train(1)


@on_device
def test_only_sums_of_sums_come_to_the_host() -> None:
    weights = [torch.randn(1 << 22, device=DEVICE.kind), torch.randn(1000, 700, device=DEVICE.kind).t()]
    with DEVICE.hidden_syncs_raise(), pinned_bytes() as peak:
        before = checksum.fingerprint(weights)
        weights[0][12345] += 1
        changed = checksum.fingerprint(weights)
    assert before != changed
    assert 0 < peak[0] <= SUMS_BYTES


@on_device
def test_random_numbers_of_a_device_depend_on_the_seed_alone_and_are_put_back() -> None:
    def draw() -> list[float]:
        return torch.rand(4, device=DEVICE.kind).tolist()

    rng.seed_everything(5)
    first = draw()
    with rng.kept():
        rng.seed_everything(5)
        assert draw() == first
        second = draw()
        draw()
    assert draw() == second
