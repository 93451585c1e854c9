"""Gradients summed over shards and members, against those of plain PyTorch, whatever way a script takes."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fallow.model import FallowError
from fallow.worker.reduction import buckets, reduction
from fallow.worker.reduction.arithmetic import Arithmetic
from fallow.worker.reduction.exact import Exact
from fallow.worker.transport.group import Group
from members import Body, Summing, together, world

torch.set_num_threads(1)

BLOCKS = 4
EVERY = tuple(range(BLOCKS))
KINDS = [Arithmetic, Exact]


class Ways(nn.Module):
    """Blocks that are gone through in any order, some of them not at all, or twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in EVERY)

    def forward(self, x: torch.Tensor, way: Sequence[int]) -> torch.Tensor:
        for number in way:
            x = x + self.blocks[number](x).tanh()
        return x.square().mean()


with torch.random.fork_rng():
    torch.manual_seed(0)  # the rounding, too, is the same in each run
    NET = Ways()
BATCHES = torch.randn(12, 4, 6, generator=torch.Generator().manual_seed(3))


class Member(Summing):
    """Of a copy of that net."""

    def __init__(self, group: Group, net: nn.Module, arithmetic: Arithmetic | None = None) -> None:
        super().__init__(group, copy.deepcopy(net), arithmetic)

    def step(self, *how: Any) -> list[torch.Tensor | None]:
        """The gradients that the script finds. Args: as for `sum`."""
        self.sum(*how)
        return [None if p.grad is None else p.grad.clone() for p in self.net.parameters()]


def alone(net: nn.Module = NET, arithmetic: Arithmetic | None = None) -> Member:
    """The only member of a world of one."""
    return Member(Group(0, 0, 1), net, arithmetic)


def plain(net: nn.Module, body: Body, shards: int) -> list[torch.Tensor | None]:
    """Gradients by PyTorch, in float64."""
    reference = copy.deepcopy(net).double()
    for shard in range(shards):
        body(reference, shard)
    return [None if p.grad is None else p.grad / shards for p in reference.parameters()]


def assert_close(
    got: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | None], error: float = 1e-6
) -> None:
    """To a part of the largest gradient, and None where it should be."""
    assert [grad is None for grad in got] == [grad is None for grad in wanted]
    most = max([float(w.detach().abs().max()) for w in wanted if w is not None], default=0.0)
    for one, other in zip(got, wanted, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=error * most)


def equal(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> bool:
    """Bit for bit."""
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def scripted(ways: Sequence[Sequence[Sequence[int]]], frozen: frozenset[int] = frozenset()) -> Body:
    """A script: by shard, the ways of its backwards; blocks that are frozen."""

    def body(net: nn.Module, shard: int) -> None:
        for number, block in enumerate(net.blocks):  # type: ignore[arg-type]
            block.requires_grad_(number not in frozen)
        dtype = next(net.parameters()).dtype
        for way in ways[shard]:
            loss = net(BATCHES[shard].to(dtype), way)
            if loss.requires_grad:
                loss.backward()

    return body


def divided(shards: int, cuts: Sequence[int]) -> list[list[int]]:
    """Shards of each member, some of whom have none."""
    return [list(range(a, b)) for a, b in itertools.pairwise([0, *sorted(min(cut, shards) for cut in cuts), shards])]


WAY = st.one_of(st.just(EVERY), st.just(EVERY[::-1]), st.lists(st.sampled_from(EVERY), max_size=5).map(tuple))
SCRIPT = st.tuples(
    st.lists(st.lists(WAY, min_size=0, max_size=3), min_size=4, max_size=4),
    st.frozensets(st.sampled_from(EVERY), max_size=3),
)


@pytest.mark.parametrize(("bucket_bytes", "waiting_bytes"), [(100, 1 << 18), (1 << 20, 1 << 18), (1 << 20, 200)])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(
    steps=st.lists(SCRIPT, min_size=2, max_size=4),
    cuts=st.one_of(st.lists(st.integers(1, 4), max_size=2), st.just([1, 2, 3])),
)
def test_any_way_through_the_model_gives_the_gradients_of_plain_pytorch(
    steps: list[tuple[list[list[tuple[int, ...]]], frozenset[int]]],
    cuts: list[int],
    kind: type[Arithmetic],
    bucket_bytes: int,
    waiting_bytes: int,
) -> None:
    """A matrix has 288 bytes, and everything else 48: where 200 may wait, matrices are added at once."""
    bodies = [scripted(*step) for step in steps]
    shares = divided(4, cuts)
    net = copy.deepcopy(NET).double()  # in float32 backward itself errs by more than the sum

    def member(group: Group) -> tuple[list[list[torch.Tensor | None]], dict[str, Any]]:
        one = Member(group, net, kind())
        counts = list(map(len, shares))
        return [one.step(body, shares[group.rank], 4, counts) for body in bodies], one.reduction.export()

    with pytest.MonkeyPatch.context() as patched:
        for name in ("_FIRST_BYTES", "BUCKET_BYTES", "_LAST_BYTES"):
            patched.setattr(buckets, name, bucket_bytes)
        patched.setattr(reduction, "WAITING_BYTES", waiting_bytes)
        found = together(member, world(len(shares)))
        single = alone(net, kind())
        by_one = [single.step(body, EVERY, 4) for body in bodies]
    for results, state in found:
        assert state == found[0][1]
        for step, body in enumerate(bodies):
            assert equal(results[step], found[0][0][step])
            assert_close(results[step], plain(net, body, 4), error=1e-12)
            assert kind is Arithmetic or equal(results[step], by_one[step])


def test_buckets_are_laid_out_as_gradients_came_whether_they_are_added_at_once_or_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reduction, "WAITING_BYTES", 100)
    member, came = alone(), list[int]()
    for number, parameter in enumerate(member.net.parameters()):
        parameter.register_hook(lambda _, number=number: came.append(number))  # type: ignore[no-untyped-call, misc]
    member.step(scripted([[EVERY]]), [0], 1)
    assert member.reduction.export()["order"] == came


def test_a_second_backward_now_and_then_voids_a_sum_once() -> None:
    """A penalty in every fourth step, say: the sixteen bodies before that one have none."""
    member = alone()
    for step in range(15):
        member.step(scripted([[EVERY]] * 7 + [[EVERY] * (2 if step % 4 == 2 else 1)]), range(8), 8)
    assert member.reduction.repeated_sums == 1


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_newcomer_voids_no_sum_for_want_of_what_the_others_have_learned(interrupted: bool) -> None:
    """Also where somebody is lost in its first sum, of which it has seen the bodies."""
    member, newcomer = alone(), alone()
    twice = scripted([[EVERY] * 2])
    for one in (member, newcomer):
        if one is newcomer and interrupted:
            one.attempt(twice, [0], 1)
            one.reduction.forget()
        for _ in range(3):
            one.step(twice, [0], 1)
        assert one.reduction.repeated_sums == 1, "the run's first sum"
        newcomer.reduction.load(member.reduction.export())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_takes_no_part_in_a_sum_that_is_made_again(
    kind: type[Arithmetic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of a model that is fine-tuned may be: there is no memory for its gradients."""
    monkeypatch.setattr(buckets, "_FIRST_BYTES", 100)
    net, frozen = copy.deepcopy(NET), frozenset({0, 1})
    for number in frozen:
        net.blocks[number].requires_grad_(False)  # type: ignore[union-attr]
    arithmetic, launched = kind(), set[int]()
    launch = arithmetic.launch

    def noted(group: Group, bucket: buckets.Bucket) -> None:
        launched.update(bucket.members)
        launch(group, bucket)

    monkeypatch.setattr(arithmetic, "launch", noted)
    member = alone(net, arithmetic)
    for times in (1, 1, 1, 2):
        body = scripted([[EVERY] * times], frozen)
        assert_close(member.step(body, [0], 1), plain(net, body, 1))
    assert member.reduction.repeated_sums == 1
    assert launched == {number for number, one in enumerate(net.parameters()) if one.requires_grad}


def test_a_bucket_that_has_come_back_is_waited_for_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the model for one task of many: else each of its steps would be done twice."""
    monkeypatch.setattr(buckets, "_FIRST_BYTES", 100)
    monkeypatch.setattr(buckets, "_LAST_BYTES", 100)
    member = alone()
    for step in range(1, 4 * 20):
        member.step(scripted([[EVERY if step % 20 == 0 else EVERY[:3]]]), [0], 1)
    assert member.reduction.repeated_sums == 1


@pytest.mark.parametrize("small", [buckets.SMALL, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights_and_create_graph(kind: type[Arithmetic], small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether gradients are added together or, from `SMALL` elements on, one by one."""
    monkeypatch.setattr(buckets, "SMALL", small)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    net[2].weight = net[0].weight

    def body(net: nn.Module, shard: int) -> None:
        x = BATCHES[shard].to(net[0].weight.dtype)  # type: ignore[index]
        grads = torch.autograd.grad(net(x).square().mean(), list(net.parameters()), create_graph=True)
        (net(x).square().mean() + sum(g.square().sum() for g in grads)).backward(create_graph=True)

    member = alone(net, kind())
    for _ in range(2):
        got = member.step(body, [0, 1], 2)
        assert not any(grad.requires_grad for grad in got if grad is not None)
        assert_close(got, plain(net, body, 2))


def test_gradients_that_a_script_keeps_stay_as_they_are_and_others_memory_is_used_again() -> None:
    member = alone()
    kept, copies, places = [], [], []
    for step in range(4):
        member.step(scripted([[EVERY]] * 4), [step], 1)
        grad = next(member.net.parameters()).grad
        assert grad is not None
        places.append(grad.untyped_storage().data_ptr())
        if step == 1:
            kept.append(grad.reshape(-1)[:3])
            copies.append(kept[0].clone())
        grad = None
    assert torch.equal(kept[0], copies[0])
    assert places[2] != places[1], "somebody holds it"
    assert places[2] == places[3], "nobody does"


def test_complex_parameters_add_up_as_they_are_and_are_refused_where_integers_are_summed() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def body(net: nn.Module, shard: int) -> None:
        ((net.weight * (shard + 1j)).abs().square().sum()).backward()  # type: ignore[operator]

    net = Complex()
    wanted = copy.deepcopy(net)
    body(wanted, 0)
    body(wanted, 1)
    (got,) = alone(net).step(body, [0, 1], 2)
    torch.testing.assert_close(got, wanted.weight.grad / 2)
    with pytest.raises(FallowError, match="complex64"):
        alone(net, Exact())


def checkpointed(times: int, *, reentrant: bool) -> Body:
    """The same modules in several checkpoints."""

    def body(net: nn.Module, shard: int) -> None:
        x = BATCHES[shard].to(next(net.parameters()).dtype).requires_grad_()
        for _ in range(times):
            x = checkpoint(lambda x: x + sum(block(x).tanh() for block in net.blocks), x, use_reentrant=reentrant)  # type: ignore[union-attr]
        x.square().mean().backward()

    return body


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_activation_checkpointing(times: int, reentrant: bool) -> None:
    member = alone()
    ends: list[int] = []
    bodies: list[int] = []
    member.reduction.after_backward = lambda: ends.append(len(bodies))
    body = checkpointed(times, reentrant=reentrant)

    def counted(net: nn.Module, shard: int) -> None:
        bodies.append(1)
        body(net, shard)

    for _ in range(3):
        assert_close(member.step(counted, [0, 1], 2), plain(NET, body, 2))
    if times == 1 or not reentrant:
        assert ends == [1, 2, 3, 4, 5, 6], "once in each body"


def test_a_buffer_on_another_device_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False, device="meta"))
    with pytest.raises(FallowError, match=r"parameters and buffers lie on several devices, cpu, meta; .* move the mo"):
        Summing(Group(0, 0, 1, None), net)


def test_sparse_gradients_are_refused_at_the_end_of_the_body() -> None:
    net = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    member = alone(net)
    with pytest.raises(FallowError, match=r"0\.weight has a sparse gradient.*sparse=False"):
        member.attempt(lambda net, _: net(torch.tensor([1])).sum().backward(), [0], 1)
