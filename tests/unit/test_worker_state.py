from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallow.model import FallowError
from fallow.worker.prepared.state import (
    as_bytes,
    decode,
    digest,
    encode,
    fingerprint,
    from_bytes,
    room,
    spec_of,
    to_bytes,
)

TREE = {
    "plain": [None, True, 1, -(2**70), 2.5, math.inf, "ü", b"\x00\xff"],
    "keys": {1: "a", (1, "b"): "c", None: "d", 2.5: "e"},
    "kinds": (
        OrderedDict(a=1),
        Counter("aab"),
        defaultdict(int, x=3),
        defaultdict(None, {"y": 1}),
        {1, 2},
    ),
    "numpy": [np.float64(1.5), np.arange(6, dtype=np.int16).reshape(2, 3), np.bool_(True)],
    "dtype": torch.bfloat16,
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def round_trip(value):
    encoded = encode(value, "test")
    places = room(encoded.specs)
    for place, tensor in zip(places, encoded.tensors, strict=True):
        assert place.data_ptr() % 64 == 0
        place.copy_(tensor)
    return decode(encoded.tree, places)


def test_plain_values_come_back_as_they_were() -> None:
    back = round_trip(TREE)
    assert back["plain"] == TREE["plain"]
    assert back["keys"] == TREE["keys"]
    assert back["kinds"] == TREE["kinds"]
    assert [type(a) for a in back["kinds"]] == [type(a) for a in TREE["kinds"]]
    assert back["kinds"][2].default_factory is int
    assert back["dtype"] is torch.bfloat16
    for got, put in zip(back["numpy"], TREE["numpy"], strict=True):
        assert type(got) is type(put)
        np.testing.assert_array_equal(got, put)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5)])
def test_tensors_come_back_bit_for_bit(dtype, shape) -> None:
    put = (torch.randn(shape) * 3).to(dtype)
    got = round_trip({"t": put, "again": [put]})["t"]
    assert got.dtype == dtype
    assert got.shape == put.shape
    assert torch.equal(got, put)


def test_views_and_transposes_are_taken_by_value() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(round_trip(base.t()), base.t())


@pytest.mark.parametrize("value", [object(), lambda: 0, defaultdict(lambda: 1), np.array([object()])])
def test_an_unknown_type_is_refused_by_name(value) -> None:
    with pytest.raises(FallowError, match=r"EMA\.inner: its state holds a "):
        encode({"inner": value}, "EMA")


def test_the_fingerprint_depends_on_order_and_on_where_one_tensor_ends() -> None:
    one = [torch.arange(9.0), torch.zeros(3)]
    assert fingerprint(one) == fingerprint([t.clone() for t in one])
    assert fingerprint([one[1], one[0]]) != fingerprint(one)
    assert fingerprint([torch.arange(8.0), torch.tensor([8.0, 0, 0, 0])]) != fingerprint(one)
    transposed = torch.arange(6.0).reshape(2, 3).t()
    assert fingerprint([transposed]) == fingerprint([transposed.contiguous()])


@given(st.integers(0, 5000 * 4 - 1), st.integers(0, 7), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_the_fingerprint_sees_a_single_bit_anywhere(at: int, bit: int, dtype: torch.dtype) -> None:
    raw = torch.arange(5000 * 4 // 8, dtype=torch.int64).view(torch.uint8)
    tensors = [torch.zeros(3), raw.clone().view(dtype), torch.zeros((), dtype=torch.bool)]
    before = fingerprint(tensors)
    tensors[1].view(torch.uint8)[at] ^= 1 << bit
    assert fingerprint(tensors) != before


def test_negated_weights_change_the_fingerprint() -> None:
    weights = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert fingerprint([weights]) != fingerprint([-weights])


WORDS = st.integers(0, 1023)
"""64-bit words in two rows of 4 KiB, whose sums are taken one by one."""


def words(seed: int) -> torch.Tensor:
    return torch.randn(2048, generator=torch.Generator().manual_seed(seed)).view(torch.int64)


def seen(changed: torch.Tensor, before: torch.Tensor) -> bool:
    return bool((changed == before).all()) or fingerprint([changed]) != fingerprint([before])


@given(st.integers(0, 99), WORDS, WORDS)
def test_the_fingerprint_sees_words_that_are_exchanged(seed: int, one: int, other: int) -> None:
    before = words(seed)
    changed = before.clone()
    changed[one], changed[other] = before[other], before[one]
    assert seen(changed, before)


@given(st.integers(0, 99), st.permutations(range(8)), st.integers(0, 127))
def test_the_fingerprint_sees_a_permutation(seed: int, order: list[int], first: int) -> None:
    before = words(seed)
    changed = before.clone()
    changed[first * 8 : first * 8 + 8] = before[first * 8 : first * 8 + 8][list(order)]
    assert seen(changed, before)


@given(st.integers(0, 99), st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=6), st.integers(0, 62))
def test_the_fingerprint_sees_changes_of_opposite_sign(seed: int, pairs: list[tuple[int, int]], bit: int) -> None:
    before = words(seed)
    changed = before.clone()
    for more, less in pairs:
        changed[more] += 1 << bit
        changed[less] -= 1 << bit
    assert seen(changed, before)


@given(st.integers(0, 99), st.sets(st.integers(0, 2047), min_size=1, max_size=64))
def test_the_fingerprint_sees_weights_that_are_negated(seed: int, places: set[int]) -> None:
    """The sign of every second float32 is the highest bit of a word: two of them make 2^64, which is nothing."""
    before = words(seed)
    changed = before.clone()
    floats = changed.view(torch.float32)
    floats[sorted(places)] *= -1
    assert seen(changed, before)


def test_the_fingerprint_does_not_depend_on_where_a_tensor_begins() -> None:
    block = torch.randn(4097, generator=torch.Generator().manual_seed(0))
    assert fingerprint([block[1:]]) == fingerprint([block[1:].clone()])


def test_tensors_of_equal_sum_are_not_mistaken_for_each_other() -> None:
    one, other = torch.zeros(2048), torch.zeros(2048)
    one[3], other[1900] = 1.0, 1.0
    assert fingerprint([one, other]) != fingerprint([other, one])


def test_large_room_is_one_block_of_zeros() -> None:
    specs = encode([torch.zeros(1 << 20), torch.zeros((), dtype=torch.int16), torch.zeros(3, 0)], "test").specs
    big, small, empty = room(specs)
    assert (big.shape, small.shape, empty.shape) == ((1 << 20,), (), (3, 0))
    assert small.data_ptr() - big.data_ptr() == 4 << 20
    assert not big.any()


def test_each_tensor_has_a_path_and_what_holds_none_is_one_part() -> None:
    tree = {"a": [torch.zeros(1), {"b": (torch.ones(2), 3), 7: {"c": [1, 2]}}], (1, 2): {"d": None}}
    encoded = encode(tree, "test")
    assert [t.data_ptr() for t in encoded.tensors] == [tree["a"][0].data_ptr(), tree["a"][1]["b"][0].data_ptr()]
    assert encoded.paths == [["a", 0], ["a", 1, "b", 0]]
    assert encoded.plain == [(["a", 1, "b", 1], 3), (["a", 1, "7"], {"c": [1, 2]}), (["(1, 2)"], {"d": None})]
    assert encode({"x": [1]}, "test").plain == [([], {"x": [1]})]
    with pytest.raises(FallowError, match="tensor as a key"):
        encode({torch.zeros(1): 1}, "test")


def test_what_does_not_lie_row_by_row_is_taken_as_it_lies() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (image, torch.randn(4, 3).t()):
        assert as_bytes(tensor).data_ptr() == tensor.data_ptr()
        (place,) = room([spec_of(tensor)])
        as_bytes(place).copy_(as_bytes(tensor))
        assert torch.equal(place, tensor)
        assert place.stride() == tensor.stride()
    gaps = torch.randn(4, 6)[:, ::2]
    (place,) = room([spec_of(gaps)])
    as_bytes(place).copy_(as_bytes(gaps))
    assert torch.equal(place, gaps)


def test_a_small_state_travels_as_bytes() -> None:
    parameter = torch.nn.Parameter(torch.randn(2, 3).t(), requires_grad=False)
    value = {"a": [parameter, torch.tensor(3).to(torch.uint8), torch.empty(0, 2)], "b": TREE["plain"]}
    got = from_bytes(to_bytes(value, "test"))
    assert got["b"] == value["b"]
    assert all(torch.equal(*pair) for pair in zip(got["a"], value["a"], strict=True))
    assert isinstance(got["a"][0], torch.nn.Parameter)
    assert not got["a"][0].requires_grad
    with pytest.raises(FallowError, match="cannot be read"):
        from_bytes(b"something else")


def test_host_tensors_stay_on_the_host_where_a_script_has_set_a_default_device() -> None:
    torch.set_default_device("meta")
    try:
        tree = {"a": torch.ones(600, 800, device="cpu"), "b": torch.ones(3, device="cpu")}
        got = from_bytes(to_bytes(tree, "test"))
        total = fingerprint(tree.values())
    finally:
        torch.set_default_device(None)
    assert torch.equal(got["a"], tree["a"])
    assert total == fingerprint(tree.values())


def test_digest_depends_on_names_not_on_order() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    assert digest([{"x": a, "y": b}]) == digest([{"y": b, "x": a}]) != digest([{"x": b, "y": a}])
