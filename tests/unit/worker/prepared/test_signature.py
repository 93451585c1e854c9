"""The arithmetic signature, and who is refused because of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fallow.core.membership.joining import difference
from fallow.core.membership.messages import Contract
from fallow.model import FallowError
from fallow.worker.prepared import signature as sg

CPU = [torch.device("cpu")]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    threads, type_ = torch.get_num_threads(), torch.get_default_dtype()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.set_default_dtype(type_)
    torch.set_float32_matmul_precision("highest")


def refusal(members: list[str], newcomer: list[str]) -> str | None:
    one, other = (
        Contract(signature="s", shards=2, global_batch=4, total_steps=1, arithmetic=tuple(lines))
        for lines in (members, newcomer)
    )
    return difference(one, other)


def test_equal_processes_have_equal_signatures_and_leave_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert sg.signature(CPU) == sg.signature(CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert refusal(sg.signature(CPU), sg.signature(CPU)) is None


def test_a_newcomer_with_other_arithmetic_is_told_which() -> None:
    torch.set_num_threads(1)
    members = sg.signature(CPU)
    torch.set_num_threads(2)
    said = refusal(members, sg.signature(CPU))
    assert said is not None
    assert "it computes with 2 thread(s), the members with 1 thread(s)" in said
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    assert "high precision, the members with float32 matrix products of highest" in (
        refusal(members, sg.signature(CPU)) or ""
    )
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float64)
    assert "default type float64, the members with the default type float32" in (
        refusal(members, sg.signature(CPU)) or ""
    )


def test_the_test_sums_tell_libraries_apart_that_look_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    members = sg.signature(CPU)
    plain = torch.nn.functional.gelu
    monkeypatch.setattr(sg.F, "gelu", lambda x: plain(x) * (1 + 2**-23))
    assert "it computes with test sums on cpu of digest" in (refusal(members, sg.signature(CPU)) or "")


def test_processor_of_other_kinds(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 rdseed fma avx\n\nflags: amx\n")
    assert sg._processor(info) == ("GenuineIntel", ["avx", "avx2", "fma"])
    info.write_text("processor: 0\nFeatures: fp asimd sve\nCPU implementer: 0x41\n")
    assert sg._processor(info) == ("0x41", ["asimd", "sve"])
    assert sg._processor(tmp_path / "none") == ("(unknown)", [])


def test_cuda_without_repeatable_sums_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(FallowError, match="export it in the batch script"):
        sg.enforce([torch.device("cuda", 0)])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sg.enforce([torch.device("cuda", 0)])
    assert torch.are_deterministic_algorithms_enabled()
