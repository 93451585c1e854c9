"""What `run.prepare` takes over, and its state from one member to another."""

from __future__ import annotations

import threading
from collections import OrderedDict
from operator import eq
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fallow.model import FallowError
from fallow.worker.prepared import state
from fallow.worker.prepared.objects import Prepared, signature_of

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


def test_a_state_is_put_where_a_forward_has_left_a_view_of_a_weight() -> None:
    old, new = nn.Linear(2, 1), nn.Linear(2, 1)
    for model in (old, new):
        first = model.weight.detach()[0, :1]
        model.register_buffer("mask", first.clone().expand(8))
        model.register_buffer("same", model.mask)
    sides = [prepared(old), prepared(new)]
    new.mask = new.same = new.weight.detach()[0, :1].expand(8)
    version = new.weight._version
    assert len(sides[1].make_buffers_writable()) == 1, "it is one tensor in both places, as before"
    new.mask.fill_(3.0)
    assert new.weight._version == version
    new.mask = new.same = new.weight.detach()[0, :1].expand(8)
    hand_over(*sides)
    assert torch.equal(new.weight, old.weight)
    assert new.mask.tolist() == new.same.tolist() == old.mask.tolist()


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
