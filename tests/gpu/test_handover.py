"""State on a device: handed over, put back after a rehearsal, and saved, without a hidden wait and without a race."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore

from fallow.worker.checkpoint.parts import take
from fallow.worker.checkpoint.restore import load
from fallow.worker.checkpoint.writer import Writing
from fallow.worker.handover import pieces, supply
from fallow.worker.handover.align import align
from fallow.worker.handover.snapshot import Snapshot, load_from_host
from fallow.worker.handover.standing import HOLDS, Standing
from fallow.worker.handover.transfer import Roles, export_state, transfer
from fallow.worker.prepared import checksum, extra_state, state
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group
from gpu import DEVICE, Member, on_both, on_device, on_two_devices

DEADLINE_S = 180.0


class Scaled(nn.Linear):
    """Keeps scales as FP8 layers do: not in buffers."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.amax = torch.ones(2, device=DEVICE.kind)

    def get_extra_state(self) -> Any:
        return {"amax": self.amax}

    def set_extra_state(self, state: Any) -> None:
        self.amax = state["amax"]


class Script:
    """What one worker prepared, on the device."""

    def __init__(self, seed: int, *, scaler: bool = False) -> None:
        torch.manual_seed(seed)
        turned = nn.Linear(8, 2100)
        turned.weight = nn.Parameter(torch.randn(8, 2100).t())  # does not lie row by row
        body = [nn.Linear(8, 9000), nn.Tanh(), nn.Linear(9000, 8), nn.BatchNorm1d(8), Scaled(), turned]
        self.model: Any = nn.Sequential(*body).to(DEVICE.kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.values: dict[str, Any] = {"seen": 0, "mean": torch.zeros(3, device=DEVICE.kind)}
        self.scaler = torch.amp.GradScaler(DEVICE.kind, init_scale=8.0) if scaler else None
        self.prepared = Prepared()
        for thing in (self.model, self.optimizer, self.schedule, self.values, self.scaler):
            if thing is not None:
                self.prepared.add(thing)
        self.standing = Standing()

    def backward(self) -> None:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(self.values["seen"]))
        loss = self.model(x.pin_memory().to(DEVICE.kind, non_blocking=True)).square().mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.values["seen"] += 1
        self.values["mean"] += 1
        self.model[4].amax += 1

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step()

    def tree(self) -> dict[str, Any]:
        return {"state": export_state(self.prepared, {}), "extra": extra_state.read(self.prepared.modules)}

    def held(self) -> int:
        """Weights and the optimizer's state, to be compared."""
        return checksum.fingerprint([*self.prepared.weights(), *self.prepared.optimizer_tensors()])

    def seen(self) -> tuple[bytes, int]:
        """Everything, to be compared."""
        encoded = state.encode(self.tree(), "test")
        return encoded.tree, checksum.fingerprint(encoded.tensors)


def hand_over(group: Group, script: Script, donors: list[int]) -> dict[str, Any] | None:
    receivers = [rank for rank in range(group.size) if rank not in donors]
    roles = Roles(donors=donors, receivers=receivers, begun=True, whole=False, modes=True)
    own = b""
    if group.rank in donors:
        own = checksum.fingerprint(script.prepared.weights()).to_bytes(8, "little")
    fingerprint = int.from_bytes(group.gather(own)[donors[0]], "little")
    if group.rank not in donors:
        script.train(1)  # a rehearsal: the device is still busy with it when the state arrives
    return transfer(group, script.prepared, script.standing, roles, lambda: {"step": 2}, fingerprint=fingerprint)


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
        script.standing.value = HOLDS
    with connected(member) as group:
        with DEVICE.hidden_syncs_raise():
            plain = hand_over(group, script, [0])
            assert plain == (None if member.rank == 0 else {"step": 2})
            script.backward()  # the late part is on its way
            assert script.standing.settle()
            script.step()
        script.train(2)
        seen = script.seen()
        one, other = group.gather(repr(seen).encode())
        assert one == other
        if member.rank == 1:
            latest = script.standing.latest
            assert latest is not None
            assert latest.bytes_behind > 3 * 2 * 9000 * 8 * 4, "weights and optimizer"
            assert script.model[5].weight.stride() == script.optimizer.state[script.model[5].weight]["exp_avg"].stride()


@on_both
def test_the_state_of_a_scaler_comes_without_a_wait(member: Member) -> None:
    script = Script(member.rank, scaler=True)
    script.train(3 - member.rank)
    if member.rank == 0:
        script.standing.value = HOLDS
    with connected(member) as group:
        with DEVICE.hidden_syncs_raise():
            hand_over(group, script, [0])
            assert script.standing.settle()
        one, other = group.gather(repr(script.seen()).encode())
        assert one == other


@on_both
def test_what_a_donor_has_to_send_does_not_wait_for_its_training(member: Member) -> None:
    """Its stream may wait for sums that the newcomer can join only when it has everything."""
    script = Script(member.rank)
    if member.rank == 0:
        script.train(2)
        script.standing.value = HOLDS
    with connected(member) as group:
        gate = threading.Event()
        if member.rank == 0:
            plain = pieces.send_piece

            def send(line: Any, memory: Any, number: int, count: int) -> None:
                if memory is not supply_of(script)[supply.EARLY]:
                    assert gate.wait(DEADLINE_S)
                plain(line, memory, number, count)

            supply.send_piece = send
        try:
            hand_over(group, script, [0])
            if member.rank == 0:
                with DEVICE.held(torch.accelerator.current_stream()):
                    script.backward()
                    with devices.side_stream(DEVICE.here()):
                        torch.zeros(1, device=DEVICE.kind).add_(1)
                    gate.set()
                    assert script.standing.settle()
            else:
                assert script.standing.settle()
        finally:
            supply.send_piece = pieces.send_piece
        torch.accelerator.synchronize()
        assert len(set(group.gather(checksum.fingerprint(script.model.parameters()).to_bytes(8, "little")))) == 1


def supply_of(script: Script) -> list[Any]:
    while script.standing.supply is None:
        pass
    return script.standing.supply._memory


@on_device
def test_each_donor_copies_its_own_piece_only() -> None:
    scripts = [Script(0), Script(0), Script(1)]
    for script in scripts[:2]:
        script.train(2)
        script.standing.value = HOLDS
    store = HashStore()
    staged: dict[str, int] = {}
    plain = pieces.cut

    def cut(*args: Any) -> Iterator[list[torch.Tensor]]:
        name = threading.current_thread().name.split("-")[0] + str(threading.get_ident())
        for chunk in plain(*args):
            staged[name] = staged.get(name, 0) + sum(part.numel() for part in chunk)
            yield chunk

    pieces.cut = cut
    try:
        with ThreadPoolExecutor(3) as pool:
            groups = list(
                pool.map(
                    lambda rank: build_group(2, rank, 3, PrefixStore("2", store), "127.0.0.1", DEADLINE_S), range(3)
                )
            )
            list(pool.map(hand_over, groups, scripts, [[0, 1]] * 3))
            assert all(pool.map(lambda script: script.standing.settle(), scripts))
    finally:
        pieces.cut = plain
        for group in groups:
            group.destroy()
    assert scripts[0].seen() == scripts[2].seen()
    whole = sum(spec.nbytes for spec in state.encode(scripts[0].prepared.export(), "test").specs)
    sent = [size for name, size in staged.items() if name.startswith("stream")]
    assert len(sent) == 2
    for size in sent:
        assert abs(size - whole / 2) < 0.05 * whole


@on_device
def test_the_fingerprint_is_taken_on_the_device() -> None:
    host = [torch.randn(5000), torch.randn(3, 700).t(), torch.tensor(2), torch.randn(2000).bfloat16(), torch.empty(0)]
    device = [tensor.to(DEVICE.kind) for tensor in host]
    with DEVICE.hidden_syncs_raise():
        there = checksum.row_hashes(state.as_bytes(device[0]))
        assert there.device.type == DEVICE.kind
        copied = devices.to_host(there)
        devices.wait(devices.event(there.device))
        assert torch.equal(copied, checksum.row_hashes(state.as_bytes(host[0])))
        before = checksum.fingerprint(device)
        assert before == checksum.fingerprint([tensor.clone() for tensor in device])
        device[0][4999] += 1
        assert before != checksum.fingerprint(device)


@on_device
def test_a_rehearsal_leaves_nothing_behind() -> None:
    one, other = Script(1), Script(1)
    with DEVICE.hidden_syncs_raise():
        snapshot = Snapshot(one.prepared)
        one.train(2)
        snapshot.restore()
        one.optimizer.zero_grad()
    assert one.seen() == other.seen()
    assert one.values["mean"].device.type == one.model[4].amax.device.type == DEVICE.kind
    for script in (one, other):
        script.train(2)
    assert one.seen() == other.seen()


@on_device
@pytest.mark.parametrize("has_room", [True, False])
def test_a_checkpoint_holds_the_state_of_its_step_though_the_training_goes_on(tmp_path: Path, has_room: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.get_device_module(DEVICE.kind), "mem_get_info", lambda device: (has_room << 30, 1 << 30))
        check_checkpoint(tmp_path)


def check_checkpoint(tmp_path: Path) -> None:
    script = Script(1, scaler=True)
    script.train(2)
    script.backward()
    wanted, script_held = script.seen(), script.held()
    with DEVICE.hidden_syncs_raise(), DEVICE.held(torch.accelerator.current_stream()):
        saving = Saving(script.prepared, tmp_path)
        script.step()
        saving.writing.join(0.1)
        assert saving.writing.is_alive(), "nothing is copied yet"
    for steps in (0, 1):  # a newcomer, and a member that goes back
        again, saved = Script(2, scaler=True), saving.load()
        again.train(steps)
        with DEVICE.hidden_syncs_raise():
            assert load_from_host(again.prepared, saved) == {"step": 2}
        assert again.values["mean"].device.type == DEVICE.kind
        again.model[4].amax = again.model[4].amax.to(DEVICE.kind)
        assert again.held() == script_held
        assert not steps or again.seen() == wanted, "a scaler that has not been used yet looks different"


class Saving:
    """A checkpoint of one member that is on its way to the disk."""

    def __init__(self, prepared: Prepared, folder: Path) -> None:
        snapshot = take(
            export_state(prepared, {"step": 2}),
            0,
            1,
            names=prepared.names(),
            extra=extra_state.read(prepared.modules),
            generation=1,
            step=2,
            epoch=0,
            modes=[],
            asked=False,
            written_at=0.0,
        )
        self._reports: list[Any] = []
        self.writing = Writing(folder, snapshot, self._reports.append)
        self.writing.start()

    def load(self) -> Any:
        """What it holds, when it is complete."""
        self.writing.join(DEADLINE_S)
        assert not self.writing.is_alive()
        return load(Path(self._reports[0].path))


@on_both
def test_members_that_came_apart_are_brought_together(member: Member) -> None:
    bring_together(member, devices.HOST)


@on_two_devices
def test_members_that_came_apart_are_brought_together_on_the_device(member: Member) -> None:
    bring_together(member, DEVICE.here())


def bring_together(member: Member, device: torch.device) -> None:
    script = Script(1)
    script.train(2)
    for parameter in script.model.parameters():
        parameter.data += 1e-7 * member.rank
    wanted = script.seen()
    with connected(member, device) as group:
        align(group, script.prepared, 0)
        one, other = group.gather(repr(script.seen()).encode())
        assert one == other
        if member.rank == 0:
            assert script.seen() == wanted
        script.train(1)
        one, other = group.gather(repr(script.seen()).encode())
        assert one == other
