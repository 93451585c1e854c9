from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch

from fallow.model import FallowError
from fallow.worker.prepared.state import as_bytes, decode, encode, fitting, from_bytes, room, spec_of, to_bytes

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


def test_equal_sets_are_equal_bytes_whatever_the_order_of_their_items() -> None:
    """-1 and -2 have the same hash, so that the one which came first is given first."""
    one, other = {-1, -2}, {-2, -1}
    assert list(one) != list(other), "else this test shows nothing"
    assert encode(one, "test").tree == encode(other, "test").tree
    assert round_trip(one) == other


@pytest.mark.parametrize("value", [object(), lambda: 0, defaultdict(lambda: 1), np.array([object()])])
def test_an_unknown_type_is_refused_by_name(value) -> None:
    with pytest.raises(FallowError, match=r"EMA\.inner: its state holds a "):
        encode({"inner": value}, "EMA")


def test_each_tensor_has_a_path_and_what_holds_none_is_one_part() -> None:
    tree = {"a": [torch.zeros(1), {"b": (torch.ones(2), 3), 7: {"c": [1, 2]}}], (1, 2): {"d": None}}
    encoded = encode(tree, "test")
    assert [t.data_ptr() for t in encoded.tensors] == [tree["a"][0].data_ptr(), tree["a"][1]["b"][0].data_ptr()]
    assert encoded.paths == [["a", 0], ["a", 1, "b", 0]]
    assert encoded.plain == [(["a", 1, "b", 1], 3), (["a", 1, "7"], {"c": [1, 2]}), (["(1, 2)"], {"d": None})]
    assert encode({"x": [1]}, "test").plain == [([], {"x": [1]})]
    with pytest.raises(FallowError, match="tensor as a key"):
        encode({torch.zeros(1): 1}, "test")


@pytest.mark.parametrize("kind", [lambda tensor: tensor, torch.nn.Parameter])
def test_a_tensor_in_several_places_stays_one_tensor(kind) -> None:
    tensor = kind(torch.ones(2))
    back = round_trip({"a": tensor, "b": [tensor], "c": kind(torch.ones(2))})
    assert back["a"] is back["b"][0]
    assert back["a"] is not back["c"]
    assert type(back["a"]) is type(tensor)
    encoded = encode({"a": tensor, "b": [tensor, 1]}, "test")
    assert (encoded.paths, encoded.aliases) == ([["a"]], [(0, ["b", 0])])
    assert encoded.plain == [(["b", 1], 1)]


@pytest.mark.parametrize("late", [torch.randn(3, dtype=torch.cfloat).conj(), torch._neg_view(torch.ones(3))])
def test_what_torch_has_put_off_is_done_when_bytes_are_wanted(late: torch.Tensor) -> None:
    assert late.is_contiguous()
    plain = late.resolve_conj().resolve_neg()
    assert as_bytes(late).tolist() == as_bytes(plain).tolist()
    assert list(fitting([late, plain], [spec_of(late), spec_of(plain)])) == [1], "bytes that come would mean others"


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
