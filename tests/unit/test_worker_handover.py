"""First exchanges over real gloo groups and sockets, one thread per member: receivers train on as the others."""

from __future__ import annotations

import copy
import io
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore

from fallow.model import Exit, FallowError
from fallow.worker.handover import intake, stream, supply, switch
from fallow.worker.handover.align import align, source
from fallow.worker.handover.standing import FRESH, HOLDS, TORN, Standing
from fallow.worker.handover.stream import Card, Streams, cut, receive_piece, send_piece, sources, word_sum
from fallow.worker.handover.switch import Exchanged, Verdict, View, exchange, judge
from fallow.worker.loop.catch_up import CatchUp
from fallow.worker.loop.position import Position
from fallow.worker.prepared.objects import Gate, Prepared
from fallow.worker.reduction.exact import Exact
from fallow.worker.transport.group import Group, Interrupted, build_group

DEADLINE_S = 20.0
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
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("mask", torch.rand(5) > 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tied(torch.tanh(self.wide(x)))
        return self.norm(y * self.scale + self.shift.float())


class Image(nn.Module):
    """Large parameters that do not lie row by row in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 256, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.rand(40, 600).t())
        self.scale = nn.Parameter(torch.rand(()))
        self.register_buffer("count", torch.tensor(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x[:, :, None, None].expand(-1, -1, 2, 3)) * self.scale + (self.turned**3).mean()


class Member:
    """What one worker prepared, and its standing."""

    def __init__(
        self,
        seed: int,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        net: Callable[[], nn.Module] = Net,
    ) -> None:
        torch.manual_seed(seed)
        self.model: Any = net()
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.prepared = Prepared(Gate())
        for thing in (self.model, self.optimizer, self.schedule, self.average):
            self.prepared.add(thing)
        self.position = Position()
        self.standing = Standing()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.position.step)
            x = torch.randn(6, 8, generator=generator)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = (self.model(x) ** 2).mean() + self.model.scale
                loss.backward()
                return loss

            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(closure)
            else:
                closure()
                self.optimizer.step()
            self.model.count += 1
            self.schedule.step()
            self.average.update_parameters(self.model)
            self.position.finish_step(6, last=False)

    def tensors(self) -> list[torch.Tensor]:
        return list(switch.state.tensors_in(self.prepared.export()))


def equal(one: Member, two: Member) -> None:
    assert one.position == two.position
    assert [g["lr"] for g in one.optimizer.param_groups] == [g["lr"] for g in two.optimizer.param_groups]
    left, right = one.tensors(), two.tensors()
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def groups(generation: int, members: Sequence[Member], store: HashStore) -> list[Group]:
    store.set_timeout(timedelta(seconds=DEADLINE_S))

    def build(rank: int) -> Group:
        own = PrefixStore(str(generation), store)
        holds = members[rank].standing.holds
        return build_group(generation, rank, len(members), own, "127.0.0.1", DEADLINE_S, holds=holds)

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(build, range(len(members))))


def meet(group: Group, member: Member, restore: switch.Restore = lambda: None) -> Exchanged:
    done = exchange(group, member.prepared, member.position, member.standing, restore, 0.0)
    member.position = done.position
    return done


def change(generation: int, members: Sequence[Member], restore: switch.Restore = lambda: None) -> list[Exchanged]:
    """One whole change of generation; the state is complete on all afterwards."""
    ours = groups(generation, members, HashStore())
    with ThreadPoolExecutor(len(members)) as pool:
        done = list(pool.map(meet, ours, members, [restore] * len(members)))
        assert all(pool.map(lambda member: member.standing.settle(), members))
    for group in ours:
        group.destroy()
    return done


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
    old, new = Member(1, OPTIMIZERS[name]), Member(2, OPTIMIZERS[name])
    old.standing.value = HOLDS
    old.train(steps)
    done = change(3, [old, new])
    equal(old, new)
    assert new.standing.holds
    intake = done[1].intake
    assert intake is not None
    assert LARGE_WEIGHTS < intake.bytes_in_pause < 2 * LARGE_WEIGHTS, "only the average's are that large"
    held = LARGE_WEIGHTS - (9000 * 8 * 4 if name == "lbfgs" else 0)
    assert intake.bytes_behind >= held
    assert (intake.bytes_behind > held) == (name == "adagrad" or (steps > 0 and name != "plain sgd"))
    for member in (old, new):
        member.train(3)
    equal(old, new)


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}])
def test_state_lies_in_memory_as_its_parameter_does_wherever_it_comes_from(how: dict[str, bool]) -> None:
    """Fused kernels go along both: with other strides they take another element's momentum."""
    old, new = (Member(seed, lambda p: torch.optim.AdamW(p, lr=0.01, **how), Image) for seed in (1, 2))
    old.standing.value = HOLDS
    old.train(3)
    done = change(3, [old, new])
    intake = done[1].intake
    assert intake is not None
    assert intake.bytes_behind >= 2 * 4 * (old.model.conv.weight.numel() + old.model.turned.numel()), "it came late"
    for parameter in (new.model.conv.weight, new.model.turned):
        assert new.optimizer.state[parameter]["exp_avg"].stride() == parameter.stride()
    for member in (old, new):
        member.train(3)
    equal(old, new)


def test_what_was_frozen_on_the_way_is_frozen_for_a_newcomer() -> None:
    old, new = Member(1, OPTIMIZERS["momentum"]), Member(2, OPTIMIZERS["momentum"])
    old.standing.value = HOLDS
    old.train(1)
    old.model.wide.requires_grad_(False)
    old.model.norm.eval()
    new.model.norm.requires_grad_(False)  # by a rehearsal that went another way
    new.model.wide.eval()
    change(3, [old, new])
    assert [name for name, part in new.model.named_modules() if not part.training] == ["norm"]
    frozen = {name for name, parameter in new.model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"wide.weight", "wide.bias", "frozen"}
    for member in (old, new):
        member.optimizer.zero_grad()
        member.train(2)
    equal(old, new)


@pytest.mark.parametrize("missed", [1, 2])
@pytest.mark.parametrize("newer", ["old", "new"])
def test_groups_that_a_script_added_to_an_optimizer_on_the_way(missed: int, newer: str) -> None:
    """As it thaws layers. A newcomer has missed some; one that goes back to a checkpoint has some too many."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.shape[:1] != (9000,)], lr=0.01)

    old, new = Member(1, make), Member(2, make)
    old.standing.value = HOLDS
    for number in range(2):
        old.train(1)
        for member in (old, new):
            if (member is old) == (newer == "old") or number >= missed:
                added = [member.model.wide.weight, member.model.wide.bias][number]
                member.optimizer.add_param_group({"params": [added], "lr": 0.1 / (number + 1)})
    change(3, [old, new])
    for member in (old, new):
        member.train(2)
    equal(old, new)
    assert len(new.optimizer.param_groups) == (3 if newer == "old" else 3 - missed)


def test_where_members_have_switched_different_things_a_newcomer_stays_as_its_script_made_it() -> None:
    """One has evaluated and left it at that: the next body will begin with `train()`."""
    old, other, new = (Member(seed, OPTIMIZERS["momentum"]) for seed in (1, 1, 2))
    for member in (old, other):
        member.standing.value = HOLDS
        member.train(1)
    old.model.eval()
    new.model.norm.eval()
    change(3, [old, other, new])
    assert [name for name, part in new.model.named_modules() if not part.training] == ["norm"]
    assert other.model.training
    assert not old.model.training


class Scaled(nn.Linear):
    """Keeps scales as FP8 layers do: not in buffers."""

    def __init__(self, scales: Any = None) -> None:
        super().__init__(8, 8)
        self.scales: Any = scales

    def get_extra_state(self) -> Any:
        return self.scales

    def set_extra_state(self, state: Any) -> None:
        self.scales = state


def scaled(scales: Any) -> Member:
    member = Member(1, OPTIMIZERS["momentum"], lambda: nn.Sequential(Scaled(0.0), nn.ReLU(), Scaled(1.5)))
    member.model[0].scales = scales
    return member


@pytest.mark.parametrize(
    "value", [torch.tensor([3.0, 0.5]), {"amax": torch.rand(2, 3), "steps": [7, 1 << 70]}, io.BytesIO(b"fp8"), None]
)
def test_extra_state_reaches_newcomers_as_a_whole(value: Any) -> None:
    """Two donors whose own extra states differ, since a forward changes it: a newcomer has all of the first one's."""
    members = [scaled("of a newcomer"), scaled(value), scaled({"of": "another donor", "long": list(range(999))})]
    for member in members[1:]:
        member.standing.value = HOLDS
    change(3, members)
    new = members[0].model[0].scales
    if isinstance(value, io.BytesIO):
        assert new.getvalue() == value.getvalue()
    elif isinstance(value, dict):
        assert torch.equal(new["amax"], value["amax"])
        assert new["steps"] == value["steps"]
    else:
        assert (torch.equal(new, value)) if isinstance(value, torch.Tensor) else new == value
    assert members[0].model[2].scales == 1.5
    assert members[2].model[0].scales["of"] == "another donor"


def test_extra_state_that_cannot_travel_is_refused_by_name_before_the_training() -> None:
    with pytest.raises(FallowError) as refused:
        Prepared(Gate()).add(nn.Sequential(Scaled(1.0), Scaled({"lock": threading.Lock()})))
    assert refused.value.message == (
        "prepare: Sequential.model.0.1._extra_state.lock: its state holds a _thread.lock, which cannot be handed to "
        "another member; return plain values, arrays and tensors from state_dict() and get_extra_state()"
    )


def test_a_member_with_other_extra_state_is_of_another_layout() -> None:
    with_state, without = scaled(1.0).prepared.layout(), Prepared(Gate())
    without.add(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    assert "model.0.0._extra_state" in set(with_state) - set(without.layout())


def test_several_donors_and_several_receivers_and_rank_0_is_new() -> None:
    members = [Member(seed, OPTIMIZERS["adamw"]) for seed in (5, 1, 1, 6, 1, 7)]
    for rank in (1, 2, 4):
        members[rank].standing.value = HOLDS
        members[rank].train(2)
    change(9, members)
    for member in members:
        equal(members[1], member)
    for member in members:
        member.train(1)
    equal(members[0], members[2])


def test_who_begins_gives_its_first_state_to_all() -> None:
    members = [Member(seed, OPTIMIZERS["momentum"]) for seed in (1, 2, 3)]
    first = copy.deepcopy(members[0].model.state_dict())
    done = change(1, members)
    assert done[1].intake is not None
    for member in members:
        assert member.standing.holds
        assert all(torch.equal(value, member.model.state_dict()[name]) for name, value in first.items())


@pytest.mark.parametrize("agreed", [True, False])
def test_from_a_checkpoint_all_have_frozen_what_was_frozen_when_it_was_written(agreed: bool) -> None:
    """Those who come after all were lost, and those who go back: not what the one that loads it had before."""
    writer, *members = (Member(seed, OPTIMIZERS["momentum"]) for seed in (1, 2, 3, 4))
    writer.train(2)
    writer.model.wide.requires_grad_(False)
    writer.model.norm.eval()
    members[0].model.scale.requires_grad_(False)
    members[1].model.wide.eval()
    before = [member.prepared.modes.export() for member in members]
    modes = writer.prepared.modes.export()

    def restore() -> dict[str, object]:
        tree = switch.export_state(writer.prepared, writer.position)
        return {**tree, "modes": modes if agreed else None}

    change(3, members, restore)
    for member in members:
        equal(writer, member)
    assert [member.prepared.modes.export() for member in members] == ([modes] * 3 if agreed else before)


def test_a_survivor_one_step_behind_receives_the_newer_state() -> None:
    ahead, behind = Member(1, OPTIMIZERS["adamw"]), Member(1, OPTIMIZERS["adamw"])
    for member, steps in ((ahead, 3), (behind, 2)):
        member.standing.value = HOLDS
        member.train(steps)
    change(2, [behind, ahead])
    equal(ahead, behind)
    assert behind.position.step == 3


def test_a_drifted_member_is_healed_by_the_majority() -> None:
    members = [Member(1, OPTIMIZERS["adamw"]) for _ in range(3)]
    for member in members:
        member.standing.value = HOLDS
        member.train(2)
    members[1].model.unused.data.view(torch.int32)[17] ^= 1
    done = change(4, members)
    assert [one.healed for one in done] == [[1], [1], [1]]
    equal(members[0], members[1])


def test_members_that_came_apart_are_brought_together() -> None:
    members = [Member(1, OPTIMIZERS["adamw"]) for _ in range(3)]
    for number, member in enumerate(members):
        member.train(2)
        member.model.wide.weight.data += 1e-7 * number
        member.optimizer.state[member.model.wide.weight]["exp_avg"] *= 1 + 1e-6 * number
    wanted = [tensor.clone() for tensor in members[1].tensors()]
    ours = groups(4, members, HashStore())
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda group, member: align(group, member.prepared, 1), ours, members))
    for group in ours:
        group.destroy()
    assert all(torch.equal(*pair) for pair in zip(wanted, members[1].tensors(), strict=True)), "it gave only"
    for member in members:
        member.train(1)
    equal(members[1], members[0])
    equal(members[1], members[2])


def test_whose_weights_count() -> None:
    assert [source(pieces) for pieces in ([5, 7], [7, 5, 5], [1, 2, 3], [9, 4, 9, 4, 4])] == [0, 1, 0, 1]


def all_meet(generation: int, members: Sequence[Member]) -> list[Exchanged | Exception]:
    """An exchange that may fail; what became of it on each member."""

    def one(group: Group, member: Member) -> Exchanged | Exception:
        try:
            return meet(group, member)
        except (FallowError, Interrupted) as error:
            group.interrupt(str(error))  # as the end of the process would
            return error

    ours = groups(generation, members, HashStore())
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, ours, members))


def test_drift_without_a_majority_ends_a_reproducible_run() -> None:
    members = [Member(1, OPTIMIZERS["adamw"]) for _ in range(2)]
    for member in members:
        member.prepared.arithmetic = Exact()
        member.standing.value = HOLDS
    members[1].model.mask.logical_not_()
    for error in all_meet(4, members):
        assert isinstance(error, FallowError)
        assert "different weights" in error.message


def test_drift_without_a_majority_is_healed_from_the_first_where_bits_may_differ() -> None:
    members = [Member(1, OPTIMIZERS["adamw"]) for _ in range(2)]
    for member in members:
        member.standing.value = HOLDS
        member.train(1)
    members[1].model.wide.weight.data += 1e-7
    done = change(4, members)
    assert [one.healed for one in done] == [[1], [1]]
    equal(members[0], members[1])


def test_donors_with_different_optimizer_state_are_found_out() -> None:
    members = [Member(seed, OPTIMIZERS["adamw"]) for seed in (1, 1, 2)]
    for member in members[:2]:
        member.standing.value = HOLDS
        member.train(1)
    members[1].optimizer.param_groups[0]["weight_decay"] = 0.5
    error = all_meet(4, members)[2]
    assert isinstance(error, FallowError)
    assert "different optimizer or other state" in error.message


# ------------------------------------------------------------------------------------------------------ breaks


class Stall:
    """Holds up the donors' sending of one part: `supply.EARLY`, `MIDDLE` or `LATE`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        gone: list[socket.socket] = []
        real = stream.send_piece

        def send(line: socket.socket, memory: Sequence[stream.Bytes], number: int, pieces: int) -> int:
            now = gone.count(line)
            gone.append(line)
            if now == part:
                self.reached.set()
                assert self.go_on.wait(DEADLINE_S)
            return real(line, memory, number, pieces)

        monkeypatch.setattr(supply, "send_piece", send)


def held_up(monkeypatch: pytest.MonkeyPatch, part: int) -> tuple[Member, Member, Stall, list[Group]]:
    """A member that has trained, a newcomer, what holds that part up between them, and their new groups."""
    old, new = Member(1, OPTIMIZERS["adamw"]), Member(2, OPTIMIZERS["adamw"])
    old.standing.value = HOLDS
    old.train(2)
    return old, new, Stall(monkeypatch, part), groups(2, [old, new], HashStore())


@pytest.mark.parametrize("who", [0, 1])
def test_a_break_while_the_late_part_comes_leaves_a_torn_newcomer_that_the_next_generation_mends(
    monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    old, new, stall, ours = held_up(monkeypatch, supply.LATE)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(meet, ours, [old, new]))
    assert stall.reached.wait(DEADLINE_S)
    intake = done[1].intake
    assert intake is not None
    assert not intake.complete
    told = threading.Event()
    intake.when_complete(told.set)
    equal_weights = [torch.equal(a, b) for a, b in zip(old.model.parameters(), new.model.parameters(), strict=True)]
    assert all(equal_weights), "forward and backward may run"
    ours[who].interrupt("on purpose")
    stall.go_on.set()
    assert not new.standing.settle()
    assert not told.is_set()
    assert (old.standing.value, new.standing.value) == (HOLDS, TORN)
    for member in (old, new):
        member.standing.give_up()
    old.train(1)
    change(3, [new, old])
    equal(old, new)
    assert new.standing.holds


@pytest.mark.parametrize("who", [0, 1])
def test_donors_go_on_while_weights_are_on_their_way_and_a_break_leaves_a_torn_newcomer(
    monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    old, new, stall, ours = held_up(monkeypatch, supply.MIDDLE)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(meet, group, member) for group, member in zip(ours, [old, new], strict=True)]
        runs[0].result(DEADLINE_S)
        assert stall.reached.wait(DEADLINE_S)
        assert torch.equal(old.model.norm.running_mean, new.model.norm.running_mean), "a forward changes it"
        assert not runs[1].done()
        ours[who].interrupt("on purpose")
        stall.go_on.set()
        with pytest.raises(Interrupted):
            runs[1].result(DEADLINE_S)
    assert not old.standing.settle()
    assert (old.standing.value, new.standing.value) == (HOLDS, TORN)
    for member in (old, new):
        member.standing.give_up()
    old.train(1)
    change(3, [new, old])
    equal(old, new)


@pytest.mark.parametrize("name", ["adamw", "lbfgs", "two groups"])
def test_only_what_optimizers_hold_may_come_while_donors_compute(name: str) -> None:
    """A forward changes buffers; a frozen parameter may be somebody's moving average."""
    member = Member(1, OPTIMIZERS[name])
    tensors = member.prepared.weight_tensors()
    got = {tensors[number].data_ptr() for number in member.prepared.trained_weights()}
    assert got == {p.data_ptr() for group in member.optimizer.param_groups for p in group["params"]}


def late_sum(stalled: threading.Event) -> Callable[[Sequence[stream.Bytes]], int]:
    """A donor's sum of a large chunk that another thread changes at once."""
    real = stream.word_sum

    def word_sum(chunk: Sequence[stream.Bytes]) -> int:
        wrong = stalled.is_set() and threading.current_thread().name.startswith("stream-2")
        return real(chunk) ^ wrong

    return word_sum


def touch(member: Member) -> None:
    """As a script does by hand at the start of a body; unseen by autograd."""
    member.model.wide.weight.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("summed", [False, True])
def test_weights_that_change_while_they_are_sent_are_found_and_sent_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, summed: bool
) -> None:
    """`summed`: after the donor has summed up a chunk, before it is gone."""
    members = [Member(seed, OPTIMIZERS["adamw"]) for seed in (1, 1, 2)]
    for member in members[:2]:
        member.standing.value = HOLDS
        member.train(2)
    stall = Stall(monkeypatch, supply.MIDDLE)
    if summed:
        monkeypatch.setattr(stream, "word_sum", late_sum(stall.go_on))
    ours = groups(2, members, HashStore())
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(meet, group, member) for group, member in zip(ours, members, strict=True)]
        for run in runs[:2]:
            run.result(DEADLINE_S)
        for member in members[:2]:
            touch(member)
        stall.go_on.set()
        with pytest.raises(Interrupted, match="changes them before a backward"):
            runs[2].result(DEADLINE_S)
    assert ours[2].broken
    assert [member.standing.whole for member in members] == [False, False, True]
    for group in ours:
        group.interrupt("the head builds the next one")
    for member in members:
        member.standing.give_up()
    done = change(3, members)
    assert done[2].intake is not None
    assert done[2].intake.bytes_in_pause > 2 * LARGE_WEIGHTS
    assert all(member.standing.whole for member in members)
    equal(members[0], members[2])


@pytest.mark.parametrize("who", [0, 1])
def test_a_break_in_the_pause_interrupts_both_sides(monkeypatch: pytest.MonkeyPatch, who: int) -> None:
    old, new = Member(1, OPTIMIZERS["adamw"]), Member(2, OPTIMIZERS["adamw"])
    old.standing.value = HOLDS
    old.train(2)
    stall = Stall(monkeypatch, supply.EARLY)
    ours = groups(2, [old, new], HashStore())
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(meet, group, member) for group, member in zip(ours, [old, new], strict=True)]
        assert stall.reached.wait(DEADLINE_S)
        ours[who].interrupt("on purpose")
        stall.go_on.set()
        for run in runs:
            with pytest.raises(Interrupted):
                run.result(DEADLINE_S)
    assert (old.standing.value, new.standing.value) == (HOLDS, TORN)
    change(3, [old, new])
    equal(old, new)


def test_s20_a_donor_hears_of_a_break_before_anybody_has_asked_it_for_anything() -> None:
    """The newcomer dies between the exchange and its first question: no line is there whose end would tell."""
    old, new = Member(1, OPTIMIZERS["adamw"]), Member(2, OPTIMIZERS["adamw"])
    old.standing.value = HOLDS
    ours = groups(2, [old, new], HashStore())
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(meet, ours[0], old)
        ours[1].all_reduce(torch.zeros(1))
        ours[1].wait()
        fresh = switch._view(ours[1], new.standing, new.position, 0, 0, 0.0, switch.NOTHING_TOLD, doubtful=False)
        switch._views(ours[1], fresh)
        deadline = time.monotonic() + DEADLINE_S
        while old.standing.supply is None or not ours[0].waiting:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ours[0].interrupt("the newcomer is gone")
        with pytest.raises(Interrupted, match="the newcomer is gone"):
            run.result(DEADLINE_S)
    assert old.standing.holds


def test_an_old_state_stays_whole_until_the_newer_one_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, behind = Member(1, OPTIMIZERS["adamw"]), Member(1, OPTIMIZERS["adamw"])
    for member, steps in ((ahead, 3), (behind, 2)):
        member.standing.value = HOLDS
        member.train(steps)
    before = [tensor.clone() for tensor in behind.tensors()]
    stall = Stall(monkeypatch, supply.LATE)
    ours = groups(2, [ahead, behind], HashStore())
    with ThreadPoolExecutor(2) as pool:
        pool.submit(meet, ours[0], ahead)
        run = pool.submit(meet, ours[1], behind)
        assert stall.reached.wait(DEADLINE_S)
        ours[0].interrupt("on purpose")
        stall.go_on.set()
        with pytest.raises(Interrupted):
            run.result(DEADLINE_S)
    assert behind.standing.holds
    assert all(torch.equal(a, b) for a, b in zip(before, behind.tensors(), strict=True))


def test_where_nobody_has_the_state_a_torn_member_ends_and_a_fresh_one_begins() -> None:
    torn, fresh, other = (Member(seed, OPTIMIZERS["adamw"]) for seed in (1, 2, 3))
    torn.standing.value = TORN
    first, *others = all_meet(5, [torn, fresh, other])
    assert isinstance(first, FallowError)
    assert first.code == Exit.TEMPFAIL
    assert not any(isinstance(one, FallowError) for one in others)
    assert fresh.position.step == 0


def test_what_arrives_damaged_is_refused() -> None:
    here, there = socket.socketpair()
    sent = np.arange(3000, dtype=np.uint8)
    got = np.zeros(3000, dtype=np.uint8)
    send_piece(here, [sent], 0, 1)
    data = bytearray(there.recv(10_000))
    data[1234] ^= 1
    here.sendall(data)
    moves: list[int] = []
    with pytest.raises(FallowError, match="damaged"):
        receive_piece(there, [got], 0, 1, lambda: moves.append(1))
    assert moves, "those who wait for it do not hear that something comes"
    here.close()
    with pytest.raises(OSError, match="closed"):
        receive_piece(there, [got], 0, 1, lambda: None)
    there.close()


class Damage:
    """Spoils what the first donor sends of the outline or of one part to a newcomer, so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: int | None, times: int) -> None:
        self.left = times
        self._spoiling = threading.local()
        known: dict[socket.socket, list[int]] = {}
        real_send, real_sum, real_receive = stream.send_piece, stream.word_sum, stream.receive

        def send(line: socket.socket, memory: Sequence[stream.Bytes], number: int, pieces: int) -> int:
            parts = known.setdefault(line, [])
            if id(memory) not in parts:
                parts.append(id(memory))
            if (parts.index(id(memory)), number) != (what, 0) or not self.left:
                return real_send(line, memory, number, pieces)
            self.left -= 1
            self._spoiling.now = True
            spoiled = [array ^ 1 for array in memory]
            try:
                return real_send(line, spoiled, number, pieces)
            finally:
                self._spoiling.now = False

        def word_sum(chunk: Sequence[stream.Bytes]) -> int:
            return real_sum(chunk) ^ getattr(self._spoiling, "now", False)

        def receive(line: socket.socket, size: int) -> bytes:
            data = real_receive(line, size)
            if what is not None or size <= supply.HEAD.size or not self.left:
                return data
            self.left -= 1
            return data[:-1] + bytes([data[-1] ^ 1])

        monkeypatch.setattr(supply, "send_piece", send)
        monkeypatch.setattr(stream, "word_sum", word_sum)
        monkeypatch.setattr(intake, "receive", receive)


@pytest.mark.parametrize("what", [None, supply.EARLY, supply.MIDDLE, supply.LATE])
def test_t8_what_arrives_damaged_is_sent_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: int | None
) -> None:
    members = [Member(seed, OPTIMIZERS["adamw"]) for seed in (1, 1, 2)]
    for member in members[:2]:
        member.standing.value = HOLDS
        member.train(2)
    damage = Damage(monkeypatch, what, intake.TRIES - 1)
    change(2, members)
    assert damage.left == 0
    equal(members[0], members[2])
    again = "fallow: generation 2: state from rank 0 to rank 2 arrived damaged; it is sent again\n"
    assert capsys.readouterr().err == again * (intake.TRIES - 1)


@pytest.mark.parametrize("what", [None, supply.EARLY, supply.MIDDLE, supply.LATE])
def test_t8_what_arrives_damaged_again_and_again_ends_the_newcomer_alone(
    monkeypatch: pytest.MonkeyPatch, what: int | None
) -> None:
    members = [Member(seed, OPTIMIZERS["adamw"]) for seed in (1, 1, 2)]
    for member in members[:2]:
        member.standing.value = HOLDS
        member.train(2)
    Damage(monkeypatch, what, intake.TRIES)
    ours = groups(2, members, HashStore())

    def take_part(group: Group, member: Member) -> Exception | None:
        try:
            meet(group, member)
            member.standing.settle()
        except (FallowError, Interrupted) as error:
            for one in ours:  # as the head would: a donor that was not asked for anything yet sees nothing of it
                one.interrupt(str(error))
            return error
        return None

    with ThreadPoolExecutor(3) as pool:
        *_, error = pool.map(take_part, ours, members)
    # Weights may have been changed by the script: they are tried once more in the next generation, as a whole.
    assert isinstance(error, Interrupted if what == supply.MIDDLE else FallowError)
    if what != supply.MIDDLE:
        assert "generation 2: state from rank 0 to rank 2 arrived damaged 3 times" in str(error)
    assert [member.standing.value for member in members] == [HOLDS, HOLDS, TORN]
    for member in members:
        member.standing.give_up()
    change(3, members)
    equal(members[0], members[2])


def test_a_stranger_is_not_served() -> None:
    streams = Streams(7, "127.0.0.1")
    served: list[socket.socket] = []
    streams.serve(served.append)
    card = streams.card(holds=True)
    assert Card.decode(card.encode()) == card
    for token, generation in ((bytes(16), 7), (card.token, 6)):
        with socket.create_connection((card.address, card.port), timeout=DEADLINE_S) as line:
            line.sendall(stream._HELLO.pack(token, generation))
            assert line.recv(1) == b""
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
        old.standing.value = HOLDS
        old.train(1)
        entry = old.optimizer.state[old.model.wide.weight]
        entry["momentum_buffer"] = entry["momentum_buffer"].double()  # plain loading makes it float32 again
        change(2, [old, new])
        got = new.optimizer.state[new.model.wide.weight]["momentum_buffer"]
        assert torch.equal(got, entry["momentum_buffer"].to(got.dtype))
        assert (got.dtype == torch.float64) == (type(new.optimizer) is torch.optim.SGD)


@pytest.mark.parametrize("hidden", [False, True])
def test_where_loading_copies_the_late_part_is_copied_when_it_is_here(
    monkeypatch: pytest.MonkeyPatch, hidden: bool
) -> None:
    """As on another device; `hidden`: the copies cannot be matched, so that everything is waited for."""
    real = torch.optim.Optimizer._process_value_according_to_param_policy

    def clone(*args: object, **kwargs: object) -> torch.Tensor:
        return real(*args, **kwargs).clone()

    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(clone))
    if hidden:
        monkeypatch.setattr(Prepared, "optimizer_pairs", lambda *_: None)
    old, new = Member(1, OPTIMIZERS["adamw"]), Member(2, OPTIMIZERS["adamw"])
    old.standing.value = HOLDS
    old.train(2)
    _, done = change(2, [old, new])
    assert done.intake is not None
    assert done.intake.bytes_behind > LARGE_WEIGHTS
    equal(old, new)


# ---------------------------------------------------------------------------------------------------------- pure

SIZES = st.lists(st.one_of(st.integers(0, 200), st.integers(0, 3 * stream.CHUNK)), max_size=8)


@given(SIZES, st.integers(1, 5))
def test_pieces_cover_everything_once(sizes: list[int], pieces: int) -> None:
    memory = [np.zeros(size, dtype=np.uint8) for size in sizes]
    for number in range(pieces):
        for chunk in cut(memory, number, pieces):
            assert 0 < sum(part.size for part in chunk) <= stream.CHUNK
            for part in chunk:
                part += 1
    assert all((array == 1).all() for array in memory)


@given(st.binary(min_size=1, max_size=100), st.integers(0, 10**6))
def test_the_sum_of_a_chunk_sees_a_single_bit(data: bytes, where: int) -> None:
    chunk = [np.frombuffer(bytearray(data[: len(data) // 3]), np.uint8), np.frombuffer(bytearray(data), np.uint8)]
    before = word_sum(chunk)
    chunk[1][where % len(data)] ^= 1 << where % 8
    assert word_sum(chunk) != before


@given(st.integers(1, 12), st.integers(0, 12))
def test_the_load_is_spread_evenly_over_the_donors(donors: int, receivers: int) -> None:
    plan = sources(range(donors), range(100, 100 + receivers))
    assert all(len(set(row)) == len(row) == min(4, donors) for row in plan.values())
    loads = [sum(row.count(donor) for row in plan.values()) for donor in range(donors)]
    assert max(loads) - min(loads) <= 1


STANDINGS = st.sampled_from([FRESH, HOLDS, TORN])
VIEWS = st.lists(st.builds(View, st.just(3), STANDINGS, st.integers(0, 2), st.just(0), st.integers(0, 1), st.just(0)))


@given(VIEWS)
def test_donors_are_the_majority_of_those_at_the_newest_step(views: list[View]) -> None:
    holders = [view for view in views if view.standing == HOLDS]
    newest = [view for view in holders if view.progress == max(v.progress for v in holders)]
    ones = sum(view.fingerprint for view in newest)
    if newest and 2 * ones == len(newest):
        with pytest.raises(FallowError):
            judge(3, views)
        donors, _, healed = judge(3, views, drift=True)
        assert [views[rank] for rank in donors] == [
            view for view in newest if view.fingerprint == newest[0].fingerprint
        ]
        assert len(donors) == len(healed)
        return
    donors, _, healed = judge(3, views)
    assert judge(3, views, drift=True).donors == donors
    usual = [view for view in newest if view.fingerprint == (2 * ones > len(newest))]
    assert [views[rank] for rank in donors] == usual
    assert len(donors) + len(healed) == len(newest)
    assert not set(donors) & set(healed)


def test_a_stale_process_is_found_out() -> None:
    with pytest.raises(FallowError, match="rank 1 is in generation 2, not 3"):
        judge(3, [View(3, HOLDS, 1, 0, 0, 0), View(2, HOLDS, 1, 0, 0, 0)])


def seen(standing: int = HOLDS, progress: int = 5, call: int = 2, fingerprint: int = 7) -> View:
    return View(generation=3, standing=standing, progress=progress, call=call, fingerprint=fingerprint, pace=0)


def test_who_gives_and_who_receives() -> None:
    views = [seen(progress=4, fingerprint=1), seen(), seen(standing=FRESH, progress=0), seen(), seen(standing=TORN)]
    assert judge(3, views) == Verdict([1, 3], [], [])
    assert judge(3, [seen(standing=FRESH), seen(standing=TORN)]) == Verdict([], [], [])
    assert judge(3, [seen(), seen(fingerprint=8), seen()]) == Verdict([0, 2], [], [1])
    with pytest.raises(FallowError, match="hold different weights"):
        judge(3, [seen(), seen(fingerprint=8)])


def test_a_member_that_left_its_call_already_gives_and_one_that_has_not_stays_as_it_is() -> None:
    # Between two calls a script may do what changes weights (an average swapped in), and the other will do it, too.
    views = [seen(call=1), seen(call=2, fingerprint=8), seen(standing=FRESH, progress=0, call=0)]
    assert judge(3, views) == Verdict([1], [0], [])


def test_what_a_script_changes_on_its_way_to_the_members_is_put_back_as_it_was_received() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    prepared, catch_up = Prepared(Gate()), CatchUp()
    for thing in (model, optimizer, average):
        prepared.add(thing)

    def seen() -> list[object]:
        settings = [optimizer.param_groups[0]["lr"], model[1].training, len(optimizer.state)]
        return [*settings, *(tensor.tolist() for tensor in switch.state.tensors_in(prepared.export()))]

    def train() -> None:
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)

    train()
    received = seen()
    for _ in range(2):  # at each loop that the members are past
        catch_up.keep(prepared)
        with torch.no_grad():
            model(torch.randn(8, 3))
            model[0].weight.mul_(0.9)
        optimizer.param_groups[0]["lr"] *= 0.5
        model[1].eval()
        for entry in optimizer.state.values():
            entry["exp_avg"].zero_()
        optimizer.state.clear()
        average.load_state_dict({**model.state_dict(prefix="module."), "n_averaged": torch.tensor(0)})
    catch_up.put_back(prepared)
    assert seen() == received
    train()
    assert seen() != received
    model[1].eval()
    catch_up.put_back(prepared)
    assert not model[1].training, "what comes afterwards is the script's own"
