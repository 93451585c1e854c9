"""What `run.prepare` takes over, and its state from one member to another."""

import math
import threading
from collections import Counter, OrderedDict, defaultdict
from operator import eq
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fallow.model import FallowError
from fallow.worker.prepared import state
from fallow.worker.prepared.objects import Prepared, signature_of
from fallow.worker.prepared.state import (
    allocate,
    as_bytes,
    decode,
    encode,
    from_bytes,
    reusable_tensors,
    spec_of,
    to_bytes,
)

torch.set_num_threads(1)


def prepared(*things: Any) -> Prepared:
    made = Prepared()
    for thing in things:
        made.add(thing)
    return made


def hand_over(old: Prepared, new: Prepared) -> None:
    """As a transfer does: plain values are packed, tensors are others."""
    encoded = state.encode(old.export(), "test")
    new.load(state.decode(encoded.tree, [tensor.detach().clone() for tensor in encoded.tensors]))


@pytest.mark.parametrize("make", [dict, OrderedDict])
def test_a_dict_gets_the_members_values_in_place(make: Any) -> None:
    old = make(
        seen=7, best=None, name="x", ok=True, mean=torch.ones(3), nested={"a": [1, (2.5, {"b": torch.zeros(1)})]}
    )
    new = make(seen=0, stale="of a rehearsal", mean=torch.zeros(3))
    hand_over(prepared(old), prepared(new))
    assert list(new) == list(old)
    assert (new["seen"], new["best"], new["name"], new["ok"]) == (7, None, "x", True)
    assert torch.equal(new["mean"], torch.ones(3))
    assert new["nested"]["a"][1][0] == 2.5
    old["seen"] += 1
    old["nested"]["a"].append(3)
    assert (new["seen"], len(new["nested"]["a"])) == (7, 2)


def test_an_optimizer_keeps_what_is_of_no_parameter() -> None:
    """torch hands over such entries of the state as they are."""
    old, new = (torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1, momentum=0.9) for _ in range(2))
    old.state["steps"], old.state["own"] = 3, {"sum": torch.ones(1, dtype=torch.float64)}
    hand_over(prepared(old), prepared(new))
    assert new.state["steps"] == 3
    assert torch.equal(new.state["own"]["sum"], torch.ones(1, dtype=torch.float64))


def test_a_tensor_under_two_keys_of_a_dict_changes_under_both() -> None:
    mean = torch.ones(3)
    new = {"mean": torch.zeros(3), "best": torch.zeros(3)}
    hand_over(prepared({"mean": mean, "best": mean}), prepared(new))
    new["mean"] += 1
    assert torch.equal(new["best"], mean + 1)


def test_what_a_dict_cannot_hold_is_refused_by_name_when_it_is_prepared_and_later() -> None:
    with pytest.raises(FallowError, match=r"prepare: dict\.inner\.lock: its state holds a _thread\.lock"):
        prepared({"inner": {"lock": threading.Lock()}})
    values: dict[str, Any] = {}
    made = prepared(values)
    values["model"] = nn.Linear(1, 1)
    with pytest.raises(FallowError, match="Linear, which cannot be handed to another member"):
        state.encode(made.export(), "run")


def test_an_object_that_is_given_twice_or_has_no_state_is_refused() -> None:
    values: dict[str, Any] = {}
    with pytest.raises(FallowError, match="dict was given twice"):
        prepared(values, values)
    prepared(values, {})  # an equal one is another one
    with pytest.raises(FallowError, match="object has no state_dict and load_state_dict"):
        prepared(object())
    with pytest.raises(FallowError, match=r"Parameter has no state_dict.*ParameterList\(\[parameter\]\)"):
        prepared(nn.Parameter(torch.zeros(())))


def test_parameters_that_are_frozen_later_keep_their_place() -> None:
    model = nn.Sequential(nn.Linear(3, 4), parametrizations.weight_norm(nn.Linear(4, 4)))
    made = prepared(model, torch.compile(nn.Linear(4, 1), backend="eager"))
    names, layout = [name for name, _ in made.parameters()], made.layout()
    assert "model.0.0.weight" in names
    assert len(names) == len(set(names))
    assert not any("_orig_mod" in name for name in names), "a compiled module has the names of its own"
    model.requires_grad_(False)
    assert [name for name, _ in made.parameters()] == names
    assert signature_of(made.layout()) == signature_of(layout)


def test_modes_are_told_by_name() -> None:
    old, new = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    one, other = prepared(old), prepared(new)
    assert one.modes.fingerprints() == other.modes.fingerprints()
    old[0].weight.requires_grad_(False)
    old[1].eval()
    new.eval()
    assert one.modes.export() == ["frozen model.0.0.weight", "resting model.0.1"]
    assert not any(map(eq, one.modes.fingerprints(), other.modes.fingerprints()))
    other.modes.load(one.modes.export())
    assert other.modes.export() == one.modes.export()
    assert (new.training, new[0].training, new[1].training) == (True, True, False)


def test_a_state_that_does_not_fit_is_refused_with_advice() -> None:
    with pytest.raises(FallowError, match="does not fit what this script prepared"):
        prepared(nn.Linear(2, 2)).load(prepared(nn.Linear(2, 3)).export())
    with pytest.raises(FallowError, match="does not fit what this script prepared"):
        prepared(nn.Linear(2, 2)).load(prepared(nn.Linear(2, 2, bias=False)).export())
    with pytest.raises(FallowError, match="does not fit"):
        prepared({}).load(prepared({}, {}).export())


# -- values on their way ----------------------------------------------------------------------------------------------


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
    places = allocate(encoded.specs)
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
    assert list(reusable_tensors([late, plain], [spec_of(late), spec_of(plain)])) == [1], (
        "bytes that come would mean others"
    )


def test_a_single_element_of_a_column_has_bytes() -> None:
    one = torch.randn(1, 5)[:, 0]
    assert (one.is_contiguous(), one.stride()) == (True, (5,))
    assert as_bytes(one).tolist() == as_bytes(torch.tensor(one.tolist())).tolist()
    assert as_bytes(one).data_ptr() == one.data_ptr()


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
