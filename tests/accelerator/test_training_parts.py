"""Operators, optimizers, random numbers, mixed precision and storage give what they give on the CPU."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from accelerator import build
from accelerator.crew import on_device
from gpu.device import DEVICES, require


def train(device: str, **how: bool) -> list[torch.Tensor]:
    """The parameters after a few steps of a small net."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 16))
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **how)
    for _ in range(3):
        numbers = torch.randint(0, 16, (4, 5), generator=generator)
        loss = functional.cross_entropy(model(numbers.to(device)).flatten(0, 1), numbers.to(device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@on_device
@pytest.mark.parametrize("how", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_training_gives_the_same_weights_as_on_the_cpu(how: dict[str, bool]) -> None:
    for ours, cpus in zip(train("fake", **how), train("cpu", **how), strict=True):
        torch.testing.assert_close(ours, cpus, rtol=1e-5, atol=1e-6)


@on_device
def test_tensors_of_two_devices_do_not_mix_except_for_numbers() -> None:
    tensor = torch.ones(4, device="fake")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        tensor + torch.ones(4)
    assert (tensor * torch.tensor(2.0)).tolist() == [2.0] * 4


@on_device
def test_views_and_outputs_of_another_size_share_and_resize_memory() -> None:
    tensor = torch.arange(12.0, device="fake").view(3, 4)
    tensor.t()[1].zero_()
    tensor.unfold(1, 2, 2)[0].fill_(7.0)
    assert tensor.tolist() == [[7.0] * 4, [4.0, 0.0, 6.0, 7.0], [8.0, 0.0, 10.0, 11.0]]
    result = torch.empty(0, device="fake")
    torch.add(tensor[1], 1, out=result)
    assert result.tolist() == [5.0, 1.0, 7.0, 8.0]
    parts = tensor.split([1, 3], dim=1)
    assert torch.cat(parts, 1).equal(tensor)
    with pytest.raises(IndexError):
        tensor[5]


@on_device
def test_random_numbers_follow_their_seed_and_leave_the_cpus_alone() -> None:
    def draw() -> list[float]:
        dropped = functional.dropout(torch.ones(64, device="fake"), 0.5)
        return [*torch.randn(4, device="fake").tolist(), dropped.sum().item()]

    torch.manual_seed((1 << 63) + 5)
    before, first = torch.get_rng_state(), draw()
    assert torch.get_rng_state().equal(before)
    state, second = torch.get_device_module("fake").get_rng_state(), draw()
    assert first != second
    torch.get_device_module("fake").set_rng_state(state)
    assert draw() == second
    torch.manual_seed((1 << 63) + 5)
    assert draw() == first
    own = [torch.rand(4, device="fake", generator=torch.Generator("fake").manual_seed(3)).tolist() for _ in range(2)]
    assert own[0] == own[1]


@on_device
def test_states_are_saved_loaded_and_copied() -> None:
    model, file = nn.Linear(4, 4).to("fake"), io.BytesIO()
    torch.save(model.state_dict(), file)
    for target in ("fake", "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=target)
        assert loaded["weight"].device.type == target
        assert loaded["weight"].tolist() == model.weight.tolist()
    assert copy.deepcopy(model).weight.equal(model.weight)
    storage = torch.arange(4.0, device="fake").untyped_storage()
    storage.resize_(8)
    assert torch.empty(0, device="fake").set_(storage).tolist() == [0.0, 1.0]


def test_without_a_compiler_tests_are_skipped_or_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("FALLOW_REQUIRE_ACCELERATOR", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"needs g\+\+"):
        require(DEVICES["fake"])
    monkeypatch.setenv("FALLOW_REQUIRE_ACCELERATOR", "1")
    with pytest.raises(pytest.fail.Exception, match=r"needs g\+\+"):
        require(DEVICES["fake"])


def test_a_build_is_made_once_and_a_failed_one_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "compiler"
    monkeypatch.setenv("CXX", str(compiler))
    write_output = 'while [ "$1" != -o ]; do shift; done; echo built >"$2"; echo called >>"$0.log"'
    compiler.write_text(f"#!/bin/sh\n{write_output}\necho the reason >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(build.Unavailable, match="the reason"):
        build.library()
    compiler.write_text(f"#!/bin/sh\n{write_output}\n")
    built = build.library()
    assert (build.library(), built.read_text()) == (built, "built\n")
    assert (tmp_path / "compiler.log").read_text() == "called\n" * 2
    assert {path.suffix for path in built.parent.iterdir()} == {".so", ".lock"}
    assert not built.is_relative_to(Path(build.__file__).parent)
