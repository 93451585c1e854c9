"""State on a device: handed over, put back after a rehearsal, and saved, without a hidden wait and without a race."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fallow.worker.checkpoint.parts import take
from fallow.worker.checkpoint.restore import load
from fallow.worker.checkpoint.writer import Writing
from fallow.worker.handover import pieces, supply
from fallow.worker.handover.snapshot import Snapshot, export_state, load_from_host
from fallow.worker.handover.transfer import HOLDS, Roles, StateStatus, transfer
from fallow.worker.prepared import checksum, state
from fallow.worker.prepared.modes import KINDS, read_extra
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group
from gpu import DEVICE, Member, on_both, on_device, shared_device
from small_training import Scaled

DEADLINE_S = 180.0
pieces.CHUNK = 1 << 14  # each part takes many chunks
RING_BYTES = 2 * pieces.CHUNK
SUMS_BYTES, BATCH_BYTES = 8 << 10, 1 << 10
"Of the weights' sums, which come to the host as well, and of batches."


class Script:
    """What one worker prepared, on the device."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        turned = nn.Linear(8, 2100)
        turned.weight = nn.Parameter(torch.randn(8, 2100).t())  # does not lie row by row
        scaled = Scaled(8, {"amax": torch.ones(2, device=DEVICE.kind)})
        body = [nn.Linear(8, 9000), nn.Tanh(), nn.Linear(9000, 8), nn.BatchNorm1d(8), scaled, turned]
        self.model: Any = nn.Sequential(*body).to(DEVICE.kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.values: dict[str, Any] = {"seen": 0, "mean": torch.zeros(3, device=DEVICE.kind)}
        self.prepared = Prepared()
        for thing in (self.model, self.optimizer, self.schedule, self.values):
            self.prepared.add(thing)
        self.state_status = StateStatus()

    def backward(self) -> None:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(self.values["seen"]))
        self.model(x.pin_memory().to(DEVICE.kind, non_blocking=True)).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.values["seen"] += 1
        self.values["mean"] += 1
        self.model[4].scales["amax"] += 1

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step()

    def tree(self) -> dict[str, Any]:
        return {"state": export_state(self.prepared, {}), "extra": read_extra(self.prepared.modules)}

    def held(self) -> int:
        """Weights and the optimizer's state, to be compared."""
        return checksum.fingerprint([*self.prepared.weights(), *self.prepared.optimizer_tensors()])

    def seen(self) -> tuple[bytes, int]:
        """Everything, to be compared."""
        encoded = state.encode(self.tree(), "test")
        return encoded.tree, checksum.fingerprint(encoded.tensors)


@contextmanager
def pinned_bytes() -> Iterator[list[int]]:
    """The largest amount of pinned memory that was in use at once, complete when the block is left."""
    guard, peak, held, freed = threading.Lock(), [0], [0], list[int]()

    def count(tensor: torch.Tensor, sign: int) -> torch.Tensor:
        if sign and tensor.is_pinned():
            size = tensor.untyped_storage().nbytes()
            with guard:
                held[0] += size
                peak[0] = max(peak[0], held[0] - sum(freed))
            weakref.finalize(tensor, freed.append, size)  # on any thread, whoever has the guard
        return tensor

    empty, pin = torch.empty, torch.Tensor.pin_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **known: count(empty(*args, **known), known.get("pin_memory", 0)))
        patch.setattr(torch.Tensor, "pin_memory", lambda self, *args: count(pin(self, *args), 1))
        yield peak


def hand_over(group: Group, script: Script, donors: list[int]) -> dict[str, Any] | None:
    receivers = [rank for rank in range(group.size) if rank not in donors]
    roles = Roles(donors=donors, receivers=receivers, has_begun=True, weights_in_pause=False, modes=KINDS)
    own = b""
    if group.rank in donors:
        own = checksum.fingerprint(script.prepared.weights()).to_bytes(8, "little")
    fingerprint = int.from_bytes(group.gather(own)[donors[0]], "little")
    if group.rank not in donors:
        script.train(1)  # a rehearsal: the device is still busy with it when the state arrives
    return transfer(group, script.prepared, script.state_status, roles, lambda: {"step": 2}, fingerprint=fingerprint)


@contextmanager
def connected(member: Member, device: torch.device = devices.HOST) -> Iterator[Group]:
    """A group of both processes."""
    group = build_group(2, member.rank, member.size, member.store, "127.0.0.1", DEADLINE_S, device=device)
    try:
        yield group
        group.gather(b"")  # a group that is closed while the other one still receives may end the process
    finally:
        group.destroy()


@on_both
def test_a_newcomer_trains_on_bit_for_bit_and_nobody_waits_for_the_device_unasked(member: Member) -> None:
    script = Script(member.rank)
    if member.rank == 0:
        script.train(2)
        script.state_status.value = HOLDS
    with connected(member) as group:
        with DEVICE.hidden_syncs_raise(), pinned_bytes() as peak:
            plain = hand_over(group, script, [0])
            assert plain == (None if member.rank == 0 else {"step": 2})
            script.backward()  # the late part is on its way
            assert script.state_status.settle()
            script.step()
        assert 0 < peak[0] <= RING_BYTES + SUMS_BYTES + BATCH_BYTES
        script.train(2)
        seen = script.seen()
        one, other = group.gather(repr(seen).encode())
        assert one == other
        if member.rank == 1:
            latest = script.state_status.latest
            assert latest.bytes_behind > 3 * 2 * 9000 * 8 * 4, "weights and optimizer"
            assert script.model[5].weight.stride() == script.optimizer.state[script.model[5].weight]["exp_avg"].stride()


@on_both
def test_what_a_donor_has_to_send_does_not_wait_for_its_training(member: Member) -> None:
    """Its streams may wait for sums that the newcomer can join only when it has everything."""
    script = Script(member.rank)
    if member.rank == 0:
        script.train(2)
        script.state_status.value = HOLDS
    with connected(member) as group:
        gate, plain = threading.Event(), pieces.send_piece

        def send(line: Any, memory: Any, number: int, count: int) -> None:
            if memory is not supply_of(script)[supply.EARLY_PART]:
                assert gate.wait(DEADLINE_S)
            plain(line, memory, number, count)

        with DEVICE.pooled_streams(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(supply, "send_piece", send)
            hand_over(group, script, [0])
            if member.rank == 0:
                main = torch.accelerator.current_stream()
                with DEVICE.held(main):
                    script.backward()
                    for priority in (0, -1):
                        for _ in range(32):  # torch has no more of them
                            torch.Stream(device=DEVICE.here(), priority=priority).wait_stream(main)
                    gate.set()
                    assert script.state_status.settle()
            else:
                assert script.state_status.settle()
        torch.accelerator.synchronize()
        assert len(set(group.gather(checksum.fingerprint(script.model.parameters()).to_bytes(8, "little")))) == 1


def supply_of(script: Script) -> list[Any]:
    while script.state_status.supply is None:
        pass
    return script.state_status.supply._memory


@on_device
def test_a_rehearsal_leaves_nothing_behind() -> None:
    one, other = Script(1), Script(1)
    for _ in range(2):  # without state of the optimizer, and with it
        snapshot = Snapshot(one.prepared)
        one.train(2)
        assert one.held() != other.held()
        snapshot.restore()
        one.optimizer.zero_grad()
        assert one.seen() == other.seen()
        assert one.values["mean"].device.type == one.model[4].scales["amax"].device.type == DEVICE.kind
        for script in (one, other):
            script.train(2)
        assert one.seen() == other.seen()


def out_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("it is more than this process may have")


@on_device
@pytest.mark.parametrize("room", ["enough", "none", "less than it says"])
def test_a_checkpoint_holds_the_state_of_its_step_though_the_training_goes_on(tmp_path: Path, room: str) -> None:
    script = Script(1)
    script.train(2)
    script.backward()
    wanted, script_held = script.seen(), script.held()
    reports: list[Any] = []
    with (
        pytest.MonkeyPatch.context() as patch,
        DEVICE.hidden_syncs_raise(),
        DEVICE.held(torch.accelerator.current_stream()),
    ):
        patch.setattr(
            torch.get_device_module(DEVICE.kind), "mem_get_info", lambda device: ((room != "none") << 30, 1 << 30)
        )
        tree, prepared = export_state(script.prepared, {"step": 2}), script.prepared
        about: dict[str, Any] = {
            "generation": 1,
            "step": 2,
            "epoch": 0,
            "modes": [],
            "by_hand": False,
            "written_at": 0.0,
        }
        extra = read_extra(prepared.modules)
        with pytest.MonkeyPatch.context() as limit:
            if room == "less than it says":  # as `torch.cuda.set_per_process_memory_fraction` sets one
                limit.setattr(torch.Tensor, "clone", out_of_memory)
            snapshot = take(tree, 0, 1, names=prepared.names(), extra=extra, **about)
        writing = Writing(tmp_path, snapshot, reports.append)
        writing.start()
        script.step()
        writing.join(0.1)
        assert writing.is_alive(), "nothing is copied yet"
    writing.join(DEADLINE_S)
    assert not writing.is_alive()
    for steps in (0, 1):  # a newcomer, and a member that goes back
        again, saved = Script(2), load(Path(reports[0].path))
        again.train(steps)
        assert load_from_host(again.prepared, saved) == {"step": 2}
        assert again.values["mean"].device.type == again.model[4].scales["amax"].device.type == DEVICE.kind
        assert again.held() == script_held
        assert again.seen() == wanted


@on_both
def test_members_that_came_apart_are_brought_together(member: Member) -> None:
    script = Script(1)
    script.train(2)
    for parameter in script.model.parameters():
        parameter.data += 1e-7 * member.rank
    wanted = script.seen()
    with shared_device(), connected(member, DEVICE.here()) as group:
        script.state_status.value = HOLDS
        hand_over(group, script, [0])
        assert script.state_status.settle()
        one, other = group.gather(repr(script.seen()).encode())
        assert one == other
        if member.rank == 0:
            assert script.seen() == wanted
        script.train(1)
        one, other = group.gather(repr(script.seen()).encode())
        assert one == other
