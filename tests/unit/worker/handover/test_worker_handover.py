"""State over real gloo groups and sockets, one thread per member: receivers train on as the donors do."""

import copy
import io
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fallow.model import FallowError
from fallow.worker.handover import intake, pieces, supply
from fallow.worker.handover.snapshot import Snapshot, export_state, load_state
from fallow.worker.handover.transfer import HOLDS, TORN, Roles, StateStatus, transfer
from fallow.worker.prepared import state
from fallow.worker.prepared.checksum import fingerprint as state_sum
from fallow.worker.prepared.modes import KINDS
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport import stream
from fallow.worker.transport.group import Group
from fallow.worker.transport.stream import Streams, sources
from fallow.worker.transport.waits import Interrupted
from members import build_world
from small_training import Scaled

DEADLINE_S = 120.0
LARGE_WEIGHTS = (9000 * 8 * 2 + 40_000) * 4
"""Bytes of those that come while the others compute, if an optimizer holds them."""

torch.set_num_threads(1)


class Net(nn.Module):
    """A bit of everything: large and small, tied, frozen, bfloat16, integer and 0-dimensional tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 9000)  # its optimizer state comes late
        self.back = nn.Linear(9000, 8)
        self.tied = self.back
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.rand(()))
        self.shift = nn.Parameter(torch.rand(8).bfloat16())
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(40_000))
        self.scaled = Scaled(8, {"steps": 0})
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("mask", torch.rand(5) > 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tied(torch.tanh(self.wide(x)))
        return self.norm(y * self.scale + self.shift.float())


class Member:
    """What one worker prepared, and the status of its state."""

    def __init__(
        self,
        seed: int,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        torch.manual_seed(seed)
        self.model: Any = Net()
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.counts: dict[str, Any] = {"history": [], "mean": torch.zeros(3)}
        self.prepared = Prepared()
        for thing in (self.model, self.optimizer, self.schedule, self.average, self.scaler, self.counts):
            self.prepared.add(thing)
        self.step = 0
        self.state_status = StateStatus()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            x = torch.randn(6, 8, generator=generator)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss: torch.Tensor = (self.model(x) ** 2).mean() + self.model.scale
                loss.backward()
                return loss

            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(closure)
            else:
                self.optimizer.zero_grad()
                self.scaler.scale((self.model(x) ** 2).mean() + self.model.scale).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.model.count += 1
            self.schedule.step()
            self.average.update_parameters(self.model)
            self.counts["history"].append(self.step)
            self.counts["mean"] += x.mean()
            self.step += 1

    def tensors(self) -> list[torch.Tensor]:
        return state.encode(self.prepared.export(), "test").tensors


def equal(one: Member, two: Member) -> None:
    assert one.step == two.step
    assert one.scaler.get_scale() == two.scaler.get_scale()
    assert one.counts["history"] == two.counts["history"]
    assert [g["lr"] for g in one.optimizer.param_groups] == [g["lr"] for g in two.optimizer.param_groups]
    for member in (one, two):
        member.scaler.scale(torch.zeros(()))  # it has its tensors from the first use on
    left, right = one.tensors(), two.tensors()
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def trained(steps: int, optimizer: str = "adamw", seed: int = 1) -> Member:
    """A member that holds the run's state."""
    member = Member(seed, OPTIMIZERS[optimizer])
    member.state_status.value = HOLDS
    member.train(steps)
    return member


def agreed(members: Sequence[Member], *, modes: Sequence[str] = KINDS) -> Roles:
    """What members conclude at a switch."""
    holders = [rank for rank, member in enumerate(members) if member.state_status.has_state]
    most = max((members[rank].step for rank in holders), default=0)
    donors = [rank for rank in holders if members[rank].step == most] or [0]
    receivers = [rank for rank in range(len(members)) if rank not in donors]
    weights_in_pause = (
        not holders or any(member.state_status.weights_in_pause for member in members) or len(holders) > len(donors)
    )
    return Roles(
        donors=donors, receivers=receivers, has_begun=bool(holders), weights_in_pause=weights_in_pause, modes=modes
    )


def meet(group: Group, member: Member, roles: Roles, fingerprint: int) -> intake.Intake | None:
    """One member's part in a switch; what it received."""
    plain = transfer(
        group, member.prepared, member.state_status, roles, lambda: {"step": member.step}, fingerprint=fingerprint
    )
    assert (plain is not None) == (group.rank in roles.receivers)
    if plain is not None:
        member.step = plain["step"]
    return member.state_status.latest


def all_meet(
    groups: Sequence[Group], members: Sequence[Member], roles: Roles | None = None
) -> list[intake.Intake | Exception | None]:
    """A switch that may fail; what became of it on each member."""
    roles = roles or agreed(members)
    fingerprint = state_sum(members[roles.donors[0]].prepared.weights())

    def one(group: Group, member: Member) -> intake.Intake | Exception | None:
        try:
            result = meet(group, member, roles, fingerprint)
            if not member.state_status.settle():
                raise Interrupted(group.broken)
        except (FallowError, Interrupted) as error:
            for each in groups:  # as the head would: a donor that was not asked for anything yet sees nothing of it
                each.interrupt(str(error))
            return error
        return result

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, groups, members))


def change(members: Sequence[Member], roles: Roles | None = None) -> list[intake.Intake]:
    """One whole change of generation; the state is complete on all afterwards. What was received, by rank."""
    groups = build_world(len(members))
    results = all_meet(groups, members, roles)
    for one in results:
        if isinstance(one, Exception):
            raise one
    for group in groups:
        group.destroy()
    return results  # type: ignore[return-value]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p[:4], lr=0.1, max_iter=3, history_size=3),
    "two groups": lambda p: torch.optim.NAdam([{"params": p[:3]}, {"params": p[3:], "lr": 0.003}], lr=0.01),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_newcomer_trains_on_bit_for_bit_like_the_member_it_met(name: str, steps: int) -> None:
    old, new = trained(steps, name), Member(2, OPTIMIZERS[name])
    counts = new.counts
    new_intake = change([old, new])[1]
    equal(old, new)
    assert new.state_status.has_state
    assert counts is new.counts, "a dict is replaced in place"
    assert LARGE_WEIGHTS < new_intake.bytes_in_pause < 2 * LARGE_WEIGHTS, "only the average's are that large"
    late_bytes = LARGE_WEIGHTS - (9000 * 8 * 4 if name == "lbfgs" else 0)
    assert new_intake.bytes_behind >= late_bytes
    assert (new_intake.bytes_behind > late_bytes) == (name == "adagrad" or (steps > 0 and name != "plain sgd"))
    for member in (old, new):
        member.train(3)
    equal(old, new)


@pytest.mark.parametrize("missed", [1, 2])
@pytest.mark.parametrize("newer", ["old", "new"])
def test_groups_that_a_script_added_to_an_optimizer_on_the_way(missed: int, newer: str) -> None:
    """As it thaws layers. A newcomer has missed some; one that goes back to a checkpoint has some too many."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.shape[:1] != (9000,)], lr=0.01)

    old, new = Member(1, make), Member(2, make)
    old.state_status.value = HOLDS
    for number in range(2):
        old.train(1)
        for member in (old, new):
            if (member is old) == (newer == "old") or number >= missed:
                added = [member.model.wide.weight, member.model.wide.bias][number]
                member.optimizer.add_param_group({"params": [added], "lr": 0.1 / (number + 1)})
    change([old, new])
    for member in (old, new):
        member.train(2)
    equal(old, new)
    assert len(new.optimizer.param_groups) == (3 if newer == "old" else 3 - missed)


def test_extra_state_reaches_newcomers_as_a_whole() -> None:
    """Two donors whose own extra states differ, since a forward changes it: a newcomer has all of one of them."""
    value = {"amax": torch.rand(2, 3), "steps": [7, 1 << 70], "file": io.BytesIO(b"fp8"), "none": None}
    members = [Member(2, OPTIMIZERS["momentum"]), trained(0, "momentum"), trained(0, "momentum")]
    members[1].model.scaled.scales = value
    members[2].model.scaled.scales = {"of": "another donor", "long": list(range(999))}
    change(members)
    new = members[0].model.scaled.scales
    assert torch.equal(new.pop("amax"), value["amax"])
    assert new.pop("file").getvalue() == b"fp8"
    assert new == {"steps": [7, 1 << 70], "none": None}
    assert members[2].model.scaled.scales["of"] == "another donor"


@pytest.mark.parametrize("kept", [KINDS, ["frozen"], ["resting"], []])
def test_from_a_checkpoint_all_have_frozen_what_was_frozen_when_it_was_written(kept: Sequence[str]) -> None:
    """Those who come after all were lost, and those who go back: not what the one that loads it had before."""
    writer, *members = (Member(seed, OPTIMIZERS["momentum"]) for seed in (1, 2, 3, 4))
    writer.train(2)
    writer.model.wide.requires_grad_(False)
    writer.model.norm.eval()
    members[0].model.scale.requires_grad_(False)
    members[1].model.wide.eval()
    before = [member.prepared.modes.export() for member in members]
    members[0].step = load_state(members[0].prepared, export_state(writer.prepared, {"step": writer.step}, modes=kept))[
        "step"
    ]
    change(members, agreed(members, modes=kept))
    for member in members:
        equal(writer, member)
    after = writer.prepared.modes.export()
    for member, own in zip(members, before, strict=True):
        expected_modes = [line for line in after if line.startswith(tuple(kept))]
        expected_modes += [line for line in own if not line.startswith(tuple(kept))]
        assert sorted(member.prepared.modes.export()) == sorted(expected_modes)


def test_donors_with_different_optimizer_state_are_found_out() -> None:
    members = [trained(1), trained(1), Member(2, OPTIMIZERS["adamw"])]
    members[1].optimizer.param_groups[0]["weight_decay"] = 0.5
    error = all_meet(build_world(len(members)), members)[2]
    assert isinstance(error, FallowError)
    assert "different optimizer or other state" in error.message
    assert "one version of Fallow" in error.message, "the state's own form may differ, too"


def test_s20_a_donor_hears_of_a_break_before_anybody_has_asked_it_for_anything() -> None:
    """The newcomer dies before its first question: no line is there whose end would tell."""
    old, new = trained(0), Member(2, OPTIMIZERS["adamw"])
    groups = build_world(2)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(meet, groups[0], old, agreed([old, new]), 0)
        deadline = time.monotonic() + DEADLINE_S
        while old.state_status.supply is None or not groups[0].waiting:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        groups[0].interrupt("the newcomer is gone")
        with pytest.raises(Interrupted, match="the newcomer is gone"):
            run.result(DEADLINE_S)
    assert old.state_status.has_state


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_newcomer_whose_last_part_is_under_way_when_the_group_breaks_is_torn(
    monkeypatch: pytest.MonkeyPatch, is_given_up: bool
) -> None:
    """The same where it is the newcomer that waits no longer."""
    old, new = trained(2), Member(2, OPTIMIZERS["adamw"])
    members, groups, is_broken, part_of = [old, new], build_world(2), threading.Event(), Counter[socket.socket]()
    real = pieces.send_piece

    def send(line: socket.socket, memory: Sequence[pieces.Bytes], number: int, count: int) -> None:
        part, part_of[line] = part_of[line], part_of[line] + 1
        if part == supply.LATE_PART:
            assert is_broken.wait(DEADLINE_S)
        real(line, memory, number, count)

    monkeypatch.setattr(supply, "send_piece", send)
    roles, fingerprint = agreed(members), state_sum(old.prepared.weights())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda group, member: meet(group, member, roles, fingerprint), groups, members))
    assert all(map(torch.equal, old.model.parameters(), new.model.parameters())), "forward and backward may run"
    if is_given_up:
        new.state_status.give_up()
        assert groups[1].broken, "what comes later would be written into the next state"
    else:
        groups[1].interrupt("on purpose")
    is_broken.set()
    assert [member.state_status.settle() for member in members] == [False, is_given_up]
    assert [member.state_status.value for member in members] == [HOLDS, TORN]
    for member in members:
        member.state_status.give_up()
    change([new, old])
    equal(old, new)


def spoil_once(monkeypatch: pytest.MonkeyPatch, what: int | None) -> None:
    """The outline (None), or a part, of the first donor arrives damaged."""
    targets, part_of = [what], Counter[socket.socket]()

    def receive(line: socket.socket, size: int) -> bytes:
        data = stream.receive(line, size)
        if targets != [None] or size <= supply.HEAD.size:
            return data
        targets.clear()
        return data[:-1] + bytes([data[-1] ^ 1])

    def receive_piece(line: socket.socket, memory: Any, number: int, *how: Any) -> int:
        part, part_of[line] = part_of[line], part_of[line] + 1
        size = pieces.receive_piece(line, memory, number, *how)
        if (number, targets) == (0, [part]):
            targets.clear()
            raise pieces.Damaged
        return size

    monkeypatch.setattr(intake, "receive", receive)
    monkeypatch.setattr(intake, "receive_piece", receive_piece)


@pytest.mark.parametrize("what", [None, supply.EARLY_PART, supply.MIDDLE_PART, supply.LATE_PART])
def test_t8_what_arrives_damaged_ends_the_newcomer_alone(monkeypatch: pytest.MonkeyPatch, what: int | None) -> None:
    members = [trained(2), trained(2), Member(2, OPTIMIZERS["adamw"])]
    spoil_once(monkeypatch, what)
    *_, error = all_meet(build_world(len(members)), members)
    # Weights may have been changed by the script: they are tried once more in the next generation, as a whole.
    assert isinstance(error, Interrupted if what == supply.MIDDLE_PART else FallowError)
    if what != supply.MIDDLE_PART:
        assert "state arrived damaged from another member" in str(error)
    assert [member.state_status.value for member in members] == [HOLDS, HOLDS, TORN]
    for member in members:
        member.state_status.give_up()
    change(members)
    equal(members[0], members[2])


def test_a_stranger_is_not_served() -> None:
    """Nor is a member of another generation, whose token is another one."""
    streams, former = Streams(7, 0, 2, "127.0.0.1"), Streams(6, 0, 2, "127.0.0.1")
    served: list[socket.socket] = []
    streams.serve(served.append)
    card = streams.card
    for token in (bytes(16), former.card.token):
        with socket.create_connection((card.address, card.port), timeout=DEADLINE_S) as line:
            line.sendall(stream._HELLO.pack(stream._HELLO.size, token, 1))
            assert line.recv(1) == b""
    former.close()
    assert not served
    streams.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((card.address, card.port), timeout=DEADLINE_S)


def test_optimizers_that_load_in_their_own_way_and_state_of_another_dtype_are_received_too() -> None:
    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: dict) -> None:
            super().load_state_dict(copy.deepcopy(state_dict))

    for make in (OPTIMIZERS["momentum"], lambda p: Own(p, lr=0.01, momentum=0.9)):
        old, new = Member(1, make), Member(2, make)
        old.state_status.value = HOLDS
        old.train(1)
        entry = old.optimizer.state[old.model.wide.weight]
        entry["momentum_buffer"] = entry["momentum_buffer"].double()  # plain loading makes it float32 again
        change([old, new])
        got = new.optimizer.state[new.model.wide.weight]["momentum_buffer"]
        assert torch.equal(got, entry["momentum_buffer"].to(got.dtype))
        assert (got.dtype == torch.float64) == (type(new.optimizer) is torch.optim.SGD)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rehearsal_leaves_nothing_behind(name: str) -> None:
    """Whoever has rehearsed trains on as one that has not."""
    one, other = Member(1, OPTIMIZERS[name]), Member(1, OPTIMIZERS[name])
    snapshot = Snapshot(one.prepared)
    one.train(2)
    one.model.wide.requires_grad_(False)
    one.model.norm.eval()
    one.counts["more"] = 1
    one.model.scaled.scales["steps"] = 1
    one.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    snapshot.restore()
    assert one.model.scaled.scales == {"steps": 0}
    one.step = 0
    one.optimizer.zero_grad()
    assert one.prepared.modes.export() == other.prepared.modes.export()
    equal(one, other)
    for member in (one, other):
        member.train(2)
    equal(one, other)


@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 4), st.data())
def test_pieces_make_the_whole_and_a_bit_that_is_changed_on_the_way_is_found(
    sizes: list[int], count: int, data: st.DataObject
) -> None:
    memory = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    taken = [torch.zeros_like(one) for one in memory]

    def take(sent: bytes, into: list[torch.Tensor], number: int) -> None:
        near, far = socket.socketpair()
        with near, far:
            near.sendall(sent)
            near.shutdown(socket.SHUT_WR)
            pieces.receive_piece(far, into, number, count, lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "CHUNK", 64)
        for number in range(count):
            near, far = socket.socketpair()
            with near:
                pieces.send_piece(near, memory, number, count)
            with far:
                sent = bytearray(far.recv(1 << 16, socket.MSG_WAITALL))
            take(sent, taken, number)
            if sent:
                sent[data.draw(st.integers(0, len(sent) - 1))] ^= 1 << data.draw(st.integers(0, 7))
                with pytest.raises(pieces.Damaged):
                    take(sent, list(map(torch.zeros_like, memory)), number)
    assert all(map(torch.equal, taken, memory))


@given(st.integers(1, 12), st.integers(0, 12), st.booleans())
def test_the_load_is_spread_evenly_over_the_donors(donors: int, receivers: int, several_connections: bool) -> None:
    plan = sources(range(donors), range(100, 100 + receivers), several_connections=several_connections)
    for row in plan.values():
        assert len(set(row)) == min(4, donors)
        assert len(row) == (4 if several_connections else min(4, donors))
    loads = [sum(row.count(donor) for row in plan.values()) for donor in range(donors)]
    assert max(loads) - min(loads) <= 1


def test_extra_state_that_cannot_travel_is_refused_by_name_before_the_training() -> None:
    with pytest.raises(
        FallowError, match=r"Sequential\.model\.0\.1\._extra_state\.lock: its state holds a _thread\.lock"
    ):
        Prepared().add(nn.Sequential(Scaled(8, 1.0), Scaled(8, {"lock": threading.Lock()})))
